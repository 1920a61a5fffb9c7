"""What growth of the KV cache costs: a valid bound, above the area's, derived again by the checker."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.argument import Curve, Known
from batchbound.models.bounds.least_counts import Counts, least_counts
from batchbound.models.bounds.makespan import trivial_bound, with_differences
from batchbound.models.bounds.memory_growth import closed_form, programmes
from batchbound.models.bounds.memory_growth.programmes import growing_curve
from batchbound.models.bounds.memory_growth.states import (
    GrowthPrices,
    GrowthProof,
    GrowthStates,
    growth_curve,
)
from batchbound.models.bounds.prove import certified, proven_bound
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.claims import RefutedError, Work
from batchbound.models.certificates.memory_growth import FINEST, Growth, proven_by_growth
from batchbound.models.deadline import Deadline

BY_STEPS = CostModel(prefill_base=0.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
BOTH = replace(BY_STEPS, prefill_base=0.5)
"""A stage takes half as long as a step."""


def job(
    prompts: list[int], decode_steps: list[int], slots: int, capacity: int, cost: CostModel = BOTH
) -> Problem:
    return Problem(Workload.from_lengths(prompts, decode_steps), cost, slots, kv_capacity=capacity)


def least_steps(problem: Problem) -> dict[int, int]:
    """The fewest decode steps by the number of stages, by trying all starts before every step."""
    prompts, lengths = problem.kv_at_start.tolist(), problem.decode_steps.tolist()
    states = {(tuple(lengths), tuple([0] * len(lengths)), 0)}
    fewest: dict[int, int] = {}
    for steps in range(sum(lengths) + 1):
        after = set()
        for left, held, stages in states:
            if not any(left):
                fewest.setdefault(stages, steps)
                continue
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
                    grown = tuple(t + 1 if k in active and rest[k] else 0 for k, t in enumerate(now))
                    after.add((rest, grown, stages + bool(chosen)))
        states = after
    return fewest


def growing_bound(problem: Problem, counts: Counts, seconds: float) -> Bound | None:
    """Return the bound of the counts and the growth of memory, if that is tried."""
    known = Known.of(problem, counts)
    curve = growing_curve(known, Deadline(seconds))
    return None if curve is None else certified(known.with_curves([curve]))


def least_seconds(problem: Problem) -> float:
    return min(problem.cost.prefill_base * stages + steps for stages, steps in least_steps(problem).items())


def test_it_proves_more_than_the_tokens_read_over_the_capacity() -> None:
    # Each reads 1 to 6 tokens: 84 in all, seven times the capacity; but two side by side leave room at first.
    problem = job([1, 1, 1, 1], [6, 6, 6, 6], 4, 12)
    bound = growing_bound(problem, least_counts(problem), 10.0)
    assert bound is not None
    assert trivial_bound(problem).seconds < bound.seconds <= least_seconds(problem)


def test_stages_that_cost_something_are_counted_with_the_steps() -> None:
    # All four never fit at their ends, so that one stage, which is all that slots ask for, takes more steps.
    problem = job([1, 1, 1, 1], [6, 6, 6, 6], 4, 12, replace(BY_STEPS, prefill_base=3.0))
    counts = replace(least_counts(problem), decode_steps=0)
    with_stages = growing_bound(problem, counts, 10.0)
    free = growing_bound(replace(problem, cost=BY_STEPS), counts, 10.0)
    assert with_stages is not None
    assert free is not None
    assert counts.stages == 1
    assert free.seconds + 3.0 < with_stages.seconds <= least_seconds(problem)


BRIEF = 0.03
"""Seconds in which prices are proven, and no linear programme is solved."""


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0, programmes.FEW_SLOTS]),
    st.sampled_from([BRIEF, 10.0]),
)
def test_it_is_never_above_the_least_seconds(
    pairs: list[tuple[int, int]], slots: int, room: int, stage: float, few: int, seconds: float
) -> None:
    prompts, lengths = [prompt for prompt, _ in pairs], [length for _, length in pairs]
    capacity = max(p + n - 1 for p, n in pairs) + room
    problem = job(prompts, lengths, slots, capacity, replace(BY_STEPS, prefill_base=stage))
    with pytest.MonkeyPatch.context() as patched:
        # With 0, rows of few numbers of requests, as where slots are many.
        patched.setattr(programmes, "FEW_SLOTS", few)
        patched.setattr(closed_form, "MANY_SLOTS", few)
        bound = growing_bound(problem, replace(least_counts(problem), decode_steps=0), seconds)
    assert bound is not None
    assert bound.seconds <= least_seconds(problem) + 1e-9


def test_many_slots_have_few_rows_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programmes, "GRIDS", programmes.GRIDS[:1])
    rng = np.random.default_rng(0)
    problem = job(rng.integers(5, 60, 120).tolist(), rng.integers(5, 90, 120).tolist(), 40, 2000)
    bound = growing_bound(problem, least_counts(problem), 60.0)
    assert bound is not None
    growth = bound.certificate["growth"]
    assert isinstance(growth, dict)
    assert growth["active"] == [0, 1, 40]
    assert bound.seconds > trivial_bound(problem).seconds
    assert verify_bound(problem, bound) is None


def many_requests() -> Problem:
    rng = np.random.default_rng(0)
    return job(rng.integers(20, 200, 60).tolist(), rng.integers(20, 400, 60).tolist(), 12, 3000)


@pytest.mark.parametrize("most", [8, 32], ids=["one parabola", "two parabolas"])
def test_without_a_programme_it_proves_most_of_what_that_does(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = many_requests()
    counts = least_counts(problem)
    monkeypatch.setattr(closed_form, "MANY_SLOTS", most)
    bound = growing_bound(problem, counts, BRIEF)
    assert bound is not None
    assert verify_bound(problem, bound) is None
    monkeypatch.setattr(programmes, "GRIDS", programmes.GRIDS[:1])
    by_programme = growing_bound(problem, counts, 60.0)
    assert by_programme is not None
    area = trivial_bound(problem, counts).seconds
    assert bound.seconds - area > 0.5 * (by_programme.seconds - area) > 0.0


def test_a_longer_limit_begins_with_the_grid_of_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second grid may prove less than the first: a bound fell by 0.4 % with more time.
    begun = list[object]()
    monkeypatch.setattr(programmes._Search, "follow", lambda _, grid, end: begun.append(grid))
    for seconds in (0.1, 10.0):
        begun.clear()
        growing_bound(FOUR, least_counts(FOUR), seconds)
        assert begun[0] is programmes.GRIDS[0]


def drawn_prices(rng: np.random.Generator, problem: Problem) -> GrowthPrices:
    assert problem.kv_capacity is not None
    most = problem.kv_capacity + problem.slots
    points = [most + int(rng.integers(3))]
    while points[-1] > 0:
        points.append(points[-1] - int(rng.choice([1, 2, 4])))
    scale = int(rng.choice([2, 40]))
    active = [0, 1]
    while active[-1] < problem.slots:
        active.append(active[-1] + int(rng.integers(1, 4)))
    # Whole in between as well.
    values = rng.integers(-scale, scale, (2, 1, len(points)))
    for apart in np.diff(active).tolist():
        last = values[:, -1:]
        values = np.append(values, last + apart * (rng.integers(-scale, scale, last.shape) // apart), axis=1)
    token, end = int(rng.integers(0, 20 * scale)), int(rng.integers(-scale, scale))
    return GrowthPrices(np.array(active), np.array(points[::-1]), token, values, end)


def claimed(prices: GrowthPrices) -> dict[str, Any]:
    closed, opened = prices.values.tolist()
    between = {"active": prices.active.tolist(), "points": prices.points.tolist()}
    return {**between, "token": prices.token, "closed": closed, "open": opened, "end": prices.end}


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_any_values_prove_something_true_and_the_checker_says_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests, slots = [(3, 2), (4, 3), (4, 4)][int(rng.integers(3))]
    prompts, lengths = rng.integers(1, 4, requests).tolist(), rng.integers(1, 6, requests).tolist()
    problem = job(prompts, lengths, slots, int(rng.integers(8, 14)))
    problem = replace(problem, prefill_emits_first_token=bool(rng.integers(2)))
    prices = drawn_prices(rng, problem)
    proof = GrowthProof.of(GrowthStates.of(problem, slots), prices)
    for stages, steps in least_steps(problem).items():
        assert proof.step * steps + proof.stage * stages >= proof.worth
        assert proof.steps(np.array([stages])).tolist() <= [steps]
    assert proven_by_growth(problem, slots, claimed(prices), Work()) == Growth(
        proof.worth, proof.step, proof.stage
    )


FOUR = job([1, 1, 1, 1], [6, 6, 6, 6], 4, 12)


@cache
def proven() -> Bound:
    return proven_bound(FOUR, 5.0)


def test_its_certificate_is_found_right() -> None:
    bound = proven()
    growth = bound.certificate["growth"]
    assert isinstance(growth, dict)
    assert bound.source == "growth"
    assert [len(rows) for rows in (growth["closed"], growth["open"])] == [5, 5]
    assert verify_bound(FOUR, bound) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token": -1}, "growth: token is -1, less than 0"),
        ({"token": 0.5}, "a certificate is readable: token is 0.5, not a whole number"),
        ({"points": [0]}, "growth: points do not ascend"),
        ({"points": [0, 16, 16]}, "growth: points do not ascend"),
        ({"points": [1, 8, 16]}, "growth: points from 1 to 16 leave states without a value"),
        ({"points": [0, 15]}, "growth: points from 0 to 15 leave states without a value"),
        ({"points": [0, "16"]}, "a certificate is readable: points is '16', not a whole number"),
        (
            {"points": [0, 10**6 + 3, 2 * 10**6 + 10, 3 * 10**6 + 1]},
            "growth: points at distances that make 1000000999930999811 parts of a token",
        ),
        ({"points": None}, "a certificate is readable: points is None, not a list"),
        ({"active": None}, "a certificate is readable: active is None, not a list"),
        (
            {"active": [0, 1, 2.5, 4]},
            "a certificate is readable: active is 2.5, not a whole number",
        ),
        ({"active": [0, 2, 3, 4]}, "growth: numbers of active requests do not ascend from 0 and 1"),
        ({"active": [1, 2, 3, 4]}, "growth: numbers of active requests do not ascend from 0 and 1"),
        ({"active": [0]}, "growth: numbers of active requests do not ascend from 0 and 1"),
        ({"active": [0, 1, 4, 4]}, "growth: numbers of active requests do not ascend from 0 and 1"),
        ({"active": [0, 1, 2, 3]}, "growth: rows of up to 3 requests for 4"),
        (
            {"points": [0, 16], "closed": [[0, 0]] * 4, "open": [[0, 0]] * 5},
            "growth: 4 rows of closed values for 5 numbers",
        ),
        (
            {"points": [0, 16], "closed": [[0, 0]] * 5, "open": [[0, 0]] * 6},
            "growth: 6 rows of open values for 5 numbers",
        ),
        (
            {"active": [0, 1, 4], "points": [0, 16], "closed": [[0, 0], [0, 0], [3, 2]]},
            "growth: closed values between 1 and 4 requests are not whole",
        ),
        (
            {"points": [0, 16], "closed": [[0, 0, 0]] * 5},
            "a certificate is readable: closed is [0, 0, 0], not 2 whole numbers",
        ),
        (
            {"points": [0, 16], "closed": [[0, "0"]] * 5},
            "a certificate is readable: closed is '0', not a whole number",
        ),
        (
            {"points": [0, 16], "closed": [0] * 5},
            "a certificate is readable: closed is 0, not 2 whole numbers",
        ),
        ({"open": None}, "a certificate is readable: open is None, not a list"),
        ({"end": None}, "a certificate is readable: end is None, not a whole number"),
    ],
)
def test_what_a_claim_does_not_prove_is_refused(changed: dict[str, object], message: str) -> None:
    bound = proven()
    growth = bound.certificate["growth"]
    assert isinstance(growth, dict)
    told = replace(bound, certificate={**bound.certificate, "growth": {**growth, **changed}})
    assert str(verify_bound(FOUR, told)) == message


def test_a_certificate_of_before_has_a_row_for_each_number_of_requests() -> None:
    bound = proven()
    growth = bound.certificate["growth"]
    assert isinstance(growth, dict)
    assert growth["active"] == [0, 1, 2, 3, 4]
    before = {name: claim for name, claim in growth.items() if name != "active"}
    assert verify_bound(FOUR, replace(bound, certificate={**bound.certificate, "growth": before})) is None
    for rows, message in ((4, "growth: rows of up to 3 requests for 4"), (1, "do not ascend from 0 and 1")):
        fewer = {**before, "closed": growth["closed"][:rows]}
        told = replace(bound, certificate={**bound.certificate, "growth": fewer})
        assert message in str(verify_bound(FOUR, told))


@pytest.mark.parametrize("name", ["token", "closed", "open", "end"])
def test_other_prices_prove_less_and_are_refused(name: str) -> None:
    bound = proven()
    growth = bound.certificate["growth"]
    assert isinstance(growth, dict)
    changed: object = growth[name]
    if isinstance(changed, int):
        changed = 0 if name == "token" else changed - 10**10
    else:
        assert isinstance(changed, list)
        changed = [[value + 10**10 * (place % 2) for place, value in enumerate(row)] for row in changed]
    told = replace(bound, certificate={**bound.certificate, "growth": {**growth, name: changed}})
    violation = verify_bound(FOUR, told)
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"


def test_a_claim_that_is_missing_is_refused() -> None:
    bound = proven()
    told = {name: claim for name, claim in bound.certificate.items() if name != "growth"}
    violation = verify_bound(FOUR, replace(bound, certificate=told))
    assert str(violation) == "a certificate is readable: growth is None, not a claim"


def test_without_a_capacity_nothing_is_proven() -> None:
    problem = Problem(Workload.from_lengths([1], [3]), BY_STEPS, 1)
    with pytest.raises(RefutedError) as refused:
        proven_by_growth(problem, 1, {}, Work())
    assert refused.value.args == ("growth", "nothing grows over a KV capacity where there is none")


ONE = job([1], [2], 1, 5)
NOTHING = [[0, 0]] * 2
OF_TOKENS = {"active": [0, 1], "points": [0, 6], "token": 1, "closed": NOTHING, "open": NOTHING, "end": 0}


def of_growth(problem: Problem, growth: dict[str, Any], seconds: float) -> Bound:
    stages = {"kind": "requests over slots", "at_least": 1}
    decode_steps = {"kind": "lifted", "at_least": 0, "heaviest": 1, "machines": 1}
    certificate = {"kind": "growth", "slots": problem.slots, "stages": stages, "decode_steps": decode_steps}
    terms = {"decode steps": seconds}
    return Bound(seconds, "growth", terms, {**certificate, "growth": growth})


PRICED_STAGES = {
    **OF_TOKENS,
    "token": 2,
    "closed": [[0, 0], [1, 1]],
    "open": [[1, 1]] * 2,
}
"""For one request a stage is priced 6 and a step 4, and all are worth 12."""
OF_TWO = {
    **PRICED_STAGES,
    "active": [0, 1, 2],
    "points": [0, 7],
    "closed": [[0, 0], [1, 1], [1, 1]],
    "open": [[1, 1]] * 3,
}
"""For two requests a stage is priced 7 and a step, of 4 tokens at most, 8; all are worth 12."""


@pytest.mark.parametrize(
    ("problem", "growth", "seconds"),
    [
        # Two steps whatever the stages: with a stage, since none is too few.
        (ONE, OF_TOKENS, 0.5 + 2),
        # Two steps with a stage, and none with two, of which one request has but one.
        (ONE, PRICED_STAGES, 0.5 + 2),
        # A step with one stage, and with two none, which is cheaper.
        (job([1, 1], [2, 2], 2, 5), OF_TWO, 2 * 0.5),
    ],
)
def test_it_is_the_least_from_the_fewest_stages_to_one_a_request(
    problem: Problem, growth: dict[str, Any], seconds: float
) -> None:
    assert verify_bound(problem, of_growth(problem, growth, seconds)) is None
    violation = verify_bound(problem, of_growth(problem, growth, seconds + 0.25))
    assert violation is not None
    assert violation.message == f"it proves {seconds!r} s, the bound says {seconds + 0.25!r} s"


def test_each_span_looked_at_takes_steps_of_the_check() -> None:
    # One request: a step, a stage, a start and an end, each at two points, as many shifted and both ends.
    # Before that two rows on either side.
    assert proven_by_growth(ONE, 1, OF_TOKENS, Work(72 + 8)) == Growth(3, 2, 0)
    with pytest.raises(RefutedError, match="takes more than 79 steps"):
        proven_by_growth(ONE, 1, OF_TOKENS, Work(79))


def test_prices_of_tokens_alone_prove_the_tokens_read_over_the_capacity() -> None:
    nothing = [[0, 0]] * 3
    claim = {**OF_TOKENS, "active": [0, 1, 4], "points": [-4, 16], "closed": nothing, "open": nothing}
    assert proven_by_growth(FOUR, 4, claim, Work()).steps(1) == 84 // 12
    assert proven_by_growth(FOUR, 4, {**claim, "token": 0}, Work()).steps(1) == 0


def test_the_price_of_a_stage_takes_steps_away() -> None:
    # Worth 10 in parts: 3 for a step, 2 for a stage.
    assert [Growth(10, 3, 2).steps(stages) for stages in (0, 1, 2, 5, 6)] == [4, 3, 2, 0, 0]
    assert GrowthProof(10, 3, 2).steps(np.array([0, 1, 2, 5, 6])).tolist() == [4, 3, 2, 0, 0]
    assert Growth(7, 3, 2).steps(3) == 1, "what is left of 1 takes a step of 3"
    assert Growth(7, 1, 2).steps(3) == 1
    assert Growth(10, 0, 2).steps(1) == 0
    assert GrowthProof(10, 0, 2).steps(np.array([1])).tolist() == [0]


def test_a_proof_counts_in_parts_beyond_64_bits() -> None:
    # (10**20 - 3 * 10**17) / 10**18 is 99.7.
    assert GrowthProof(10**20, 10**18, 10**17).steps(np.array([0, 3, 2000])).tolist() == [100, 100, 0]
    assert GrowthProof(-(10**20), 1, 1).steps(np.array([1])).tolist() == [0]


def test_the_end_is_worth_no_less_than_the_start() -> None:
    # Worth less at the end, what ends would seem to lose: yet it may begin again from there.
    claim = {**OF_TOKENS, "closed": [[7, 7], [0, 0]]}
    assert proven_by_growth(ONE, 1, claim, Work()) == proven_by_growth(ONE, 1, {**claim, "end": -9}, Work())


def test_requests_of_no_step_need_none() -> None:
    problem = replace(job([3, 3], [1, 1], 2, 6), prefill_emits_first_token=True)
    # No request ends, so that what the end is worth proves nothing.
    claim = {**OF_TOKENS, "end": 5}
    assert proven_by_growth(problem, 2, claim, Work()) == Growth(0, 0, 0)


def test_values_are_exact_however_great() -> None:
    # A step reads 2 tokens at most. After a stage it gains what closed is worth more than open, in 6 parts.
    great = 2**60 + 1
    claim = {**OF_TOKENS, "closed": [[0, 0], [great, great]]}
    assert proven_by_growth(ONE, 1, claim, Work()).step == 2 + 6 * great


def test_points_may_tell_so_many_parts_apart_and_no_more() -> None:
    assert proven_by_growth(ONE, 1, {**OF_TOKENS, "points": [0, FINEST]}, Work()) == Growth(3, 2, 0)
    with pytest.raises(RefutedError, match="points at distances that make 1000000000001 parts of a token"):
        proven_by_growth(ONE, 1, {**OF_TOKENS, "points": [0, FINEST + 1]}, Work())


def test_a_bound_is_the_least_over_all_numbers_of_stages() -> None:
    # Of tokens alone: as many steps whatever the stages, so the fewest stages there can be.
    counts = least_counts(FOUR)
    states = GrowthStates.of(FOUR, counts.slots)
    values = np.zeros((2, 3, 2), dtype=np.int64)
    prices = GrowthPrices(np.array([0, 1, 4]), np.array([-4, 16]), 1, values, 0)
    known = Known.of(FOUR, counts)
    bound = certified(known.with_curves([growth_curve(GrowthProof.of(states, prices), prices, known.stages)]))
    assert bound.seconds == 0.5 * counts.stages + 7


def test_curves_of_several_arguments_stand_in_one_certificate() -> None:
    counted = Known.of(FOUR, least_counts(FOUR))
    curve = growing_curve(counted, Deadline(10.0))
    assert curve is not None
    known = with_differences(counted)
    charge = Curve("charges", np.zeros_like(curve.steps), 1)
    both = known.with_curves((*known.curves, charge, curve))
    bound = certified(both)
    assert bound.source == "difference set and growth"
    assert bound.seconds == certified(counted.with_curves([curve])).seconds
    assert verify_bound(FOUR, bound) is None
    assert certified(both.pruned()).source == "growth"
    for part in ("growth", "charges"):
        fewer = {name: claim for name, claim in bound.certificate.items() if name != part}
        assert verify_bound(FOUR, replace(bound, certificate=fewer)) is not None
    terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + 1}
    violation = verify_bound(FOUR, replace(bound, seconds=bound.seconds + 1, terms=terms))
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"
