"""Finds the heads of a model that retrieve facts, on documents whose answers are known."""
