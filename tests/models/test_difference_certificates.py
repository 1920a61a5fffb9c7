"""Bounds from differences of stage times: the checker derives just what their certificates prove."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import UNIT, problem_of, steps_of, verified_within

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.models.bounds.difference_set import (
    difference_set_bound,
    useful_differences,
)
from batchbound.models.bounds.makespan import trivial_bound
from batchbound.models.certificates.checker import (
    _difference_seconds,
    _near_beside,
    _near_in_chain,
    _WasteClaims,
    source_of,
    verify_bound,
)
from batchbound.models.certificates.claims import Work
from batchbound.solvers.bounds.proven_bound import CASE_SECONDS, proven_bound


def tiny_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 12))
    outputs, prompts = rng.integers(1, 12, count), rng.integers(1, 7, count)
    cost = CostModel(
        prefill_base=float(rng.choice([0.0, 0.5, 2.0, 5.0])),
        prefill_per_token=float(rng.choice([0.0, 0.1])),
        decode_base=float(rng.choice([0.5, 1.0])),
        decode_per_slot=float(rng.choice([0.0, 0.2])),
        prefill_floor=float(rng.choice([0.0, 0.0, 3.0])),
        decode_per_kv_token=float(rng.choice([0.0, 0.01])),
        prefill_bend=float(rng.choice([0.0, 4.0, 9.0])),
        prefill_per_token_beyond=float(rng.choice([0.0, 0.0, 0.3])),
    )
    return problem_of(
        prompts.tolist(),
        outputs.tolist(),
        int(rng.integers(1, 5)),
        cost,
        kv_capacity=int((prompts + outputs).max() + rng.integers(0, 12)) if rng.random() < 0.3 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, 6)) if rng.random() < 0.3 else None,
        prefill_emits_first_token=bool(rng.random() < 0.3),
    )


def is_proven_and_no_more(problem: Problem, bound: Bound) -> None:
    """The checker derives just the seconds of the code that made the bound: it shares none with it."""
    assert verify_bound(problem, bound) is None
    share = 1 + 1e-6
    terms = dict(bound.terms) | {"prefill stages": bound.terms["prefill stages"] + bound.seconds * 1e-6}
    higher = replace(bound, seconds=bound.seconds * share, terms=terms)
    violation = verify_bound(problem, higher)
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"


LATE = (308, 447, 563)
"""Seeds whose bounds take what the longest requests waste that are held for longer."""


@pytest.mark.parametrize("batch", range(4))
def test_the_checker_derives_what_the_differences_prove_and_no_more(batch: int) -> None:
    for seed in (*range(60 * batch, 60 * batch + 60), *LATE[batch : batch + 1]):
        problem = tiny_problem(seed)
        for bound in (trivial_bound(problem), difference_set_bound(problem)):
            is_proven_and_no_more(problem, bound)


def few_a_slot(seed: int) -> Problem:
    """Return a problem of few requests a slot: the bounds of some take prices."""
    rng = np.random.default_rng(seed)
    requests, slots, longest = (int(rng.integers(*of)) for of in ((6, 13), (2, 6), (5, 16)))
    many, few = rng.random() < 0.7, rng.choice([0.2, 0.4, 0.6])
    length = rng.integers(1, longest + 1, requests)
    lengths = np.where(rng.random(requests) < few, longest if many else 1, length)
    return problem_of([1] * requests, lengths.tolist(), slots, CostModel(0.5, 0.0, 1.0, 0.0))


def with_many_longest(seed: int) -> Problem:
    """Problems most of whose requests are the longest: spans of just that length follow one another."""
    rng = np.random.default_rng(seed)
    requests, longest = int(rng.integers(4, 16)), int(rng.integers(3, 8))
    lengths = np.where(rng.random(requests) < 0.6, longest, rng.integers(1, longest + 1, requests))
    slots, stage = int(rng.integers(1, 4)), float(rng.choice([0.5, 2.0]))
    return problem_of([1] * requests, lengths.tolist(), slots, CostModel(stage, 0.0, 1.0, 0.0))


@pytest.mark.parametrize("seed", [1012, 1029, 1037, 1049])
def test_the_checker_derives_what_spans_of_the_longest_prove_and_no_more(seed: int) -> None:
    problem = with_many_longest(seed)
    is_proven_and_no_more(problem, difference_set_bound(problem))


SEEDS_OF_PRICES = (0, 49, 74, 85, 92)


@pytest.mark.parametrize("seed", SEEDS_OF_PRICES)
def test_the_checker_derives_what_prices_prove_and_no_more(seed: int) -> None:
    problem = few_a_slot(seed)
    is_proven_and_no_more(problem, proven_bound(problem, 60.0))


def test_some_of_these_take_prices() -> None:
    assert any("prices" in proven_bound(few_a_slot(seed), 60.0).source for seed in SEEDS_OF_PRICES)


# Differences at work: six lengths on three slots, two stages leave two differences below the longest.
APART = problem_of([1] * 6, [1, 2, 3, 4, 5, 6], 3, UNIT)


def difference(**changes: Any) -> Bound:
    bound = difference_set_bound(replace(APART, cost=replace(UNIT, prefill_base=100.0)))
    return replace(bound, certificate={**bound.certificate, **changes})


REFUTED = {"values": 0, "capacity": 11, "lengths": [1, 2, 3, 4, 5, 6], "prices": [1] * 6, "limit": 11}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"charges": [-1]}, "charges: charges is -1, less than 0"),
        ({"charges": 3}, "a certificate is readable: charges is 3, not a list"),
        ({"charges": [1.5]}, "a certificate is readable: charges is 1.5, not a whole number"),
        ({"charges": []}, "the certificate proves the bound"),
        ({"late": [-1]}, "late: late is -1, less than 0"),
        ({"late": None}, "a certificate is readable: late is None, not a list"),
        ({"late": []}, "the certificate proves the bound"),
        ({"refuted": [{**REFUTED, "values": -1}]}, "refuted: values is -1, less than 0"),
        ({"refuted": [{**REFUTED, "capacity": -1}]}, "refuted: capacity is -1, less than 0"),
        ({"refuted": [{**REFUTED, "limit": 0}]}, "refuted: limit is 0, less than 1"),
        ({"refuted": [{**REFUTED, "limit": 10}]}, "refuted: a slot of 11 rounds holds 11, above 10"),
        ({"refuted": [REFUTED]}, "refuted: roundings worth 6 fit 3 slots of 11"),
        ({"refuted": [{**REFUTED, "lengths": [1]}]}, "refuted: 6 prices for 1 lengths, 1 of them different"),
        ({"refuted": [{**REFUTED, "capacity": 10**12}]}, "a certificate is small"),
        ({"refuted": [{}]}, "a certificate is readable: lengths is None, not a list"),
        ({"refuted": [5]}, "a certificate is readable: AttributeError"),
        (
            {"ends": [{"rounds": 9}]},
            "a certificate is of a known kind: 'slot ends' is an argument of an earlier version: plan it",
        ),
    ],
)
def test_claims_of_differences_are_judged(changes: dict[str, Any], message: str) -> None:
    problem = replace(APART, cost=replace(UNIT, prefill_base=100.0))
    assert verify_bound(problem, difference()) is None
    assert str(verify_bound(problem, difference(**changes))).startswith(message)
    # Claims that hold and are of no use change nothing but the name.
    unfit = {**REFUTED, "capacity": 1, "limit": 1}
    assert (
        verify_bound(problem, replace(difference(refuted=[unfit]), source="difference set and prices"))
        is None
    )


def test_many_requests_on_one_slot_are_bounded_and_checked_in_steps_of_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[int]()

    def counted(*values: Any) -> Any:
        asked.append(1)
        return min(*values)

    monkeypatch.setattr("batchbound.models.bounds.difference_set.min", counted, raising=False)
    useful_differences(2000, longest=7, rounds=14_000, exact=1000)
    assert len(asked) < 10
    problem = problem_of([1] * 2000, [7] * 2000, slots=1)
    bound = difference_set_bound(problem)
    verified_within(problem, bound, monkeypatch)(Work(10_000))
    # Where there is no time for that, nothing is looked for.
    found = proven_bound(problem, seconds=2000 * CASE_SECONDS)
    assert found.certificate["kind"] == "trivial"
    assert found.seconds == pytest.approx(bound.seconds)


@pytest.mark.parametrize(("refuted", "steps"), [(0, 46), (1, 162), (2, 278)])
def test_claims_of_differences_are_checked_in_just_these_steps(
    refuted: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(APART, cost=replace(UNIT, prefill_base=100.0))
    unfit = {**REFUTED, "values": 2, "capacity": 1, "limit": 1}
    bound = difference(refuted=[unfit] * refuted)
    bound = replace(bound, source=source_of(bound.certificate))
    assert steps_of(verified_within(problem, bound, monkeypatch)) == steps


@pytest.mark.parametrize("seed", range(40))
def test_a_packing_is_refuted_by_just_the_prices_that_trying_all_roundings_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.choice(np.arange(1, 9), int(rng.integers(2, 6)), replace=False)).tolist()
    counts = rng.integers(1, 5, len(lengths)).tolist()
    price = dict(zip(lengths, rng.integers(0, 6, len(lengths)).tolist(), strict=True))
    capacity, values = int(rng.integers(1, 17)), int(rng.integers(0, 4))
    slots = int(rng.integers(1, 4))
    problem = problem_of([1] * sum(counts), np.repeat(lengths, counts).tolist(), slots, UNIT)
    # What a slot holds, by all numbers of each length; and what all cost, rounded up to chosen ones.
    numbers = itertools.product(*(range(capacity // n + 1) for n in lengths))
    held = max(
        sum(price[n] * k for n, k in zip(lengths, chosen, strict=True))
        for chosen in numbers
        if sum(n * k for n, k in zip(lengths, chosen, strict=True)) <= capacity
    )
    worth = min(
        sum(
            price[min(v for v in (*chosen, lengths[-1]) if v >= n)] * k
            for n, k in zip(lengths, counts, strict=True)
        )
        for size in range(min(values, len(lengths) - 1) + 1)
        for chosen in itertools.combinations(lengths[:-1], size)
    )
    bound = difference_set_bound(problem)

    def refusal(limit: int) -> str:
        claim = {"values": values, "capacity": capacity, "lengths": lengths, "prices": list(price.values())}
        certificate = {**bound.certificate, "refuted": [{**claim, "limit": limit}]}
        return str(
            verify_bound(problem, replace(bound, source=source_of(certificate), certificate=certificate))
        )

    for limit in range(1, held + worth + 2):
        if held > limit:
            said = f"refuted: a slot of {capacity} rounds holds {held}, above {limit}"
        elif worth <= slots * limit:
            said = f"refuted: roundings worth {worth} fit {slots} slots of {limit}"
        else:
            said = "None"
        assert refusal(limit) == said


def test_requests_of_no_rounds_leave_stages_alone() -> None:
    problem = problem_of([1] * 3, [1] * 3, 2, UNIT, prefill_emits_first_token=True)
    bound = difference_set_bound(problem)
    assert bound.seconds == bound.terms["prefill stages"] == 2
    is_proven_and_no_more(problem, bound)


def test_requests_of_no_rounds_are_in_no_packing() -> None:
    # The first of seven has its only token from its stage, and six of 1 to 6 rounds are left.
    problem = problem_of([1] * 7, [1, 2, 3, 4, 5, 6, 7], 3, UNIT, prefill_emits_first_token=True)
    bound = difference_set_bound(problem)
    certificate = {**bound.certificate, "refuted": [{**REFUTED, "capacity": 1, "limit": 1}]}
    priced = replace(bound, source="difference set and prices", certificate=certificate)
    is_proven_and_no_more(problem, priced)


@pytest.mark.parametrize(
    ("lengths", "slots", "stages", "rounds", "claims", "needed"),
    [
        # One stage leaves no two points near, and 7 rounds are refuted for as few.
        ([3], 1, 1, 3, _WasteClaims([], [0], [(0, 7)], []), 8),
        # Two spans of 5, one after the other: with fewer, one of the three is held for 10 rounds more.
        ([5, 5, 5], 2, 2, 8, _WasteClaims([], [9], [], []), 10),
        # A span of 6 to 10 rounds may fill all 7, so that the point in it may be near both its ends.
        ([6, 6], 3, 2, 7, _WasteClaims([], [4], [(1, 9)], []), 7),
    ],
)
def test_the_case_that_needs_the_fewest_rounds_decides(
    lengths: list[int], slots: int, stages: int, rounds: int, claims: _WasteClaims, needed: int
) -> None:
    problem = problem_of([1] * len(lengths), lengths, slots, UNIT)
    assert _difference_seconds(problem, slots, stages, rounds, claims, Work()) == stages + needed


SMALL_COUNTS = [
    (stages, longest, rounds, spans, late)
    for stages in range(1, 12)
    for longest in range(1, 4)
    for rounds in range(longest, 4 * longest + 2)
    for spans in range(stages + 1)
    for late in (0, 1, 2)
]


def test_the_checker_counts_near_pairs_of_points_as_the_prover_does_by_code_of_its_own() -> None:
    for stages, longest, rounds, spans, late in SMALL_COUNTS:
        near = _near_in_chain(stages, longest, rounds)
        if spans:
            beside = _near_in_chain(stages, longest + late + 1, rounds) - spans
            near = max(0, min(near, beside, _near_beside(stages, longest + late, rounds, spans)))
        assert near == useful_differences(stages, longest, rounds, spans, late)


def placements(stages: int, gap: int, rounds: int) -> Iterator[list[int]]:
    """Yield all points that begin at 0, end in so many rounds or later, and leave no gap above one."""
    for intervals in itertools.product(range(1, gap + 1), repeat=stages):
        points = [0, *itertools.accumulate(intervals)]
        if points[-1] >= rounds:
            yield points


@pytest.mark.parametrize(("stages", "gap"), [(1, 3), (2, 3), (3, 2), (3, 4), (4, 3), (5, 2), (5, 3)])
def test_no_points_have_more_near_pairs_than_the_checker_counts(stages: int, gap: int) -> None:
    met = 0
    for rounds in range(gap, stages * gap + 1):
        near = max(
            sum(b - a < gap for a, b in itertools.combinations(points, 2))
            for points in placements(stages, gap, rounds)
        )
        assert near <= _near_in_chain(stages, gap, rounds)
        met += near == _near_in_chain(stages, gap, rounds)
    assert met
