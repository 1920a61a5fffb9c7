"""Jobs without decode steps: requests packed into prefill stages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...models.bounds.least_counts import least_counts
from ...models.bounds.packing.partition import packed_full

TRIES = 20
"""Stages to relieve for one step down before it is given up."""


def evenly_packed(problem: Problem, rng: np.random.Generator, seconds: float) -> Iterator[Schedule]:
    """Yield schedules of ever more, evenly packed prefill stages.

    Even stages keep a token cap and a KV capacity if any packing does, and pay least beyond a bend of the
    prefill cost. A schedule may break a limit of tokens if too few stages have room for whole prompts.

    problem: Problem whose requests have no decode step and share no prompts.
    rng: Draws the moves of the packing.
    seconds: Time limit of a packing.
    """
    prompts = problem.prompt_tokens
    fewest = least_counts(problem).stages
    numbers = np.arange(fewest, len(problem) + 1)
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
