"""Policies made of a queue, a prefill rule and an admission."""
