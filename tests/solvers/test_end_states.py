"""Of states back from the end one is dropped only if another is ahead of it whatever follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers.exact.end_states import DUE, Dominance, EndStates, packed
from batchbound.solvers.exact.least_steps import Shapes
from batchbound.solvers.exact.request_sets import RequestSets

STAGE = 5.0
"""Seconds of a stage: what sharing it saves."""


def requests(capacity: int = 100) -> tuple[RequestSets, Shapes]:
    """Return three requests of 8, 6 and 3 decode steps and two prompt tokens on three slots."""
    prompts = np.array([2, 2, 2])
    workload = Workload.from_lengths(prompts, np.array([8, 6, 3]))
    problem = Problem(workload, CostModel(STAGE, 0.0, 1.0, 0.0), 3, kv_capacity=capacity)
    shapes = Shapes(problem.decode_steps, problem.kv_at_start, 3, capacity)
    return RequestSets(problem, shapes, prompts), shapes


def state(spent: float, *slots: int, now: int = 4) -> EndStates:
    """Return a state in which the last of three requests waits."""
    row, column = np.zeros(1, dtype=np.int64), np.array([*slots, 0, 0, 0][:3])[:, None]
    seconds = np.array([spent])
    soonest = np.zeros((3, 1), dtype=np.int32)
    return EndStates(row + 0b100, row + now, seconds, seconds, seconds, soonest, column, row, row, row)


def serving(over: int, who: int, group: int, due: bool = False) -> int:
    return int(packed(np.array(over), np.array(who), np.array(group))) | (DUE if due else 0)


def left_of(one: EndStates, other: EndStates, capacity: int = 100) -> list[float]:
    """Return the seconds spent of those of two states that are kept."""
    sets, shapes = requests(capacity)
    dominance = Dominance(sets, shapes, 1.0)
    kept = dominance.ahead(EndStates.together([one, other]), lambda steps: None)
    return sorted(kept.spent.tolist())


def test_who_may_join_a_stage_is_no_longer_and_has_room() -> None:
    sets, _ = requests()
    assert sets.joining.tolist() == [0, 0b110, 0b100, 0b100, 0, 0, 0, 0]
    # In its last decode step the shortest one holds 4 tokens beside 4 of another and no more than 8 in all.
    sets, _ = requests(9)
    assert sets.joining.tolist() == [0, 0b100, 0b100, 0, 0, 0, 0, 0]


def test_a_state_as_cheap_whose_request_is_over_sooner_is_ahead() -> None:
    early, late = state(1.0, serving(9, 0, 0b1)), state(2.0, serving(10, 0, 0b1))
    assert left_of(early, late) == [1.0]


def test_a_cheaper_state_may_be_moved_by_the_steps_it_is_cheaper() -> None:
    cheap, early = state(1.0, serving(10, 0, 0b1)), state(4.0, serving(7, 0, 0b1))
    assert left_of(cheap, early) == [1.0]
    assert left_of(cheap, replace(early, spent=np.array([3.0]))) == [1.0, 3.0]


@pytest.mark.parametrize(("spent", "kept"), [(STAGE + 1, [1.0]), (STAGE + 0.5, [1.0, STAGE + 0.5])])
def test_an_open_stage_is_worth_what_sharing_it_saves(spent: float, kept: list[float]) -> None:
    # Another may share the stage of the second request, but in the one state the first one is under way.
    one, other = state(1.0, serving(9, 0, 0b1)), state(spent, serving(9, 1, 0b10))
    assert left_of(one, other) == kept


def test_a_group_that_has_to_be_joined_is_ahead_only_of_one_that_has_to_be() -> None:
    due, free = state(1.0, serving(9, 0, 0b1, due=True)), state(2.0, serving(9, 0, 0b1))
    assert left_of(due, free) == [1.0, 2.0]
    assert left_of(due, state(2.0, serving(9, 0, 0b1, due=True))) == [1.0]


def test_what_holds_less_is_not_ahead_if_it_uses_more_slots() -> None:
    # Both requests share a stage and are over in five steps; the other state serves one of them for longer.
    both, alone = state(1.0, serving(9, 0, 0b11), serving(9, 1, 0b11)), serving(20, 0, 0b1)
    assert left_of(both, state(STAGE + 2, alone)) == [1.0, STAGE + 2]
    # Five seconds cheaper, beside the stage that may be shared, it is moved until both are over.
    assert left_of(both, state(2 * STAGE + 1, alone)) == [1.0]


def test_of_states_that_differ_in_time_alone_the_cheapest_is_kept() -> None:
    early, late = state(3.0, serving(9, 0, 0b1)), state(2.0, serving(11, 0, 0b1), now=6)
    together = EndStates.together([early, late])
    assert together.distinct(1.0).spent.tolist() == [3.0]
    assert together.distinct(0.4).spent.tolist() == [2.0]


def test_what_joins_stages_under_way_costs_no_less_than_counted() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        prompts, outputs, slots = rng.integers(1, 9, 6), rng.integers(2, 9, 6), int(rng.integers(2, 4))
        cost = CostModel(3.0, 0.1, 1.0, 0.0, prefill_bend=8.0, prefill_per_token_beyond=0.5)
        problem = Problem(Workload.from_lengths(prompts, outputs), cost, slots, kv_capacity=40)
        order = np.lexsort((-problem.prompt_tokens, -problem.decode_steps))
        shapes = Shapes(problem.decode_steps[order], problem.kv_at_start[order], slots, 40)
        sets = RequestSets(problem, shapes, prompts[order])
        for group in (set_ for set_ in range(1, 64) if set_.bit_count() < slots):
            waiting = 63 & ~group
            joining = int(sets.joining[group]) & waiting
            by_one = [request for request in range(6) if joining >> request & 1]
            costs = [
                sets.stages[group | 1 << one] - sets.stages[group] + sets.apart[waiting ^ 1 << one]
                for one in by_one
            ]
            assert sets.beside[1, waiting] <= min([*costs, sets.apart[waiting]]) + 1e-9
            assert sets.beside[1, waiting] >= sets.apart[waiting] - sets.shared - 1e-9


def test_one_of_six_in_pairs_leaves_three_stages_beside_one_under_way() -> None:
    # Six in pairs take three stages. One that joins a stage leaves five, which take three as well.
    prompts, outputs = np.full(8, 2), np.full(8, 5)
    problem = Problem(
        Workload.from_lengths(prompts, outputs), CostModel(STAGE, 0.0, 1.0, 0.0), 2, kv_capacity=12
    )
    shapes = Shapes(problem.decode_steps, problem.kv_at_start, 2, 12)
    sets = RequestSets(problem, shapes, prompts)
    assert sets.apart[0b111111] == 3 * STAGE
    assert sets.beside[:, 0b111111].tolist() == [3 * STAGE, 3 * STAGE, 2 * STAGE]
