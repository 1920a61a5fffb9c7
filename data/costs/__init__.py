"""Costs of stages: cost models, layer profiles and measurements."""
