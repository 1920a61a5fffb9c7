"""Outcome of one attempt at a request."""

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
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to one attempt at a request.

    kind: Completed, refused for good, busy or failing for now (429, 5xx), connection lost, unreachable,
        timed out, or ended by the engine before its completion was whole.
    status: HTTP status; None without a response.
    body: The response's JSON object, or a substitute.
    request_id: The server's name of the request, or empty.
    wait: Seconds that the server asks to wait before another attempt, or None.
    message: Error in one sentence.
    mend: Next step if the server refuses all such requests alike (key, account, path, model), or empty.
    """

    kind: Kind
    status: int | None = None
    body: Mapping[str, Any] | None = None
    request_id: str = ""
    wait: float | None = None
    message: str = ""
    mend: str = ""
