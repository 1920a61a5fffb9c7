"""The order to release requests to a mixing engine in: near the bound, and never worse than simple rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.heuristics.serving.release import predict
from batchbound.models.bounds.iterations import iteration_bound
from batchbound.planning.release import Releasable, best_release, named_orders, named_release, packed_order


def work_of(output: list[int], prompt: int = 1, *, exact: bool = True) -> Releasable:
    ones = np.ones(len(output), dtype=np.int64)
    return Releasable(ones * prompt, np.array(output), ones, exact)


def test_requests_are_packed_where_longest_first_leaves_slots_empty() -> None:
    # Two slots; longest first ends after 3 + 2 + 2 = 7 iterations, and 3 + 3 beside 2 + 2 + 2 after 6.
    work, limits = work_of([3, 3, 2, 2, 2]), EngineLimits(2)
    assert predict(work.sequences(), limits, [0, 1, 2, 3, 4]).iterations == 7  # type: ignore[union-attr]
    found = best_release(work, limits)
    assert found.predicted is not None
    assert (found.name, found.predicted.iterations) == ("packed into slots", 6)


def test_lengths_that_are_predictions_are_released_longest_first() -> None:
    assert best_release(work_of([3, 3, 2, 2, 2], exact=False), EngineLimits(2)).name == "longest first"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=14), st.integers(1, 5), st.integers(1, 9))
def test_no_order_with_a_name_is_predicted_better(output: list[int], slots: int, prompt: int) -> None:
    work, limits = work_of(output, prompt), EngineLimits(slots, 16, 512, 4)
    found = best_release(work, limits)
    sequences = work.sequences()
    assert found.predicted is not None
    assert sorted(found.order.tolist()) == list(range(len(output)))
    assert iteration_bound(sequences, limits).iterations <= found.predicted.iterations
    for order in named_orders(work, None).values():
        other = predict(sequences, limits, order)
        assert other is not None
        assert found.predicted.work <= other.work


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=14), st.integers(1, 5))
def test_a_packed_order_is_as_even_as_the_packing(output: list[int], slots: int) -> None:
    ones = np.ones(len(output), dtype=np.int64)
    sequences, limits = Sequences(ones, np.array(output)), EngineLimits(slots)
    order = packed_order(sequences, limits)
    assert sorted(order.tolist()) == list(range(len(output)))
    packed, longest = (
        predict(sequences, limits, order),
        predict(sequences, limits, np.argsort(-np.array(output))),
    )
    assert packed is not None
    assert longest is not None
    assert packed.iterations <= longest.iterations


def test_completions_of_one_prompt_follow_each_other() -> None:
    work = Releasable(np.array([5, 7]), np.array([2, 4]), np.array([1, 3]))
    assert work.sequences().prompt.tolist() == [5, 7, 7, 7]
    assert work.sequences().cached.tolist() == [0, 0, 6, 6]
    assert work.expanded(np.array([1, 0])).tolist() == [1, 2, 3, 0]


def test_an_order_is_had_by_its_name() -> None:
    found = named_release(work_of([1, 2]), EngineLimits(1), "file order", None)
    assert found.order.tolist() == [0, 1]
    with pytest.raises(KeyError):
        named_release(work_of([1, 2]), EngineLimits(1), "plan", None)
