"""One text on a pool: its steps, cuts, scores, paging and checkpoints.

`Sequence.prepare` makes a `Step`, `Pool.run` computes one or several in one step of the engine, and `Sequence.commit`
makes it count. A step commits as a whole or leaves no trace: what is half done is in `Unfinished`, and the next call
settles it. `prefill.py` reads prompts, `scoring.py` and `selection.py` say what stays resident.

The room may ask the engine, the pool's table, the host's images and a policy. It knows tokens and positions: no
characters, no sampler, no request, and nothing of upstream's class.
"""
