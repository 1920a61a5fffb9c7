"""`batchbound run PROMPTS`: planned by what is known, run, and measured by the run itself."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from batchbound.cli import main
from batchbound.cost_cache import CostCache
from batchbound.data.files.disk import InputError
from batchbound.data.plan import Plan
from batchbound.data.trace import Trace
from batchbound.executor.jobs.journal import Journal
from batchbound.planning.plan import make_plan
from batchbound.run_job import prompts as run_prompts
from batchbound.run_job.options import ModelOptions
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


def test_prompts_of_unknown_lengths_are_served_at_once_and_nothing_is_promised(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts, "--slots", "2") == 0
    said = capsys.readouterr()
    assert said.err.startswith("batchbound: 3 prompts, 2 slots, lengths unknown: larger caps first")
    assert "predicted" not in said.err
    assert list(lengths_in(prompts.with_name("answers.jsonl"))) == ["r1", "r2", "r3"]
    plan = Plan.load(plan_of(prompts))
    assert (plan.problem.slots, plan.bound, plan.provenance.cost_source) == (2, None, {"name": "assumed"})
    assert main(["report", str(plan_of(prompts)), str(prompts.with_name("trace.jsonl"))]) == 0


def test_equal_caps_order_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"custom_id": f"r{i}", "body": {"prompt": "Count. " * i, "max_tokens": 4}} for i in (3, 1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(path, "--slots", "1") == 0
    assert (
        capsys.readouterr()
        .err.splitlines()[0]
        .endswith(
            "lengths unknown: file order; prefill waits to be shared only once completions show that it saves"
        )
    )
    trace = Trace.load(tmp_path / "trace.jsonl")
    assert trace.finished.tolist() == sorted(trace.finished.tolist()), "in the order of the file"


def test_kinds_of_prompts_start_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    names = [f"{kind}-{i}" for kind in ("word", "essay") for i in range(8)]
    lines = [{"custom_id": name, "body": {"prompt": "Count.", "max_tokens": 2}} for name in names]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(path, "--slots", "2") == 0
    assert "2 kinds of prompts, longer ones first once it saves" in capsys.readouterr().err
    trace = Trace.load(tmp_path / "trace.jsonl")
    assert sorted(np.argsort(trace.finished, kind="stable")[:2].tolist()) == [0, 8]


def test_larger_caps_are_served_first(prompts: Path) -> None:
    assert run(prompts, "--slots", "1") == 0
    trace = Trace.load(prompts.with_name("trace.jsonl"))
    assert trace.finished.tolist() == sorted(trace.finished.tolist(), reverse=True)


def test_a_run_keeps_its_costs_for_the_next_plan(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCHBOUND_COST_CACHE", str(prompts.parent / "cache"))
    many = [
        {"custom_id": f"r{i}", "body": {"prompt": "a" * (1 + i), "max_tokens": 5 + i % 9}} for i in range(16)
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in many))
    assert run(prompts, "--slots", "2") == 0
    kept = CostCache.of_user().find("tiny:llama", 2)
    assert kept is not None
    assert kept.error is not None
    assert kept.error.decode_steps == Trace.load(prompts.with_name("trace.jsonl")).decode_steps
    capsys.readouterr()
    assert run(prompts, "--slots", "2", "--overwrite") == 0
    assert Plan.load(plan_of(prompts)).problem.cost == kept.cost
    assert "s predicted" in capsys.readouterr().err


def test_one_prompt_of_milliseconds_is_announced_as_that(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text(json.dumps({"custom_id": "r", "body": {"prompt": "abc", "max_tokens": 3}}))
    cost = {"prefill_base": 0.01, "prefill_per_token": 0.0, "decode_base": 0.01, "decode_per_slot": 0.0}
    costs = prompts.with_name("cost.json")
    costs.write_text(json.dumps({"batchbound_cost": 2, "cost": cost}))
    assert run(prompts, "--slots", "2", "--lengths", "constant:3", "--cost", str(costs)) == 0
    # A prefill stage and two decode steps.
    assert "1 prompt, 2 slots, lengths known: 30.0 ms predicted" in capsys.readouterr().err


def test_the_second_run_is_planned_with_the_lengths_of_the_first(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts, "--slots", "2") == 0
    first = prompts.with_name("answers.jsonl").read_bytes()
    capsys.readouterr()
    assert run(prompts, "--slots", "2", "--overwrite") == 0
    assert "planning with the lengths of an earlier run" in capsys.readouterr().err
    plan = Plan.load(plan_of(prompts))
    assert plan.provenance.lengths["kind"] == "completions"
    assert dict(zip(plan.workload.ids, plan.workload.output_tokens.tolist(), strict=True)) == lengths_in(
        prompts.with_name("answers.jsonl")
    )
    assert prompts.with_name("answers.jsonl").read_bytes() == first
    other = ["-o", str(prompts.with_name("other.jsonl")), "--trace", str(prompts.with_name("other.trace"))]
    assert main(["run", str(prompts), *MODEL, *other, "--lengths", "auto"]) == 0
    assert Plan.load(prompts.with_name("other.plan.json")).provenance.lengths["kind"] == "completions"


@pytest.mark.parametrize("words", [["--temperature", "1"], ["--lengths", "cap"], ["--slots", "2"]])
def test_lengths_are_kept_only_for_the_same_prompts_where_they_repeat(
    prompts: Path, words: list[str]
) -> None:
    assert run(prompts) == 0
    if words == ["--slots", "2"]:
        prompts.write_text(prompts.read_text().replace("Count.", "Say."))
    assert run(prompts, *words, "--overwrite") == 0
    assert Plan.load(plan_of(prompts)).provenance.lengths["kind"] == "cap"


def test_an_interrupted_second_run_goes_on_by_the_same_command(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(prompts, "--slots", "2") == 0
    first = prompts.with_name("answers.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        interrupted_after(2, patch)
        assert run(prompts, "--slots", "2", "--overwrite") == 130
    before = plan_of(prompts).read_bytes()
    assert run(prompts, "--slots", "2", "--overwrite") == 0
    assert plan_of(prompts).read_bytes() == before
    assert prompts.with_name("answers.jsonl").read_bytes() == first


def test_the_end_screen_fits_and_gives_the_next_command(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompts.parent)
    assert main(["run", "prompts.jsonl", *MODEL, "--slots", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 prompts, 2 at a time, tiny:llama"
    assert [line[2:27].rstrip() for line in lines[1:5]] == [
        "first come, first served",
        "this run",
        "lengths known beforehand",
        "least possible",
    ]
    assert lines[-4] == "answers.jsonl, trace.jsonl   details: batchbound report answers.plan.json"
    assert lines[-3] == "3 of 3 completions were cut at a cap of at most 9 tokens"
    assert lines[-2].startswith("  all under a higher cap: batchbound run prompts.jsonl --model tiny:llama ")
    assert max(map(len, lines)) <= 80


def test_a_report_begins_with_the_figures_of_the_end_screen(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompts.parent)
    assert main(["run", "prompts.jsonl", *MODEL, "--slots", "2"]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert main(["report", "answers.plan.json", "trace.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == screen[1:3]


def test_the_newest_run_is_reported_though_an_older_plan_is_here(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompts.parent)
    assert main(["plan", "table3:0:3", "--slots", "2"]) == 0
    os.utime("plan.json", (1, 1))
    assert main(["run", "prompts.jsonl", *MODEL]) == 0
    capsys.readouterr()
    assert main(["report"]) == 0
    assert "Measured seconds" in capsys.readouterr().out


def test_names_follow_the_output(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompts.parent)
    assert main(["run", "prompts.jsonl", *MODEL, "-o", "mine.jsonl"]) == 0
    capsys.readouterr()
    assert main(["report", "--json"]) == 0
    newest = capsys.readouterr().out
    assert main(["report", "mine.plan.json", "mine.trace.jsonl", "--json"]) == 0
    assert capsys.readouterr().out == newest, "the newest run is reported"
    assert {path.name for path in prompts.parent.iterdir()} == {
        "prompts.jsonl",
        "mine.jsonl",
        "mine.next.json",
        "mine.plan.json",
        "mine.trace.jsonl",
    }


def test_a_finished_job_says_so_before_the_model_is_loaded(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts) == 0

    def loaded(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(ModelOptions, "load", loaded)
    assert run(prompts) == 0
    assert "this job is finished" in capsys.readouterr().err


def test_one_object_is_printed_with_json(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(prompts, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == report["gain"]["requests"] == 3


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
    assert run(prompts, "--lengths", "constant:3") == status
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
    assert run(prompts, "--lengths", "constant:3") == 0
    assert plan_of(prompts).read_bytes() == meanwhile[0]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--slots", "5"], "--slots"),
        (["--lengths", "constant:2"], "--lengths"),
        (["--longest-completion", "4"], "--longest-completion"),
        (["--cost", "paper"], "--cost"),
        (["--prompt-column", "text"], "--prompt-column"),
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
    assert run(plan_of(prompts), "--lengths", "cap") == 2
    assert "--lengths has no effect on a plan" in capsys.readouterr().err


def test_slots_beside_a_plan_are_a_remark(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(prompts) == 0
    assert run(plan_of(prompts), "--slots", "3") == 0
    assert "--slots has no effect: the plan fixes its slots; plan again for 3" in capsys.readouterr().err


def test_lengths_that_need_not_hold_are_named_expected(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "plan",
        str(prompts),
        "--tokenizer",
        "bytes",
        "--slots",
        "2",
        "--time-limit",
        "0.1",
        "--cost",
        "paper",
    ]
    assert main([*words, "--lengths", "constant:3", "-o", str(prompts.with_name("p.json"))]) == 0
    said = capsys.readouterr().out
    assert "expected, by constant" in said
    assert "bound, if they hold" in said
    assert "proven" not in said


def interrupted_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Interrupt a run once some completions are in its journal."""
    append, seen = Journal.append, list[str]()

    def interrupted(journal: Journal, name: str, answer: Any) -> None:
        append(journal, name, answer)
        seen.append(name)
        if len(seen) == count:
            raise KeyboardInterrupt

    patch.setattr(Journal, "append", interrupted)


