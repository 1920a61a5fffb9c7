"""Serving systems iteration by iteration, simulated and on a model."""
