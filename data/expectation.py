"""Expected makespan of a plan with predicted lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from .lengths.interval import COVERAGE, Interval
from .lengths.remaining import RemainingLengths

Follow = Literal["schedule", "longest-first", "as-given", "shortest-first"]
"""Way to follow a plan: its schedule, or a queue in some order."""


@dataclass(frozen=True, slots=True)
class Tail:
    """End of a queue, when nearly finished requests yield their slots.

    share: Waiting requests at which the end begins, as a multiple of the slots.
    margin: Decode steps that a waiting request must have left beyond a running one to take its slot.
    remaining: Remaining tokens of each request by its decoded tokens.
    """

    share: float
    margin: int
    remaining: RemainingLengths


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected makespan over sampled lengths, with its policy.

    mean: Mean makespan over sampled lengths, in model seconds.
    low, high: Interval that holds the makespan with probability ``coverage``, seconds.
    coverage: Probability between 0 and 1.
    samples: Number of sampled sets of lengths.
    follow: ``schedule``, or the order of a queue by planned length: ``longest-first``, ``shortest-first`` or
        ``as-given``. With a queue the plan's schedule only shows the planned lengths.
    patience: Patience of the ski-rental rule that starts prefill stages, or repairs the schedule.
    held_back: Number of the longest requests that a longest-first queue keeps for its end.
    tail: Preemption at the end of a fleet's queues; None for no preemption.
    error: Stated error of the predictions, as plain JSON values.
    compared: Mean seconds of each compared policy, by name.
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

    @classmethod
    def of(cls, makespans: Sequence[float], follow: Follow, patience: float, **policy: Any) -> Self:
        """Return what sampled makespans let expect of a policy, in seconds."""
        interval = asdict(Interval.of(makespans))
        return cls(
            **interval,
            coverage=COVERAGE,
            samples=len(makespans),
            follow=follow,
            patience=patience,
            **policy,
        )

    def what(self) -> str:
        """Return a description of the followed policy."""
        held = f", the {self.held_back} longest held back" if self.held_back else ""
        held += f", the last {self.tail.share:g} a slot by what is left" if self.tail else ""
        return f"{'the schedule' if self.follow == 'schedule' else f'a queue, {self.follow}'}{held}"
