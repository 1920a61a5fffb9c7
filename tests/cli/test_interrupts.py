"""An interrupt that comes where Python drops exceptions is heeded all the same."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from batchbound.cli import INTERRUPTED, main
from batchbound.cli.commands import bound
from batchbound.cli.interrupts import AGAIN_AFTER, heeding, terminating
from batchbound.executor.models.faults import TerminatedError


class Watched:
    """Something to hold a weak reference to."""


def lose_a_weakly_held(sent: signal.Signals) -> None:
    """Let a signal come in the callback of a weak reference."""
    watched = Watched()
    _held = weakref.ref(watched, lambda _: signal.raise_signal(sent))
    del watched
    # Without a second signal this ends in silence.
    for _ in range(1000):
        time.sleep(0.01)


def test_an_interrupt_in_a_weak_references_callback_ends_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), heeding():
        lose_a_weakly_held(signal.SIGINT)
    assert capsys.readouterr().err == ""


def test_every_command_heeds_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bound, "run", lambda _: lose_a_weakly_held(signal.SIGINT))
    assert main(["bound", "table3:0", "--slots", "200", "--cost", "paper"]) == INTERRUPTED
    assert capsys.readouterr().err == "batchbound: interrupted\n"


def test_an_interrupt_is_not_sent_again_before_the_hook_that_heard_of_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        # As on a machine with much else to do.
        end = time.monotonic() + 20 * AGAIN_AFTER
        while time.monotonic() < end:
            time.sleep(0.001)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with pytest.raises(KeyboardInterrupt), heeding():
        lose_a_weakly_held(signal.SIGINT)


def test_an_interrupt_while_the_command_is_read_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def configure(parser: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bound, "configure", configure)
    assert main(["bound"]) == INTERRUPTED
    assert capsys.readouterr().err == "batchbound: interrupted\n"


def test_the_systems_request_to_end_is_as_little_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TerminatedError), heeding(), terminating():
        lose_a_weakly_held(signal.SIGTERM)
    assert capsys.readouterr().err == ""


def test_another_error_in_a_finalizer_is_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __del__(self) -> None:
            raise ValueError

    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(dropped.exc_type))
    with heeding():
        Failing()
    assert told == [ValueError]


def import_and_wait(name: str) -> None:
    assert importlib.import_module(name).imported
    for _ in range(1000):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminatedError)]
)
def test_an_interrupt_in_an_import_that_drops_it_ends_the_command_afterwards(
    sent: signal.Signals, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As modules in C do that import others.
    lines = (
        "import signal",
        "try:",
        f"    signal.raise_signal({int(sent)})",
        "except BaseException:",
        "    pass",
    )
    (tmp_path / "module_that_drops_interrupts.py").write_text("\n".join([*lines, "imported = True"]))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error), heeding(), terminating():
        import_and_wait("module_that_drops_interrupts")
    del sys.modules["module_that_drops_interrupts"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
