"""What the first and the last requests of slots waste is proven, and no schedule wastes less."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from builders import UNIT, mostly_slow, problem_of

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel, IntArray
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.models.bounds.difference_set import Differences, difference_set_bound, useful_end_values
from batchbound.models.bounds.least_counts import least_counts
from batchbound.models.bounds.slot_ends import PARTS, EndCase, EndPrices, SlotEnds
from batchbound.models.certificates.checker import source_of, verify_bound
from batchbound.models.certificates.claims import Work
from batchbound.models.certificates.enumeration import fits
from batchbound.models.certificates.slot_ends import checked_ends
from batchbound.solvers.bounds.proven_bound import proven_bound
from batchbound.solvers.bounds.slot_ends import refute_case


def random_prices(rng: np.random.Generator, longest: int, rounds: int) -> EndPrices:
    share, value, end_value, end = rng.integers(0, [PARTS + 1, 60, 60, 80]).tolist()
    dearer = np.minimum(rng.integers(0, 20, longest) * (rng.random(longest) < rng.random()), end_value)
    dearer[0] = 0
    mirror = (rounds - np.arange(longest)) % longest
    dearer = np.where(mirror > 0, dearer, 0)
    moved = dearer - np.where(mirror > 0, dearer[mirror], 0)
    return EndPrices(rounds, bool(rng.integers(2)), share, value, end_value, end, moved)


def random_lengths(rng: np.random.Generator, longest: int) -> tuple[IntArray, IntArray]:
    lengths = np.append(np.flatnonzero(rng.random(longest - 1) < 0.7) + 1, longest)
    return lengths, rng.integers(1, 5, len(lengths))


def least_constant(ends: SlotEnds, prices: EndPrices) -> int:
    """Return the least waste and charges by trying all sets of values and of end values."""
    longest, left = ends.longest, prices.rounds % ends.longest
    have = [(n, int(ends.number[n])) for n in range(1, longest) if ends.number[n]]
    charge_of = {v: prices.end_value + int(prices.moved[v]) for v in range(1, longest)}
    best = 10**9
    for values in subsets([n for n, _ in have]):
        for end_values in subsets(list(charge_of)):
            cost = prices.value * len(values) + sum(charge_of[v] for v in end_values)
            for n, count in have:
                held = min(v for v in (*values, longest) if v >= n) - n
                held_end = max(held, min(v for v in (*end_values, longest) if v >= n) - n)
                alone = max(held, (left - n) % longest)
                rest = PARTS - prices.share
                if prices.filling and n == ends.shortest:
                    cost += count * rest * held
                else:
                    as_end = rest * held + prices.share * held_end - prices.end
                    as_both = rest * held + prices.share * alone - 2 * prices.end
                    cost += count * min(PARTS * held, as_end, as_both)
            best = min(best, cost)
    return best + ends.at_rest(prices)


def subsets(items: list[int]) -> list[tuple[int, ...]]:
    return [chosen for size in range(len(items) + 1) for chosen in combinations(items, size)]


def test_the_relaxation_is_what_trying_all_values_gives_and_what_the_checker_derives() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths, counts = random_lengths(rng, int(rng.integers(2, 6)))
        if len(lengths) < 2:
            continue
        ends = SlotEnds(lengths, counts, slots=int(rng.integers(1, 4)))
        prices = random_prices(rng, ends.longest, rounds=int(rng.integers(ends.longest, 5 * ends.longest)))
        waste = ends.relaxed(prices)
        assert waste.constant == least_constant(ends, prices)
        have = list(zip(lengths.tolist(), counts.tolist(), strict=True))
        claim = checked_ends(have, ends.slots, prices.witness, Work())
        assert (claim.rounds, claim.constant) == (prices.rounds, waste.constant)
        assert (claim.value, claim.end_value) == (prices.value, prices.end_value)
        assert claim.rest == PARTS - prices.share


def test_the_solution_found_costs_what_the_relaxation_says() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        lengths, counts = random_lengths(rng, int(rng.integers(3, 40)))
        ends = SlotEnds(lengths, counts, slots=int(rng.integers(1, 9)))
        prices = random_prices(rng, ends.longest, rounds=int(rng.integers(ends.longest, 200)))
        waste = ends.relaxed(replace(prices, share=PARTS, filling=False))
        # At a slightly higher price what was bought costs as much more, or less if something else is better.
        for name, bought in (
            ("value", waste.values),
            ("end_value", len(waste.end_values)),
            ("end", -waste.ends),
        ):
            dearer = replace(waste.prices, **{name: getattr(waste.prices, name) + 1})
            more = ends.relaxed(dearer).constant - ends.at_rest(dearer)
            assert more <= waste.constant - ends.at_rest(waste.prices) + bought


def random_slots(rng: np.random.Generator) -> tuple[IntArray, list[list[tuple[int, int]]]]:
    """Return points of time, and for each slot its requests' rounds and those they are held for."""
    longest = int(rng.integers(3, 14))
    end = int(rng.integers(longest, 5 * longest))
    points = np.unique(np.concatenate(([0], rng.integers(0, end, rng.integers(0, 6)), [end])))
    full, exact = rng.choice([0.2, 0.5, 0.8]), rng.choice([0.0, 0.5, 1.0])
    slots = []
    for _ in range(rng.integers(1, 5)):
        served, at = [], 0
        while at < end:
            later = points[points > at]
            until = int(rng.choice(later) if rng.random() < 0.5 else later[0])
            most = min(until - at, longest)
            if most < longest or rng.random() > full:
                most = min(most, longest - 1)
                most = most if rng.random() < exact else int(rng.integers(1, most + 1))
            served.append((most, until - at))
            at = until
        slots.append(served)
    return points, slots


