"""Attention: masks, kernels, and the forward call of a decoder."""
