"""Rounding of a fractional slot flow, and shifted stage times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....models.programme import Programme
from .parameters import STANDARD, StageTimeParameters
from .spans import LengthProfile, Spans

WHOLE = 1e-6
"""Largest distance from a whole number."""


def can_round() -> bool:
    """Return whether CP-SAT is installed (extra ``solvers``)."""
    return find_spec("ortools") is not None


def round_flow(
    spans: Spans,
    profile: LengthProfile,
    slots: int,
    stages: int,
    flow: FloatArray,
    seconds: float,
    values: StageTimeParameters = STANDARD,
) -> IntArray | None:
    """Round a flow to whole slots that lack the least.

    If spans of a length or above are fewer than the requests that need them, a request takes the next shorter
    span. CP-SAT minimises the missing steps, for which the times are stretched afterwards
    (:func:`shift_times`). A flow without missing steps often does not exist, and takes long to find.

    spans, profile, slots: Arcs of the flow, requests to serve, and number of slots.
    flow: Fractional flow, shape (spans,).
    seconds: Time limit.
    """
    below = np.floor(flow + WHOLE).astype(np.int64)
    open_spans = np.flatnonzero(flow - below > WHOLE)
    if not len(open_spans):
        return below
    if not can_round():
        return None
    from ortools.sat.python import cp_model

    rank, at_least = spans.demand(profile)
    gap = np.diff(np.unique(spans.decode_steps), prepend=0)
    model = cp_model.CpModel()
    up = {int(span): model.new_bool_var("") for span in open_spans}
    idle = [model.new_int_var(0, slots, "") for _ in range(stages)]
    leaving = np.bincount(spans.first, weights=below, minlength=stages + 1)
    leaving -= np.bincount(spans.last, weights=below, minlength=stages + 1)
    leaving[0], leaving[stages] = leaving[0] - slots, leaving[stages] + slots
    balance = [
        int(net) + sum(idle[k : k + 1]) - sum(idle[k - 1 : k] if k else []) for k, net in enumerate(leaving)
    ]
    for span, variable in up.items():
        balance[spans.first[span]] += variable
        balance[spans.last[span]] -= variable
    for net in balance:
        model.add(net == 0)
    there = np.bincount(rank, weights=below, minlength=len(at_least))[::-1].cumsum()[::-1]
    lacking = (at_least - there).astype(np.int64)
    longer, short = [], []
    # From one level of open spans down to the next, the same spans are long enough: one row for all of them.
    levels = np.unique(rank[open_spans])[::-1].tolist()
    for level, below_it in zip([len(at_least), *levels], [*levels, -1], strict=True):
        longer += [up[int(span)] for span in open_spans[rank[open_spans] == level]]
        here = slice(below_it + 1, min(level, len(at_least) - 1) + 1)
        largest = int(lacking[here].max(initial=0))
        if largest > 0:
            missing = model.new_int_var(0, largest, "")
            model.add(sum(longer) + missing >= largest)
            short.append(int(gap[here].sum()) * missing)
    # Every request needs some span, however short it is.
    model.add(sum(longer) >= int(lacking[0]))
    model.minimize(sum(short))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    # Its own handler leaves Ctrl-C to end the process without a word, from then on.
    solver.parameters.catch_sigint_signal = False
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = (
        values.cp_sat_work if np.isinf(seconds) else min(seconds, values.most_cp_sat_work)
    )
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    used = below.copy()
    used[list(up)] += [solver.value(variable) for variable in up.values()]
    return used


def shift_times(
    times: IntArray, spans: Spans, used: IntArray, profile: LengthProfile
) -> tuple[IntArray, Spans]:
    """Shift stage times to the times that a use of slots needs.

    The longest requests take the longest spans; then every stage comes as early as the ends there allow. Then
    single steps are left out while the requests still fit the spans: for every length, at least as many spans
    as requests are that long or longer.

    times: Decode steps of the stages and the end, shape (stages + 1,).
    spans, used: Spans, and the slots in each, shape (spans,), no fewer than there are requests.
    """
    longest_first = np.argsort(-(times[spans.last] - times[spans.first]), kind="stable")
    taken = np.repeat(longest_first, used[longest_first])[: profile.requests]
    decode_steps = np.repeat(np.arange(profile.longest + 1), np.diff(profile.at_most, prepend=0))[::-1]
    times = _earliest(spans.first[taken], spans.last[taken], decode_steps, len(times))
    times = _without_steps(times, spans, used, profile)
    return times, Spans(spans.first, spans.last, times[spans.last] - times[spans.first])


def _earliest(first: IntArray, last: IntArray, decode_steps: IntArray, points: int) -> IntArray:
    """Return the earliest stages and end for some requests."""
    order = np.argsort(last, kind="stable")
    first, decode_steps = first[order], decode_steps[order]
    ends = np.searchsorted(last[order], np.arange(points + 1))
    times = np.zeros(points, dtype=np.int64)
    for stage in range(1, points):
        here = slice(ends[stage], ends[stage + 1])
        times[stage] = (times[first[here]] + decode_steps[here]).max(initial=times[stage - 1])
    return times


def _without_steps(times: IntArray, spans: Spans, used: IntArray, profile: LengthProfile) -> IntArray:
    """Leave single steps out while all requests fit the spans."""
    needed = profile.requests - np.concatenate(([0], profile.at_most[:-1]))
    first, last, weight = spans.first[used > 0], spans.last[used > 0], used[used > 0]
    while True:
        decode_steps = np.minimum(times[last] - times[first], profile.longest + 1)
        offered = np.bincount(decode_steps, weights=weight, minlength=profile.longest + 2)[::-1].cumsum()[
            ::-1
        ]
        spare = np.append(offered[: profile.longest + 1] - needed, np.inf)
        lengths, rank = np.unique(decode_steps, return_inverse=True)
        across = np.zeros((len(lengths), len(times) + 1))
        np.add.at(across, (rank, first + 1), weight)
        np.add.at(across, (rank, last + 1), -weight)
        across = across.cumsum(axis=1)[:, : len(times)]
        fits = (across <= spare[lengths][:, None]).all(axis=0)
        fits[1:] &= np.diff(times) > 0
        fits[0] = False
        if not fits.any():
            return times
        # A step with few spans across it leaves most for further steps.
        stage = int(np.argmin(np.where(fits, across.sum(axis=0), np.inf)))
        times = times.copy()
        times[stage:] -= 1


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
    (:func:`shift_times`).

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
