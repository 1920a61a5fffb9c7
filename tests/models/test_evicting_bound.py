"""The bound of schedules that may evict is never above the best of them, and says less than the other one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

import pytest
from builders import UNIT, limited_problem, mostly_slow, problem_of, scarce_problem

from batchbound.data.bound import Bound
from batchbound.data.problem import Problem
from batchbound.models.bounds.makespan import best_bound, trivial_bound
from batchbound.models.bounds.prove import evicting_bound
from batchbound.models.certificates.checker import verify_bound

State = tuple[tuple[int, ...], int]
"""Decode steps that each request has had, and the running requests as bits."""


def subsets(mask: int) -> Iterator[int]:
    """Yield every subset of some bits, itself and none of them included."""
    part = mask
    while True:
        yield part
        if not part:
            return
        part = (part - 1) & mask


class Evicting:
    """All schedules of a tiny problem, with evictions at any time, by Dijkstra's algorithm."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.prompts, self.first = problem.prompt_tokens.tolist(), problem.kv_at_start.tolist()
        self.steps = problem.decode_steps.tolist()
        self.capacity = problem.kv_capacity or 10**9

    def least_seconds(self) -> float:
        """Return the least makespan."""
        none = tuple([0] * len(self.steps))
        # A request of no decode steps is done by its prefill, so -1 stands for before it.
        start = tuple(-1 if not n else 0 for n in self.steps)
        best: dict[State, float] = {(start, 0): 0.0}
        queue: list[tuple[float, State]] = [(0.0, (start, 0))]
        while queue:
            seconds, state = heapq.heappop(queue)
            if seconds > best[state]:
                continue
            if all(done == n for done, n in zip(state[0], self.steps, strict=True)):
                return seconds
            for more, after in self.moves(state):
                if seconds + more < best.get(after, 1e18):
                    best[after] = seconds + more
                    heapq.heappush(queue, (seconds + more, after))
        raise AssertionError(f"{none} leads nowhere")

    def moves(self, state: State) -> Iterator[tuple[float, State]]:
        """Yield the seconds of each stage and step, after evictions or none, and the state that follows."""
        done, running = state
        left = sum(1 << i for i, n in enumerate(self.steps) if done[i] < n)
        for kept in subsets(running):
            for chosen in subsets(left & ~kept):
                if chosen:
                    yield from self.stage(done, kept, chosen)
            if kept:
                yield from self.step(done, kept)

    def stage(self, done: tuple[int, ...], kept: int, chosen: int) -> Iterator[tuple[float, State]]:
        """Yield a prefill stage next to the requests that are kept, if its limits allow it."""
        requests = [i for i in range(len(done)) if chosen >> i & 1]
        tokens = sum(self.prompts[i] + max(0, done[i]) for i in requests)
        held = sum(self.prompts[i] + max(0, done[i]) for i in range(len(done)) if (kept | chosen) >> i & 1)
        cap = self.problem.prefill_token_cap
        if (kept | chosen).bit_count() > self.problem.slots or held > self.capacity:
            return
        if cap is not None and tokens > cap and len(requests) > 1:
            return
        after = tuple(max(0, n) if chosen >> i & 1 else n for i, n in enumerate(done))
        running = sum(
            1 << i for i in range(len(done)) if (kept | chosen) >> i & 1 and after[i] < self.steps[i]
        )
        yield self.problem.cost.prefill_seconds(tokens), (after, running)

    def step(self, done: tuple[int, ...], kept: int) -> Iterator[tuple[float, State]]:
        """Yield a decode step of the requests that are kept, if the KV cache holds them."""
        requests = [i for i in range(len(done)) if kept >> i & 1]
        held = sum(self.first[i] + done[i] for i in requests)
        if held > self.capacity:
            return
        after = tuple(n + (kept >> i & 1) for i, n in enumerate(done))
        running = sum(1 << i for i in requests if after[i] < self.steps[i])
        yield self.problem.cost.decode_seconds(len(requests), held), (after, running)


TWO = problem_of([1, 1], [10, 10], 2, UNIT, kv_capacity=12)


def test_two_requests_that_evict_once_take_fourteen_steps_where_none_may_evict_eighteen() -> None:
    steps_alone = replace(TWO, cost=replace(UNIT, prefill_base=0.0))
    assert best_bound(steps_alone).seconds == 18
    assert Evicting(steps_alone).least_seconds() == 14
    assert evicting_bound(steps_alone).seconds <= 14


@pytest.mark.parametrize("batch", mostly_slow(range(12), fast=range(1)))
def test_no_schedule_that_evicts_takes_less(batch: int) -> None:
    for seed in range(20 * batch, 20 * batch + 20):
        problem = limited_problem(seed, most=3)
        bound, least = evicting_bound(problem), Evicting(problem).least_seconds()
        assert bound.seconds <= least + 1e-9, seed
        assert bound.seconds <= best_bound(problem).seconds + 1e-9, seed
        assert verify_bound(problem, bound) is None, seed


def test_some_schedules_that_evict_take_less_than_the_bound_of_those_that_do_not() -> None:
    beaten = 0
    for seed in range(12):
        problem = scarce_problem(seed, most=3)
        least = Evicting(problem).least_seconds()
        assert evicting_bound(problem).seconds <= least + 1e-9, seed
        beaten += best_bound(problem).seconds > least + 1e-9
    assert beaten


def claiming_evictions(bound: Bound) -> Bound:
    source = evicting_bound(TWO).source
    return replace(bound, source=source, certificate={**bound.certificate, "evictions": True})


def test_a_claim_that_evictions_break_is_refused() -> None:
    bound = trivial_bound(TWO)
    assert bound.certificate["decode_steps"] == {"at_least": 18, "kind": "two requests", "requests": [0, 1]}
    assert verify_bound(TWO, bound) is None
    assert str(verify_bound(TWO, claiming_evictions(bound))) == (
        "evictions: 'two requests' does not hold of schedules that evict"
    )


def test_some_slots_alone_prove_nothing_where_requests_are_evicted() -> None:
    problem = problem_of([1, 1, 1], [3, 3, 4], 2, UNIT)
    bound = trivial_bound(problem)
    assert bound.certificate["decode_steps"] == {
        "at_least": 6,
        "kind": "lifted",
        "heaviest": 3,
        "machines": 1,
    }
    assert str(verify_bound(problem, claiming_evictions(bound))) == (
        "evictions: 'lifted' does not hold of schedules that evict"
    )


def test_a_curve_over_stages_is_refused_where_requests_are_evicted() -> None:
    bound = evicting_bound(TWO)
    for kind in ("difference set", "growth", "states"):
        forged = replace(bound, certificate={**bound.certificate, "kind": kind})
        assert str(verify_bound(TWO, forged)) == f"evictions: {kind!r} does not hold of schedules that evict"
    for value in (1, "yes", [True]):
        forged = replace(bound, certificate={**bound.certificate, "evictions": value})
        assert str(verify_bound(TWO, forged)).startswith("a certificate is readable: evictions is ")


def test_a_second_more_is_not_proven() -> None:
    bound = evicting_bound(TWO)
    assert verify_bound(TWO, bound) is None
    terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + 1}
    violation = verify_bound(TWO, replace(bound, seconds=bound.seconds + 1, terms=terms))
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"
