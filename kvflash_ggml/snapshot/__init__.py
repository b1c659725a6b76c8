"""What a session must save, and in which bytes."""
