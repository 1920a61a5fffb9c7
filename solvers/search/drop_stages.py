"""Prefill stages given up: where memory and slots allow, their requests start at other stages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule

REACH = 12
"""Stages before and after one that its requests are tried at, the nearest first."""

MOST = 4
"""Requests of a stage beyond which it is kept: all of them hardly ever find another."""

WIDE, WIDE_MOST = 200, 30
"""Both where there is time for it."""


def drop_stages(
    problem: Problem, schedule: Schedule, late: Callable[[], bool] = lambda: False, *, wide: bool = False
) -> Schedule:
    """
    Return a schedule of no more decode steps, with stages of few requests given up where that is possible.

    schedule: It keeps every rule, and has no idle steps. With several stages in one decode step, or requests
        of no round, it is returned as it is.
    late: Whether there is no time left, asked before each stage.
    wide: Whether more of them are tried, and farther.
    """
    if not schedule.decode_steps.all() or not problem.decode_steps.all():
        return schedule
    return _Merger(problem, schedule).schedule(late, wide)


class _Merger:
    """Where requests start, and what every decode step holds."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self._problem = problem
        self._end = int(schedule.decode_steps.sum())
        self._start = schedule.starts[schedule.bin_of].tolist()
        self._decode_steps, self._first = problem.decode_steps.tolist(), problem.kv_at_start.tolist()
        self._prompt = problem.prompt_tokens.tolist()
        self._active, self._held = schedule.active(problem), schedule.kv_tokens(problem)
        self._ramp = np.arange(max(self._decode_steps) + 1)
        self._capacity = np.iinfo(np.int64).max if problem.kv_capacity is None else problem.kv_capacity
        self._cap = problem.prefill_token_cap
        self._members: dict[int, list[int]] = {}
        for request, start in enumerate(self._start):
            self._members.setdefault(start, []).append(request)

    def schedule(self, late: Callable[[], bool], wide: bool) -> Schedule:
        """Return the schedule that is left once every stage of few requests has been tried."""
        reach, most = (WIDE, WIDE_MOST) if wide else (REACH, MOST)
        few = [time for time, members in self._members.items() if len(members) <= most]
        for time in sorted(few, key=lambda time: len(self._members[time])):
            if late():
                break
            self._remove_stage(time, reach)
        times, bin_of = np.unique(np.array(self._start), return_inverse=True)
        return Schedule.from_bins(self._problem, bin_of, np.diff(np.append(times, self._end)))

    def _remove_stage(self, time: int, reach: int) -> None:
        """Start all requests of a stage at others so near to it, or leave it as it is."""
        members = self._members.pop(time)
        times = np.array(sorted(self._members), dtype=np.int64)
        at = int(np.searchsorted(times, time))
        near = times[max(0, at - reach) : at + reach]
        near = near[np.argsort(np.abs(near - time), kind="stable")]
        moved: list[int] = []
        for request in sorted(members, key=lambda each: -self._decode_steps[each]):
            self._change(request, time, -1)
            found = next((other for other in near.tolist() if self._fits(request, other)), None)
            if found is None:
                self._change(request, time, 1)
                break
            self._change(request, found, 1)
            self._members[found].append(request)
            self._start[request] = found
            moved.append(request)
        else:
            return
        for request in moved:
            self._members[self._start[request]].remove(request)
            self._change(request, self._start[request], -1)
            self._change(request, time, 1)
            self._start[request] = time
        self._members[time] = members

    def _change(self, request: int, start: int, sign: int) -> None:
        """Count a request in the decode steps from its start on, or no longer."""
        span = slice(start, start + self._decode_steps[request])
        self._active[span] += sign
        self._held[span] += sign * self._holding(request)

    def _holding(self, request: int) -> IntArray:
        held: IntArray = self._first[request] + self._ramp[: self._decode_steps[request]]
        return held

    def _fits(self, request: int, start: int) -> bool:
        """Return whether a request may start at a stage."""
        end = start + self._decode_steps[request]
        if end > self._end or int(self._active[start:end].max()) >= self._problem.slots:
            return False
        if self._cap is not None:
            tokens = sum(self._prompt[other] for other in self._members[start])
            if tokens + self._prompt[request] > self._cap:
                return False
        return int((self._held[start:end] + self._holding(request)).max()) <= self._capacity
