"""Tokens that decode steps read, counted for the checker alone."""

from __future__ import annotations


def tokens_read(rounds: int, held: int) -> int:
    """Return the tokens of KV cache that a request reads in all its decode steps."""
    return rounds * held + rounds * (rounds - 1) // 2
