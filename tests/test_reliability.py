"""Mistakes and damage that reviews once found to end badly."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.figures import percent
from batchbound.data.predictor import Predicted
from batchbound.data.trace import Trace
from batchbound.data.workload import LONGEST

ROOT = Path(__file__).resolve().parent.parent
HUGE = 10**400


def test_a_gap_that_rounds_to_nothing_has_no_sign() -> None:
    assert [percent(value, 2) for value in (-1e-9, -0.1, 0.1)] == ["0.00 %", "-10.00 %", "10.00 %"]


def planned(folder: Path) -> Path:
    plan = folder / "plan.json"
    assert main(["plan", "table3:0:5", "--slots", "2", "--time-limit", "0.1", "-o", str(plan)]) == 0
    return plan


def edited(file: Path, place: str, value: Any) -> None:
    whole = json.loads(file.read_text())
    *steps, last = place.split(".")
    inside = whole
    for step in steps:
        inside = inside[int(step) if isinstance(inside, list) else step]
    inside[last] = value
    file.write_text(json.dumps(whole))


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    return said


def test_a_trace_nested_without_end_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, trace = planned(tmp_path), tmp_path / "trace.jsonl"
    trace.write_text("[" * 100_000 + "\n")
    assert "trace.jsonl, line 1: not JSON that can be parsed" in refused(
        ["report", str(plan), str(trace)], capsys
    )


@pytest.mark.parametrize("slots", [2_000_000])
def test_a_replica_of_more_slots_than_memory_is_refused(
    slots: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "fleet.json"
    fleet.write_text(json.dumps({"replicas": [{"slots": slots}]}))
    words = ["plan", "table3:0:5", "--replicas", str(fleet), "-o", str(tmp_path / "plan.json")]
    assert "fleet.json, field 'replicas.0" in refused(words, capsys)


@pytest.mark.parametrize("place", ["makespan_s", "fleet.replicas.0.cost.decode_base", "bound.seconds"])
def test_a_number_beyond_all_numbers_in_a_plan_is_refused(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path)
    edited(plan, place, HUGE)
    assert "plan.json: the number 1000" in refused(["verify", str(plan)], capsys)


@pytest.mark.parametrize(
    "text", ['{"prefill_base": Infinity}', '{"prefill_base": NaN}', f'{{"prefill_base": {HUGE}}}']
)
def test_a_cost_that_is_no_number_is_refused_before_the_work(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(text)
    words = ["plan", "table3:0:5", "--cost", str(cost), "-o", str(tmp_path / "plan.json")]
    assert "cost.json" in refused(words, capsys)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGKILL])
def test_a_plan_that_is_killed_leaves_no_temporary_folder(asked: signal.Signals, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["plan", "table3:0:200", "--slots", "20", "--time-limit", "600", "-o", "plan.json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "batchbound", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    begun = time.monotonic()
    while not any(temporary.iterdir()) and time.monotonic() - begun < 8:
        time.sleep(0.05)
    process.send_signal(asked)
    process.communicate(timeout=120)
    assert list(temporary.iterdir()) == []


def test_a_run_asked_to_end_before_its_first_stage_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "batchbound.running.run_on_model", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert main(["run", str(planned(tmp_path)), "--model", "tiny:llama"]) == 1
    assert "stopped: the system asked the process to end (SIGTERM)" in capsys.readouterr().err


def test_a_measured_length_beyond_all_plans_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.csv").write_text("predicted,actual\n9,2147483647\n10,9\n")
    words = ["plan", "table3:0:5", "--length-error", str(tmp_path / "pairs.csv")]
    said = refused([*words, "-o", str(tmp_path / "plan.json")], capsys)
    assert "pairs.csv, line 2, column 'actual': '2147483647' is not a length" in said


def test_costs_beyond_all_times_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"prefill_per_token_beyond is 1e\+308; it must be finite"):
        CostModel(0.0, 0.0, 0.0, 0.0, prefill_per_token_beyond=1e308)


def test_a_server_run_nested_without_end_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "server.jsonl").write_text('{"unknown": ' + "[" * 100_000 + "\n")
    assert "server.jsonl, line 1: not valid JSON" in refused(["audit", str(file)], capsys)


def test_an_infinite_interval_of_a_predictor_is_cut_to_the_longest_length() -> None:
    ends = Predicted.of(np.array([5.0]), np.array([0.0]), np.array([math.inf]))
    assert (ends.low.tolist(), ends.high.tolist()) == ([1], [LONGEST])


def test_a_trace_in_which_nothing_ran_cannot_be_validated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trace.empty(2).save(tmp_path / "trace.jsonl")
    said = refused(["validate", str(tmp_path / "trace.jsonl"), "--cost", "paper"], capsys)
    assert "trace.jsonl: the trace has no request" in said


def test_a_plan_whose_prompts_were_moved_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"custom_id": "a", "body": {"prompt": "Hi", "max_tokens": 2}}
    Path("in.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["plan", "in.jsonl", "--model", "tiny:llama", "--work", "1"]) == 0
    Path("in.jsonl").rename("moved.jsonl")
    words = ["run", "plan.json", "--model", "tiny:llama"]
    assert "in.jsonl: the plan's prompts are missing. Give the planned file with --prompts" in refused(
        words, capsys
    )
    assert main([*words, "--prompts", "moved.jsonl"]) == 0


def test_a_prompt_with_an_image_is_refused_by_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 2}
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "body": body}) + "\n")
    said = refused(["plan", str(tmp_path / "in.jsonl")], capsys)
    assert "line 1, field 'body.messages[0].content[0]': 'image_url' is not a text part" in said


def test_least_versions_go_together() -> None:
    """From numpy 2 on, these are the first that take it; scipy's HiGHS takes 64-bit indices from 1.14."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["parquet"]]
    least = dict(text.split(">=") for text in stated)
    first = {"numpy": (2, 0), "pandas": (2, 2, 2), "pyarrow": (16, 1), "scipy": (1, 14)}
    for name, version in first.items():
        assert tuple(int(part) for part in least[name].split(".")) >= version, name
