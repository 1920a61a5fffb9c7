"""``run --repeatable``: the same bits whatever the batch was, also after a stop; ``verify`` compares runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound import ModelOptions, RunOptions, RunParams, run
from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.plan import Plan
from batchbound.data.trace import Stage, Trace
from batchbound.executor.attention.host_kernels import built
from batchbound.executor.jobs.digests import DIGEST
from batchbound.executor.jobs.journal import Journal

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(built() is None, reason="the functions in C++ do not build here"),
]
REPEATABLE = RunOptions(params=RunParams(repeatable=True))


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Plans of the same eight requests on three slots and on five."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "custom_id": f"r{k}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": "word " * (1 + k % 3)}],
                "max_tokens": 2 + 2 * k,
                "temperature": float(k % 2),
                "n": 2 if k == 3 else 1,
            },
        }
        for k in range(8)
    ]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for slots in (3, 5):
        options = ["--model", "tiny:llama", "--slots", str(slots), "--time-limit", "0.1"]
        assert main(["plan", "p.jsonl", *options, "-o", f"plan{slots}.json"]) == 0
    return "plan3.json", "plan5.json"


def stopping(stages: int) -> Callable[..., Any]:
    """Return what interrupts a run after some stages."""

    @contextmanager
    def watching(plan: Plan, journal: Journal) -> Iterator[Callable[[Stage, int], None]]:
        seen = 0

        def on_stage(stage: Stage, done: int) -> None:
            nonlocal seen
            seen += 1
            if seen > stages:
                raise KeyboardInterrupt

        yield on_stage

    return watching


def digest_of_run(plan: str, name: str, dtype: str, options: RunOptions = REPEATABLE) -> object:
    result = run(
        plan, ModelOptions("tiny:llama", dtype=dtype), options, output=f"{name}.jsonl", trace=f"{name}.trace"
    )
    assert result.report.engine["digest"] == Trace.load(f"{name}.trace").engine["digest"]
    return result.report.engine["digest"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_slots_or_stops(plans: tuple[str, str], dtype: str) -> None:
    few, more = plans
    unbroken = digest_of_run(few, "a", dtype)
    assert digest_of_run(more, "b", dtype) == unbroken
    for stages in (5, 4):
        with pytest.raises(KeyboardInterrupt):
            run(
                few,
                ModelOptions("tiny:llama", dtype=dtype),
                REPEATABLE,
                output="c.jsonl",
                trace="c.trace",
                watching=stopping(stages),
            )
    assert Path("c.jsonl.journal").read_text(encoding="utf-8").count(DIGEST) >= 2
    assert digest_of_run(few, "c", dtype) == unbroken
    lines = [json.loads(line) for line in Path("c.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({line[DIGEST] for line in lines}) == len(lines)


def test_verify_compares_two_runs(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    few, more = plans
    digest_of_run(few, "a", "float32")
    digest_of_run(more, "b", "float32")
    assert main(["verify", "a.trace", "--same-as", "b.trace"]) == 0
    assert "bit by bit" in capsys.readouterr().out
    digest_of_run(few, "c", "bfloat16")
    assert main(["verify", "a.trace", "--same-as", "c.trace"]) == 1
    assert "number format: float32 and bfloat16" in capsys.readouterr().err
    run(few, "tiny:llama", output="d.jsonl", trace="d.trace")
    assert main(["verify", "a.trace", "--same-as", "d.trace"]) == 2
    assert "names no digest" in capsys.readouterr().err


def test_a_run_that_cannot_keep_its_bits_is_refused(plans: tuple[str, str]) -> None:
    with pytest.raises(InputError, match="window tier pads rows"):
        run(plans[0], ModelOptions("tiny:llama", tier="window"), REPEATABLE, output="a.jsonl")


def test_the_flag_is_the_parameter(plans: tuple[str, str]) -> None:
    unbroken = digest_of_run(plans[0], "a", "float32")
    arguments = ["--model", "tiny:llama", "--dtype", "float32", "--repeatable", "-o", "b.jsonl"]
    assert main(["run", plans[1], *arguments]) == 0
    assert Trace.load("b.trace.jsonl").engine["digest"] == unbroken
