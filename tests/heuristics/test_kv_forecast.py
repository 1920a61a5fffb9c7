"""Memory that requests will hold, and whether one more fits in between."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.heuristics.serving.pipelined import KvForecast

Requests = list[tuple[int, int]]


def forecast(capacity: int, requests: Requests, buffer: float = 0.0) -> KvForecast:
    held, rest = np.array(requests, dtype=np.int64).reshape(-1, 2).T
    return KvForecast(capacity, held, rest, np.ceil(rest * (1 + buffer)).astype(np.int64))


def test_a_short_one_fits_before_a_long_one_needs_its_memory() -> None:
    # The long one holds 10 now and 40 in 30 iterations; 15 of the 40 places are used by both after 5.
    assert forecast(40, [(10, 30)]).fits(20, 5, 5)
    assert not forecast(40, [(10, 30)]).fits(21, 5, 5)
    # After 10 iterations 20 are left, of which it has filled 10.
    assert [forecast(40, [(10, 30)]).fits(held, 10, 10) for held in (10, 11)] == [True, False]


def test_who_may_overstay_must_fit_for_longer() -> None:
    # Twice as long as predicted it holds its 15 + 5 when the other holds 10 + 10.
    assert [forecast(40, [(10, 30)], buffer=1.0).fits(held, 5, 10) for held in (15, 16)] == [True, False]


def test_what_is_added_counts() -> None:
    one = forecast(40, [(10, 30)])
    one.add(10, 5, 5)
    assert one.promised == 40 + 15
    assert [one.fits(held, 5, 5) for held in (5, 6)] == [True, False]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=6),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 22)), max_size=6),
    st.integers(10, 80),
    st.sampled_from([0.0, 0.15, 0.5]),
)
@settings(max_examples=200, deadline=None)
def test_it_agrees_with_counting_iteration_by_iteration(
    there: Requests, more: Requests, capacity: int, buffer: float
) -> None:
    def most(requests: Requests) -> int:
        stays = [math.ceil(rest * (1 + buffer)) for _, rest in requests]
        return max(
            sum(
                held + min(time, rest)
                for (held, rest), stay in zip(requests, stays, strict=True)
                if time <= stay
            )
            for time in range(max(stays, default=0) + 1)
        )

    if most(there) > capacity:
        return
    tested = forecast(capacity, there, buffer)
    if more:
        stays = [math.ceil(rest * (1 + buffer)) for _, rest in more]
        held_rest = np.array(more, dtype=np.int64).T
        may = tested.may_fit(held_rest[0], held_rest[1], np.array(stays)).tolist()
        fitting = [tested.fits(*one, stay) for one, stay in zip(more, stays, strict=True)]
        assert not [one for one, yes, fits in zip(more, may, fitting, strict=True) if fits and not yes]
        if buffer == 0:
            assert may == fitting
    for held, rest in more:
        fits = most([*there, (held, rest)]) <= capacity
        stay = math.ceil(rest * (1 + buffer))
        assert tested.fits(held, rest, stay) == fits
        if fits:
            tested.add(held, rest, stay)
            there = [*there, (held, rest)]
