"""What is put aside, as values."""
