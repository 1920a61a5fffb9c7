"""Iterations counted from event to event are those of the engine that carries each of them out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.heuristics.iterations.iteration_fit import PricedDevice
from batchbound.heuristics.prefixes.leaps import LeapingEngine, SentTogether
from batchbound.heuristics.serving.release import fits, predict, simulated
from batchbound.models.iterations.iteration_minorant import Minorant

PRICES = PricedDevice(Minorant(1.0, 0.1, 0.01, 0.02, 0.001, 0.0001))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 24)), min_size=1, max_size=20),
    st.tuples(st.integers(1, 8), st.integers(1, 20), st.integers(1, 5)),
    st.one_of(st.none(), st.integers(0, 30)),
    st.tuples(st.one_of(st.none(), st.integers(1, 10)), st.integers(0, 3)),
)
@settings(max_examples=50, deadline=None)
def test_leaps_say_what_the_simulation_says(
    pairs: list[tuple[int, int]],
    sizes: tuple[int, int, int],
    room: int | None,
    client: tuple[int | None, int],
) -> None:
    work = Sequences(np.array([p for p, _ in pairs]), np.array([a for _, a in pairs]))
    slots, budget, block = sizes
    largest = block * int((-(-(work.prompt + work.output) // block)).max())
    limits = EngineLimits(slots, budget, None if room is None else largest + room, block)
    counted = predict(work, limits, np.arange(len(work)), *client, prices=PRICES)
    carried_out = simulated(work, limits, *client, device=PRICES)
    assert counted is not None
    assert (counted.iterations, counted.preemptions, counted.tokens) == (
        carried_out.iterations,
        carried_out.preemptions,
        carried_out.tokens,
    )
    assert counted.seconds == pytest.approx(carried_out.seconds, rel=1e-9)


def test_requests_are_put_back_where_blocks_run_out() -> None:
    # Two of four tokens each on five blocks of one: the later one gives up its block and is computed anew.
    work, limits = Sequences(np.array([1, 1]), np.array([4, 4])), EngineLimits(2, 8, 5, 1)
    assert fits(work, limits)
    found = LeapingEngine([1, 1], [4, 4], limits).run()
    assert found.preemptions == 1
    assert found == simulated(work, limits)
    assert found.seconds is None


def test_iterations_without_events_are_not_carried_out() -> None:
    engine = LeapingEngine([1], [1_000_000], EngineLimits(1, 8))
    # The prompt's iteration draws the first token; the others follow at once.
    assert list(engine.events()) == [1, 1_000_000]


def test_chunks_of_a_long_prompt_are_not_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    iterate = LeapingEngine._iterate

    def counted(engine: LeapingEngine) -> None:
        begun.append(engine._t)
        iterate(engine)

    monkeypatch.setattr(LeapingEngine, "_iterate", counted)
    # A token an iteration beside the first completion's six, then two, and a decode step.
    engine = LeapingEngine([1, 1_000_000], [6, 2], EngineLimits(2, 2))
    assert engine.run().iterations == 6 + (1_000_000 - 6) // 2 + 1
    assert len(begun) < 12


def test_a_request_keeps_its_room_until_its_last_completion_ends() -> None:
    sent = SentTogether([2, 2, 2], [1, 1, 1])
    # With two requests in flight both slots are always full; with one, each waits for the one before.
    lengths, limits = [1, 5, 1, 5, 1, 5], EngineLimits(2, 64)
    assert LeapingEngine([1] * 6, lengths, limits, 2, 0, sent).run().iterations == 11
    assert LeapingEngine([1] * 6, lengths, limits, 1, 0, sent).run().iterations == 15
