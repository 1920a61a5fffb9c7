"""An interrupt that comes where Python drops exceptions is heeded all the same."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from batchbound.cli import INTERRUPTED, main
from batchbound.cli.commands import bound
from batchbound.cli.parser import Parser
from batchbound.executor.models.faults import TerminatedError
from batchbound.screen.interrupts import AGAIN_AFTER, heeding, terminating


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
    def add_options(parser: Parser, record: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Parser, "add_options", add_options)
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


def ended(folder: Path, *lines: str) -> tuple[int, str]:
    """Return the status of a process whose command is ``main`` of a few lines, and what it says of errors."""
    begin = ("import atexit, signal, sys", "import batchbound.cli", "from batchbound.__main__ import command")
    end = ("batchbound.cli.main = main", "sys.exit(command())")
    (folder / "module_of_a_process.py").write_text("\n".join([*begin, *lines, *end]), encoding="utf-8")
    words = [sys.executable, "-m", "module_of_a_process"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_an_interrupt_in_a_text_that_is_run_leaves_the_status_as_it_is(tmp_path: Path) -> None:
    # As where a data class is made.
    lines = ("try:", "        exec('raise KeyboardInterrupt')", "    except KeyboardInterrupt:")
    assert ended(tmp_path, "def main():", f"    {lines[0]}", *lines[1:], "        return 130") == (130, "")


def test_an_interrupt_after_the_work_prints_no_traceback(tmp_path: Path) -> None:
    late = "    atexit.register(signal.raise_signal, signal.SIGINT)"
    assert ended(tmp_path, "def main():", late, "    return 0") == (-signal.SIGINT, "")


def import_and_wait(name: str) -> None:
    assert importlib.import_module(name).imported
    for _ in range(1000):
        time.sleep(0.01)


def write_dropping(folder: Path, sent: signal.Signals, patch: pytest.MonkeyPatch) -> None:
    # As modules in C do that import others.
    lines = (
        "import signal",
        "try:",
        f"    signal.raise_signal({int(sent)})",
        "except BaseException:",
        "    pass",
    )
    (folder / "module_that_drops_interrupts.py").write_text("\n".join([*lines, "imported = True"]))
    patch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("sent", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminatedError)]
)
def test_an_interrupt_in_an_import_that_drops_it_ends_the_command_afterwards(
    sent: signal.Signals, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dropping(tmp_path, sent, monkeypatch)
    with pytest.raises(error), heeding(), terminating():
        import_and_wait("module_that_drops_interrupts")
    del sys.modules["module_that_drops_interrupts"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_so_does_one_while_the_commands_own_modules_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dropping(tmp_path, signal.SIGINT, monkeypatch)
    monkeypatch.setattr(Parser, "add_options", lambda *_: import_and_wait("module_that_drops_interrupts"))
    assert main(["bound"]) == INTERRUPTED
    assert capsys.readouterr().err == "batchbound: interrupted\n"
    del sys.modules["module_that_drops_interrupts"]
