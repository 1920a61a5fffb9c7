"""Rounding of a fractional slot flow, and stretched stage times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....models.programme import Programme
from .parameters import STANDARD, StageTimeParameters
from .spans import LengthProfile, Spans


def stretched(times: IntArray, decode_steps: float) -> IntArray:
    """Return stage times with more steps, spread evenly."""
    return times + np.rint(np.linspace(0, decode_steps, len(times))).astype(np.int64)


def whole_slots(
    times: IntArray,
    profile: LengthProfile,
    slots: int,
    seconds: float,
    values: StageTimeParameters = STANDARD,
) -> tuple[Spans, IntArray] | None:
    """Return a whole flow of slots that serves every request, or None.

    The fractional flow that holds slots for the fewest decode steps is rounded up or down in each span. If
    that gives no flow, whole numbers are searched farther from it for few spans.

    times: Decode steps of the stages and the end, not decreasing, shape (stages + 1,).
    seconds: Time limit.

    The result is the spans, and the slots in each, shape (spans,).
    """
    end = time.perf_counter() + seconds
    spans = Spans.between(times, profile)
    if not spans.hold(profile):
        return None
    rank, at_least = spans.demand(profile)
    stages, ranks = len(times) - 1, len(at_least)
    entries = spans.flow(rank, stages, ranks)
    balance = np.zeros(stages + 1 + ranks)
    balance[0], balance[stages] = slots, -slots
    columns = len(spans) + stages + ranks
    lower = np.zeros(columns)
    lower[-ranks:] = at_least
    whole = np.ones(columns, dtype=np.int64)
    whole[-ranks:] = 0
    holding = np.zeros(columns)
    holding[: len(spans)] = spans.decode_steps
    programme = Programme.of(holding, entries, balance, balance, lower)
    optimum = programme.solved(seconds, interior=True)
    if optimum is None:
        return None
    fractional = optimum.x[: len(spans)]
    for lowest, greatest in _boxes(fractional, lower, values):
        seconds_left = end - time.perf_counter()
        if seconds_left <= 0:
            break
        boxed = replace(programme, cost=np.zeros(columns), lower=lowest, upper=greatest)
        solution = boxed.solved_whole(whole, seconds_left, mip_max_nodes=values.rounding_nodes)
        if solution is not None:
            return spans, np.rint(solution[: len(spans)]).astype(np.int64)
    return None


def _boxes(
    fractional: FloatArray, lower: FloatArray, values: StageTimeParameters
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield lower and upper bounds on a whole flow, each pair wider."""
    spans, infinite = len(fractional), np.full(len(lower), np.inf)
    nearest, above, wider = lower.copy(), infinite.copy(), infinite.copy()
    nearest[:spans] = np.floor(fractional + 1e-7)
    above[:spans], wider[:spans] = np.ceil(fractional - 1e-7), nearest[:spans] + 1.0
    yield nearest, above
    if spans <= values.some_spans:
        yield nearest, wider
    if spans <= values.few_spans:
        yield lower, infinite
