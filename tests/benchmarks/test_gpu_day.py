"""The half hour on a GPU runs from end to end on the CPU, and keeps what it has whatever happens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

import gpu_day

pytestmark = pytest.mark.usefixtures("one_thread")

COMPILES = "compiled"
"""Needs minutes of a compiler."""
UNLIKE_THE_REST = ("kernels", "ends", "memory", "long_prompts", "host", "log_probabilities")


def figures_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU it takes half an hour")
def test_the_parts_that_only_this_command_has_run_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "day.json"
    gpu_day.main(["--output", str(output), "--parts", *UNLIKE_THE_REST])
    report = figures_of(output)
    assert set(report) == {"device", "seconds", *UNLIKE_THE_REST}
    assert not [part for part in UNLIKE_THE_REST if "error" in report[part]], report
    assert all(entry["right"] for entry in report["kernels"] if entry["kernel"] == "masked sdpa")
    memory = report["memory"]
    assert memory["allocated_tokens"] <= memory["capacity_tokens"] + 16 * (memory["slots"] + 1)
    assert [entry["with_captured"] for entry in report["log_probabilities"]] == [True, True]
    assert all(entry["calls"] <= entry["decode_steps"] <= 8 for entry in report["ends"])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU it takes half an hour")
def test_the_parts_it_shares_run_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "day.json"
    shared = [part for part in gpu_day.PARTS if part not in (*UNLIKE_THE_REST, COMPILES)]
    gpu_day.main(["--output", str(output), "--parts", *shared])
    report = figures_of(output)
    assert not [part for part in shared if "error" in report[part]], report
    assert report["job"]["gap_of_the_plan"] >= 0
    assert all(point["tokens_right"] for point in report["decode_steps"])


def test_figures_are_written_when_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "day.json"
    seen: list[set[str]] = []

    def fail(day: gpu_day.Day) -> None:
        day.note("kernels", [{"slots": 2}])
        raise RuntimeError("no such kernel\nmore of it")

    def look(_: gpu_day.Day) -> None:
        seen.append(set(figures_of(output)))

    monkeypatch.setitem(gpu_day.PARTS, "kernels", (fail, 1.0))
    monkeypatch.setitem(gpu_day.PARTS, "memory", (look, 1.0))
    gpu_day.main(["--output", str(output), "--parts", "kernels", "memory"])
    assert seen == [{"device", "seconds", "kernels"}]
    expected = {"error": "RuntimeError: no such kernel", "before": [{"slots": 2}]}
    assert figures_of(output)["kernels"] == expected


def test_what_no_longer_fits_is_named(tmp_path: Path) -> None:
    day = gpu_day.Day(tmp_path / "day.json", torch.device("cpu"), gpu_day.ON_CPU, time.monotonic() - 60)
    gpu_day.run(day, ["kernels", "job"])
    left_out = figures_of(day.output)
    assert left_out["kernels"] == {"left_out": "-1.0 minutes were left, it takes about 0.5"}
    assert left_out["job"] == {"left_out": "-1.0 minutes were left, it takes about 5"}


def test_the_parts_fit_into_half_an_hour_with_the_most_important_first() -> None:
    assert sum(minutes for _, minutes in gpu_day.PARTS.values()) <= 25
    assert list(gpu_day.PARTS)[:3] == ["kernels", "decode_steps", "job"]
