"""Every claim of a certificate is judged: what holds passes, what is a little more is refused by name."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import UNIT, problem_of, workload_of

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.problem import Problem
from batchbound.models.bounds.difference_set import difference_set_bound
from batchbound.models.bounds.fleet import fleet_bound
from batchbound.models.bounds.makespan import trivial_bound
from batchbound.models.certificates.checker import source_of, verify_bound
from batchbound.models.certificates.claims import MOST_STEPS, RefutedError, Work, prices, whole, wholes
from batchbound.models.certificates.enumeration import MOST_REQUESTS, fits
from batchbound.models.certificates.fleet import verify_fleet_bound
from batchbound.models.certificates.slot_ends import PARTS, EndClaim, checked_ends
from batchbound.solvers.bounds.proven_bound import proven_bound

Certificate = dict[str, Any]


def bound_of(problem: Problem, certificate: Certificate, stages: int, rounds: int) -> Bound:
    """Return the bound of so many stages and rounds of a second each."""
    assert problem.cost == UNIT
    terms = {"prefill stages": float(stages), "decode rounds": float(rounds)}
    return Bound(sum(terms.values()), source_of(certificate), terms, certificate)


def trivial(slots: int, stages: Certificate, rounds: Certificate) -> Certificate:
    return {"kind": "trivial", "slots": slots, "stages": stages, "rounds": rounds}


def by_slots(at_least: int) -> Certificate:
    return {"kind": "requests over slots", "at_least": at_least}


def lifted(at_least: int, heaviest: int, machines: int) -> Certificate:
    return {"kind": "lifted", "at_least": at_least, "heaviest": heaviest, "machines": machines}


def priced(at_least: int, capacity: int, limit: int, price: Mapping[int, int]) -> Certificate:
    lengths, worth = list(price), list(price.values())
    return {
        "kind": "prices",
        "at_least": at_least,
        "capacity": capacity,
        "limit": limit,
        "lengths": lengths,
        "prices": worth,
    }


# Three requests on two slots: two stages, and one slot serves two of them, of six rounds at least.
SMALL = problem_of([1, 1, 1], [3, 3, 4], 2, UNIT)
# Five of ten and three of six rounds on two slots of 35: worth 13 at two for a ten and one for a six, and
# 35 rounds hold three tens, or two tens and two sixes, worth 6 at most.
PACKED = problem_of([1] * 8, [10] * 5 + [6] * 3, 2, UNIT)
PACKED_ROUNDS = priced(36, 35, 6, {6: 1, 10: 2})
PACKED_STAGES = by_slots(4)
# No two of these prompts fit a stage of ten tokens.
CAPPED = problem_of([6, 6, 6, 5], [1] * 4, 4, UNIT, prefill_token_cap=10)
CAPPED_STAGES = priced(4, 10, 1, {5: 1, 6: 1})
# Two of these prompts fit a KV capacity of five.
TIGHT = problem_of([2, 2, 2], [1, 2, 3], 3, UNIT, kv_capacity=5)
READING = problem_of([1, 1, 1], [9, 9, 9], 3, UNIT, kv_capacity=12)
BY_READING = {"kind": "KV tokens over capacity", "at_least": 12}
# With the first token at prefill, a request of one token has no round: it fits any slot for nothing.
DONE_AT_ONCE = problem_of([1, 1, 1], [1, 4, 4], 1, UNIT, prefill_emits_first_token=True)

HOLDS: dict[str, tuple[Problem, Certificate, int, int]] = {
    "few slots": (SMALL, trivial(2, by_slots(2), lifted(6, 3, 1)), 2, 6),
    "all slots": (SMALL, trivial(2, by_slots(2), lifted(5, 3, 2)), 2, 5),
    "prices of rounds": (PACKED, trivial(2, PACKED_STAGES, PACKED_ROUNDS), 4, 36),
    "prices of prompts": (CAPPED, trivial(4, CAPPED_STAGES, lifted(1, 4, 1)), 4, 1),
    "tokens over the cap": (
        CAPPED,
        trivial(4, {"kind": "tokens over cap", "at_least": 3}, lifted(1, 4, 1)),
        3,
        1,
    ),
    "slots that memory holds": (TIGHT, trivial(2, by_slots(2), lifted(3, 1, 1)), 2, 3),
    "tokens over the KV capacity": (
        TIGHT,
        trivial(2, {"kind": "tokens over cap", "at_least": 2}, lifted(3, 1, 1)),
        2,
        3,
    ),
    "keys and values read": (READING, trivial(3, by_slots(1), BY_READING), 1, 12),
    "requests of no rounds": (DONE_AT_ONCE, trivial(1, by_slots(3), priced(6, 5, 1, {0: 0, 3: 1})), 3, 6),
    "an enumeration": (SMALL, {"kind": "enumeration", "stages": 2, "rounds": 6}, 2, 6),
    "an enumeration of single rounds": (
        problem_of([1] * 3, [1, 1, 2], 1, UNIT),
        {"kind": "enumeration", "stages": 3, "rounds": 4},
        3,
        4,
    ),
    "an enumeration of as many requests as are tried": (
        problem_of([1] * MOST_REQUESTS, [3] * MOST_REQUESTS, MOST_REQUESTS, UNIT),
        {"kind": "enumeration", "stages": 1, "rounds": 3},
        1,
        3,
    ),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_holds_passes(name: str) -> None:
    problem, certificate, stages, rounds = HOLDS[name]
    assert verify_bound(problem, bound_of(problem, certificate, stages, rounds)) is None


@pytest.mark.parametrize("name", HOLDS)
def test_a_second_more_is_not_proven(name: str) -> None:
    problem, certificate, stages, rounds = HOLDS[name]
    violation = verify_bound(problem, bound_of(problem, certificate, stages, rounds + 1))
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"
    assert (
        violation.message
        == f"it proves {float(stages + rounds)!r} s, the bound says {stages + rounds + 1.0!r} s"
    )


REFUSED: dict[str, tuple[Problem, Certificate, str]] = {
    "an unknown kind": (SMALL, {"kind": "faith"}, "a certificate is of a known kind: 'faith' is not"),
    "no kind": (SMALL, {}, "a certificate is readable: KeyError: 'kind'"),
    "a kind that is a list": (SMALL, {"kind": []}, "a certificate is of a known kind: [] is not"),
    "no slots": (SMALL, trivial(0, by_slots(2), lifted(6, 3, 1)), "slots: slots is 0, less than 1"),
    "slots below none": (TIGHT, trivial(-2, by_slots(2), lifted(3, 1, 1)), "slots: slots is -2, less than 1"),
    "too many slots": (SMALL, trivial(3, by_slots(2), lifted(6, 3, 1)), "slots: 3 claimed, there are 2"),
    "too few slots": (
        SMALL,
        trivial(1, by_slots(3), lifted(10, 3, 1)),
        "slots: more than 1 requests can be in progress together",
    ),
    "fewer slots than memory holds": (
        problem_of([2, 2, 2], [1, 2, 3], 3, UNIT, kv_capacity=6),
        trivial(2, by_slots(2), lifted(3, 1, 1)),
        "slots: more than 2 requests can be in progress together",
    ),
    "slots in words": (
        SMALL,
        trivial("2", by_slots(2), lifted(6, 3, 1)),  # type: ignore[arg-type]
        "a certificate is readable: slots is '2', not a whole number",
    ),
    "slots that are true": (
        SMALL,
        trivial(True, by_slots(2), lifted(6, 3, 1)),
        "a certificate is readable: slots is True, not a whole number",
    ),
    "no claim of stages": (
        SMALL,
        {**trivial(2, {}, lifted(6, 3, 1)), "stages": None},
        "a certificate is readable: stages is None, not a claim",
    ),
    "no claim of rounds": (
        SMALL,
        {**trivial(2, by_slots(2), {}), "rounds": [6]},
        "a certificate is readable: rounds is [6], not a claim",
    ),
    "a stage too many for the slots": (
        SMALL,
        trivial(2, by_slots(3), lifted(6, 3, 1)),
        "stages: 3 claimed, 2 proven",
    ),
    "a stage too many for the tokens": (
        CAPPED,
        trivial(4, {"kind": "tokens over cap", "at_least": 4}, lifted(1, 4, 1)),
        "stages: 4 claimed, 3 proven",
    ),
    "a stage too many for the prices": (
        CAPPED,
        trivial(4, {**CAPPED_STAGES, "at_least": 5}, lifted(1, 4, 1)),
        "stages: 5 claimed, 4 proven",
    ),
    "stages below none": (
        SMALL,
        trivial(2, by_slots(-1), lifted(6, 3, 1)),
        "stages: at_least is -1, less than 0",
    ),
    "stages by another argument": (
        SMALL,
        trivial(2, {"kind": "luck", "at_least": 1}, lifted(6, 3, 1)),
        "stages: no argument is called 'luck'",
    ),
    "prices of a smaller stage": (
        CAPPED,
        trivial(4, {**CAPPED_STAGES, "capacity": 9}, lifted(1, 4, 1)),
        "prices: made for a capacity of 9, not 10",
    ),
    "prices that a stage exceeds": (
        problem_of([6, 6, 5, 5], [1] * 4, 4, UNIT, prefill_token_cap=10),
        trivial(4, CAPPED_STAGES, lifted(1, 4, 1)),
        "prices: items that fit in 10 are priced 2, above 1",
    ),
    "rounds by another argument": (
        SMALL,
        trivial(2, by_slots(2), {"kind": "luck", "at_least": 1}),
        "rounds: no argument is called 'luck'",
    ),
    "a round too many for a slot": (
        SMALL,
        trivial(2, by_slots(2), lifted(7, 3, 1)),
        "rounds: 7 claimed, 6 proven",
    ),
    "a round too many for all slots": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, 3, 2)),
        "rounds: 6 claimed, 5 proven",
    ),
    "rounds below none": (
        SMALL,
        trivial(2, by_slots(2), lifted(-1, 3, 1)),
        "rounds: at_least is -1, less than 0",
    ),
    "fewer than no requests": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, -1, 1)),
        "rounds: heaviest is -1, less than 0",
    ),
    "no slot chosen": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, 3, 0)),
        "rounds: machines is 0, less than 1",
    ),
    "more slots chosen than there are": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, 3, 3)),
        "rounds: 3 of 2 slots cannot be chosen",
    ),
    "a round more than prices refute": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "at_least": 37}),
        "rounds: 37 claimed, 36 proven",
    ),
    "prices that fit the slots": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "limit": 7}),
        "rounds: prices of 13 fit 2 slots of 7",
    ),
    "prices that a slot exceeds": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "limit": 5}),
        "prices: items that fit in 35 are priced 6, above 5",
    ),
    "a limit of nothing": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "limit": 0}),
        "prices: limit is 0, less than 1",
    ),
    "a negative price": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "prices": [-1, 2]}),
        "prices: prices is -1, less than 0",
    ),
    "a negative length": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "lengths": [-6, 10]}),
        "prices: lengths is -6, less than 0",
    ),
    "a length priced twice": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "lengths": [6, 6]}),
        "prices: 2 prices for 2 lengths, 1 of them different",
    ),
    "a length without a price": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "prices": [2]}),
        "prices: 1 prices for 2 lengths, 2 of them different",
    ),
    "prices that are no list": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "prices": 2}),
        "a certificate is readable: prices is 2, not a list",
    ),
    "a price of requests that need no room": (
        DONE_AT_ONCE,
        trivial(1, by_slots(3), priced(6, 5, 1, {0: 1, 3: 1})),
        "prices: an item of no weight fits any number of times, so it has no price",
    ),
    "prices of endless rounds": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_ROUNDS, "capacity": 10**15}),
        f"a certificate is small: its check takes more than {MOST_STEPS:,} steps",
    ),
    "a round more than reading takes": (
        READING,
        trivial(3, by_slots(1), {**BY_READING, "at_least": 13}),
        "rounds: 13 claimed, 12 proven",
    ),
    "reading where there is no capacity": (
        SMALL,
        trivial(2, by_slots(2), {**BY_READING, "at_least": 2}),
        "rounds: 2 claimed, 1 proven",
    ),
    "an enumeration of a stage more": (
        SMALL,
        {"kind": "enumeration", "stages": 3, "rounds": 6},
        "enumeration: 2 stages and fewer than 7.000000 rounds are enough",
    ),
    "an enumeration of two stages where one is enough": (
        problem_of([1, 1], [3, 3], 2, UNIT),
        {"kind": "enumeration", "stages": 2, "rounds": 3},
        "enumeration: 1 stages and fewer than 4.000000 rounds are enough",
    ),
    "an enumeration of rounds that cost nothing": (
        problem_of([1, 1], [3, 3], 2, replace(UNIT, decode_base=0.0)),
        {"kind": "enumeration", "stages": 1, "rounds": 3},
        "enumeration: without decode rounds that cost something there is nothing to try",
    ),
    "an enumeration of no stage": (
        SMALL,
        {"kind": "enumeration", "stages": 0, "rounds": 6},
        "enumeration: stages is 0, less than 1",
    ),
    "an enumeration of no rounds": (
        SMALL,
        {"kind": "enumeration", "stages": 2, "rounds": 0},
        "enumeration: rounds is 0, less than 1",
    ),
    "an enumeration of requests of no rounds": (
        problem_of([1, 1], [1, 1], 2, UNIT, prefill_emits_first_token=True),
        {"kind": "enumeration", "stages": 1, "rounds": 1},
        "enumeration: without decode rounds that cost something there is nothing to try",
    ),
    "an enumeration of too many requests": (
        problem_of([1] * 41, [3] * 41, 3, UNIT),
        {"kind": "enumeration", "stages": 14, "rounds": 42},
        "an enumeration is small: 41 requests, of which 40 at most are tried in every order",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_hold_is_refused_by_name(name: str) -> None:
    problem, certificate, message = REFUSED[name]
    bound = Bound(1.0, "", {"prefill stages": 1.0}, certificate)
    assert str(verify_bound(problem, bound)) == message


def enumerated(problem: Problem, stages: int, rounds: int, seconds: float) -> str:
    """Return what is wrong with an enumeration of so many stages and rounds."""
    certificate = {"kind": "enumeration", "stages": stages, "rounds": rounds}
    bound = Bound(seconds, source_of(certificate), {"prefill stages": seconds}, certificate)
    return str(verify_bound(problem, bound))


def test_an_enumeration_counts_rounds_of_other_costs() -> None:
    half = replace(SMALL, cost=replace(UNIT, decode_base=0.5))
    assert enumerated(half, 2, 6, 2 + 0.5 * 6) == "None"
    assert enumerated(half, 2, 7, 2 + 0.5 * 7).endswith("2 stages and fewer than 7.000000 rounds are enough")


@pytest.mark.parametrize(("beyond", "cheapest", "seconds"), [(1.0, 2, 5.0), (0.125, 1, 4.5)])
def test_an_enumeration_under_a_bend_tries_more_stages_than_rounds_need(
    beyond: float, cheapest: int, seconds: float
) -> None:
    # Both of four tokens in one stage are four beyond the bend, and two stages in a row cost one second more:
    # 1 + 4 beyond or 2, and three rounds.
    cost = replace(UNIT, prefill_bend=4.0, prefill_per_token_beyond=beyond)
    problem = problem_of([4, 4], [3, 3], 2, cost)
    assert enumerated(problem, cheapest, 3, seconds) == "None"
    dearer = 3 - cheapest
    claimed = {1: 1 + 4 * beyond, 2: 2.0}[dearer] + 3
    rounds = claimed - seconds + 3
    assert enumerated(problem, dearer, 3, claimed) == (
        f"enumeration: {cheapest} stages and fewer than {rounds:.6f} rounds are enough"
    )


@pytest.mark.parametrize("count", [60, 100])
def test_a_hand_written_enumeration_of_many_requests_ends_at_once(count: int) -> None:
    lengths = np.random.default_rng(0).integers(50, 500, count).tolist()
    problem = problem_of([1] * count, lengths, 10, UNIT)
    violation = verify_bound(
        problem, Bound(9.0, "", {"": 9.0}, {"kind": "enumeration", "stages": 9, "rounds": 9})
    )
    assert violation is not None
    assert violation.rule == "an enumeration is small"


def test_an_enumeration_that_would_not_end_is_given_up() -> None:
    lengths = np.random.default_rng(0).integers(50, 500, MOST_REQUESTS).tolist()
    with pytest.raises(RefutedError, match="its check takes more than 50,000 steps"):
        fits(lengths, 8, 5, sum(lengths) // 8 + 3, Work(50_000))
    # As many rounds as all requests need one after the other are enough for any number more.
    assert fits([2, 3], 1, 2, 10**18, Work(100))


SOUND = bound_of(SMALL, trivial(2, by_slots(2), lifted(6, 3, 1)), 2, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid": False}, "a bound is valid: 'fewest stages and rounds' is a printed formula"),
        ({"seconds": 8.1}, "terms add up: the terms add up to 8.0 s, the bound says 8.1 s"),
        ({"seconds": math.nan}, "terms add up: the terms add up to 8.0 s, the bound says nan s"),
        (
            {"terms": {"decode rounds": 9.0, "prefill stages": -1.0}},
            "terms are seconds: 'prefill stages' is -1.0",
        ),
        ({"terms": {"decode rounds": math.inf}}, "terms are seconds: 'decode rounds' is inf"),
        ({"terms": {"KV reads": 8.0}}, "terms are those of the costs: 'KV reads' is 8.0, not 0.0"),
        ({"terms": {"slot-rounds": 8.0}}, "terms are those of the costs: 'slot-rounds' is 8.0, not 0.0"),
        ({"terms": {"prompt tokens": 8.0}}, "terms are those of the costs: 'prompt tokens' is 8.0, not 0.0"),
        (
            {"source": "divine insight"},
            "a bound is called by its argument: 'divine insight', and its certificate proves 'fewest",
        ),
    ],
)
def test_a_bound_is_what_its_parts_say(changes: dict[str, Any], message: str) -> None:
    assert verify_bound(SMALL, SOUND) is None
    assert str(verify_bound(SMALL, replace(SOUND, **changes))).startswith(message)


def test_rounding_is_let_pass_and_nothing_more() -> None:
    def raised(share: float) -> Bound:
        terms = {name: seconds * (1 + share) for name, seconds in SOUND.terms.items()}
        return replace(SOUND, seconds=SOUND.seconds * (1 + share), terms=terms)

    assert verify_bound(SMALL, raised(0.9e-9)) is None
    assert verify_bound(SMALL, raised(1.1e-9)) is not None
    assert verify_bound(SMALL, replace(SOUND, seconds=SOUND.seconds * (1 + 1.1e-9))) is not None
    # Costs may be tiny: no fixed number of seconds is rounding.
    tiny = CostModel(prefill_base=1e-15, prefill_per_token=0.0, decode_base=1e-15, decode_per_slot=0.0)
    terms = {"prefill stages": 2e-15, "decode rounds": 7e-15}
    violation = verify_bound(replace(SMALL, cost=tiny), replace(SOUND, seconds=9e-15, terms=terms))
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"


@pytest.mark.parametrize(
    ("certificate", "source"),
    [
        ({"kind": "difference set", "ends": [], "refuted": []}, "difference set"),
        ({"kind": "difference set", "ends": [1], "refuted": []}, "difference set and ends"),
        ({"kind": "difference set", "ends": [], "refuted": [1]}, "difference set and prices"),
        ({"kind": "difference set", "ends": [1], "refuted": [1]}, "difference set and ends and prices"),
        ({"kind": "enumeration"}, "enumeration of packings and orders"),
        ({"kind": "solver"}, ""),
    ],
)
def test_a_bound_is_called_by_what_proves_it(certificate: Certificate, source: str) -> None:
    assert source_of(certificate) == source


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


@pytest.mark.parametrize("batch", range(4))
def test_the_checker_derives_what_the_differences_prove_and_no_more(batch: int) -> None:
    for seed in range(60 * batch, 60 * batch + 60):
        problem = tiny_problem(seed)
        for bound in (trivial_bound(problem), difference_set_bound(problem)):
            is_proven_and_no_more(problem, bound)


def with_ends(seed: int) -> Problem:
    """Problems of few requests a slot, some of whose bounds take ends or rounded packings."""
    rng = np.random.default_rng(seed)
    requests, slots, longest = (int(rng.integers(*of)) for of in ((6, 13), (2, 6), (5, 16)))
    many, few = rng.random() < 0.7, rng.choice([0.2, 0.4, 0.6])
    length = rng.integers(1, longest + 1, requests)
    lengths = np.where(rng.random(requests) < few, longest if many else 1, length)
    return problem_of([1] * requests, lengths.tolist(), slots, CostModel(0.5, 0.0, 1.0, 0.0))


ENDS_AND_PRICES = (61, 181, 289, 379, 460, 578, 630)


@pytest.mark.parametrize("seed", ENDS_AND_PRICES)
def test_the_checker_derives_what_ends_and_packings_prove_and_no_more(seed: int) -> None:
    problem = with_ends(seed)
    is_proven_and_no_more(problem, proven_bound(problem, 60.0))


def test_some_of_these_take_ends_and_some_packings() -> None:
    sources = {proven_bound(with_ends(seed), 60.0).source for seed in ENDS_AND_PRICES}
    assert any("ends" in source for source in sources)


@functools.cache
def fewest_rounds(waiting: tuple[int, ...], running: tuple[int, ...], slots: int, stages: int) -> float:
    """Return the fewest rounds that serve what waits and what runs with so many stages at most."""
    if not waiting and not running:
        return 0
    best = math.inf
    if running:
        later = tuple(sorted(left - 1 for left in running if left > 1))
        best = 1 + fewest_rounds(waiting, later, slots, stages)
    if stages:
        for size in range(1, min(len(waiting), slots - len(running)) + 1):
            for chosen in set(itertools.combinations(waiting, size)):
                left = list(waiting)
                for length in chosen:
                    left.remove(length)
                started = tuple(sorted((*running, *chosen)))
                best = min(best, fewest_rounds(tuple(left), started, slots, stages - 1))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_requests_fit_just_the_stages_and_rounds_that_trying_everything_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = sorted(rng.integers(1, 7, int(rng.integers(1, 7))).tolist())
    slots = int(rng.integers(1, 4))
    for stages in range(1, len(lengths) + 1):
        fewest = fewest_rounds(tuple(lengths), (), slots, stages)
        for rounds in range(max(lengths) - 1, sum(lengths) + 1):
            assert fits(lengths, slots, stages, rounds, Work()) == (rounds >= fewest), (stages, rounds)


@pytest.mark.parametrize(
    ("lengths", "slots", "stages", "rounds"),
    [
        ([1, 4, 4, 7, 8, 8, 9, 9, 12], 3, 3, 24),
        ([2, 3, 4, 5, 6, 7, 7, 9, 10, 11], 3, 4, 23),
    ],
)
def test_stages_in_which_all_slots_must_meet_are_found(
    lengths: list[int], slots: int, stages: int, rounds: int
) -> None:
    # Found by search: what the orders of each slot allow by itself, no stages serve together in fewer rounds.
    assert fewest_rounds(tuple(lengths), (), slots, stages) == rounds
    for fewer in range(rounds - 4, rounds):
        assert not fits(lengths, slots, stages, fewer, Work())
    assert fits(lengths, slots, stages, rounds, Work())


def test_each_request_of_a_slot_needs_a_stage_of_its_own() -> None:
    assert not fits([1, 2, 4, 4, 5, 5, 7, 9, 10, 12], 3, 3, 59, Work())


# Differences at work: six lengths on three slots, two stages leave two differences below the longest.
APART = problem_of([1] * 6, [1, 2, 3, 4, 5, 6], 3, UNIT)


def difference(**changes: Any) -> Bound:
    bound = difference_set_bound(replace(APART, cost=replace(UNIT, prefill_base=100.0)))
    return replace(bound, certificate={**bound.certificate, **changes})


ENDS = {"rounds": 9, "filling": False, "share": 8, "value": 16, "end_value": 8, "end": 16, "dearer": [[1, 2]]}
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
        ({"ends": [{**ENDS, "value": -1}]}, "ends: value is -1, less than 0"),
        ({"ends": [{**ENDS, "end_value": -1}]}, "ends: end_value is -1, less than 0"),
        ({"ends": [{**ENDS, "end": -1}]}, "ends: end is -1, less than 0"),
        ({"ends": [{**ENDS, "share": -1}]}, "ends: share is -1, less than 0"),
        ({"ends": [{**ENDS, "share": 17}]}, "ends: a share of 17 is more than all 16 parts"),
        ({"ends": [{**ENDS, "rounds": -9}]}, "ends: rounds is -9, less than 0"),
        ({"ends": [{**ENDS, "filling": 1}]}, "a certificate is readable: filling is 1, not true or false"),
        (
            {"ends": [{**ENDS, "dearer": [[1]]}]},
            "a certificate is readable: dearer is [1], not an end value and",
        ),
        (
            {"ends": [{**ENDS, "dearer": [[1, 0.5]]}]},
            "a certificate is readable: dearer is [1, 0.5], not an end",
        ),
        ({"ends": [{**ENDS, "dearer": [[0, 2]]}]}, "ends: no other end value comes with 0, so it cannot be"),
        ({"ends": [{**ENDS, "dearer": [[6, 2]]}]}, "ends: no other end value comes with 6, so it cannot be"),
        ({"ends": [{**ENDS, "dearer": [[3, 2]]}]}, "ends: no other end value comes with 3, so it cannot be"),
        ({"ends": [{**ENDS, "dearer": [[1, 9]]}]}, "ends: an end value has a negative price"),
    ],
)
def test_claims_of_differences_are_judged(changes: Certificate, message: str) -> None:
    problem = replace(APART, cost=replace(UNIT, prefill_base=100.0))
    assert verify_bound(problem, difference()) is None
    assert str(verify_bound(problem, difference(**changes))).startswith(message)
    # Claims that hold and are of no use change nothing but the name.
    unfit = {**REFUTED, "capacity": 1, "limit": 1}
    assert (
        verify_bound(problem, replace(difference(refuted=[unfit]), source="difference set and prices"))
        is None
    )
    assert verify_bound(problem, replace(difference(ends=[ENDS]), source="difference set and ends")) is None


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


def test_ends_add_up_and_must_be_more_than_the_room() -> None:
    # Two values of 3 and five end values of 2 are taken away, and four late rounds of 7 are added.
    claim = EndClaim(rounds=9, constant=20, value=3, end_value=2, rest=7)
    assert 2 * PARTS == 20 - 2 * 3 - 5 * 2 + 4 * 7
    assert not claim.exceeds(2, 2, 5, 4)
    assert claim.exceeds(2, 1, 5, 4)
    assert claim.exceeds(2, 2, 4, 4)
    assert claim.exceeds(2, 2, 5, 5)
    assert claim.exceeds(1, 2, 5, 4)


def test_ends_of_endless_requests_are_given_up() -> None:
    with pytest.raises(RefutedError, match="its check takes more than"):
        checked_ends([(10**9, 1)], 1, ENDS, Work())


def test_work_is_taken_before_it_is_done() -> None:
    work = Work(3)
    work.spend()
    work.spend(2)
    with pytest.raises(RefutedError, match=r"a certificate is small.*its check takes more than 3 steps"):
        work.spend()
    assert Work().left == MOST_STEPS


def test_whole_numbers_are_read_strictly() -> None:
    claim = {"n": 3, "list": [0, 2]}
    assert whole(claim, "n", "rule", least=3) == 3
    assert wholes(claim, "list", "rule") == [0, 2]
    with pytest.raises(RefutedError, match=r"'rule', 'n is 3, less than 4'"):
        whole(claim, "n", "rule", least=4)
    with pytest.raises(RefutedError, match=r"readable.*absent is None, not a whole number"):
        whole(claim, "absent", "rule")
    with pytest.raises(RefutedError, match=r"'rule', 'list is 0, less than 1'"):
        wholes(claim, "list", "rule", least=1)
    assert prices({"lengths": [1, 0], "prices": [5, 6]}, "rule") == {1: 5, 0: 6}
    long = {"n": list(range(10**6))}
    with pytest.raises(RefutedError) as refused:
        whole(long, "n", "rule")
    assert len(refused.value.args[1]) < 80, "what is wrong is one line, whatever stands there"


QUICK, SLOW = Replica(UNIT, 2, busy=1.0), Replica(replace(UNIT, decode_base=2.0), 4)
PAIR = Fleet(workload_of([1, 1, 1], [4, 4, 2]), (QUICK, SLOW))
SHARES = {"kind": "fleet shares", "weights": [0.5, 0.5], "stage_by": "slots", "round_by": "slots"}
# Half of the second that is busy, and a half of the least share of each: (1 + n) / 2 and (1 + 2 n) / 4.
SHARED = 0.5 * 1.0 + 0.5 * (min(5 / 2, 9 / 4) + min(5 / 2, 9 / 4) + min(3 / 2, 5 / 4))


def shares(seconds: float = SHARED, **changes: object) -> Bound:
    return Bound(seconds, "shares of the fleet", {"requests": seconds}, {**SHARES, **changes})


def alone(seconds: float, request: object = 0) -> Bound:
    certificate = {"kind": "one request", "request": request}
    return Bound(seconds, "the longest request", {"one request": seconds}, certificate)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (shares(SHARED * 1.01), "the certificate proves the bound"),
        (shares(weights=[0.5]), "weights: 1 weights for 2 replicas"),
        (shares(weights=[0.6, 0.5]), "weights: they add up to 1.1, more than one"),
        (shares(weights=[-0.5, 0.5]), "weights: -0.5 is negative or not finite"),
        (shares(weights=[math.inf, 0.5]), "weights: inf is negative or not finite"),
        (shares(weights=[True, 0]), "a certificate is readable: weights is True, not a number"),
        (shares(weights=["1", 0]), "a certificate is readable: weights is '1', not a number"),
        (shares(weights=1), "a certificate is readable: weights is 1, not a list"),
        (shares(stage_by="luck"), "shares: no argument is called 'luck' or 'slots'"),
        (shares(round_by="luck"), "shares: no argument is called 'slots' or 'luck'"),
        (shares(kind="faith"), "a certificate is of a known kind: 'faith' is not one of a fleet"),
        (replace(shares(), valid=False), "a bound is valid"),
        (replace(shares(), source="luck"), "a bound is called by its argument"),
        (alone(7.0), "the certificate proves the bound: it proves 6.0 s, the bound says 7.0 s"),
        (alone(6.0, 2), "the certificate proves the bound: it proves 4.0 s, the bound says 6.0 s"),
        (alone(6.0, 3), "one request: there is no request 3 of 3"),
        (alone(6.0, -1), "one request: request is -1, less than 0"),
        (alone(6.0, True), "a certificate is readable: request is True, not a whole number"),
    ],
)
def test_a_fleets_claims_are_judged(bound: Bound, message: str) -> None:
    assert verify_fleet_bound(PAIR, shares()) is None
    # One second busy, one of prefill and four rounds; the slow replica takes nine.
    assert verify_fleet_bound(PAIR, alone(6.0)) is None
    assert str(verify_fleet_bound(PAIR, bound)).startswith(message)


def test_a_fleet_of_one_has_the_bounds_of_its_problem_unless_it_is_busy() -> None:
    fleet = Fleet.of(SMALL, 1)
    assert verify_fleet_bound(fleet, SOUND) is None
    busy = replace(fleet, replicas=(replace(fleet.replicas[0], busy=1.0),))
    assert (
        str(verify_fleet_bound(busy, SOUND))
        == "a certificate is of a known kind: 'trivial' is not one of a fleet"
    )
    assert str(verify_fleet_bound(Fleet.of(SMALL, 2), SOUND)).startswith("a certificate is of a known kind")


def test_a_request_alone_reads_its_keys_and_values() -> None:
    cost = replace(UNIT, decode_per_kv_token=0.5, decode_per_slot=0.25, prefill_per_token=0.125)
    fleet = Fleet(workload_of([4], [3]), (Replica(cost, 1), Replica(cost, 1)), prefill_emits_first_token=True)
    # A prefill of four tokens, then rounds over five and six.
    seconds = 1.5 + 2 * 1.25 + 0.5 * (5 + 6)
    assert verify_fleet_bound(fleet, alone(seconds)) is None
    assert verify_fleet_bound(fleet, alone(seconds + 0.001)) is not None


def test_a_longer_request_alone_reads_more_in_every_round() -> None:
    fleet = Fleet(workload_of([4], [4]), (Replica(replace(UNIT, decode_per_kv_token=0.5), 1),) * 2)
    seconds = 1 + 4 + 0.5 * (4 + 5 + 6 + 7)
    assert verify_fleet_bound(fleet, alone(seconds)) is None
    assert verify_fleet_bound(fleet, alone(seconds + 0.001)) is not None


def test_a_share_has_the_keys_and_values_that_a_request_reads() -> None:
    costs = replace(UNIT, decode_per_kv_token=0.5), replace(UNIT, decode_per_kv_token=1.0)
    fleet = Fleet(workload_of([4], [3]), (Replica(costs[0], 2), Replica(costs[1], 2)))
    # Half a stage, half of three rounds, and 4 + 5 + 6 tokens read; the first replica is the cheaper one.
    seconds = 0.5 * ((1 + 3) / 2 + 0.5 * 15)
    assert verify_fleet_bound(fleet, shares(seconds)) is None
    assert verify_fleet_bound(fleet, shares(seconds + 0.001)) is not None


def test_of_replicas_alike_the_one_of_less_weight_counts() -> None:
    fleet = Fleet(workload_of([1], [4]), (Replica(UNIT, 2), Replica(UNIT, 2)))
    seconds = 0.25 * (1 + 4) / 2
    for weights in ([0.25, 0.75], [0.75, 0.25]):
        assert verify_fleet_bound(fleet, shares(seconds, weights=weights)) is None
        assert verify_fleet_bound(fleet, shares(seconds + 0.001, weights=weights)) is not None
    # A replica of no weight serves for nothing.
    assert verify_fleet_bound(PAIR, shares(1.0, weights=[1.0, 0])) is None
    assert verify_fleet_bound(PAIR, shares(1.001, weights=[1.0, 0])) is not None


@pytest.mark.parametrize("seed", range(60))
def test_the_checker_derives_what_a_fleets_bound_proves_and_no_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    outputs, prompts = rng.integers(1, 9, count), rng.integers(1, 9, count)
    largest = int((prompts + outputs).max())
    kinds = []
    for _ in range(int(rng.integers(1, 4))):
        base, token = rng.choice([0.0, 0.5, 2.0], 2).tolist()
        decode, slot = rng.choice([0.5, 1.0], 2).tolist()
        cost = CostModel(base, token, decode, slot, prefill_floor=float(rng.choice([0.0, 3.0])))
        limits: dict[str, Any] = {
            "kv_capacity": largest + int(rng.integers(0, 9)) if rng.random() < 0.5 else None,
            "prefill_token_cap": int(prompts.max()) + 3 if rng.random() < 0.5 else None,
        }
        kinds.append(Replica(cost, int(rng.integers(1, 4)), busy=float(rng.choice([0.0, 2.0])), **limits))
    replicas = tuple(kinds[k] for k in rng.integers(0, len(kinds), 3))
    fleet = Fleet(workload_of(prompts.tolist(), outputs.tolist()), replicas, bool(rng.random() < 0.5))
    bound = fleet_bound(fleet)
    assert verify_fleet_bound(fleet, bound) is None
    name = next(iter(bound.terms))
    more = {**bound.terms, name: bound.terms[name] + bound.seconds * 1e-6}
    higher = replace(bound, seconds=bound.seconds * (1 + 1e-6), terms=more)
    assert str(verify_fleet_bound(fleet, higher)).startswith("the certificate proves the bound")
