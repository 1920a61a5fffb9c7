"""Fixtures shared by the tests."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tiny_optima import optimum

from batchbound.data.problem import Problem
from batchbound.solvers.backends.worker import Desk, Outcome, _Call
from batchbound.solvers.result import Limits

settings.register_profile("batchbound", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("batchbound")


def pytest_configure() -> None:
    """Let Ctrl-C reach the tests and their processes, and let completions be of one moment."""
    # A shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
    _switch_off_cost_cache()
    if factor := float(os.environ.get("BATCHBOUND_TEST_CLOCK", 0)):
        _set_clock(factor)
    if not Path("/dev/nvidiactl").exists():
        # Read when triton is imported, which any test may do first: kernels run in its interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what collecting made: they took a seventh of the tests' time."""
    gc.collect()
    gc.freeze()


def _set_clock(factor: float) -> None:
    """
    Let the clock of all searches and proofs go so many times as fast.

    With 10 they get as far as on a machine ten times slower, with 0.1 as on one ten times faster. Workers of
    solver libraries keep their own clock.
    """
    from batchbound.solvers.search.core import compiled

    real, limits_of = time.perf_counter, compiled._limits

    def limits(allowance: compiled.Allowance, stop: Any) -> compiled.LimitsStructure:
        return limits_of(replace(allowance, seconds=allowance.seconds / factor), stop)

    time.perf_counter = lambda: real() * factor
    compiled._limits = limits


def _switch_off_cost_cache() -> None:
    """Let no run keep or find costs: a device stands in the place of the cache's folder."""
    os.environ["BATCHBOUND_COST_CACHE"] = os.devnull


@pytest.fixture(scope="session")
def optimal_makespan() -> Callable[[Problem], float]:
    """Least makespan of a tiny problem, by exhaustive search that shares nothing with the solvers."""
    return optimum


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on a single thread meanwhile: tiny models are slower on more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> Any:
    """Return a tiny Llama in double precision, in which answers must be identical to generate's."""
    from batchbound.executor.models.source import load_model

    return load_model("tiny:llama", dtype="float64", device="cpu")


@pytest.fixture(scope="session")
def public_data() -> Path:
    """
    Folder of the published measurements and traces, which the repository does not carry.

    Without it a test is skipped; a folder that ``BATCHBOUND_DATA`` names, or that lacks a file, is a failure.
    """
    named = os.environ.get("BATCHBOUND_DATA")
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" if named is None else Path(named)
    if not folder.is_dir():
        if named is not None:
            pytest.fail(f"BATCHBOUND_DATA names {named}, which is no folder")
        pytest.skip("the public data is not here; set BATCHBOUND_DATA to its folder")
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of the given lines (objects become JSON) and give its path."""

    def write_lines(*lines: object, name: str = "batch.jsonl") -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return path

    return write_lines


@pytest.fixture
def press_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Return what has Ctrl-C pressed some seconds after a step of a call to a solver's process has begun."""

    def pressed(step: str, after: float) -> None:
        carried_out = getattr(_Call, step)

        def interrupted(call: _Call, *given: object) -> None:
            timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                carried_out(call, *given)
            finally:
                timer.cancel()

        monkeypatch.setattr(_Call, step, interrupted)

    return pressed


@pytest.fixture
def solve_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Solve in this process, on one thread: a worker takes a second to start, and has tests of its own."""

    def run(
        module: str,
        function: str,
        task: tuple[Any, ...],
        seconds: float | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Outcome:
        reports: dict[str, object] = {}
        task = tuple(replace(part, threads=1) if isinstance(part, Limits) else part for part in task)

        def send(message: tuple[str, object]) -> None:
            if message[0] == "report":
                assert isinstance(message[1], tuple)
                reports.update([message[1]])

        meanwhile()
        desk = Desk(send, seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = getattr(importlib.import_module(module), function)(*task, desk)
        return Outcome(answer, reports, None, 0.0)

    for name in ("mip", "backends.linear"):
        monkeypatch.setattr(f"batchbound.solvers.{name}.run_in_worker", run)
    yield
    # A solver may have left another handler.
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))


@pytest.fixture
def processes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the engine's processes from one that has torch imported."""
    from scripts import FORKS

    for name in ("encode_worker", "tensor_peers"):
        monkeypatch.setattr(f"batchbound.executor.processes.{name}.get_context", lambda _: FORKS)
