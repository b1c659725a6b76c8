"""Many conversations on one model: who is next, whose text is at hand, and where the others are meanwhile."""
