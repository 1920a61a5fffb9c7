"""Digests of completions, to compare two runs bit by bit."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DIGEST = "batchbound_digest"
"""Key of a completion's digest in its output line."""


def completion_digest(tokens: Sequence[int], log_probabilities: Sequence[float]) -> str:
    """Return the digest of a completion's tokens and log-probabilities."""
    digest = hashlib.sha256(array("q", tokens).tobytes())
    digest.update(array("d", log_probabilities).tobytes())
    return digest.hexdigest()[:32]


def digest_of(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of output lines.

    It combines completions' digests and failures' messages.
    """
    digest = hashlib.sha256()
    for line in lines:
        own = repr(line["error"]) if DIGEST not in line and line["error"] is not None else line[DIGEST]
        digest.update(f"{line['custom_id']}:{own}\n".encode())
    return digest.hexdigest()[:32]
