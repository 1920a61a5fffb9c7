"""An enumeration is judged by another one, which finds what trying everything finds."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from builders import UNIT, problem_of, steps_of

from batchbound.data.bound import Bound
from batchbound.data.problem import Problem
from batchbound.models.certificates.checker import source_of, verify_bound
from batchbound.models.certificates.claims import RefutedError, Work
from batchbound.models.certificates.enumeration import MOST_REQUESTS, fits

SMALL = problem_of([1, 1, 1], [3, 3, 4], 2, UNIT)


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


@pytest.mark.parametrize(
    ("lengths", "slots", "stages", "rounds", "served", "steps"),
    [
        ([1, 4, 4, 7, 8], 2, 3, 11, False, 8),
        ([1, 2, 4, 4, 5, 5], 3, 3, 7, False, 34),
        ([5] * 7, 3, 3, 14, False, 11),
        ([5] * 7, 3, 3, 15, True, 73),
        ([2, 2, 2, 3, 3, 3, 4], 3, 4, 7, True, 80),
        ([3, 3, 3, 3, 7, 7, 9], 3, 3, 12, False, 30),
        ([6000, 6000, 7000, 9000], 2, 3, 14000, False, 19),
        ([4, 7, 8, 8, 9, 9, 12], 3, 3, 20, False, 319),
        ([1, 4, 4, 7, 8, 8, 9, 9, 12], 3, 3, 23, False, 5352),
    ],
)
def test_an_enumeration_takes_no_more_steps_than_it_needs_and_is_refused_with_one_less(
    lengths: list[int], slots: int, stages: int, rounds: int, served: bool, steps: int
) -> None:
    assert fits(lengths, slots, stages, rounds, Work()) == served
    assert steps_of(lambda work: fits(lengths, slots, stages, rounds, work)) == steps
