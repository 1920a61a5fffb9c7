"""Small problems, schedules and fleets, built the same way in every test that wants one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.heuristics.policy import FREE, Policy, State, Step
from batchbound.models.certificates import checker
from batchbound.models.certificates.claims import MOST_STEPS, RefutedError, Work

PAPER = CostModel.paper()
UNIT = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
"""A second a prefill stage and a second a decode step."""
STEPS_ALONE = CostModel(prefill_base=0.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
"""A second a decode step."""


def mostly_slow(values: Iterable[object], fast: Container[object]) -> list[Any]:
    """Return values to parametrize a test by; all but the fast ones repeat its rule, and are slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def workload_of(prompts: Sequence[int], outputs: Sequence[int], **columns: Any) -> Workload:
    """Return requests of these lengths, named by their position."""
    return Workload([str(i) for i in range(len(prompts))], prompts, outputs, **columns)  # type: ignore[arg-type]


def tree_of(
    parent: Sequence[int], tokens: Sequence[int], leaf: Sequence[int], own: Sequence[int], unit: int = 1
) -> PrefixTree:
    """Return a tree of shared beginnings from lists."""
    columns = [np.array(column, dtype=np.int64) for column in (parent, tokens, leaf, own)]
    return PrefixTree(columns[0], columns[1], columns[2], columns[3], unit)


def problem_of(
    prompts: Sequence[int],
    outputs: Sequence[int],
    slots: int,
    cost: CostModel = PAPER,
    *,
    arrival: Sequence[float] | None = None,
    **limits: Any,
) -> Problem:
    """Return the problem of serving requests of these lengths."""
    return Problem(workload_of(prompts, outputs, arrival=arrival), cost, slots, **limits)


def sharing(
    own: Sequence[int], groups: Sequence[int], shared: int, slots: int, cost: CostModel = PAPER, **limits: Any
) -> Problem:
    """Return requests of a token each: those of a group begin with one prompt of so many shared tokens."""
    begins = [shared if group >= 0 else 0 for group in groups]
    prompts = [alone + tokens for alone, tokens in zip(own, begins, strict=True)]
    workload = workload_of(prompts, [1] * len(own), group=groups).sharing(begins)
    return Problem(workload, cost, slots, **limits)


def schedule_of(bins: Sequence[int], slots: Sequence[int], decode_steps: Sequence[int]) -> Schedule:
    """Return a schedule of plain lists."""
    return Schedule(bins, slots, decode_steps)  # type: ignore[arg-type]


def limited_problem(seed: int, most: int = 6) -> Problem:
    """Return a problem of a few short requests; each limit and each cost is there or not."""
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, most + 1))
    prompts, outputs = rng.integers(1, 8, requests), rng.integers(1, 8, requests)
    cost = CostModel(
        prefill_base=float(rng.choice([0.0, 0.5, 2.0, 5.0])),
        prefill_per_token=float(rng.choice([0.0, 0.1])),
        decode_base=float(rng.choice([0.0, 1.0, 1.0])),
        decode_per_slot=float(rng.choice([0.0, 0.2])),
        prefill_floor=float(rng.choice([0.0, 0.0, 1.0, 3.0])),
        decode_per_kv_token=float(rng.choice([0.0, 0.01])),
        prefill_bend=float(rng.choice([0.0, 4.0, 8.5])),
        prefill_per_token_beyond=float(rng.choice([0.0, 0.0, 0.3])),
    )
    largest = int((prompts + outputs).max())
    return Problem(
        Workload.from_lengths(prompts, outputs),
        cost,
        slots=int(rng.integers(1, 5)),
        kv_capacity=int(largest + rng.integers(0, 14)) if rng.random() < 0.6 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, 8)) if rng.random() < 0.5 else None,
        prefill_emits_first_token=bool(rng.random() < 0.5),
    )


def scarce_problem(
    seed: int, *, cost: CostModel = STEPS_ALONE, capped: bool = False, most: int = 6
) -> Problem:
    """Return a problem of six short requests, or so many, that memory often does not hold at once."""
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 9, most), rng.integers(1, 9, most)
    return Problem(
        Workload.from_lengths(prompts, outputs),
        cost,
        slots=int(rng.integers(2, 5)),
        kv_capacity=int((prompts + outputs).max() + rng.integers(0, 12)),
        prefill_token_cap=int(prompts.max() + rng.integers(0, 6)) if capped else None,
        prefill_emits_first_token=bool(seed % 2),
    )


def verified_within(
    problem: Problem, bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Work], None]:
    """Return what verifies a bound within given steps, and raises what it is refused for."""

    def check(work: Work) -> None:
        monkeypatch.setattr(checker, "Work", lambda: work)
        violation = checker.verify_bound(problem, bound)
        if violation is not None:
            raise RefutedError(violation.rule, violation.message)

    return check


def steps_of(check: Callable[[Work], object]) -> int:
    """Return the steps that a check takes, with one less of which it is refused."""
    work = Work()
    check(work)
    steps = MOST_STEPS - work.left
    check(Work(steps))
    try:
        check(Work(steps - 1))
    except RefutedError:
        return steps
    raise AssertionError(f"{steps - 1} steps are enough")


class Watched:
    """A policy whose every step is held against the limits."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, state: State) -> Step:
        step = self._policy(state)
        problem = state.problem
        chosen = np.array(step.prefill, dtype=np.int64)
        tokens = int((problem.prompt_tokens[chosen] + state.decoded[chosen]).sum())
        if problem.prefill_token_cap is not None:
            assert tokens <= problem.prefill_token_cap or len(chosen) == 1
        active = int((state.slot_request != FREE).sum())
        if problem.kv_capacity is not None and not step.evict:
            assert state.kv_held <= problem.kv_capacity or active <= 1
            assert state.kv_held + tokens <= problem.kv_capacity or active + len(chosen) == 1
            if not len(chosen) and active > 1:
                left = problem.decode_steps - state.decoded
                decode_steps = min(step.decode_steps, max(1, int(left[state.running].min())))
                assert state.kv_held + active * (decode_steps - 1) <= problem.kv_capacity
        return step
