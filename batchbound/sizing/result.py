"""Deployments of a model, when they finish jobs, and what to type."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path

import numpy as np

from ..data.demand import Excess
from ..models.sizing.load import MEMORY_SHARE, OFF, IterationSeconds, Load
from ..options.size import SizeOptions
from ..solvers.windows import keep_most
from .offers import Offer
from .pooled_job import PooledJob

_SURE = 0.78
"""Share of the 95 % quantile's distance, in logarithms, at which the 90 % quantile lies."""

START_OFF = 2.0
"""Factor within which an assumed start lies; a larger one widens the interval."""


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
    def of(
        cls, seconds: float, startup: float, spread: tuple[float, float], *, start_off: float = 1.0
    ) -> Finish:
        """Return the finish by estimated seconds.

        spread: Interval of the lengths, as factors.
        start_off: Factor within which the start is assumed to lie; 1 if it was stated.
        """
        middle = seconds / OFF[0.5]
        low, high, sure = (
            math.hypot(math.log(OFF[quantile] / OFF[0.5]), part * math.log(factor))
            for quantile, part, factor in (
                (0.95, 1, spread[0]),
                (0.05, 1, spread[1]),
                (0.1, _SURE, spread[1]),
            )
        )
        starts = (startup, startup / start_off, startup * start_off, startup * start_off**_SURE)
        ends = (middle, middle * math.exp(-low), middle * math.exp(high), middle * math.exp(sure))
        return cls(*(start + end for start, end in zip(starts, ends, strict=True)))


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
    def sure_cost(self) -> float:
        """Money that suffices with 90 %; device-hours without prices."""
        return self.cost * self.end.sure / self.end.expected

    @property
    def name(self) -> str:
        """Devices, and how many share a layer."""
        shared = f", TP {self.replica.degree}" if self.replica.degree > 1 else ""
        return f"{self.replicas * self.replica.degree} x {self.replica.offer.name}{shared}"

    @property
    def end(self) -> Finish:
        """Finish of all jobs."""
        return self.finishes[-1]


