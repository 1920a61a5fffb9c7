"""Jobs without decode steps: requests packed into prefill stages."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.least_counts import least_counts
from ...models.bounds.packing.partition import packed_full
from .incumbent import BETTER

TRIES = 20
"""Stages to relieve for one step down before it is given up."""

MOVES = 500
"""Moves tried in a step."""

HOTTEST, COLDEST = 0.2, 0.002
"""Temperatures at the start and at the end, in openings of a stage."""


def evenly_packed(problem: Problem, rng: np.random.Generator, seconds: float) -> Iterator[Schedule]:
    """Yield schedules of ever more, evenly packed prefill stages.

    Even stages keep a token cap and a KV capacity if any packing does, and pay least beyond a bend of the
    prefill cost. A schedule may break a limit of tokens if too few stages have room for whole prompts.

    problem: Problem whose requests have no decode step and share no prompts.
    rng: Draws the moves of the packing.
    seconds: Time limit of a packing.
    """
    prompts = problem.prompt_tokens
    least = least_counts(problem).stages
    numbers = np.arange(least, len(problem) + 1)
    costs = numbers * problem.cost.prefill_seconds(prompts.sum() / numbers)
    for stages in numbers[int(costs.argmin()) :].tolist():
        packed = packed_full(prompts, stages, TRIES, rng, seconds)
        yield _schedule(problem, _on_slots(problem, packed, stages))


def _schedule(problem: Problem, stage_of: IntArray) -> Schedule:
    used, bin_of = np.unique(stage_of, return_inverse=True)
    return Schedule.from_bins(problem, bin_of, np.zeros(len(used), dtype=np.int64))


def _on_slots(problem: Problem, stage_of: IntArray, stages: int) -> IntArray:
    """Move the shortest prompts beyond the slots to other stages."""
    prompts, slots = problem.prompt_tokens, problem.slots
    count, load = (np.bincount(stage_of, weights, stages) for weights in (None, prompts))
    for stage in np.flatnonzero(count > slots):
        members = np.flatnonzero(stage_of == stage)
        shortest = members[np.argsort(prompts[members], kind="stable")]
        for request in shortest[: len(members) - slots]:
            to = int(np.where(count < slots, load, np.inf).argmin())
            stage_of[request] = to
            count[to] += 1
            load[to] += prompts[request]
    return stage_of


class StageExchange:
    """Annealing over the requests of prefill stages.

    A request moves to another stage, or two change places.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator, start: Schedule) -> None:
        self._problem, self._rng = problem, rng
        caps = [cap for cap in (problem.prefill_token_cap, problem.kv_capacity) if cap is not None]
        self._cap = min(caps, default=math.inf)
        self._prompts: list[int] = problem.prompt_tokens.tolist()
        self._stage_of: list[int] = start.bin_of.tolist()
        # One stage more than any request needs to be alone in.
        self._count, self._load = (
            np.bincount(start.bin_of, weights, len(problem) + 1).tolist()
            for weights in (None, problem.prompt_tokens)
        )
        self._opening = float(problem.cost.prefill_seconds(0))
        self._gained = self._least = 0.0

    def step(self, done: float) -> Schedule | None:
        """Try some moves; return a schedule if it is best.

        done: Share of the time that is over.
        """
        temperature = self._opening * HOTTEST * (COLDEST / HOTTEST) ** done
        requests = self._rng.integers(len(self._prompts), size=(MOVES, 2)).tolist()
        bearable = (-temperature * np.log(self._rng.random(MOVES))).tolist()
        swaps = (self._rng.random(MOVES) < 0.5).tolist()
        for (one, other), most, swap in zip(requests, bearable, swaps, strict=True):
            self._move(one, other, most, swap)
        if self._gained >= self._least - BETTER:
            return None
        self._least = self._gained
        return _schedule(self._problem, np.array(self._stage_of, dtype=np.int64))

    def _move(self, one: int, other: int, most: float, swap: bool) -> None:
        """Move or exchange a request if that costs little enough."""
        left, right = self._stage_of[one], self._stage_of[other]
        if one == other:
            # A stage of its own.
            right, swap = self._count.index(0), False
        moved = self._prompts[one] - (self._prompts[other] if swap else 0)
        loads = self._load[left] - moved, self._load[right] + moved
        full = not swap and self._count[right] == self._problem.slots
        if left == right or full or max(loads) > self._cap:
            return
        empty = not swap and self._count[left] == 1
        added = self._seconds(loads[1]) - self._seconds(self._load[right], self._count[right])
        added += self._seconds(loads[0], not empty) - self._seconds(self._load[left])
        if added > most:
            return
        self._gained += added
        self._load[left], self._load[right] = loads
        self._stage_of[one] = right
        if swap:
            self._stage_of[other] = left
        else:
            self._count[left] -= 1
            self._count[right] += 1

    def _seconds(self, tokens: float, requests: int = 1) -> float:
        return float(self._problem.cost.prefill_seconds(int(tokens))) if requests else 0.0
