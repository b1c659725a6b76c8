"""Pinned upstream source: fetch, patch and build it. Standard library only."""
