"""Speculative decoding: drafters, and the controller that decides how many draft tokens a step verifies.

`loop.py` stands between a text and its drafters: it asks one, offers the rows to a step, and counts what was accepted.
`decision.py` and `costs.py` decide by measured times; they have no model and are unit tests. A drafter implements
`base.py`; those with a model of their own have a stock context (`context.py`).

Drafts change no answer: a token counts only where the target's own logits draw it. A drafter that fails is switched
off, and the answer goes on.
"""
