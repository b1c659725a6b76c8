"""Who stays resident: one policy a file."""
