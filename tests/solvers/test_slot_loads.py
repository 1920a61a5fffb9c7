"""Requests are said not to fit into slots only where no way to share them out fits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchbound.solvers.exact import slot_loads
from batchbound.solvers.exact.slot_loads import SlotLoads


def fits(decode_steps: list[int], rooms: list[int]) -> bool:
    """Return whether all requests may fit into slots with so many decode steps."""
    waiting = np.array([(1 << len(decode_steps)) - 1])
    return bool(SlotLoads(np.array(decode_steps)).fit(waiting, np.array(rooms)[:, None])[0])


def test_three_long_ones_do_not_fit_into_two_slots_that_have_as_many_steps_as_they_take() -> None:
    assert not fits([6, 6, 6], [9, 9])
    assert fits([6, 6, 6], [6, 12])
    assert fits([6, 5, 4, 3], [9, 9])
    assert not fits([6, 5, 5, 2], [9, 9])


def test_only_what_waits_is_shared_out() -> None:
    loads = SlotLoads(np.array([6, 6, 6]))
    waiting, rooms = np.array([0b111, 0b110, 0b000]), np.array([[9, 9, 0], [9, 9, 0]])
    assert loads.fit(waiting, rooms).tolist() == [False, True, True]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_a_no_is_certain_and_a_yes_is_true_where_few_parts_are_tried(slots: int) -> None:
    rng = np.random.default_rng(slots)
    decode_steps, ways = rng.integers(1, 12, 6), np.array(list(itertools.product(range(slots), repeat=6)))
    loads = np.stack([(ways == slot) @ decode_steps for slot in range(slots)])
    rooms = rng.integers(0, -(-60 // slots), (slots, 300))
    truth = [(loads <= room[:, None]).all(axis=0).any() for room in rooms.T]
    said = SlotLoads(decode_steps).fit(np.full(300, 0b111111), rooms)
    assert not (truth & ~said).any()
    assert (said == truth).mean() > 0.9
    assert not all(truth)


def test_of_many_requests_only_small_sets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_loads, "MOST_PARTS", 40)
    loads = SlotLoads(np.array([6, 6, 6, 6]))
    waiting, rooms = np.array([0b1111, 0b0011]), np.array([[5, 5], [5, 5]])
    assert loads.fit(waiting, rooms).tolist() == [True, False]
