"""Measurement of a model, and the simulator's error."""
