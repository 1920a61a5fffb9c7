"""Engines on a transformers model, with and without host offload."""
