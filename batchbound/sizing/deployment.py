"""Deployments of a model, and when they finish jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..models.sizing.load import (
    OFF,
    IterationSeconds,
    Load,
)
from .offers import Offer
from .pooled_job import PooledJob


@dataclass(frozen=True, slots=True)
class Finish:
    """Seconds until a job ends, from now.

    expected: Median of the estimate.
    low, high: 90 % interval.
    sure: Seconds that suffice with 90 %.
    """

    expected: float
    low: float
    high: float
    sure: float

    @classmethod
    def of(cls, seconds: float, startup: float, spread: tuple[float, float]) -> Finish:
        """Return the finish by estimated seconds; ``spread`` is the interval of the lengths, as factors."""
        middle = seconds / OFF[0.5]
        low, high, sure = (
            math.hypot(math.log(OFF[quantile] / OFF[0.5]), part * math.log(factor))
            for quantile, part, factor in ((0.95, 1, spread[0]), (0.05, 1, spread[1]), (0.1, 0.78, spread[1]))
        )
        ends = (middle, middle * math.exp(-low), middle * math.exp(high), middle * math.exp(sure))
        return cls(*(startup + end for end in ends))


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Engine on devices of one kind.

    degree: Devices that share every layer.
    slots, batched_tokens: Requests in progress, and tokens of an iteration, at most.
    kv_tokens: Tokens of KV cache.
    startup: Seconds until it serves.
    """

    offer: Offer
    degree: int
    cost: IterationSeconds
    slots: int
    batched_tokens: int
    kv_tokens: int
    startup: float

    def seconds(self, load: Load, replicas: int = 1) -> float:
        """Return the seconds of its share of a load."""
        return load.seconds(self.cost, self.running(load, replicas), self.batched_tokens, replicas)

    def running(self, load: Load, replicas: int) -> float:
        """Return the requests that it runs at a time."""
        return load.running(self.slots, self.kv_tokens, load.requests / replicas)


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    """Equal replicas, and when they finish each job.

    finishes: Finish of each job, in the order of their deadlines.
    cost: Money until the last expected finish; device-hours without prices.
    """

    replica: Replica
    replicas: int
    finishes: tuple[Finish, ...]
    cost: float

    @property
    def name(self) -> str:
        """Devices, and how many share a layer."""
        shared = f", TP {self.replica.degree}" if self.replica.degree > 1 else ""
        return f"{self.replicas * self.replica.degree} x {self.replica.offer.device.name}{shared}"

    @property
    def end(self) -> Finish:
        """Finish of all jobs."""
        return self.finishes[-1]


def by_deadline(windows: Sequence[float]) -> list[int]:
    """Return the jobs in the order of their deadlines."""
    return sorted(range(len(windows)), key=windows.__getitem__)


def loads_of(pooled: PooledJob, order: Sequence[int]) -> list[Load]:
    """Return the load of the first job in an order, of the first two, and so on."""
    ends = range(1, len(order) + 1)
    parts = [np.sort(np.concatenate([pooled.jobs[job] for job in order[:end]])) for end in ends]
    return [
        Load.of(pooled.rows if len(part) == len(pooled.rows) else pooled.rows.select(part)) for part in parts
    ]


def finishes_of(
    replica: Replica, replicas: int, loads: Sequence[Load], spread: tuple[float, float]
) -> tuple[Finish, ...]:
    """Return when equal replicas finish each load."""
    return tuple(Finish.of(replica.seconds(load, replicas), replica.startup, spread) for load in loads)
