"""Points of a layer profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ...models.exegpt.run_profile import WARMING_STEPS

_DEVIATION = 0.45
"""Deviation of lengths in a batch, as a share of their mean."""
_MOST_JOINING = 8
BESIDE = 4
"""Further requests of a point, which leave one by one."""
WARM_STEPS = 3
"""Decode steps to compare with those after an encoding."""
STEPS_BEFORE = WARMING_STEPS + WARM_STEPS + BESIDE
"""Decode steps of a point before those timed together."""
_FEWEST_IN_JOB = 4
_MORE_STEPS = 2 * WARMING_STEPS + 12
"""Decode steps of a point beyond the timed ones."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Grid of measurements.

    batches: Prompts encoded, and requests decoding, at a time.
    lengths: Mean tokens of a prompt, and tokens held when decoding begins.
    decode_steps: Decode steps timed at a point.
    repeats: Passes over all measurements; medians count.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    decode_steps: int = 16
    repeats: int = 3

    def __post_init__(self) -> None:
        if min(len(set(self.batches)), len(set(self.lengths))) < 2:
            raise ValueError("a grid needs two batches and two lengths at least")
        if min(*self.batches, *self.lengths, self.decode_steps - 1, self.repeats) < 1:
            raise ValueError("a grid's numbers must be at least 1, and its decode steps at least 2")

    @property
    def points(self) -> list[tuple[int, int]]:
        """Batch and length of each point, the largest last."""
        return [
            (batch, length) for batch in sorted(set(self.batches)) for length in sorted(set(self.lengths))
        ]

    @property
    def joining(self) -> list[tuple[int, int]]:
        """Numbers of prompts that join a decode batch, with each length."""
        several = min(_MOST_JOINING, max(self.batches))
        return [(prompts, length) for prompts in (1, several) for length in sorted(set(self.lengths))]

    @property
    def most_steps(self) -> int:
        """Most decode steps of a point."""
        return self.decode_steps + _MORE_STEPS

    def within(self, point: tuple[int, int], limit: int) -> bool:
        """Return whether a model with some positions can run a point."""
        batch, length = point
        longest = max(*spread(length, batch), *decoding(length, batch))
        return longest + self.most_steps <= limit

    def measurements(self, *, paired: bool) -> int:
        """Return the number of measurements, ``paired`` with a worker."""
        pairs = len(self.points) + len(self.joining)
        return self.repeats * (2 * len(self.points) + len(job_points(self.points)) + paired * pairs)


def spread(length: int, batch: int) -> list[int]:
    """Return prompt lengths of a running batch.

    They are a normal distribution's quantiles, in random order.
    """
    if batch == 1:
        return [length]
    # In order, similar rows would be neighbours, and an engine that groups rows would pad less.
    order = np.random.default_rng(batch).permutation(batch)
    at = [_DEVIATION * NormalDist().inv_cdf((k + 0.5) / batch) for k in order.tolist()]
    return [max(1, round(length * max(0.1, 1 + share))) for share in at]


def decoding(length: int, batch: int, decode_steps: int = STEPS_BEFORE) -> list[int]:
    """Return prompt lengths of a batch after some decode steps."""
    return [max(1, tokens - decode_steps) for tokens in spread(length + decode_steps, batch)]


def job_points(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the points for whole jobs.

    They are each batch but the smallest, at one length.
    """
    lengths, batches = (sorted({point[axis] for point in points}) for axis in (1, 0))
    return [
        (batch, lengths[len(lengths) // 2]) for batch in batches if batch >= min(_FEWEST_IN_JOB, batches[-1])
    ]
