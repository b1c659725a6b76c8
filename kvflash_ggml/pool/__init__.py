"""Which slot holds which token, and what moves: pure Python and numpy."""
