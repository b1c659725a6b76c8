"""Training, export and checks of the tiny recall models in ``tests/models``."""
