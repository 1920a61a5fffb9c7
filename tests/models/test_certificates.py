"""Every claim of a certificate is judged: what holds passes, what is a little more is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from builders import UNIT, problem_of, sharing, steps_of, verified_within

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.models.certificates.checker import source_of, verify_bound
from batchbound.models.certificates.claims import MOST_STEPS, RefutedError, Work, prices, whole, wholes

Certificate = dict[str, Any]


def bound_of(problem: Problem, certificate: Certificate, stages: int, decode_steps: int) -> Bound:
    """Return the bound of so many stages and decode steps of a second each."""
    assert problem.cost == UNIT
    terms = {"prefill stages": float(stages), "decode steps": float(decode_steps)}
    return Bound(sum(terms.values()), source_of(certificate), terms, certificate)


def trivial(slots: int, stages: Certificate, decode_steps: Certificate) -> Certificate:
    return {"kind": "trivial", "slots": slots, "stages": stages, "decode_steps": decode_steps}


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


# Three requests on two slots: two stages, and one slot serves two of them, of six decode steps at least.
SMALL = problem_of([1, 1, 1], [3, 3, 4], 2, UNIT)
# Five of ten and three of six steps on two slots of 35: worth 13 at two for a ten and one for a six, and
# 35 decode steps hold three tens, or two tens and two sixes, worth 6 at most.
PACKED = problem_of([1] * 8, [10] * 5 + [6] * 3, 2, UNIT)
PACKED_STEPS = priced(36, 35, 6, {6: 1, 10: 2})
PACKED_STAGES = by_slots(4)
# No two of these prompts fit a stage of ten tokens.
CAPPED = problem_of([6, 6, 6, 5], [1] * 4, 4, UNIT, prefill_token_cap=10)
CAPPED_STAGES = priced(4, 10, 1, {5: 1, 6: 1})
# Two of these prompts fit a KV capacity of five.
TIGHT = problem_of([2, 2, 2], [1, 2, 3], 3, UNIT, kv_capacity=5)
READING = problem_of([1, 1, 1], [9, 9, 9], 3, UNIT, kv_capacity=12)
BY_READING = {"kind": "KV tokens over capacity", "at_least": 12}
# At the end of one of ten tokens five are left: the other of ten has begun at most five decode steps before.
APART = problem_of([1, 1, 1], [10, 10, 2], 3, UNIT, kv_capacity=15)
BY_TWO = {"kind": "two requests", "at_least": 15, "requests": [1, 0]}
# The one of ten decode steps ends first after five beside the other, or last after seven.
UNEVEN = problem_of([1, 5], [10, 8], 2, UNIT, kv_capacity=19)
UNEVEN_TWO = {"kind": "two requests", "at_least": 11, "requests": [0, 1]}
# With the first token at prefill, a request of one token has no decode step: it fits any slot for nothing.
DONE_AT_ONCE = problem_of([1, 1, 1], [1, 4, 4], 1, UNIT, prefill_emits_first_token=True)

# Three requests share five tokens: stages compute pieces of 5, 1, 1 and 1 tokens, and each request holds 6.
SHARED = sharing([1, 1, 1], [0, 0, 0], 5, 3, UNIT, kv_capacity=13, prefill_token_cap=6)
SHARED_PIECES = priced(2, 6, 5, {1: 1, 5: 4})
SHARED_PROMPTS = {**priced(2, 13, 2, {6: 1}), "held": True}
# Each holds six tokens for itself: the memory has room for two.
HELD = sharing([6, 6, 6], [0, 0, 0], 5, 3, UNIT, kv_capacity=17)
# Any three of four prompts fit the memory, and all of them do not.
FOUR = problem_of([2] * 4, [1] * 4, 4, UNIT, kv_capacity=6)

HOLDS: dict[str, tuple[Problem, Certificate, int, int]] = {
    "few slots": (SMALL, trivial(2, by_slots(2), lifted(6, 3, 1)), 2, 6),
    "all slots": (SMALL, trivial(2, by_slots(2), lifted(5, 3, 2)), 2, 5),
    "prices of decode steps": (PACKED, trivial(2, PACKED_STAGES, PACKED_STEPS), 4, 36),
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
    "slots of which one more does not fit the memory": (FOUR, trivial(3, by_slots(2), lifted(1, 1, 1)), 2, 1),
    "prices of prompts that must fit the memory": (
        replace(CAPPED, prefill_token_cap=12, kv_capacity=10),
        trivial(4, CAPPED_STAGES, lifted(1, 4, 1)),
        4,
        1,
    ),
    "prices of pieces that stages compute": (SHARED, trivial(3, SHARED_PIECES, lifted(1, 3, 1)), 2, 1),
    "prices of prompts that requests hold": (
        HELD,
        trivial(3, {**priced(2, 17, 2, {6: 1}), "held": True}, lifted(1, 3, 1)),
        2,
        1,
    ),
    "pieces over the cap": (
        SHARED,
        trivial(3, {"kind": "tokens over cap", "at_least": 2}, lifted(1, 3, 1)),
        2,
        1,
    ),
    "held prompts over the capacity": (
        replace(HELD, kv_capacity=11),
        trivial(3, {"kind": "tokens over cap", "at_least": 2}, lifted(1, 3, 1)),
        2,
        1,
    ),
    "keys and values read": (READING, trivial(3, by_slots(1), BY_READING), 1, 12),
    "two requests": (APART, trivial(3, by_slots(1), BY_TWO), 1, 15),
    "two uneven requests": (UNEVEN, trivial(2, by_slots(1), UNEVEN_TWO), 1, 11),
    "two requests of a first token at prefill": (
        replace(APART, prefill_emits_first_token=True),
        trivial(3, by_slots(1), {**BY_TWO, "at_least": 14}),
        1,
        14,
    ),
    "requests of no decode steps": (
        DONE_AT_ONCE,
        trivial(1, by_slots(3), priced(6, 5, 1, {0: 0, 3: 1})),
        3,
        6,
    ),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_holds_passes(name: str) -> None:
    problem, certificate, stages, decode_steps = HOLDS[name]
    assert verify_bound(problem, bound_of(problem, certificate, stages, decode_steps)) is None


@pytest.mark.parametrize("name", HOLDS)
def test_a_second_more_is_not_proven(name: str) -> None:
    problem, certificate, stages, decode_steps = HOLDS[name]
    violation = verify_bound(problem, bound_of(problem, certificate, stages, decode_steps + 1))
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"
    assert (
        violation.message
        == f"it proves {float(stages + decode_steps)!r} s, the bound says {stages + decode_steps + 1.0!r} s"
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
    "slots of which one more fits the memory": (
        FOUR,
        trivial(2, by_slots(2), lifted(1, 1, 1)),
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
    "no claim of decode steps": (
        SMALL,
        {**trivial(2, by_slots(2), {}), "decode_steps": [6]},
        "a certificate is readable: decode_steps is [6], not a claim",
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
        "prices: items that fit in 10 have a price of 2, above 1",
    ),
    "prices of a smaller memory": (
        replace(CAPPED, prefill_token_cap=12, kv_capacity=10),
        trivial(4, {**CAPPED_STAGES, "capacity": 9}, lifted(1, 4, 1)),
        "prices: made for a capacity of 9, not 10",
    ),
    "prices of pieces of a smaller stage": (
        SHARED,
        trivial(3, {**SHARED_PIECES, "capacity": 5}, lifted(1, 3, 1)),
        "prices: made for a capacity of 5, not 6",
    ),
    "prices of held prompts of a smaller memory": (
        SHARED,
        trivial(3, {**SHARED_PROMPTS, "capacity": 12}, lifted(1, 3, 1)),
        "prices: made for a capacity of 12, not 13",
    ),
    "prices of pieces as if they were held": (
        SHARED,
        trivial(3, {**SHARED_PIECES, "capacity": 13, "limit": 7, "held": True}, lifted(1, 3, 1)),
        "stages: 2 claimed, 1 proven",
    ),
    "prices of prompts as if stages computed each": (
        SHARED,
        trivial(3, {**SHARED_PROMPTS, "held": 1}, lifted(1, 3, 1)),
        "stages: 2 claimed, 0 proven",
    ),
    "a stage too many for the pieces": (
        SHARED,
        trivial(3, {"kind": "tokens over cap", "at_least": 3}, lifted(1, 3, 1)),
        "stages: 3 claimed, 2 proven",
    ),
    "shared prompts stage by stage": (
        SHARED,
        {"kind": "states"},
        "states: prompts that requests share are not tried stage by stage",
    ),
    "decode steps by another argument": (
        SMALL,
        trivial(2, by_slots(2), {"kind": "luck", "at_least": 1}),
        "decode_steps: no argument is called 'luck'",
    ),
    "a decode step too many for a slot": (
        SMALL,
        trivial(2, by_slots(2), lifted(7, 3, 1)),
        "decode_steps: 7 claimed, 6 proven",
    ),
    "a decode step too many for two of three slots": (
        problem_of([1] * 4, [2, 3, 3, 4], 3, UNIT),
        trivial(3, by_slots(2), lifted(5, 4, 2)),
        "decode_steps: 5 claimed, 4 proven",
    ),
    "a decode step too many for all slots": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, 3, 2)),
        "decode_steps: 6 claimed, 5 proven",
    ),
    "decode steps below none": (
        SMALL,
        trivial(2, by_slots(2), lifted(-1, 3, 1)),
        "decode_steps: at_least is -1, less than 0",
    ),
    "fewer than no requests": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, -1, 1)),
        "decode_steps: heaviest is -1, less than 0",
    ),
    "no slot chosen": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, 3, 0)),
        "decode_steps: machines is 0, less than 1",
    ),
    "more slots chosen than there are": (
        SMALL,
        trivial(2, by_slots(2), lifted(6, 3, 3)),
        "decode_steps: 3 of 2 slots cannot be chosen",
    ),
    "a decode step more than prices refute": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "at_least": 37}),
        "decode_steps: 37 claimed, 36 proven",
    ),
    "prices that fit the slots": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "limit": 7}),
        "decode_steps: prices of 13 fit 2 slots of 7",
    ),
    "prices that just fit the slots": (
        problem_of([1] * 4, [10] * 4, 2, UNIT),
        trivial(2, by_slots(2), priced(21, 20, 2, {10: 1})),
        "decode_steps: prices of 4 fit 2 slots of 2",
    ),
    "prices that a slot exceeds": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "limit": 5}),
        "prices: items that fit in 35 have a price of 6, above 5",
    ),
    "prices of fewer requests than fill a slot": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "lengths": [6], "prices": [3], "limit": 8}),
        "prices: items that fit in 35 have a price of 9, above 8",
    ),
    "prices of two requests that fill a slot together": (
        problem_of([1] * 3, [3, 5, 9], 2, UNIT),
        trivial(2, by_slots(2), priced(9, 8, 4, {3: 2, 5: 3})),
        "prices: items that fit in 8 have a price of 5, above 4",
    ),
    "prices of a capacity below none": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "capacity": -1}),
        "prices: capacity is -1, less than 0",
    ),
    "a limit of nothing": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "limit": 0}),
        "prices: limit is 0, less than 1",
    ),
    "a negative price": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "prices": [-1, 2]}),
        "prices: prices is -1, less than 0",
    ),
    "a negative length": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "lengths": [-6, 10]}),
        "prices: lengths is -6, less than 0",
    ),
    "a length priced twice": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "lengths": [6, 6]}),
        "prices: 2 prices for 2 lengths, 1 of them different",
    ),
    "a length without a price": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "prices": [2]}),
        "prices: 1 prices for 2 lengths, 2 of them different",
    ),
    "prices that are no list": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "prices": 2}),
        "a certificate is readable: prices is 2, not a list",
    ),
    "a price of requests that need no room": (
        DONE_AT_ONCE,
        trivial(1, by_slots(3), priced(6, 5, 1, {0: 1, 3: 1})),
        "prices: an item of no weight fits any number of times, so it has no price",
    ),
    "prices of endless decode steps": (
        PACKED,
        trivial(2, PACKED_STAGES, {**PACKED_STEPS, "capacity": 10**15}),
        f"a certificate is small: its check takes more than {MOST_STEPS:,} steps",
    ),
    "a decode step more than reading takes": (
        READING,
        trivial(3, by_slots(1), {**BY_READING, "at_least": 13}),
        "decode_steps: 13 claimed, 12 proven",
    ),
    "a decode step more than two requests take": (
        APART,
        trivial(3, by_slots(1), {**BY_TWO, "at_least": 16}),
        "decode_steps: 16 claimed, 15 proven",
    ),
    "a decode step more than two uneven requests take": (
        UNEVEN,
        trivial(2, by_slots(1), {**UNEVEN_TWO, "at_least": 12}),
        "decode_steps: 12 claimed, 11 proven",
    ),
    "one request twice": (
        APART,
        trivial(3, by_slots(1), {**BY_TWO, "requests": [1, 1]}),
        "decode_steps: [1, 1] are not two requests under a KV capacity",
    ),
    "a request that is not there": (
        APART,
        trivial(3, by_slots(1), {**BY_TWO, "requests": [0, 3]}),
        "decode_steps: [0, 3] are not two requests under a KV capacity",
    ),
    "two requests where there is no capacity": (
        SMALL,
        trivial(2, by_slots(2), {**BY_TWO, "at_least": 2}),
        "decode_steps: [1, 0] are not two requests under a KV capacity",
    ),
    "a request before the first": (
        APART,
        trivial(3, by_slots(1), {**BY_TWO, "requests": [-1, 0]}),
        "decode_steps: requests is -1, less than 0",
    ),
    "two requests of which one has no decode step": (
        replace(DONE_AT_ONCE, kv_capacity=4),
        trivial(1, by_slots(3), {**BY_TWO, "at_least": 1}),
        "decode_steps: 1 claimed, 0 proven",
    ),
    "two requests that fit side by side": (
        replace(APART, kv_capacity=100),
        trivial(3, by_slots(1), {**BY_TWO, "at_least": 1}),
        "decode_steps: 1 claimed, 0 proven",
    ),
    "reading where there is no capacity": (
        SMALL,
        trivial(2, by_slots(2), {**BY_READING, "at_least": 2}),
        "decode_steps: 2 claimed, 1 proven",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_hold_is_refused_by_name(name: str) -> None:
    problem, certificate, message = REFUSED[name]
    bound = Bound(1.0, "", {"prefill stages": 1.0}, certificate)
    assert str(verify_bound(problem, bound)) == message


SOUND = bound_of(SMALL, trivial(2, by_slots(2), lifted(6, 3, 1)), 2, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid": False}, "a bound is valid: 'fewest stages and decode steps' is a printed formula"),
        ({"seconds": 8.1}, "terms add up: the terms add up to 8.0 s, the bound says 8.1 s"),
        ({"seconds": math.nan}, "terms add up: the terms add up to 8.0 s, the bound says nan s"),
        (
            {"terms": {"decode steps": 9.0, "prefill stages": -1.0}},
            "terms are seconds: 'prefill stages' is -1.0",
        ),
        ({"terms": {"decode steps": math.inf}}, "terms are seconds: 'decode steps' is inf"),
        ({"terms": {"KV reads": 8.0}}, "terms are those of the costs: 'KV reads' is 8.0, not 0.0"),
        ({"terms": {"slot-steps": 8.0}}, "terms are those of the costs: 'slot-steps' is 8.0, not 0.0"),
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


def test_what_no_schedule_is_below_is_found_by_trying_every_state() -> None:
    bound = bound_of(SMALL, {"kind": "states"}, 2, 6)
    assert verify_bound(SMALL, bound) is None
    assert str(verify_bound(SMALL, bound_of(SMALL, {"kind": "states"}, 2, 7))) == (
        "states: a schedule takes less"
    )


def test_a_shared_prompt_is_paid_once() -> None:
    problem = replace(SHARED, cost=replace(UNIT, prefill_per_token=0.5))
    certificate = trivial(3, by_slots(1), lifted(1, 3, 1))
    terms = {"prefill stages": 1.0, "prompt tokens": 4.0, "decode steps": 1.0}
    bound = Bound(6.0, source_of(certificate), terms, certificate)
    assert verify_bound(problem, bound) is None
    each = replace(bound, seconds=11.0, terms={**terms, "prompt tokens": 9.0})
    assert str(verify_bound(problem, each)) == "terms are those of the costs: 'prompt tokens' is 9.0, not 4.0"


def test_rounding_is_let_pass_and_nothing_more() -> None:
    def raised(share: float) -> Bound:
        terms = {name: seconds * (1 + share) for name, seconds in SOUND.terms.items()}
        return replace(SOUND, seconds=SOUND.seconds * (1 + share), terms=terms)

    assert verify_bound(SMALL, raised(0.9e-9)) is None
    assert verify_bound(SMALL, raised(1.1e-9)) is not None
    assert verify_bound(SMALL, replace(SOUND, seconds=SOUND.seconds * (1 + 1.1e-9))) is not None
    # Costs may be tiny: no fixed number of seconds is rounding.
    tiny = CostModel(prefill_base=1e-15, prefill_per_token=0.0, decode_base=1e-15, decode_per_slot=0.0)
    terms = {"prefill stages": 2e-15, "decode steps": 7e-15}
    violation = verify_bound(replace(SMALL, cost=tiny), replace(SOUND, seconds=9e-15, terms=terms))
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"


@pytest.mark.parametrize(
    ("certificate", "source"),
    [
        ({"kind": "difference set", "intervals": []}, "difference set"),
        ({"kind": "difference set", "intervals": [1]}, "difference set and intervals"),
        ({"kind": "solver"}, ""),
    ],
)
def test_a_bound_is_called_by_what_proves_it(certificate: Certificate, source: str) -> None:
    assert source_of(certificate) == source


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # A quarter of the capacity in all and of each kind, or for each request of a kind that has few.
        ("prices of decode steps", 35 // 4 + 3 * 35 // 4 + 35 // 4),
        ("prices of prompts", 10 // 4 + 10 // 4 + 10 // 4),
        ("requests of no decode steps", 5 // 4 + 5 // 4),
    ],
)
def test_prices_are_checked_in_just_these_steps(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, certificate, stages, decode_steps = HOLDS[name]
    bound = bound_of(problem, certificate, stages, decode_steps)
    assert steps_of(verified_within(problem, bound, monkeypatch)) == steps


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
