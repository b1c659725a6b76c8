"""Which slot holds which token, and which pages move: pure Python and numpy."""
