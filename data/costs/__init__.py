"""Costs of stages: cost models, iteration costs, layer profiles and their measurements."""
