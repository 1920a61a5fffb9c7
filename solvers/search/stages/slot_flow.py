"""Fewest slots that serve all requests with given stage times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....models.programme import Programme
from .parameters import STANDARD, StageTimeParameters
from .rounding import round_flow
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
    that gives no flow, whole numbers are searched farther from it for few spans. For many spans, or if none
    is found, some spans may be a little too short: the times then have to be shifted
    (:func:`~batchbound.solvers.search.stages.rounding.shift_times`).

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
    rounding = seconds > values.quick_seconds
    share = values.box_share if rounding else 1.0
    for lowest, greatest in _boxes(fractional, lower, rounding, values):
        boxed = replace(programme, cost=np.zeros(columns), lower=lowest, upper=greatest)
        seconds_left = (end - time.perf_counter()) * share
        solution = (
            boxed.solved_whole(whole, seconds_left, mip_max_nodes=values.rounding_nodes)
            if seconds_left > 0
            else None
        )
        if solution is not None:
            return spans, np.rint(solution[: len(spans)]).astype(np.int64)
    seconds_left = end - time.perf_counter()
    if not rounding or seconds_left <= 0:
        return None
    used = round_flow(spans, profile, slots, stages, fractional, seconds_left, values)
    return None if used is None else (spans, used)


def _boxes(
    fractional: FloatArray, lower: FloatArray, rounding: bool, values: StageTimeParameters
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield lower and upper bounds on a whole flow, each pair wider."""
    spans = len(fractional)
    nearest, above = lower.copy(), np.full(len(lower), np.inf)
    nearest[:spans] = np.floor(fractional + 1e-7)
    above[:spans] = np.ceil(fractional - 1e-7)
    if not rounding or spans <= values.some_spans:
        yield nearest, above
    if spans <= values.some_spans:
        wider = above.copy()
        wider[:spans] = nearest[:spans] + 1.0
        yield nearest, wider
    if spans <= values.few_spans:
        yield lower, np.full(len(lower), np.inf)
