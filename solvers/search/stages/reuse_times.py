"""A schedule at the stages of another one, whose requests have much the same lengths."""

from __future__ import annotations

import time

import numpy as np

from ....data.problem import Problem
from ....data.schedule import Schedule
from ..stage_split import split_stages
from .rounding import shift_times
from .slot_flow import LengthProfile, Spans, stretched, whole_slots

MOST_SPANS = 400
"""Spans between the stages up to which it is tried: of more, whole slots take as long as a search."""

STRETCHED, STRETCHES = 2e-3, 6
"""Share of all steps by which stages are first moved apart where whole slots are too few, and how often."""


def reuse_times(problem: Problem, other: Schedule, seconds: float) -> Schedule | None:
    """
    Return a schedule at about the stages of another, or None if there is none or limits are in its way.

    problem: What is scheduled, every request of a decode step at least.
    other: A schedule of other requests on as many slots.
    seconds: Time allowed for linear programmes: each has what is left of it.
    """
    began = time.perf_counter()
    if problem.memory_can_run_out or problem.prefill_token_cap is not None or not problem.decode_steps.all():
        return None
    profile, starts = LengthProfile.of(problem.decode_steps), np.unique(other.starts[other.bin_of])
    times = np.append(starts - starts[0], other.decode_steps.sum() - starts[0])
    if Spans.number_between(times, profile) > MOST_SPANS:
        return None
    for attempt in range(STRETCHES):
        most = max(1.0, STRETCHED * times[-1]) * 2.0 ** (attempt - 1) if attempt else 0.0
        later = stretched(times, most)
        left = seconds - (time.perf_counter() - began)
        flow = whole_slots(later, profile, problem.slots, left) if left > 0 else None
        if flow is not None:
            settled_times, spans = shift_times(later, *flow, profile)
            stage = spans.first[spans.of_requests(flow[1], problem.decode_steps)]
            schedule = Schedule.from_bins(problem, stage, np.diff(settled_times))
            return split_stages(problem, schedule.without_idle_steps(problem))
    return None
