"""Speculative decoding: drafters, and the controller that decides how many draft tokens a step verifies."""
