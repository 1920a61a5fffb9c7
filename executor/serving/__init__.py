"""Serving systems on a model."""
