"""Prefill stages made as several: where that takes less beyond the bend of their cost, or to keep a cap."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from ...data.costs.cost import CostModel, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule


def split_stages(problem: Problem, schedule: Schedule) -> Schedule:
    """
    Return the schedule with prefill stages made as several, one right after another, where that takes less.

    Parameters
    ----------
    problem
        What is scheduled; where no stage can reach beyond the bend, the schedule stays as it is.
    schedule
        It keeps its slots and rounds.
    """
    if not problem.reaches_bend:
        return schedule
    if len(problem.prefix_tokens):
        # Requests that share a prompt would take it apart: what is saved beyond the bend is computed twice.
        split = _split(problem, schedule, lambda prompts: _parts(prompts, problem.cost))
        return min(schedule, split, key=lambda candidate: candidate.makespan(problem))
    return _split(problem, schedule, lambda prompts: _parts(prompts, problem.cost))


def stages_capped(problem: Problem, schedule: Schedule) -> Schedule:
    """
    Return the schedule with prefill stages made as several, one right after another, to keep the token cap.

    Parameters
    ----------
    problem
        What is scheduled, with a token cap or without.
    schedule
        It may break the cap; its slots and rounds stay as they are.
    """
    cap = problem.prefill_token_cap
    return schedule if cap is None else _split(problem, schedule, lambda prompts: _first_fit(prompts, cap))


def _first_fit(prompts: IntArray, cap: int) -> IntArray:
    """Return the part of a stage each prompt goes to, the largest first, shape (prompts,)."""
    part, room = np.zeros(len(prompts), dtype=np.int64), np.full(len(prompts), cap)
    if int(prompts.sum()) > cap:
        for at in np.argsort(-prompts, kind="stable").tolist():
            part[at] = int((room >= prompts[at]).argmax())
            room[part[at]] -= prompts[at]
    return part


def _split(problem: Problem, schedule: Schedule, parts: Callable[[IntArray], IntArray]) -> Schedule:
    """Return the schedule with each stage made as several: the part of each prompt."""
    bin_of, rounds = np.empty_like(schedule.bin_of), list[int]()
    order = np.argsort(schedule.bin_of, kind="stable")
    ends = np.searchsorted(schedule.bin_of[order], np.arange(schedule.bins + 1))
    for first, last, lasting in zip(ends, ends[1:], schedule.rounds.tolist(), strict=False):
        members = order[first:last]
        part = parts(problem.prompt_tokens[members])
        bin_of[members] = len(rounds) + part
        rounds += [0] * int(part.max(initial=0)) + [lasting]
    return Schedule(bin_of, schedule.slot_of, np.array(rounds))


def _parts(prompts: IntArray, cost: CostModel) -> IntArray:
    """Return the part of a stage each prompt goes to, shape (prompts,): one where more are no better."""
    tokens, alone = int(prompts.sum()), np.zeros(len(prompts), dtype=np.int64)
    if len(prompts) < 2 or tokens <= cost.prefill_bend:
        return alone
    counts = np.arange(1, len(prompts) + 1)
    count = int(counts[np.argmin(counts * cost.prefill_seconds(tokens / counts))])
    part, loads = alone.copy(), [(0, k) for k in range(count)]
    for at in np.argsort(-prompts, kind="stable").tolist():
        load, part[at] = heapq.heappop(loads)
        heapq.heappush(loads, (load + int(prompts[at]), int(part[at])))
    split = cost.prefill_seconds(np.bincount(part, weights=prompts, minlength=count)).sum()
    return part if split < cost.prefill_seconds(tokens) else alone
