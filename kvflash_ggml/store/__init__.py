"""Texts that are not at hand, in memory and in folders: conversations that were put aside, and prefixes of prompts."""
