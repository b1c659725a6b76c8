"""Swapped-out texts as values."""