@pytest.mark.parametrize("tries", mostly_slow([60, 250], fast=[60]))
def test_no_schedule_wastes_less_than_prices_prove_and_some_waste_no_more(tries: int) -> None:
    rng = np.random.default_rng(2)
    met = 0
    for _ in range(tries):
        points, served = random_slots(rng)
        lengths, counts = np.unique([n for slot in served for n, _ in slot], return_counts=True)
        ends, rounds = SlotEnds(lengths, counts, len(served)), int(points[-1])
        wasted = sum(held - n for slot in served for n, held in slot)
        if len(lengths) < 2 or wasted == 0:
            continue
        late = sum(held - n for slot in served for n, held in slot if n == ends.longest)
        apart = np.unique(points[None] - points[:, None])
        values = int(((apart > 0) & (apart < ends.longest)).sum())
        left_and_right = {int(x) % ends.longest for x in points[1:-1]}
        left_and_right |= {(rounds - int(x)) % ends.longest for x in points[1:-1]}
        case = EndCase(rounds, wasted + 1, values, len(left_and_right - {0}), late)
        charge = int(rng.integers(0, 4))
        assert refute_case(ends, case, charge, [], np.inf) == (None, True), (points, served)
        met += refute_case(ends, replace(case, needed=wasted), charge, [], np.inf)[0] is not None
    assert met >= 3, "an argument that proves no schedule's waste is worth little"


def small_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    requests, slots, longest = (int(rng.integers(*of)) for of in ((6, 13), (2, 6), (5, 16)))
    many, few = rng.random() < 0.7, rng.choice([0.2, 0.4, 0.6])
    length = rng.integers(1, longest + 1, requests)
    lengths = np.where(rng.random(requests) < few, longest if many else 1, length)
    cost = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
    return Problem(Workload.from_lengths([1] * requests, lengths.tolist()), cost, slots)


def test_points_that_the_longest_request_joins_leave_fewer_end_values() -> None:
    rng = np.random.default_rng(3)
    most = 0
    for _ in range(4000):
        longest = int(rng.integers(2, 7))
        end = int(rng.integers(longest, 5 * longest))
        points = np.unique(np.concatenate(([0], rng.integers(0, end, rng.integers(1, 8)), [end]))).tolist()
        exact, free = 0, 0
        for point in points:
            if point - longest >= free and point - longest in points:
                exact, free = exact + 1, point
        ends = {x % longest for x in points[1:-1]} | {(end - x) % longest for x in points[1:-1]}
        allowed = useful_end_values(len(points) - 1, longest, end, exact)
        assert len(ends - {0}) <= allowed, points
        most += len(ends - {0}) == allowed and exact > 1
    assert most >= 10, "the count is met where points are joined"


def raised(problem: Problem, stages: int) -> tuple[int, int]:
    """Return the rounds that differences prove for so many stages, without ends and with them."""
    differences = Differences(problem, least_counts(problem))
    ends = SlotEnds(differences.lengths, differences.numbers, differences.slots)
    values = -1
    while (case := differences.weakest(stages)).values != values:
        values = case.values
        differences.charge(values)
    without = case.rounds
    while waste := refute_case(ends, case, differences.charge(case.values), [], np.inf)[0]:
        differences.ends = [*differences.ends, waste]
        case = differences.weakest(stages)
    return without, case.rounds


