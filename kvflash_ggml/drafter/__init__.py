"""The small model of the policy `drafter`.

It reads along with the target and its attention scores the chunks. The policy itself is `policy/drafter.py`, which
knows no model; `model.py` finds the file, loads it and keeps its context at the end of the target's text. It drafts
nothing: drafters of speculative decoding are in `speculation/`.
"""
