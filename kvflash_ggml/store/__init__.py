"""Texts that are not in the pool, in memory and in folders: swapped-out conversations, and prefixes of prompts."""