def test_one_stage_between_lets_few_slots_serve_two_requests() -> None:
    # Nine requests over five slots: four serve two each, one until the stage and one from there. In eight
    # rounds that stage is at 4, and no request of 5 is among the eight, of which there are four; or at 3 or
    # 5, and four of the eight are of 3 rounds at most, of which there are three. Differences alone, 3 and 5,
    # waste two rounds, and there are four to waste.
    cost = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
    problem = Problem(Workload.from_lengths([1] * 9, [2, 3, 3, 4, 4, 5, 5, 5, 5]), cost, 5)
    assert raised(problem, stages=2) == (8, 9)
    assert fits(problem.rounds.tolist(), 5, 2, 9, Work())
    assert not fits(problem.rounds.tolist(), 5, 2, 8, Work())


@pytest.mark.parametrize(
    ("seed", "stages"), [(61, 3), (181, 2), (289, 2), (379, 3), (460, 4), (460, 5), (578, 4), (630, 2)]
)
def test_rounds_that_ends_refute_fit_no_schedule(seed: int, stages: int) -> None:
    problem = small_problem(seed)
    without, with_ends = raised(problem, stages)
    assert with_ends > without
    assert not fits(problem.rounds.tolist(), problem.slots, stages, with_ends - 1, Work())


@pytest.mark.parametrize("seed", range(40))
def test_rounds_that_some_schedule_has_are_not_refuted(seed: int) -> None:
    problem = small_problem(seed)
    stages = least_counts(problem).stages + seed % 3
    _, proven = raised(problem, stages)
    assert not fits(problem.rounds.tolist(), problem.slots, stages, proven - 1, Work())


@pytest.mark.slow
def test_ends_raise_the_bound_at_the_papers_size() -> None:
    problem = Problem(generate("table3-atom45", 1, 1319), CostModel.paper(), 200)
    bound = proven_bound(problem, seconds=60.0)
    assert bound.source == "difference set and ends"
    assert bound.seconds > difference_set_bound(problem).seconds + 0.02
    assert verify_bound(problem, bound) is None


def test_what_a_stage_of_a_proof_has_no_time_for_is_looked_for_in_a_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines: list[float] = []

    def no_time(*given: object) -> tuple[None, bool]:
        assert isinstance(given[-1], float)
        deadlines.append(given[-1])
        return None, False

    module = importlib.import_module("batchbound.solvers.bounds.proven_bound")
    monkeypatch.setattr(module, "refute_case", no_time)
    monkeypatch.setattr(module, "FIRST_STAGE", 10.0)
    begun = time.perf_counter()
    proven_bound(Problem(generate("table3", 1, 60), CostModel.paper(), 8), seconds=640.0)
    assert deadlines[-1] >= begun + 640.0


def claiming(ends: list[dict[str, object]]) -> Bound:
    """Return the bound of eight requests on four slots, each of whose lengths but 2 is taken."""
    certificate = {
        "kind": "difference set",
        "slots": 4,
        "stages": {"kind": "requests over slots", "at_least": 2},
        "rounds": {"kind": "lifted", "heaviest": 7, "machines": 3, "at_least": 8},
        "charges": [2, 20],
        "late": [0, 2],
        "refuted": [],
        "ends": ends,
    }
    # Two stages, and nine rounds where eight are what the four slots need if nothing is wasted.
    return Bound(11.0, source_of(certificate), {"prefill stages": 2.0, "decode rounds": 9.0}, certificate)


def test_a_checker_refuses_ends_that_prove_less() -> None:
    problem = problem_of([1] * 8, [5, 1, 1, 3, 5, 4, 5, 4], 4, UNIT)
    claim = {
        "rounds": 8,
        "filling": False,
        "share": 9,
        "value": 21,
        "end_value": 8,
        "end": 12,
        "dearer": [[1, 8]],
    }
    assert verify_bound(problem, claiming([claim])) is None

    def changed(**changes: object) -> str:
        violation = verify_bound(problem, claiming([{**claim, **changes}]))
        assert violation is not None, changes
        return violation.rule

    assert changed(rounds=9) == "the certificate proves the bound"
    assert changed(end=24) == "the certificate proves the bound"
    assert changed(end_value=4, dearer=[]) == "the certificate proves the bound"
    assert changed(value=-1) == "ends"
    assert changed(share=PARTS + 1) == "ends"
    assert changed(dearer=[[1, 10**6]]) == "ends", "then the one that comes with it has a negative price"
    assert changed(dearer=[[8 % 5, 1]]) == "ends", "it comes with itself"
    violation = verify_bound(problem, replace(claiming([]), source="difference set"))
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"
