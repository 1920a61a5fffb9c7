"""That a claim of a certificate does not hold."""

from __future__ import annotations


class RefutedError(Exception):
    """A claim of a certificate does not hold: rule and message."""
