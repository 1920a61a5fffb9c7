"""Tokens that decode steps read, counted for the checker alone."""

from __future__ import annotations


def tokens_read(decode_steps: int, held: int) -> int:
    """Return the tokens of KV cache that a request reads in all its decode steps."""
    return decode_steps * held + decode_steps * (decode_steps - 1) // 2
