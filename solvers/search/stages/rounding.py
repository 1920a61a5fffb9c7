"""A fractional slot flow made whole, and the stage times moved to what it then needs."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from ....data.arrays import FloatArray, IntArray
from .slot_flow import LengthProfile, Spans

WORK, MOST_WORK = 0.2, 1.0
"""CP-SAT's own, deterministic seconds for one rounding without a time limit, and the most with one."""

WHOLE = 1e-6
"""Largest distance of a flow from a whole number to count as whole."""


def can_round() -> bool:
    """Return whether flows are rounded by CP-SAT: OR-Tools is installed, by the extra ``solvers``."""
    return find_spec("ortools") is not None


def round_flow(
    spans: Spans,
    profile: LengthProfile,
    slots: int,
    stages: int,
    flow: FloatArray,
    seconds: float,
) -> IntArray | None:
    """
    Return a flow of whole slots, each span's rounded up or down, that lacks the least, or None if not found.

    Where spans of a length or above are fewer than the requests that need them, a request takes the next
    shorter span, and what it lacks there is what CP-SAT minimises: the times are stretched for it afterwards
    (:func:`shift_times`). A flow that lacks nothing often does not exist, and is long to find where it does.

    spans, profile, slots: What the flow passes through, what it serves, and how many slots there are.
    stages: Number of stages.
    flow: The fractional flow, shape (spans,).
    seconds: Time allowed.
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
    for span, one in up.items():
        balance[spans.first[span]] += one
        balance[spans.last[span]] -= one
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
        most = int(lacking[here].max(initial=0))
        if most > 0:
            missing = model.new_int_var(0, most, "")
            model.add(sum(longer) + missing >= most)
            short.append(int(gap[here].sum()) * missing)
    # Every request needs some span, however short it is.
    model.add(sum(longer) >= int(lacking[0]))
    model.minimize(sum(short))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    # Its own handler leaves Ctrl-C to end the process without a word, from then on.
    solver.parameters.catch_sigint_signal = False
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = WORK if np.isinf(seconds) else min(seconds, MOST_WORK)
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    used = below.copy()
    used[list(up)] += [solver.value(one) for one in up.values()]
    return used


def shift_times(
    times: IntArray, spans: Spans, used: IntArray, profile: LengthProfile
) -> tuple[IntArray, Spans]:
    """
    Return the stage times that a use of slots needs, earlier or later than those it was made for.

    The longest requests take the longest spans; then every stage comes as early as what ends there allows.
    As long as single steps can still be left out, they are: the requests fit the spans if for every length
    no fewer spans than requests have it or more, so a step between two stages can go where that stays true
    of the spans across it, each a decode step shorter.

    times: The decode steps of the stages and the end, shape (stages + 1,).
    spans, used: The spans, and the slots in each, shape (spans,), no fewer than there are requests.
    """
    longest_first = np.argsort(-(times[spans.last] - times[spans.first]), kind="stable")
    taken = np.repeat(longest_first, used[longest_first])[: profile.requests]
    decode_steps = np.repeat(np.arange(profile.longest + 1), np.diff(profile.at_most, prepend=0))[::-1]
    times = _earliest(spans.first[taken], spans.last[taken], decode_steps, len(times))
    times = _without_steps(times, spans, used, profile)
    return times, Spans(spans.first, spans.last, times[spans.last] - times[spans.first])


def _earliest(first: IntArray, last: IntArray, decode_steps: IntArray, points: int) -> IntArray:
    """Return the earliest stages and end for requests between them, each of so many decode steps."""
    order = np.argsort(last, kind="stable")
    first, decode_steps = first[order], decode_steps[order]
    ends = np.searchsorted(last[order], np.arange(points + 1))
    times = np.zeros(points, dtype=np.int64)
    for stage in range(1, points):
        here = slice(ends[stage], ends[stage + 1])
        times[stage] = (times[first[here]] + decode_steps[here]).max(initial=times[stage - 1])
    return times


def _without_steps(times: IntArray, spans: Spans, used: IntArray, profile: LengthProfile) -> IntArray:
    """Return the times with single steps left out, one after the other, while all requests fit the spans."""
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
        # Where the fewest spans are across it, most is left for further decode steps.
        stage = int(np.argmin(np.where(fits, across.sum(axis=0), np.inf)))
        times = times.copy()
        times[stage:] -= 1
