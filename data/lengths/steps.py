"""Ends of rollout steps, and their unfinished requests."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """End of a rollout step, and the fate of its unfinished requests.

    ahead: Groups started beyond those that a step waits for, as a share of the step's; 0 is a barrier. A step
        ends when as many groups are complete as it has; the others continue in the next step (APRIL's
        over-provision and recycling, Zhou et al. 2025).
    keep: Completions of each group that are kept, the first to end; the rest are stopped. None keeps all.
    restart: True if unfinished groups start again in steps of their own with a barrier (RollPacker's tail
        batching, Gao et al. 2025), instead of continuing in the next step.
    keep_kv: True if continued requests keep the KV cache of the old weights; else it is computed again.
    groups: Share of a step's groups that is enough; the others are given up (K of N). None for all.
    """

    ahead: float = 0.0
    keep: int | None = None
    restart: bool = False
    keep_kv: bool = False
    groups: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ahead) and self.ahead >= 0):
            raise ValueError(f"ahead is {self.ahead!r}; it must be a share, not negative")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; at least one completion of a group is kept")
        for name in ("restart", "keep_kv"):
            if getattr(self, name) and self.ahead == 0:
                raise ValueError(f"{name} has no effect without continued requests: ahead is 0")
        if self.groups is not None and not 0 < self.groups < 1:
            raise ValueError(f"groups is {self.groups!r}; it must be a share above 0 and below 1")
        if self.groups is not None and (self.ahead or self.keep is not None):
            raise ValueError("groups that are given up are not continued: leave ahead and keep out")
        if self.restart and self.keep_kv:
            raise ValueError(
                "keep_kv has no effect on requests that start again: leave restart or keep_kv out"
            )


BARRIER = Way()
"""Every step waits for all of its completions."""
