"""EconoServe's parts, each of which can be switched, and its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Shortage = Literal["reserve", "pause", "offload", "reserve, then offload"]
"""What an answer longer than predicted does."""


@dataclass(frozen=True, slots=True)
class EconoServeSettings:
    """
    EconoServe's parts and sizes.

    Parameters
    ----------
    synced
        Whether answers of equal predicted length are started as a group, and the queue is looked at only when
        a group is done (``-SD``); if not, at every iteration (``-D``).
    ordered
        Whether both queues are in EconoServe's order (``-SDO``) instead of that of arrival.
    pipelined
        Whether promised and unused memory is lent (the full EconoServe).
    padding
        Share by which predicted lengths are raised.
    reserved
        Share of the memory kept for prompts.
    buffer
        Share of a predicted length by which a guest may overstay before its place is needed (the paper's b):
        of its own, or hosting ``"answers"`` of the outermost host's (its l/2 - b, l/4 - b, ...), or hosting
        ``"requests"`` that offload of a host's whose half it takes (l/2 - b).
    forward_size
        Tokens of an iteration to aim at (TFS).
    extension
        Least share of what it has by which an answer longer than predicted is taken to go on (or the
        padding's).
    shortage
        What an answer longer than predicted does (the three solutions of section 2.3): takes free memory, the
        reserve included, a block at a time (``"reserve"``) and pauses in place if there is none; pauses in
        place (``"pause"``); or moves to the host (``"offload"``). Or the third and, where the reserve is used
        up, the first, as a guest that overstays (``"reserve, then offload"``). Who hosts whole requests knows
        ``"reserve"``, and the last.
    hosted
        To whom unused memory is lent: ``"answers"`` whose prompt is computed and lies elsewhere, when their
        host begins (section 3.2); or whole ``"requests"``, prompt and answer, as soon as they will be gone
        before it is needed.
    beyond_reserve
        Whether a prompt may begin outside of the reserve as well, if no answer waits and its own will fit.
    literal
        Whether memory is given as the paper prints it, where the rules above do better: to a prompt whatever
        answers have left (section 3.3.1), to an answer longer than predicted what is left of the reserve and
        nothing else (3.3.2); and a guest that overstays goes to the host's memory even if there is room
        (3.2).
    """

    synced: bool = True
    ordered: bool = True
    pipelined: bool = True
    padding: float = 0.1
    reserved: float = 0.03
    buffer: float = 0.15
    extension: float = 0.0
    forward_size: int = 512
    shortage: Shortage = "reserve"
    hosted: Literal["answers", "requests"] = "requests"
    beyond_reserve: bool = True
    literal: bool = False

    def __post_init__(self) -> None:
        for name in ("padding", "reserved", "buffer", "extension"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0 and (value < 1 or name == "padding")):
                raise ValueError(f"{name} is {value!r}; it must be a share, at least 0 and below 1")
        if self.shortage not in get_args(Shortage):
            known = ", ".join(map(repr, get_args(Shortage)))
            raise ValueError(f"shortage is {self.shortage!r}; it must be one of {known}")
        if self.hosted not in ("answers", "requests"):
            raise ValueError(f"hosted is {self.hosted!r}; it must be 'answers' or 'requests'")
        if self.forward_size < 1:
            raise ValueError(f"forward_size is {self.forward_size}; it must be at least 1")

    @property
    def takes_reserve(self) -> bool:
        """Whether an answer longer than predicted takes the reserve first."""
        return self.shortage in ("reserve", "reserve, then offload")

    @property
    def offloads(self) -> bool:
        """Whether an answer longer than predicted moves to the host, at once or in the end."""
        return self.shortage in ("offload", "reserve, then offload")
