"""What a run does when memory runs out, a model gives NaN, or the system asks it to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mostly_slow

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.registry import policy_named

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from scripts import COMMAND, begun, ended
from tier_cases import answers_of_generate

from batchbound.executor.attention.decoder import Decoder
from batchbound.executor.engines import offloading as residence
from batchbound.executor.engines.huggingface import DecodeOptions, HuggingFaceEngine
from batchbound.executor.engines.tiers import choose_tier
from batchbound.executor.models.faults import RunStoppedError
from batchbound.heuristics.loop import execute

pytestmark = pytest.mark.usefixtures("one_thread")

TIERS = ("window", "ragged")


def make_job(count: int, slots: int, seed: int) -> tuple[Problem, list[list[int]]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    outputs = [rng.randint(1, 25) for _ in prompts]
    workload = Workload.from_lengths([len(prompt) for prompt in prompts], outputs)
    return Problem(workload, CostModel.paper(), slots, prefill_emits_first_token=True), prompts


def serve(model: Any, job: tuple[Problem, list[list[int]]], tier: str, **options: Any) -> HuggingFaceEngine:
    problem, prompts = job
    engine = HuggingFaceEngine(
        problem, model, prompts, problem.workload.output_tokens, tier=choose_tier(model, tier), **options
    )
    execute(problem, policy_named("fcfs", problem), engine)
    return engine


def generated(job: tuple[Problem, list[list[int]]]) -> list[list[int]]:
    lengths = job[0].workload.output_tokens.tolist()
    return answers_of_generate("llama", list(zip(job[1], lengths, strict=True)))


def fail_at(
    monkeypatch: pytest.MonkeyPatch, calls: set[int], make_error: Callable[[], Exception], *, late: bool
) -> None:
    """Let some calls of the model fail, before they begin or after they stored their keys and values."""
    forward, count = Decoder.forward, [0]

    def failing(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] in calls and not late:
            raise make_error()
        logits = forward(self, *args, **kwargs)
        if count[0] in calls:
            raise make_error()
        return logits

    monkeypatch.setattr(Decoder, "forward", failing)


@pytest.mark.parametrize("tier", TIERS)
def test_with_less_memory_than_the_slots_need_requests_take_turns(tier: str, llama: Any) -> None:
    job = make_job(14, slots=6, seed=1)
    longest = int((job[0].prompt_tokens + job[0].workload.output_tokens).max())
    engine = serve(llama, job, tier, decoding=DecodeOptions(kv_tokens=6 * longest * 6 // 10))
    assert engine.answers == generated(job)
    assert "3 requests fit at once" in str(engine.describe()["memory"])


@pytest.mark.parametrize("late", mostly_slow([False, True], fast=[True]))
@pytest.mark.parametrize("tier", mostly_slow(TIERS, fast=["ragged"]))
def test_running_out_of_memory_loses_nothing(
    tier: str, late: bool, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(12, slots=5, seed=2)
    expected = generated(job)
    fail_at(monkeypatch, {1, 3, 9, 10, 31}, lambda: torch.OutOfMemoryError("CUDA out of memory"), late=late)
    engine = serve(llama, job, tier)
    assert engine.answers == expected
    assert "ran out 5 times" in str(engine.describe()["memory"])


@pytest.mark.parametrize("tier", TIERS)
def test_an_urgent_request_preempts_and_every_answer_is_right(tier: str, llama: Any) -> None:
    problem, prompts = make_job(9, slots=2, seed=4)
    workload = dataclasses.replace(
        problem.workload,
        priority=np.array([0, 0, 0, 1, 0, 2, 0, 0, 1]),
        arrival=np.array([0, 0, 0, 4, 4, 7, 9, 9, 13]) / 100,
    )
    job = dataclasses.replace(problem, workload=workload), prompts
    ticks = itertools.count()
    engine = HuggingFaceEngine(
        job[0],
        llama,
        prompts,
        workload.output_tokens,
        tier=choose_tier(llama, tier),
        clock=lambda: next(ticks) / 400,
    )
    trace = execute(job[0], policy_named("priority", job[0]), engine)
    assert trace.evictions > 0
    assert engine.answers == generated(job)


def test_the_batch_grows_again_when_memory_is_there(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residence, "CALM_STEPS", 3)
    job = make_job(12, slots=4, seed=2)
    expected = generated(job)
    fail_at(monkeypatch, {4}, lambda: torch.OutOfMemoryError("CUDA out of memory"), late=False)
    engine = serve(llama, job, "ragged")
    assert engine.answers == expected
    assert "ran out 1 times; 4 requests fit at once" in str(engine.describe()["memory"])


def test_what_the_cpu_allocator_says_counts_as_well(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(6, slots=3, seed=3)
    expected = generated(job)
    message = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
    fail_at(monkeypatch, {5}, lambda: RuntimeError(message), late=False)
    assert serve(llama, job, "ragged").answers == expected


def test_a_device_that_does_not_hold_one_request_stops_the_run(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, set(range(1000)), lambda: torch.OutOfMemoryError("out of memory"), late=False)
    with pytest.raises(RunStoppedError, match="memory ran out with a single request"):
        serve(llama, make_job(4, slots=2, seed=4), "ragged")


def test_other_errors_are_not_taken_for_a_lack_of_memory(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, {4}, lambda: RuntimeError("a device went away"), late=False)
    with pytest.raises(RuntimeError, match="a device went away"):
        serve(llama, make_job(4, slots=2, seed=4), "ragged")


@pytest.mark.parametrize("tier", TIERS)
def test_a_model_that_gives_nan_is_named_with_request_and_token(
    tier: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, count = Decoder.forward, [0]

    def spoiling(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        logits = forward(self, *args, **kwargs)
        if count[0] == 4:
            logits = logits.clone()
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(Decoder, "forward", spoiling)
    _, prompts = make_job(2, slots=2, seed=9)
    workload = Workload.from_lengths([len(prompt) for prompt in prompts], [20, 20])
    job = Problem(workload, CostModel.paper(), 2, prefill_emits_first_token=True), prompts
    with pytest.raises(RunStoppedError, match="not finite after"):
        serve(llama, job, tier)


def write_job(folder: Path, count: int, most: int) -> list[str]:
    rng = random.Random(5)
    with (folder / "prompts.jsonl").open("w") as stream:
        for number in range(count):
            text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 40)))
            body = {"prompt": text, "max_tokens": rng.randint(1, most)}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body}) + "\n")
    plan = str(folder / "plan.json")
    words = ["plan", str(folder / "prompts.jsonl"), "--model", "tiny:llama:1", "--slots", "4", "-o", plan]
    assert main([*words, "--time-limit", "0.2"]) == 0
    run = ["run", plan, "--model", "tiny:llama:1", "--dtype", "float64", "--threads", "1"]
    return [*run, "-o", str(folder / "answers.jsonl"), "--trace", str(folder / "trace.jsonl")]


def answers_in(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_says_how_to_go_on_and_loses_nothing(tmp_path: Path) -> None:
    run = write_job(tmp_path, count=50, most=50)
    assert main(run) == 0
    expected = answers_in(tmp_path)
    (tmp_path / "answers.jsonl").unlink()
    (tmp_path / "trace.jsonl").unlink()
    journal = tmp_path / "answers.jsonl.journal"
    with begun(COMMAND, run, tmp_path) as (process, logs):
        started = time.monotonic()
        while process.is_alive() and time.monotonic() - started < 120:
            if journal.exists() and len(journal.read_bytes().splitlines()) > 2:
                break
            time.sleep(0.005)
        process.terminate()
        process.join(120)
        assert process.exitcode == 1
        said = (logs / "stderr").read_text(encoding="utf-8")
    assert "SIGTERM" in said
    assert "the same command resumes" in said
    kept = len(journal.read_bytes().splitlines()) - 1
    assert kept >= 1
    assert f"{kept} finished completions" in said
    assert main(run) == 0
    assert answers_in(tmp_path) == expected


def test_the_capacity_is_an_option_and_the_trace_says_what_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_job(tmp_path, count=24, most=30)
    assert main(run) == 0
    expected = answers_in(tmp_path)
    capsys.readouterr()
    assert main([*run, "--overwrite", "--kv-tokens", "170", "--tier", "window", "--json"]) == 0
    engine = json.loads(capsys.readouterr().out)["engine"]
    assert answers_in(tmp_path) == expected
    assert (engine["tier"], engine["tier_reason"]) == ("window", "asked for")
    assert "moved to the host" in engine["memory"]
    assert main([*run, "--overwrite", "--kv-tokens", "5"]) == 2
    assert "do not hold the longest request" in capsys.readouterr().err


PATCHED = """
import resource, sys, time
from batchbound.cli import main
from batchbound.executor.attention.decoder import Decoder

