"""Expected makespan of a plan with predicted lengths, and the way to follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .lengths.remaining import RemainingLengths

Follow = Literal["schedule", "longest-first", "as-given", "shortest-first"]
"""The schedule, or an online queue in one of three orders."""


@dataclass(frozen=True, slots=True)
class Tail:
    """
    How a queue ends: requests with little left give way to those that may have much.

    share: The end begins when no more than this many times the slots wait.
    margin: Decode steps by which a waiting request must have more left than a running one, to take its slot.
    remaining: What is left of each request by what it has decoded.
    """

    share: float
    margin: int
    remaining: RemainingLengths


@dataclass(frozen=True, slots=True)
class Expectation:
    """
    The makespan to expect over the lengths that may come out, and the policy that reaches it.

    mean: Seconds by the cost model, over sampled lengths.
    low, high: The interval the makespan lies in with probability ``coverage``, seconds.
    coverage: Between 0 and 1.
    samples: Sampled sets of lengths it was replayed against.
    follow: What the run follows: ``schedule``; or a queue for all slots, ``longest-first`` or
        ``shortest-first`` by planned length or ``as-given``; the plan's schedule is only the picture at
        planned lengths.
    patience: Of the ski-rental rule that starts a queue's prefill stages, or repairs the schedule.
    held_back: How many of the longest requests a longest-first queue keeps for its end.
    tail: How a fleet's queues end; None to preempt nothing.
    error: The stated error of the predictions, as plain JSON values.
    compared: Mean seconds of everything that was compared, by name.
    """

    mean: float
    low: float
    high: float
    coverage: float
    samples: int
    follow: Follow
    patience: float
    held_back: int = 0
    tail: Tail | None = None
    error: Mapping[str, object] = field(default_factory=dict)
    compared: Mapping[str, float] = field(default_factory=dict)

    def what(self) -> str:
        """Return what is followed, in words."""
        held = f", the {self.held_back} longest held back" if self.held_back else ""
        held += f", the last {self.tail.share:g} a slot by what is left" if self.tail else ""
        return f"{'the schedule' if self.follow == 'schedule' else f'a queue, {self.follow}'}{held}"
