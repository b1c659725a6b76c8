"""Swapped-out texts as values: a session, its bytes, and what a policy has found out.

A `SessionState` has everything that a text needs to continue bit for bit: page table, page images, recurrent state,
queries, scores, and the state of drafters. Nothing in it is on the device. Whoever holds one releases it; images are
retained and not copied.
"""
