"""Time of the slots: work, and bubbles by cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.report import BETWEEN, BUBBLES, BUSY, DECODE, NO_ARRIVAL, PREFILL, STALL, TAIL, WAITING
from ...data.trace import Trace


def slot_seconds(trace: Trace) -> dict[str, float]:
    """Return the slot-seconds of a run by cause.

    They add up to slots x makespan. An occupied slot decodes, is prefilled, is stalled by the prefill of
    others, or idles between two stages (the program's own time). A free slot waits for a prefill while a
    request waits, and idles while none has arrived. Once no request is left to start, it belongs to the tail.
    See ``docs/metrics.md``.
    """
    seconds = dict.fromkeys((*BUSY, *BUBBLES), 0.0)
    if not trace.makespan:
        return seconds
    start, end = stage_edges(trace)
    length = end - start
    active = np.array([stage.active for stage in trace.stages])
    prefill = np.array([stage.kind == "prefill" for stage in trace.stages])
    occupied = occupied_slots(trace)
    seconds[DECODE] = float((active * length)[~prefill].sum())
    seconds[PREFILL] = float((active * length)[prefill].sum())
    seconds[STALL] = float(((occupied - active) * length)[prefill].sum())
    gap = start - np.concatenate(([0.0], end[:-1]))
    before = np.where(prefill, occupied - active, active)
    seconds[BETWEEN] = float((before * gap).sum())
    causes = idle_causes(trace)
    for free, first, last in (
        (trace.slots - occupied, start, end),
        (trace.slots - before, start - gap, start),
    ):
        for cause in (WAITING, NO_ARRIVAL, TAIL):
            clock = causes.seconds_before(cause)
            seconds[cause] += float((free * (clock(last) - clock(first))).sum())
    return seconds


def occupied_slots(trace: Trace) -> IntArray:
    """Return the occupied slots during each stage, shape (stages,).

    It counts backwards from the active slots of decode steps, so it is also right with evictions.
    """
    _, end = stage_edges(trace)
    done = np.isfinite(trace.finished)
    # Several stages without duration may end as a request finishes; its last is none before its own.
    last = np.maximum(np.searchsorted(end, trace.finished[done]), trace.stage_of[done])
    leaving = np.bincount(last, minlength=len(end))
    occupied = np.zeros(len(end), dtype=np.int64)
    before_next = 0
    for index in range(len(end) - 1, -1, -1):
        stage = trace.stages[index]
        if stage.kind == "prefill":
            occupied[index] = min(trace.slots, max(stage.active, before_next + int(leaving[index])))
            before_next = int(occupied[index]) - stage.active
        else:
            occupied[index] = before_next = stage.active
    return occupied


@dataclass(frozen=True, slots=True, eq=False)
class IdleCauses:
    """Cause of free slots over the time of a run.

    times: Seconds at which the cause changes, from 0 to the makespan, shape (spans + 1,).
    causes: Cause in each span.
    """

    times: FloatArray
    causes: tuple[str, ...]

    def seconds_before(self, cause: str) -> Callable[[FloatArray], FloatArray]:
        """Return a function of the seconds during which ``cause`` held."""
        holds = np.array([named_cause == cause for named_cause in self.causes], dtype=np.float64)
        total = np.concatenate(([0.0], np.cumsum(np.diff(self.times) * holds)))
        return lambda time: np.interp(time, self.times, total)


def idle_causes(trace: Trace) -> IdleCauses:
    """Return the cause of free slots over time."""
    start, end = stage_edges(trace)
    served = trace.stage_of >= 0
    released = start[trace.stage_of[served]]
    # A clock may report the arrival after its stage; waiting time is never negative.
    queued = np.minimum(trace.queued[served], released)
    times = np.unique(np.concatenate(([0.0, end[-1]], queued, released)))
    arrived = np.searchsorted(np.sort(queued), times[:-1], side="right")
    begun = np.searchsorted(np.sort(released), times[:-1], side="right")
    causes = np.where(arrived > begun, WAITING, np.where(begun < len(released), NO_ARRIVAL, TAIL))
    changes = np.flatnonzero(np.concatenate(([True], causes[1:] != causes[:-1])))
    return IdleCauses(np.append(times[changes], times[-1]), tuple(causes[changes].tolist()))


def stage_edges(trace: Trace) -> tuple[FloatArray, FloatArray]:
    """Return each stage's start and end, shape (stages,)."""
    start = np.array([stage.start for stage in trace.stages])
    end = np.array([stage.end for stage in trace.stages])
    return start, end
