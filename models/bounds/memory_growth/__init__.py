"""Argument that the tokens in the KV cache grow and fall."""
