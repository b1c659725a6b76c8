"""What happens to a text, for those who want to watch."""
