"""One text on a pool: its steps, cuts, scores, paging and checkpoints."""
