"""Measurement of a model on this machine, and the simulator's error against measured runs."""
