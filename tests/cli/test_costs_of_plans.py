"""A plan without measured costs prints counts and no seconds; costs that a run kept are taken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from builders import UNIT

from batchbound.cli import main
from batchbound.cost_cache import CostCache
from batchbound.data.costs.cost import CalibratedCost, FitError
from batchbound.data.plan import ASSUMED, KEPT, Plan

SECONDS = re.compile(r"\d (s|ms)\b|device-hours|tokens/s|makespan|LLaMA")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text("input_tokens,output_tokens\n10,5\n20,9\n30,4\n")
    return ["plan", "lengths.csv", "--slots", "2"]


def test_a_plan_without_costs_prints_counts_and_no_seconds(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(table) == 0
    screen = capsys.readouterr().out
    lines = [line for line in screen.splitlines() if not line.startswith("  took ")]
    assert not any(map(SECONDS.search, lines))
    assert "costs not measured" in lines[0]
    assert "  prompt tokens        60" in lines
    assert "  decode steps         8" in lines
    plan = Plan.load("plan.json")
    assert plan.provenance.assumes_costs
    assert not SECONDS.search(str(plan))
    assert main(["report", "plan.json"]) == 0
    assert not SECONDS.search(capsys.readouterr().out)


def test_the_screen_of_a_plan_keeps_to_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{'begins alike, ' * 9}{k}", "max_tokens": 4} for k in range(3)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = "of-a-model-with-a-long-name"
    words = ["plan", "prompts.jsonl", "--prompt-column", "prompt", "--slots", "2", "-o", f"{long}.json"]
    assert main([*words, "--first-token", "decode"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    at = next(k for k, line in enumerate(lines) if "of them distinct" in line)
    assert lines[at].startswith("  prompts              ")
    assert lines[at + 1].startswith(" " * 23 + lines[at + 1].split()[0])


def test_its_json_keeps_all_keys(table: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*table, "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)
    assert main([*table, "--json", "--cost", "paper"]) == 0
    stated = json.loads(capsys.readouterr().out)
    assert assumed.keys() == stated.keys()
    assert (assumed["cost"], stated["cost"]) == (ASSUMED, "paper")
    assert assumed["makespan_s"] == stated["makespan_s"]


def test_stated_costs_and_the_papers_own_jobs_keep_their_seconds(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([*table, "--cost", "paper"], ["plan", "table3:0:6", "--slots", "2"]):
        assert main(words) == 0
        screen = capsys.readouterr().out
        assert "predicted makespan" in screen
        assert "LLaMA-65B" in screen


def test_a_simulation_without_costs_prints_counts_and_no_seconds(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for more, what in (([], "no seconds; "), (["--hidden-lengths"], "shares at the costs")):
        words = ["simulate", *table[1:], *more]
        assert main(words) == 0
        said = capsys.readouterr()
        assert "no --cost: " in said.out
        assert what in said.out
        assert not re.search(r"\d m?s\b", said.out)
        assert "prefill stages" in said.out
        assert main([*words, "--cost", "paper"]) == 0
        said = capsys.readouterr()
        assert "no --cost" not in said.out
        assert re.search(r"\d m?s\b", said.out)


def test_json_of_a_simulation_says_whose_seconds_it_holds(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *table[1:], "--json"]) == 0
    assert "no --cost: seconds are those of a LLaMA-65B" in capsys.readouterr().err


def test_costs_that_a_run_of_the_model_kept_are_taken(
    table: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: dict[str, object] = {"model": "mine", "device": "a CPU"}
    kept = CalibratedCost(UNIT, FitError(0.01, 0.01, 0.0, 10, 100), engine)
    monkeypatch.setenv("BATCHBOUND_COST_CACHE", str(Path("cache").absolute()))
    assert CostCache.of_user().keep("tiny:llama", 4, kept)
    body = {"prompt": "abc", "max_tokens": 4}
    Path("prompts.jsonl").write_text(json.dumps({"custom_id": "q", "body": body, "output_tokens": 4}) + "\n")
    words = ["plan", "prompts.jsonl", "--slots", "2", "--lengths", "known"]
    assert main([*words, "--model", "tiny:llama"]) == 0
    screen = capsys.readouterr().out
    assert "in the seconds of mine on a CPU" in screen
    assert "predicted makespan" in screen
    plan = Plan.load("plan.json")
    assert plan.provenance.cost_source["name"] == KEPT
    assert plan.problem.cost == UNIT
    assert main([*words, "--model", "tiny:gpt2"]) == 0
    assert Plan.load("plan.json").provenance.assumes_costs
