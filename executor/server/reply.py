"""Outcome of one attempt at a request, as a server's client found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """Outcome of one attempt at a request."""

    ANSWERED = "answered"
    REFUSED = "refused"
    BUSY = "busy"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Reply:
    """
    One attempt at a request, and what came of it.

    kind: Whether a completion came, the server refused the request for good, was busy or failed for now (429,
        5xx), lost the connection, could not be reached, or let the time run out.
    status: HTTP status, or None where no response came.
    body: The response's JSON object, or a substitute.
    request_id: The server's name of the request, or empty.
    wait: Seconds the server asks to wait before another attempt, or None.
    message: What went wrong, in a sentence.
    """

    kind: Kind
    status: int | None = None
    body: Mapping[str, Any] | None = None
    request_id: str = ""
    wait: float | None = None
    message: str = ""
