"""Commands in forked children: they start in milliseconds, as all is imported already, and may be killed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

CRASHED = 70
"""Exit status of a child whose command ended in an exception: a user would have seen a traceback."""


def fork() -> int:
    """Fork; an interrupt meanwhile comes after it: Python passes over one in the hooks of a fork."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in numbers}
    pid = os.fork()
    if pid:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
    return pid


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status, minus the signal's number if one ended it; and what it printed."""

    status: int
    said: str = field(repr=False)
    cpu_seconds: float
    hung: bool = False

    def __str__(self) -> str:
        at = self.said.find("Traceback")
        told = self.said[max(0, at - 300) : at + 1500] if at >= 0 else self.said[-400:]
        return f"status {self.status}, hung {self.hung}, said ...{told!r}"


def warm_up(folder: Path) -> None:
    """Carry a small job out in this process, so that children need import nothing; no thread may stay."""
    import torch
    from tqdm import tqdm

    tqdm.monitor_interval = 0
    torch.set_num_threads(1)
    (folder / "lengths.csv").write_text("input_tokens,output_tokens\n3,2\n5,4\n2,3\n")
    table, plan, trace = (str(folder / name) for name in ("lengths.csv", "plan.json", "trace.jsonl"))
    serve = ["run", plan, "--model", "tiny:llama:1", "--dtype", "float64", "--threads", "1", "--pinned"]
    commands = (
        ["plan", table, "--slots", "2", "--work", "1", "-o", plan],
        [*serve, "-o", str(folder / "answers.jsonl"), "--trace", trace],
        ["report", plan, trace],
        ["verify", plan],
    )
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        for words in commands:
            status = command(words)()
            assert status == 0, words
    assert threading.active_count() == 1, threading.enumerate()


def spawn(call: Callable[[], int], folder: Path, output: Path, *, file_bytes: int | None = None) -> int:
    """Return the process number of a child that makes the call in a folder, its output going to a file."""
    pid = fork()
    if pid:
        return pid
    status = CRASHED
    try:
        os.setsid()
        # tqdm's own lock is shared by forks, and kept for ever by one that is killed with it.
        tqdm.set_lock(threading.RLock())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        os.chdir(folder)
        where = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(where, 1)
        os.dup2(where, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        status = call()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        # Before or after the command has a say, as Python itself would end.
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)


def ended(pid: int, output: Path, limit: float, poll: float = 0.002) -> Ended:
    """Wait for a child; one that outlives the limit is killed with all that it started: it hung."""
    begun, hung = time.monotonic(), False
    while True:
        found, code, used = os.wait4(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() - begun > limit and not hung:
            hung = True
            kill_session(pid)
        time.sleep(poll)
    kill_session(pid)
    said = output.read_text(errors="replace") if output.exists() else ""
    return Ended(os.waitstatus_to_exitcode(code), said, used.ru_utime + used.ru_stime, hung)


def kill_session(leader: int) -> None:
    """End what a child started and left, such as a solver in a process of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def command(words: Sequence[str]) -> Callable[[], int]:
    """Return the call of one command line."""

    def call() -> int:
        from batchbound.cli import main

        return main(list(words))

    return call


def run(
    call: Callable[[], int], folder: Path, output: Path, limit: float, file_bytes: int | None = None
) -> Ended:
    """Make a call in a child and wait for its end."""
    return ended(spawn(call, folder, output, file_bytes=file_bytes), output, limit)
