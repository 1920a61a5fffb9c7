"""Rounding of a fractional slot flow, and shifted stage times."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from ....data.arrays import FloatArray, IntArray
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
