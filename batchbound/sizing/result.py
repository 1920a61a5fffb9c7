"""Result of sizing: the choice, what fails, and what to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..data.demand import Excess
from ..models.sizing.load import (
    MEMORY_SHARE,
    Load,
)
from ..options.size import SizeOptions
from ..solvers.windows import keep_most
from .deployment import Deployment, Finish, by_deadline, finishes_of, loads_of
from .pooled_job import PooledJob


@dataclass(frozen=True, eq=False)
class Sizing:
    """Deployments of a model for jobs with completion windows.

    model, positions: Model to serve, and its longest context; None if unknown.
    windows: Seconds until each job's deadline.
    tried: All deployments, the cheapest first.
    impossible: For a kind of device, the most devices that are too few, and the demand that they cannot meet.
    """

    options: SizeOptions
    model: str
    positions: int | None
    pooled: PooledJob
    windows: tuple[float, ...]
    tried: tuple[Deployment, ...]
    impossible: Mapping[str, tuple[int, Excess]]

    @property
    def names(self) -> tuple[str, ...]:
        """Files of the jobs."""
        return tuple(os.fspath(file) for file in self.options.files)

    @cached_property
    def load(self) -> Load:
        """Load of all jobs."""
        return Load.of(self.pooled.rows)

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
        words += [
            "--slots",
            str(chosen.replica.slots),
            "--batched-tokens",
            str(chosen.replica.batched_tokens),
        ]
        for name in ("prompt_column", "id_column", "max_tokens_column", "lengths", "longest_completion"):
            value = getattr(options, name)
            words += [] if value is None else [options.flag(name), str(value)]
        words += [options.flag(name) for name in ("drop_last_assistant", "raw") if getattr(options, name)]
        if len(self.names) > 1:
            words += ["--output", f"{Path(self.names[job]).stem}.answers.jsonl"]
        return shlex.join(words)
