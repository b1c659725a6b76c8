"""Watches a text: every change of its page table, and every score."""