@dataclass(frozen=True, eq=False)
class Sizing:
    """Deployments of a model for jobs with completion windows.

    model, weights, positions: Model to serve, bytes of its weights, and its longest context; None if unknown.
    windows: Seconds until each job's deadline.
    tried: All deployments, the cheapest first.
    impossible: For a kind of device, the most devices that are too few, and the demand that they cannot meet.
    now: Time from which seconds count.
    """

    options: SizeOptions
    model: str
    weights: float
    positions: int | None
    pooled: PooledJob
    windows: tuple[float, ...]
    tried: tuple[Deployment, ...]
    impossible: Mapping[str, tuple[int, Excess]]
    now: datetime

    def time_of(self, seconds: float) -> str:
        """Return the time of day after some seconds, in whole minutes, with its date if not today."""
        end = self.now + timedelta(seconds=seconds)
        end += timedelta(seconds=-end.second % 60)
        return f"{end:%H:%M}" if end.date() == self.now.date() else f"{end:%Y-%m-%d %H:%M}"

    @property
    def names(self) -> tuple[str, ...]:
        """Files of the jobs."""
        return tuple(os.fspath(file) for file in self.options.files)

    @cached_property
    def load(self) -> Load:
        """Load of all jobs."""
        return Load.of(self.pooled.rows)

    @property
    def too_long(self) -> int:
        """Completions that the model's positions cannot hold."""
        rows, most = self.pooled.rows, self.positions
        return 0 if most is None else int((rows.prompt + rows.output > most).sum())

    def order_on(self, deployment: Deployment) -> tuple[list[int], list[int]]:
        """Return the jobs that it keeps, in an order that keeps them, and the late ones."""
        ends = np.diff([0.0, *(finish.sure for finish in deployment.finishes)]).tolist()
        seconds = dict(zip(by_deadline(self.windows), ends, strict=True))
        return keep_most([seconds[job] for job in range(len(ends))], self.windows)

    @cached_property
    def kept(self) -> tuple[Deployment, ...]:
        """Deployments that keep every window with 90 %, the cheapest first."""
        return tuple(deployment for deployment in self.tried if not self.order_on(deployment)[1])

    @cached_property
    def choice(self) -> Deployment | None:
        """The cheapest deployment that keeps the windows, or else the nearest; None if nothing fits."""
        if self.kept:
            return self.kept[0]
        return min(self.tried, default=None, key=lambda one: (len(self.order_on(one)[1]), one.end.sure))

    @cached_property
    def next_cheaper(self) -> Deployment | None:
        """The dearest deployment that costs less than the choice, which keeps the windows."""
        cheaper = [other for other in self.tried if self.kept and other.cost < self.kept[0].cost]
        return cheaper[-1] if cheaper else None

    @cached_property
    def agenda(self) -> tuple[tuple[int, Finish, bool], ...]:
        """Jobs in the order to run on the choice, with their finish, and True for those kept."""
        if self.choice is None:
            return ()
        (kept, late), chosen = self.order_on(self.choice), self.choice
        order, finishes = [*kept, *late], chosen.finishes
        if late:
            loads, spread = loads_of(self.pooled, order), self.pooled.spread()
            finishes = finishes_of(chosen.replica, chosen.replicas, loads, spread)
        return tuple((job, end, job in kept) for job, end in zip(order, finishes, strict=True))

    @property
    def frontier(self) -> tuple[Deployment, ...]:
        """Deployments that are expected to finish before any cheaper one."""
        frontier: list[Deployment] = []
        for deployment in self.tried:
            if not frontier or deployment.end.expected < frontier[-1].end.expected:
                frontier.append(deployment)
        return tuple(frontier)

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands that serve the choice, and run the jobs on it."""
        if self.choice is None:
            return ()
        replica = self.choice.replica
        words = ["vllm", "serve", self.model, "--tensor-parallel-size", replica.degree]
        if self.pooled.served not in (None, self.model):
            words += ["--served-model-name", self.pooled.served]
        words += ["--max-num-seqs", replica.slots, "--max-num-batched-tokens", replica.batched_tokens]
        words += ["--gpu-memory-utilization", MEMORY_SHARE, "--enable-prefix-caching"]
        if self.positions is not None and self.positions > replica.kv_tokens:
            words += ["--max-model-len", replica.kv_tokens]
        if self.options.quantization is not None:
            words += ["--quantization", self.options.quantization]
        jobs = [job for job, _, _ in self.agenda] if self.pooled.sendable else []
        return (shlex.join(map(str, words)), *(self._run(job, self.choice) for job in jobs))

    def _run(self, job: int, chosen: Deployment) -> str:
        options, count = self.options, chosen.replicas
        words = ["batchbound", "run", self.names[job]]
        hosts = ["HOST"] if count == 1 else [f"HOST{k + 1}" for k in range(count)]
        words += [word for host in hosts for word in ("--server", f"http://{host}:8000")]
        slots, budget = str(chosen.replica.slots), str(chosen.replica.batched_tokens)
        words += ["--slots", slots, "--batched-tokens", budget]
        for name in ("prompt_column", "id_column", "max_tokens_column", "lengths", "longest_completion"):
            value = getattr(options, name)
            words += [] if value is None else [options.flag(name), str(value)]
        words += [options.flag(name) for name in ("drop_last_assistant", "raw") if getattr(options, name)]
        if len(self.names) > 1:
            words += ["--output", f"{Path(self.names[job]).stem}.answers.jsonl"]
        return shlex.join(words)


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
    off = START_OFF if replica.offer.startup is None else 1.0
    return tuple(
        Finish.of(replica.seconds(load, replicas), replica.startup, spread, start_off=off) for load in loads
    )
