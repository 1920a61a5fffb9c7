"""Prompts that begin alike: the plan says that it counts each whole, the run that they were computed once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.plan import Plan
from batchbound.data.trace import Trace
from batchbound.executor.reports.report import run_bound_of
from batchbound.judging import report
from batchbound.models.bounds.makespan import best_bound

WORDS = (
    "192 prompt tokens, 67 of them distinct: the plan and its bound count all, engines that share beginnings"
    " compute less"
)

# The token that begins all prompts is not worth sharing for one of them.
ONCE = "192 prompt tokens, 68 of them computed: what prompts share is computed once"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    # A token begins each prompt: 6 x 32 tokens, of which 1 + 30 + 5 + 31 are distinct.
    texts = [*("a" * 30 + end for end in "bcdef"), "g" * 31]
    lines = [
        {"custom_id": f"r{k}", "body": {"prompt": text, "max_tokens": 2 + k}} for k, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_bound_report_and_screens_count_what_prompts_share_once(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    model = ["--model", "tiny:llama", "--slots", "2"]
    assert main(["plan", "prompts.jsonl", *model, "--lengths", "constant:3", "--work", "1"]) == 0
    plan = Plan.load("plan.json")
    assert plan.repeats == ONCE
    assert plan.bound_of is None
    assert plan.schedule.stage_tokens(plan.problem).sum() == 68
    assert main(["verify", "plan.json"]) == 0
    assert "--prompts FILE derives it again" in capsys.readouterr().out
    assert main(["verify", "plan.json", "--prompts", "prompts.jsonl"]) == 0
    assert "was derived from the prompts again" in capsys.readouterr().out
    assert main(["run", "plan.json", "--model", "tiny:llama", "--threads", "1"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "computed: 68, each shared beginning once, of 192" in screen
    trace = Trace.load("trace.jsonl")
    ran = report(plan, [trace])
    assert trace.distinct_tokens == 31 + 5 + 32 == ran.prompt_tokens
    assert sum(stage.tokens for stage in trace.stages if stage.kind == "prefill") == 68
    assert ran.bound is not None
    assert ran.run_bound is not None
    assert ran.model_makespan >= ran.run_bound
    stages = replace(plan.problem, cost=CostModel(0.0, 1.0, 0.0, 0.0))
    assert best_bound(stages).seconds == 68
    # Without the tree, a bound counts whole prompts, above what the run took.
    apart = replace(stages, workload=replace(stages.workload, tree=None))
    assert best_bound(apart).seconds == 192
    counted = run_bound_of(Fleet.of(apart, 1), [trace], lambda _: best_bound(apart))
    assert counted is not None
    assert counted.seconds == 68


def test_a_plan_of_other_prompts_is_refused(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    model = ["--model", "tiny:llama", "--slots", "2"]
    assert main(["plan", "prompts.jsonl", *model, "--lengths", "constant:3", "--work", "1"]) == 0
    apart = prompts.read_text().replace("aaa", "xyz", 1)
    prompts.write_text(apart)
    assert main(["verify", "plan.json", "--prompts", "prompts.jsonl"]) == 1
    assert "the plan's tree is that of these prompts" in capsys.readouterr().err


def test_a_plan_that_shares_more_than_its_prompts_is_refused(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    model = ["--model", "tiny:llama"]
    words = ["plan", "prompts.jsonl", *model, "--slots", "2", "--lengths", "constant:3", "--work", "1"]
    assert main(words) == 0
    plan = Plan.load("plan.json")
    tree = plan.workload.tree
    assert tree is not None
    # The last prompt shares nothing; it would begin as the others do.
    more = replace(tree, leaf=np.zeros(6, int), own=np.array([*tree.own[:5], 1]))
    workload = plan.workload.with_tree(more)
    fleet = replace(plan.fleet, workload=workload)
    forged = replace(plan, fleet=fleet, makespan=plan.shares.makespan(fleet), bound=None)
    replace(forged, maker=replace(plan.maker, status="feasible")).save("forged.json")
    assert main(["verify", "forged.json", "--prompts", "prompts.jsonl"]) == 1
    assert "the plan's tree is that of these prompts" in capsys.readouterr().err
    assert main(["run", "forged.json", *model, "--threads", "1", "-o", "out.jsonl"]) == 2
    assert "the prompt of 'r5' does not begin as that of 'r0'" in capsys.readouterr().err


def test_replicas_count_each_prompt_whole_and_say_so(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    words = ["plan", "prompts.jsonl", "--model", "tiny:llama", "--slots", "2", "--replicas", "2"]
    assert main([*words, "--lengths", "constant:3", "--work", "1"]) == 0
    plan = Plan.load("plan.json")
    assert plan.repeats == WORDS
    assert plan.bound_of == "every schedule that computes each prompt whole"
    assert main(["verify", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert "no schedule that computes each prompt whole takes less than" in said
    assert said.count("67 of them distinct") == 2  # plan, verify


def test_prompts_that_begin_differently_say_nothing(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"custom_id": f"r{k}", "body": {"prompt": [k, 9, 9, 9], "max_tokens": 2}} for k in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = str(prompts.with_name("p.json"))
    assert main(["plan", str(prompts), "--slots", "2", "-o", output, "--work", "1"]) == 0
    assert "distinct" not in capsys.readouterr().out
    assert Plan.load(output).bound_of is None
