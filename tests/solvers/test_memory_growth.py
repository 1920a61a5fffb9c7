"""What growing keys and values cost: a valid bound, above the area's, derived again by the checker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.least_counts import least_counts
from batchbound.models.bounds.memory_growth import GrowthPrices, GrowthStates, growth_rounds
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.claims import RefutedError, Work
from batchbound.models.certificates.memory_growth import proven_by_growth
from batchbound.solvers.bounds.memory_growth import growth_bound
from batchbound.solvers.bounds.proven_bound import proven_bound

BY_ROUNDS = CostModel(prefill_base=0.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)


def job(prompts: list[int], rounds: list[int], slots: int, capacity: int) -> Problem:
    return Problem(Workload.from_lengths(prompts, rounds), BY_ROUNDS, slots, kv_capacity=capacity)


def least_rounds(problem: Problem) -> int:
    """The fewest decode steps of any schedule, by trying all starts before every step."""
    prompts, lengths = problem.kv_at_start.tolist(), problem.rounds.tolist()
    states = {(tuple(lengths), tuple([0] * len(lengths)))}
    for rounds in range(sum(lengths) + 1):
        after = set()
        for left, held in states:
            if not any(left):
                return rounds
            waiting = [k for k, tokens in enumerate(held) if not tokens and left[k]]
            for chosen in range(1 << len(waiting)):
                now = list(held)
                for place, request in enumerate(waiting):
                    if chosen >> place & 1:
                        now[request] = prompts[request]
                active = [k for k, tokens in enumerate(now) if tokens]
                reads = sum(now[k] for k in active)
                if active and len(active) <= problem.slots and reads <= (problem.kv_capacity or 0):
                    rest = tuple(n - (k in active) for k, n in enumerate(left))
                    after.add(
                        (rest, tuple(t + 1 if k in active and rest[k] else 0 for k, t in enumerate(now)))
                    )
        states = after
    raise AssertionError("every request ends")


def test_it_proves_more_than_the_tokens_read_over_the_capacity() -> None:
    # Each reads 1 to 6 tokens: 84 in all, seven times the capacity; but two side by side leave room at first.
    problem = job([1, 1, 1, 1], [6, 6, 6, 6], 4, 12)
    counts = least_counts(problem)
    bound = growth_bound(problem, counts.slots, counts.rounds, 10.0)
    assert bound is not None
    assert counts.rounds < bound.value <= least_rounds(problem)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_it_is_never_above_the_fewest_steps(pairs: list[tuple[int, int]], slots: int, room: int) -> None:
    prompts, lengths = [prompt for prompt, _ in pairs], [length for _, length in pairs]
    problem = job(prompts, lengths, slots, max(p + n - 1 for p, n in pairs) + room)
    bound = growth_bound(problem, slots, 0, 10.0)
    assert bound is not None
    assert bound.value <= least_rounds(problem)
    claim = {"at_least": bound.value, **bound.witness}
    assert proven_by_growth(problem, slots, claim, Work()) == bound.value


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_values_prove_something_true_and_the_checker_says_the_same(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    problem = job(rng.integers(1, 4, 3).tolist(), rng.integers(1, 6, 3).tolist(), 2, 8)
    problem = replace(problem, prefill_emits_first_token=bool(rng.integers(2)))
    gap = int(rng.integers(1, 5))
    scale = int(rng.choice([2, 40]))
    values = rng.integers(-scale, scale, (3, -(-10 // gap) + 1))
    prices = GrowthPrices(gap, int(rng.integers(0, scale)), values)
    proven = growth_rounds(GrowthStates.of(problem, 2), prices)
    assert proven <= least_rounds(problem)
    claim = {"gap": gap, "token": prices.token, "values": values.tolist()}
    assert proven_by_growth(problem, 2, claim, Work()) == proven


FOUR = job([1, 1, 1, 1], [6, 6, 6, 6], 4, 12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"at_least": 99}, "rounds: 99 claimed, 8 proven"),
        ({"gap": 0}, "rounds: gap is 0, less than 1"),
        ({"token": -1}, "rounds: token is -1, less than 0"),
        ({"values": [[0] * 99] * 4}, "rounds: 4 rows of values for 4 requests and none"),
        (
            {"values": [[0] * 16] * 5},
            "rounds: 16 values 1 tokens apart leave states without one",
        ),
        (
            {"values": [["0"]] * 5},
            "a certificate is readable: values is ['0'], not rows of whole numbers",
        ),
        ({"values": [0] * 5}, "a certificate is readable: values is 0, not rows of whole numbers"),
        ({"values": None}, "a certificate is readable: values is None, not a list"),
    ],
)
def test_what_a_claim_does_not_prove_is_refused(changed: dict[str, object], message: str) -> None:
    bound = proven_bound(FOUR, 5.0)
    rounds = bound.certificate["rounds"]
    assert isinstance(rounds, dict)
    assert (rounds["kind"], rounds["at_least"], rounds["gap"]) == ("growing keys and values", 8, 1)
    assert [len(row) for row in rounds["values"]] == [17] * 5
    assert verify_bound(FOUR, bound) is None
    told = replace(bound, certificate={**bound.certificate, "rounds": {**rounds, **changed}})
    assert str(verify_bound(FOUR, told)) == message


def test_without_a_capacity_nothing_is_proven() -> None:
    problem = Problem(Workload.from_lengths([1], [3]), BY_ROUNDS, 1)
    with pytest.raises(RefutedError) as refused:
        proven_by_growth(problem, 1, {"gap": 1, "token": 0, "values": [[0], [0]]}, Work())
    assert refused.value.args == ("rounds", "nothing grows over a KV capacity where there is none")


def test_each_place_looked_at_is_three_steps_of_the_check() -> None:
    # One request: a step, a start and an end, each at a point, a shifted point and the two ends of its span.
    problem = job([1], [2], 1, 5)
    claim = {"gap": 5, "token": 1, "values": [[0, 0, 0]] * 2}
    assert proven_by_growth(problem, 1, claim, Work(36)) == 2
    with pytest.raises(RefutedError, match="takes more than 35 steps"):
        proven_by_growth(problem, 1, claim, Work(35))


def test_prices_of_tokens_alone_prove_the_tokens_read_over_the_capacity() -> None:
    claim = {"gap": 16, "token": 1, "values": [[0, 0]] * 5}
    assert proven_by_growth(FOUR, 4, claim, Work()) == 84 // 12
    assert proven_by_growth(FOUR, 4, {**claim, "token": 0}, Work()) == 0


def test_a_single_step_that_reads_a_single_token_is_proven() -> None:
    claim = {"gap": 2, "token": 1, "values": [[0, 0]] * 2}
    assert proven_by_growth(job([1], [1], 1, 1), 1, claim, Work()) == 1


def test_requests_of_no_step_need_none() -> None:
    problem = replace(job([3, 3], [1, 1], 2, 6), prefill_emits_first_token=True)
    assert proven_by_growth(problem, 2, {"gap": 6, "token": 1, "values": [[0, 0]]}, Work()) == 0
