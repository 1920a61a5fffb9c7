"""Prefill stages split into several, by their costs or the cap."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from ...data.arrays import IntArray
from ...data.costs.cost import CostModel
from ...data.kept_beginnings import CountedAhead
from ...data.problem import Problem
from ...data.schedule import Schedule

FEW_IN_A_PART = 4
"""Prompts in a part up to which equal parts are tried."""


def split_stages(problem: Problem, schedule: Schedule) -> Schedule:
    """Split prefill stages where that takes less.

    problem: Problem; if no stage can exceed the bend, the schedule stays as it is.
    schedule: Its slots and decode steps stay.
    """
    if not problem.reaches_bend:
        return schedule
    # The kept shared prompts may change.
    whole = (schedule,) if problem.shares_prompts else ()
    bend = problem.cost.prefill_bend
    return _best_split(problem, schedule, bend, lambda prompts: _parts(prompts, problem.cost), *whole)


def stages_capped(problem: Problem, schedule: Schedule) -> Schedule:
    """Split prefill stages to keep the token cap.

    schedule: It may break the cap; its slots and decode steps stay.
    """
    cap = problem.prefill_token_cap
    if cap is None:
        return schedule
    return _best_split(problem, schedule, cap, lambda prompts: _first_fit(prompts, cap))


def _first_fit(prompts: IntArray, cap: int) -> IntArray:
    """Return each prompt's part, the largest first, shape (prompts,)."""
    part, room = np.zeros(len(prompts), dtype=np.int64), np.full(len(prompts), cap)
    if int(prompts.sum()) > cap:
        for at in np.argsort(-prompts, kind="stable").tolist():
            part[at] = int((room >= prompts[at]).argmax())
            room[part[at]] -= prompts[at]
    return part


def _best_split(
    problem: Problem,
    schedule: Schedule,
    most: float,
    parts: Callable[[IntArray], IntArray],
    *others: Schedule,
) -> Schedule:
    """Return the best of several schedules and their splits.

    most: Tokens up to which a stage has one part.
    """
    if not problem.shares_prompts:
        bins = schedule.bins
        counts, tokens = (
            np.bincount(schedule.bin_of, together, bins) for together in (None, problem.prompt_tokens)
        )
        large = (tokens > most) & (counts > 1)
        return _split(schedule, np.flatnonzero(large), parts, _Units(problem))
    stages = np.arange(schedule.bins)
    split = [
        _split(schedule, stages, parts, _Units(problem, together=together)) for together in (True, False)
    ]
    return min((*split, *others), key=lambda candidate: candidate.makespan(problem))


def _split(
    schedule: Schedule, stages: IntArray, parts: Callable[[IntArray], IntArray], units: _Units
) -> Schedule:
    """Split some stages by the part of each unit."""
    part_of, further = np.zeros_like(schedule.bin_of), np.zeros(schedule.bins, dtype=np.int64)
    order = np.argsort(schedule.bin_of, kind="stable")
    ends = np.searchsorted(schedule.bin_of[order], np.arange(schedule.bins + 1))
    for stage in stages.tolist():
        members = order[ends[stage] : ends[stage + 1]]
        unit, tokens = units.of(members)
        part = parts(tokens)
        part_of[members] = part[unit]
        further[stage] = part.max(initial=0)
    last = np.arange(schedule.bins) + np.cumsum(further)
    decode_steps = np.zeros(schedule.bins + int(further.sum()), dtype=np.int64)
    decode_steps[last] = schedule.decode_steps
    return Schedule((last - further)[schedule.bin_of] + part_of, schedule.slot_of, decode_steps)


class _Units:
    """Units of a stage: requests, or those that share a prompt.

    together: True if requests with a shared prompt stay together; else each counts the whole prompt.
    """

    def __init__(self, problem: Problem, *, together: bool = True) -> None:
        self._problem, self._together = problem, together and problem.shares_prompts
        self._ahead = None if problem.tree is None else CountedAhead(problem)
        self._root = None if problem.tree is None else _apart(problem.tree.root)

    def of(self, members: IntArray) -> tuple[IntArray, IntArray]:
        """Return each request's unit, and the units' tokens.

        Requests that share a prompt are several units if all of them exceed the cap of a stage.
        """
        if not self._together or self._ahead is None or self._root is None:
            return np.arange(len(members)), self._problem.prompt_tokens[members]
        return self._of_tree(members, self._ahead, self._root[members])

    def _of_tree(self, members: IntArray, ahead: CountedAhead, root: IntArray) -> tuple[IntArray, IntArray]:
        """Return the units of a tree: requests below one root, as many as the cap of a stage allows."""
        unit, tokens, last, taken = np.empty_like(members), list[int](), None, set[int]()
        cap, tree = self._problem.prefill_token_cap, self._problem.tree
        assert tree is not None
        for at in np.lexsort((tree.leaf[members], root)).tolist():
            nodes = taken if root[at] == last else set[int]()
            more = ahead.more(int(members[at]), nodes)
            if root[at] == last and (cap is None or tokens[-1] + more <= cap):
                tokens[-1] += more
            else:
                nodes = set()
                tokens.append(ahead.more(int(members[at]), nodes))
            unit[at], last, taken = len(tokens) - 1, root[at], nodes
        ahead.begin(members.tolist())
        return unit, np.array(tokens, dtype=np.int64)


def _apart(root: IntArray) -> IntArray:
    """Return the root of each request, and a number of its own for each without one."""
    return np.where(root < 0, -1 - np.arange(len(root)), root)


def _parts(prompts: IntArray, cost: CostModel) -> IntArray:
    """Return each prompt's part of a stage, split only for gain."""
    tokens, alone = int(prompts.sum()), np.zeros(len(prompts), dtype=np.int64)
    if len(prompts) < 2 or tokens <= cost.prefill_bend:
        return alone
    counts = np.arange(1, len(prompts) + 1)
    even = int(counts[np.argmin(counts * cost.prefill_seconds(tokens / counts))])
    best, cheapest = alone, cost.prefill_seconds(tokens)
    # Prompts are whole: of few in a part there are as many in each, or nearly.
    size = len(prompts) // even
    for count in {even, *(-(-len(prompts) // some) for some in (size, size + 1) if size <= FEW_IN_A_PART)}:
        part = _evenly(prompts, count)
        split = cost.prefill_seconds(np.bincount(part, weights=prompts, minlength=count)).sum()
        if split < cheapest:
            best, cheapest = part, float(split)
    return best


def _evenly(prompts: IntArray, count: int) -> IntArray:
    """Return each prompt's part, the largest to the part of fewest tokens."""
    part, loads = np.zeros(len(prompts), dtype=np.int64), [(0, k) for k in range(count)]
    for at in np.argsort(-prompts, kind="stable").tolist():
        load, part[at] = heapq.heappop(loads)
        heapq.heappush(loads, (load + int(prompts[at]), int(part[at])))
    return part
