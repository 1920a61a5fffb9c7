"""`batchbound run PROMPTS`: measured, planned and run by one command."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from batchbound.cli import main, run_prompts
from batchbound.data.costs.cost import CostModel
from batchbound.data.plan import Plan
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits, StoppedBy

MODEL = ["--model", "tiny:llama", "--threads", "1"]


def written(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    lines = [
        {"custom_id": f"r{i}", "body": {"prompt": "Count. " * i, "max_tokens": 3 * i}} for i in (1, 2, 3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that were planned and run before, for settings that are refused beside that."""
    path = written(tmp_path_factory.mktemp("planned"))
    assert run(path, "--slots", "2", "--lengths", "cap") == 0
    return path


def run(prompts: Path, *words: str) -> int:
    out = ["-o", str(prompts.with_name("answers.jsonl")), "--trace", str(prompts.with_name("trace.jsonl"))]
    return main(["run", str(prompts), *MODEL, *out, *words])


def plan_of(prompts: Path) -> Path:
    return prompts.with_name("answers.plan.json")


def lengths_in(answers: Path) -> dict[str, int]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in answers.read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"]["usage"]["completion_tokens"] for line in lines}


def test_prompts_are_planned_in_the_seconds_of_the_model_and_served(prompts: Path) -> None:
    assert run(prompts, "--slots", "2") == 0
    assert list(lengths_in(prompts.with_name("answers.jsonl"))) == ["r1", "r2", "r3"]
    plan = Plan.load(plan_of(prompts))
    assert plan.problem.slots == 2
    assert plan.problem.cost != CostModel.paper()
    engine = plan.provenance.cost_source["engine"]
    assert isinstance(engine, dict)
    assert engine["model"] == "llama"
    assert main(["verify", str(plan_of(prompts))]) == 0
    assert main(["report", str(plan_of(prompts)), str(prompts.with_name("trace.jsonl"))]) == 0


def test_one_object_is_printed_with_json(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(prompts, "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3


def test_a_measured_cost_model_is_taken_instead_of_measuring(prompts: Path) -> None:
    cost = str(prompts.with_name("cost.json"))
    words = ["--slots", "2", "--prompt-tokens", "16", "--points", "2", "--repeats", "1", "-o", cost]
    assert main(["profile", *MODEL, *words]) == 0
    assert run(prompts, "--cost", cost) == 0
    assert Plan.load(plan_of(prompts)).provenance.cost_source["name"] == cost


def test_a_table_is_planned_by_its_columns_and_no_completion_is_longer_than_the_longest(
    tmp_path: Path,
) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text('{"key": "a", "text": "One."}\n{"key": "b", "text": "Two."}\n')
    words = ["--prompt-column", "text", "--id-column", "key", "--lengths", "cap", "--longest-completion", "5"]
    assert run(table, *words) == 0
    assert lengths_in(tmp_path / "answers.jsonl") == {"a": 5, "b": 5}


def test_the_same_command_follows_the_plan_that_is_there(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts) == 0
    before = plan_of(prompts).read_bytes()
    assert run(prompts) == 0
    assert plan_of(prompts).read_bytes() == before
    assert "this job is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (signal.SIGTERM, 1, "stopped: the system asked the process to end (SIGTERM)"),
        (signal.SIGINT, 130, "batchbound: interrupted"),
    ],
)
def test_a_run_that_is_stopped_while_it_plans_says_by_what_and_writes_no_plan(
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sent: signal.Signals,
    status: int,
    said: str,
) -> None:
    def stopped(*given: Any, **options: Any) -> Plan:
        made = make_plan(*given, **options)
        try:
            signal.raise_signal(sent)
        except KeyboardInterrupt:
            # As the search ends.
            return replace(made, maker=replace(made.maker, stopped_by=StoppedBy.INTERRUPT))
        raise AssertionError

    monkeypatch.setattr(run_prompts, "make_plan", stopped)
    assert run(prompts) == status
    assert said in capsys.readouterr().err
    assert not plan_of(prompts).exists()


def test_the_plan_that_another_run_of_the_command_made_meanwhile_is_followed(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan

    def made_twice(*given: Any, **options: Any) -> Any:
        plan(*given, **{**options, "limits": Limits(work=1, seed=7)}).save(plan_of(prompts))
        meanwhile.append(plan_of(prompts).read_bytes())
        return plan(*given, **options)

    meanwhile: list[bytes] = []
    monkeypatch.setattr(run_prompts, "make_plan", made_twice)
    assert run(prompts) == 0
    assert plan_of(prompts).read_bytes() == meanwhile[0]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--slots", "5"], "--slots"),
        (["--lengths", "constant:2"], "--lengths"),
        (["--longest-completion", "4"], "--longest-completion"),
        (["--cost", "paper"], "--cost"),
        (["--prompt-column", "text"], "--prompt-column"),
        (["--tokenizer", "bytes"], "--tokenizer"),
    ],
)
def test_a_plan_made_with_other_settings_is_not_followed(
    planned: Path, words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(planned, *words) == 2
    assert f"was planned with another {option}" in capsys.readouterr().err


def test_a_plan_of_other_prompts_is_not_followed(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(prompts) == 0
    prompts.write_text(prompts.read_text().replace("Count.", "Say."))
    assert run(prompts) == 2
    assert f"is no plan of {prompts} as it is now" in capsys.readouterr().err
    assert run(prompts, "--overwrite") == 0


def test_completions_of_another_job_are_found_before_anything_is_measured(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.with_name("answers.jsonl").write_text("mine\n")
    assert run(prompts) == 2
    error = capsys.readouterr().err
    assert "answers.jsonl: exists already" in error
    assert "measured" not in error
    assert not plan_of(prompts).exists()


def test_an_option_of_planning_is_refused_beside_a_plan(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts) == 0
    assert run(plan_of(prompts), "--slots", "3") == 2
    assert "--slots has no effect on a plan" in capsys.readouterr().err
