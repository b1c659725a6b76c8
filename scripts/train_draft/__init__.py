"""Trains a DFlash drafter for a model on that model's own answers, in minutes on one GPU."""
