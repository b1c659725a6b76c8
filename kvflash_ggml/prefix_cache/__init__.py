"""Texts kept for later, in memory and in a folder, found by their beginning."""
