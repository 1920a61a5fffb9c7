"""Shares of memory that EconoServe keeps free."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EconoServeSizes:
    """EconoServe's sizes, also used by the pipelined scheduler.

    padding: Share added to predicted lengths.
    reserved: Share of the memory kept for prompts, and for completions longer than predicted.
    buffer: Share of a predicted length that a guest may stay beyond it (the paper's b).
    forward_size: Target tokens of an iteration (TFS).
    Raises ValueError if a share is negative, not finite or (except the padding) at least 1, or the forward
    size is below 1.
    """

    padding: float = 0.1
    reserved: float = 0.03
    buffer: float = 0.15
    forward_size: int = 512

    def __post_init__(self) -> None:
        for name in ("padding", "reserved", "buffer"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0 and (value < 1 or name == "padding")):
                raise ValueError(f"{name} is {value!r}; it must be a share, at least 0 and below 1")
        if self.forward_size < 1:
            raise ValueError(f"forward_size is {self.forward_size}; it must be at least 1")