forward, calls = Decoder.forward, 0

def failing(self, *args, **kwargs):
    global calls
    calls += 1
    if calls == 60:
        {at_the_sixtieth_call}
    return forward(self, *args, **kwargs)

Decoder.forward = failing
{before}
sys.exit(main(sys.argv[1:]))
"""

FAULTS = {
    "a hung device call": ("time.sleep(3600)", "", "a device call may hang", 1),
    "a failing device call": (
        "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
        "",
        "the device failed (CUDA error: an illegal memory access",
        1,
    ),
    "a full disk": (
        "pass",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))",
        "the same command resumes",
        1,
    ),
    "a model whose code fails": (
        "raise ValueError('shapes do not agree')",
        "",
        "a stage failed (ValueError: shapes do not agree); --verbose shows where",
        1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_cannot_go_on_says_so_and_loses_nothing(fault: str, tmp_path: Path) -> None:
    call, before, message, status = FAULTS[fault]
    run = write_job(tmp_path, count=30, most=30)
    script = tmp_path / "patched.py"
    script.write_text(PATCHED.format(at_the_sixtieth_call=call, before=before), encoding="utf-8")
    done = ended(script, [*run, "--stall-seconds", "5"], tmp_path)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "answers.jsonl").exists()
    journal = (tmp_path / "answers.jsonl.journal").read_bytes().splitlines()
    kept = {entry["id"]: entry["answer"] for entry in map(json.loads, journal[1:])}
    assert 1 <= len(kept) < 30
    assert main(run) == 0
    resumed = answers_in(tmp_path)
    assert all(kept.get(answer["custom_id"], answer) == answer for answer in resumed)
    assert main([*run, "--overwrite"]) == 0
    assert answers_in(tmp_path) == resumed
