"""Tokens that decode steps read, counted for the checker alone."""

from __future__ import annotations


def tokens_read(decode_steps: int, held: int) -> int:
    """Return the KV tokens that a request reads in all steps."""
    return decode_steps * held + decode_steps * (decode_steps - 1) // 2
