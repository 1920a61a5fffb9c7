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

    It combines completions' digests and failures' messages, by ``custom_id``, whatever the lines' order.
    """
    entries = [(str(line["custom_id"]), _own(line)) for line in lines]
    digest = hashlib.sha256()
    # Stable, as the completions of a request share its name.
    for name, content in sorted(entries, key=lambda entry: entry[0]):
        digest.update(f"{name}:{content}\n".encode())
    return digest.hexdigest()[:32]


def _own(line: Mapping[str, Any]) -> str:
    failed = DIGEST not in line and line["error"] is not None
    return repr(line["error"]) if failed else str(line[DIGEST])
