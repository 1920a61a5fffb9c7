"""Signs of life of long work on a terminal."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from batchbound.screen import progress


class Terminal(io.StringIO):
    """Terminal that notes when a text was written."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self.awaited, self.seen = awaited, threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.awaited in self.getvalue():
            self.seen.set()
        return written


def test_long_work_shows_on_a_terminal_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal("set 3 of 9, 0:00")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SIGN_OF_LIFE", 0.0)
    with progress.working("simulating") as tell:
        tell("set 3 of 9")
        assert terminal.seen.wait(60)


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal("")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SIGN_OF_LIFE", 3600.0)
    with progress.working("simulating"):
        pass
    assert terminal.getvalue() == ""


def test_counted_work_shows_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "BETWEEN_LINES", 0.0)
    with progress.progress(78, "measurements") as advance:
        advance(1)
        advance(21, 190.0)
    lines = ["1/78 measurements", "21/78 measurements, about 3:10 left"]
    assert written.getvalue().splitlines() == [f"batchbound: {line}" for line in lines]
