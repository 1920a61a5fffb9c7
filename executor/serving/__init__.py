"""Serving systems, simulated and on a model."""
