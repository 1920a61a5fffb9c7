"""Few stages leave few intervals that requests are held for: prices prove the steps that this takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from builders import UNIT, problem_of, steps_of

from batchbound.data.arrays import IntArray
from batchbound.models.bounds.makespan import difference_set_bound
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.bounds.stage_intervals import PARTS, IntervalBound, IntervalPrices, StageIntervals
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.claims import RefutedError, Work
from batchbound.models.certificates.stage_intervals import checked_intervals
from batchbound.models.deadline import Deadline


def random_prices(rng: np.random.Generator, kinds: int) -> IntervalPrices:
    interval, each = (int(rng.exponential(by)) for by in (4 * PARTS, PARTS))
    return IntervalPrices(interval, tuple(rng.exponential(8 * PARTS, kinds).astype(np.int64).tolist()), each)


def intervals_of(requests: list[int], slots: int) -> tuple[StageIntervals, list[tuple[int, int]]]:
    lengths, counts = np.unique(requests, return_counts=True)
    return StageIntervals(lengths, counts, slots), list(zip(lengths.tolist(), counts.tolist(), strict=True))


def least_charged(requests: list[int], prices: IntervalPrices) -> int:
    """Return the least by trying all ways to give each request a span of some intervals and some steps."""
    spans = [
        (m, decode_steps) for m in range(1, len(prices.spans) + 2) for decode_steps in sorted(set(requests))
    ]
    best = 10**12
    for held in product(spans, repeat=len(requests)):
        if any(decode_steps < n for n, (_, decode_steps) in zip(requests, held, strict=True)):
            continue
        come_to = sum(decode_steps * PARTS + m * prices.interval for m, decode_steps in held)
        for m, decode_steps in set(held):
            come_to += prices.spans[m - 1] if m <= len(prices.spans) else 0
            come_to += prices.decode_step * decode_steps if m == 1 else 0
        best = min(best, come_to)
    return best


def random_schedule(rng: np.random.Generator, requests: IntArray, slots: int) -> tuple[int, int]:
    """Return the stages and the decode steps of a schedule whose stages come at random."""
    waiting, ends, now, stages = rng.permutation(requests).tolist(), list[int](), 0, 0
    while waiting:
        ends = [end for end in ends if end > now]
        room = min(slots - len(ends), len(waiting))
        if room:
            started = waiting[: int(rng.integers(1, room + 1))]
            del waiting[: len(started)]
            ends += [now + n for n in started]
            stages += 1
        now = int(rng.integers(now + 1, max(ends) + 1)) if max(ends) > now else now
    return stages, max(ends)


def test_the_least_is_what_trying_all_spans_gives_and_what_the_checker_derives() -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        requests = rng.integers(1, 7, 4).tolist()
        prices = random_prices(rng, int(rng.integers(1, 3)))
        intervals, have = intervals_of(requests, slots=2)
        charged = intervals.solved(prices).charged
        assert charged == least_charged(requests, prices)
        claim = checked_intervals(have, 2, prices.witness, Work())
        assert claim.charged == charged
        assert [claim.decode_steps(s) for s in range(1, 9)] == [
            prices.decode_steps(charged, 2, s) for s in range(1, 9)
        ]


def test_a_solution_comes_to_what_is_said() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        intervals, _ = intervals_of(rng.integers(1, 60, 40).tolist(), slots=4)
        found = intervals.solved(random_prices(rng, 3))
        prices = found.prices
        charges = found.intervals * prices.interval + found.short * prices.decode_step
        charges += sum(price * number for price, number in zip(prices.spans, found.spans, strict=True))
        assert found.charged == found.held * PARTS + charges


def test_no_schedule_has_fewer_steps_than_any_prices_prove() -> None:
    rng = np.random.default_rng(2)
    tight = 0
    for _ in range(150):
        requests, slots = rng.integers(1, 40, int(rng.integers(1, 12))), int(rng.integers(1, 5))
        stages, decode_steps = random_schedule(rng, requests, slots)
        intervals, _ = intervals_of(requests.tolist(), slots)
        for _ in range(10):
            prices = random_prices(rng, int(rng.integers(1, 5)))
            proven = prices.decode_steps(intervals.solved(prices).charged, slots, stages)
            assert proven <= decode_steps
            tight += proven == decode_steps
    assert tight > 5, "some schedules have no decode step more than is proven"


def test_two_stages_of_two_slots_hold_four_requests_for_an_interval_each() -> None:
    # The shorter two in one and the longer two in the other: 2 + 4 steps, where slots always full take 5.
    intervals, have = intervals_of([1, 2, 3, 4], slots=2)
    found = IntervalBound(intervals).best(2, 5, Deadline(60.0))
    assert found is not None
    assert found.prices.decode_steps(found.charged, 2, 2) == 6
    assert checked_intervals(have, 2, found.prices.witness, Work()).decode_steps(2) == 6
    assert IntervalBound(intervals).best(2, 6, Deadline(60.0)) is None, "no prices prove more than is so"


def test_prices_of_one_number_of_stages_hold_for_others() -> None:
    intervals, _ = intervals_of([1, 2, 3, 4], slots=2)
    pricing = IntervalBound(intervals)
    for stages, decode_steps in ((2, 6), (3, 5)):
        found = pricing.best(stages, decode_steps - 1, Deadline(60.0))
        assert found is not None
        assert found.prices.decode_steps(found.charged, 2, stages) == decode_steps


def test_dear_stages_are_bounded_by_the_intervals_that_they_leave() -> None:
    rng = np.random.default_rng(3)
    outputs = np.clip(rng.lognormal(4.5, 0.45, 100), 20, 300).astype(np.int64).tolist()
    problem = problem_of([50] * 100, outputs, 16, replace(UNIT, prefill_base=9.0))
    bound = proven_bound(problem, seconds=5.0)
    assert "intervals" in bound.source
    assert verify_bound(problem, bound) is None
    older = {name: claims for name, claims in bound.certificate.items() if name != "intervals"}
    refused = verify_bound(problem, replace(bound, certificate=older))
    assert refused is not None
    assert refused.rule == "the certificate proves the bound"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"interval": -1}, "interval is -1, less than 0"),
        ({"decode_step": -1}, "decode_step is -1, less than 0"),
        ({"spans": [5, -2]}, "spans is -2, less than 0"),
        ({"spans": []}, "spans of one interval have no price, and would be charged as longer ones"),
    ],
)
def test_prices_that_are_none_prove_nothing(change: dict[str, object], what: str) -> None:
    with pytest.raises(RefutedError) as refused:
        checked_intervals(
            [(1, 2), (3, 1)], 2, {"interval": 3, "spans": [5, 2], "decode_step": 1} | change, Work()
        )
    assert refused.value.args == ("intervals", what)


def test_a_check_of_intervals_takes_steps_for_each_length_joined_and_kind_of_span() -> None:
    witness = {"interval": 3, "spans": [5, 2], "decode_step": 1}
    # Three kinds for each of two lengths, and for the pairs 1-1, 3-3 and 3-1 of them.
    assert steps_of(lambda work: checked_intervals([(1, 2), (3, 1)], 2, witness, work)) == 3 * (2 + 3)


def test_a_free_interval_between_stages_of_no_cost_proves_the_slots_full() -> None:
    intervals, have = intervals_of([2, 2, 4], slots=2)
    free = IntervalPrices(0, (0,), 0)
    assert intervals.solved(free).charged == 8 * PARTS
    assert checked_intervals(have, 2, free.witness, Work()).decode_steps(1) == 4
    assert free.decode_steps(8 * PARTS, 2, 1) == 4


def test_a_certificate_of_before_that_names_no_intervals_still_holds() -> None:
    problem = problem_of([1] * 6, [1, 5, 9, 2, 7, 7], 2, UNIT)
    bound = difference_set_bound(problem)
    older = {name: claims for name, claims in bound.certificate.items() if name != "intervals"}
    assert verify_bound(problem, replace(bound, certificate=older)) is None
