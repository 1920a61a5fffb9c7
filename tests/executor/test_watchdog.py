"""A run that stands still is noticed, one that shows signs of life is not."""

from __future__ import annotations

import threading

import pytest

from batchbound.executor.jobs.watchdog import Watchdog


def test_who_shows_no_sign_of_life_is_noticed_once() -> None:
    calls: list[None] = []
    noticed = threading.Event()

    def on_stall() -> None:
        calls.append(None)
        noticed.set()

    with Watchdog(0.01, on_stall):
        assert noticed.wait(60)
    assert len(calls) == 1


def test_a_late_sign_of_life_counts_from_when_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, calls = [0.0], list[float](), list[None]()
    monkeypatch.setattr("batchbound.executor.jobs.watchdog.time.monotonic", lambda: now[0])
    watchdog = Watchdog(10.0, lambda: calls.append(None))

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        if len(waits) == 1:
            # At the end of the first wait the last sign of life is 3 s old.
            watchdog._alive_at = now[0] - 3.0
        return False

    monkeypatch.setattr(watchdog._over, "wait", wait)
    watchdog._watch()
    assert waits == [10.0, 7.0]
    assert len(calls) == 1
