"""Watches a text: every change of its page table, and every score.

`events.py` defines what an observer is told, `recorder.py` keeps the history and writes it as a page. Observers see
values and cannot change them. A text without an observer pays for none.
"""
