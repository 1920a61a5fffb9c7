"""Engines that the loop runs: the transformers model, with and without host offload."""
