"""One text on a pool: its steps, its cuts, and what it looks for."""
