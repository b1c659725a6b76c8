"""Speculative decoding: drafters propose tokens, one step of the target verifies several of them."""
