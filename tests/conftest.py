"""Fixtures shared by the tests."""

from __future__ import annotations

import heapq
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import combinations, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from batchbound.data.problem import Problem
from batchbound.solvers.backends.worker import _Call

settings.register_profile("batchbound", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("batchbound")


def pytest_configure() -> None:
    """Let Ctrl-C reach the tests and their processes, and let completions be of one moment."""
    # A shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
    if not Path("/dev/nvidiactl").exists():
        # Read when triton is imported, which any test may do first: kernels run in its interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _optimal_makespan(problem: Problem) -> float:
    """Least makespan by Dijkstra over (requests waiting, rounds done by each running one, prompts kept)."""
    rounds, prompts = problem.rounds.tolist(), problem.prompt_tokens.tolist()
    first = int(problem.prefill_emits_first_token)
    capacity = problem.kv_capacity or 10**9
    cap = problem.prefill_token_cap or 10**9
    State = tuple[tuple[int, ...], tuple[tuple[int, int], ...], frozenset[int]]
    start: State = (tuple(range(len(rounds))), (), frozenset())
    # The number breaks ties: sets of kept prompts have no order.
    frontier: list[tuple[float, int, State]] = [(0.0, 0, start)]
    settled, number = set[State](), count(1)
    while frontier:
        seconds, _, state = heapq.heappop(frontier)
        if state in settled:
            continue
        settled.add(state)
        waiting, running, kept = state
        if not waiting and not running:
            return seconds
        held = sum(prompts[i] + first + done for i, done in running)
        if running and held <= capacity:
            left = tuple((i, done + 1) for i, done in running if done + 1 < rounds[i])
            cost = problem.cost.decode_seconds(len(running), held)
            heapq.heappush(frontier, (seconds + cost, next(number), (waiting, left, kept)))
        for size in range(1, min(len(waiting), problem.slots - len(running)) + 1):
            for chosen in combinations(waiting, size):
                tokens, still = _computed(problem, waiting, chosen, kept)
                if tokens > cap or held + sum(prompts[i] for i in chosen) > capacity:
                    continue
                now = tuple(sorted(running + tuple((i, 0) for i in chosen if rounds[i] > 0)))
                rest = tuple(i for i in waiting if i not in chosen)
                total = seconds + problem.cost.prefill_seconds(tokens)
                heapq.heappush(frontier, (total, next(number), (rest, now, still)))
    raise AssertionError("no schedule exists")


def _computed(
    problem: Problem, waiting: tuple[int, ...], chosen: tuple[int, ...], kept: frozenset[int]
) -> tuple[int, frozenset[int]]:
    """Return the tokens a stage computes, and the groups whose shared prompts are kept after it."""
    group, shared = problem.workload.group.tolist(), problem.workload.shared_tokens.tolist()
    tokens = sum(int(problem.prompt_tokens[i]) - shared[i] for i in chosen)
    later = {group[i] for i in waiting if i not in chosen}
    still = kept & later
    for i in sorted(range(len(problem)), key=lambda i: i):
        if i == group.index(group[i]) and shared[i]:
            begins = any(group[j] == group[i] for j in chosen)
            if begins and group[i] not in kept:
                tokens += shared[i]
                room = problem.prefix_cache - sum(shared[group.index(each)] for each in still)
                if group[i] in later and shared[i] <= room:
                    still |= {group[i]}
    return tokens, still


@pytest.fixture(scope="session")
def optimal_makespan() -> Callable[[Problem], float]:
    """Least makespan of a tiny problem, by exhaustive search that shares nothing with the solvers."""
    return _optimal_makespan


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