def test_a_stopped_run_without_caps_takes_one_for_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.jsonl"
    bodies: list[dict[str, Any]] = [
        {"prompt": "Count. ", "max_tokens": 2},
        {"prompt": "Go on. " * 2},
        {"prompt": "Go on. " * 3},
        {"prompt": "Count. " * 4, "max_tokens": 7},
    ]
    rows = [json.dumps({"custom_id": f"r{k}", "body": body}) for k, body in enumerate(bodies)]
    path.write_text("\n".join(rows) + "\n")
    words = ["--slots", "1", "--policy", "fcfs"]
    with monkeypatch.context() as patch:
        interrupted_after(1, patch)
        assert run(path, *words) == 130
    assert run(path, *words, "--longest-completion", "4") == 0
    lines = map(json.loads, path.with_name("answers.jsonl").read_text().splitlines())
    assert [line["response"]["body"]["usage"]["completion_tokens"] for line in lines] == [2, 4, 4, 7]
    assert run(path, *words, "--longest-completion", "4") == 0


@pytest.mark.parametrize(
    "other", ["--slots 3", "--slots 2 --dtype float64", "--slots 2 --longest-completion 2"]
)
def test_no_other_job_replaces_the_plan_of_an_interrupted_run(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    words = ["--slots", "2"]
    assert run(prompts, *words) == 0
    whole = prompts.with_name("answers.jsonl").read_bytes()
    prompts.with_name("answers.jsonl").unlink()
    prompts.with_name("trace.jsonl").unlink()
    with monkeypatch.context() as patch:
        interrupted_after(2, patch)
        assert run(prompts, *words) == 130
    kept = {path.name: path.read_bytes() for path in prompts.parent.iterdir()}
    for overwrite in ([], ["--overwrite"]):
        capsys.readouterr()
        assert run(prompts, *other.split(), *overwrite) == 2
        error = capsys.readouterr().err
        assert "--overwrite" not in error.splitlines()[-1]  # it would be refused
        assert {path.name: path.read_bytes() for path in prompts.parent.iterdir()} == kept
    assert run(prompts, *words) == 0
    assert "continuing after 2 finished completions" in capsys.readouterr().err
    assert prompts.with_name("answers.jsonl").read_bytes() == whole


def test_a_start_that_fails_leaves_no_plan(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise InputError("there is no such device", hint="Name another.")

    with monkeypatch.context() as patch:
        patch.setattr(ModelOptions, "load", refused)
        assert run(prompts, "--slots", "2") == 2
    assert [path.name for path in prompts.parent.iterdir()] == ["prompts.jsonl"]
    # A plan that stood there before is there again.
    assert run(prompts, "--slots", "2") == 0
    before = plan_of(prompts).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(ModelOptions, "load", refused)
        assert run(prompts, "--slots", "3", "--overwrite") == 2
    assert plan_of(prompts).read_bytes() == before


def test_naming_the_default_output_continues_its_job(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(prompts.parent)
    words = ["run", prompts.name, *MODEL, "--slots", "2"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "-o", "answers.jsonl"]) == 0
    assert "this job is finished" in capsys.readouterr().err


def test_plan_tells_of_rows_for_another_model_and_of_a_cap_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "other", "prompt": "abc", "max_tokens": 4}
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"custom_id": "q", "body": body}) + "\n")
    words = ["plan", str(path), "--model", "tiny:llama", "-o", str(tmp_path / "plan.json")]
    assert main([*words, "--longest-completion", "4"]) == 0
    told = capsys.readouterr().err
    assert "line 1, field 'body.model': 'other' is not tiny:llama: run the plan with --any-model" in told
    assert "--longest-completion 4 has no effect: each request has a max_tokens of at most that" in told
    path.write_text(json.dumps({"custom_id": "q", "body": {**body, "model": "llama"}}) + "\n")
    assert main([*words, "--longest-completion", "3", "--overwrite"]) == 0
    told = capsys.readouterr().err
    assert "body.model" not in told
    assert "no effect" not in told
