"""``run`` of a plan of several steps: the step that is due, what it keeps for the next, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.lengths.steps_plan import StepsPlan
from batchbound.data.lengths.steps_progress import StepsProgress
from batchbound.data.readers.completions import lengths_by_name
from batchbound.heuristics.unknown_lengths.registry import hidden_policy, without_sharing
from batchbound.heuristics.unknown_lengths.steps import simulate_steps
from batchbound.planning.steps import known_lengths
from batchbound.running.options import ModelOptions, RunOptions
from batchbound.running.steps import StepResult, run_step

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS, SAMPLES = 6, 4
WAYS = [["--ahead", "1", "--keep", "3"], ["--ahead", "1", "--restart"], []]


@pytest.fixture(autouse=True)
def few_sets_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect by fewer sets of lengths: what is expected is not what is tried here."""
    monkeypatch.setattr("batchbound.planning.steps.SAMPLES", 3)


def written(folder: Path, *way: str, most: int = 40) -> str:
    """Write prompts, a history, and a plan of three steps in a way; return the plan's file."""
    rng = np.random.default_rng(0)
    rows = ["group,id,input_tokens,output_tokens"]
    for group in range(GROUPS):
        lengths = np.exp(2.5 + 0.5 * rng.standard_normal() + 0.5 * rng.standard_normal(SAMPLES)).astype(int)
        rows += [f"h{group},h{group}-{k},5,{min(each + 1, 40)}" for k, each in enumerate(lengths)]
    (folder / "past.csv").write_text("\n".join(rows) + "\n")
    body = {"n": SAMPLES, "temperature": 1.0, "stop_token_ids": [0]}
    lines = [
        {"custom_id": f"p{k}", "body": {**body, "prompt": f"say {k}", "logit_bias": {"0": 2 + 0.5 * k}}}
        for k in range(GROUPS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", str(folder / "prompts.jsonl"), "--model", "tiny:llama", "--slots", "5", *way]
    words += ["--steps", "3", "--history", str(folder / "past.csv"), "--longest-completion", str(most)]
    out = str(folder / "steps.json")
    assert main([*words, "--policy", "learned", "-o", out, "--quiet"]) == 0
    return out


def steps_of(plan: str, folder: Path) -> list[StepResult]:
    found = []
    while (result := run_step(plan, "tiny:llama", output=folder / "answers.jsonl")) is not None:
        found.append(result)
    return found


def choices(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        f"{line['custom_id']}#{choice['index']}": choice
        for line in lines
        for choice in line["response"]["body"]["choices"]
    }


@pytest.mark.parametrize("way", WAYS)
def test_steps_end_as_they_would_in_the_simulator_with_the_lengths_that_came(
    way: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, *way)
    plan, results = StepsPlan.load(path), steps_of(path, tmp_path)
    names = plan.fleet.workload.ids.tolist()
    served = [choices(one.files.completions(one.step)) for one in results]
    lengths = {name: len(one["token_ids"]) for step in served for name, one in step.items()}
    assert len(lengths) == GROUPS * (3 if "--keep" in way else SAMPLES)
    # Whoever was stopped would have been longer.
    truth = np.array([lengths.get(name, 40) for name in names])
    policy = hidden_policy("learned", without_sharing(plan.problem), known_lengths(plan))
    expected = simulate_steps(plan.problem, plan.step, plan.way, policy, truth)
    assert [one.model_seconds for one in results] == pytest.approx(expected.seconds.tolist())
    for name, ended, begun in zip(names, expected.ended.tolist(), expected.begun.tolist(), strict=True):
        # A completion waits for the others of its group.
        first = next((k for k, step in enumerate(served) if name in step), -1)
        assert first == -1 if ended == -1 else first >= ended
        if first >= 0:
            assert [served[first][name]["versions"][at][0] for at in (0, -1)] == [begun + 1, ended + 1]
            assert sum(count for _, count in served[first][name]["versions"]) == lengths[name]
    last = results[-1].plan
    assert last.expected.total.low == pytest.approx(expected.makespan)
    assert last.expected.total.high == pytest.approx(expected.makespan)
    assert (results[1].staleness > 0) == ("--keep" in way)
    read = [lengths_by_name(one.files.completions(one.step), apart=True) for one in results]
    assert {name: tokens for step in read for name, tokens in step.items()} == lengths
    capsys.readouterr()
    assert main(["run", path, "--model", "tiny:llama", "-o", str(tmp_path / "answers.jsonl"), "--json"]) == 0
    said = capsys.readouterr()
    assert "all steps are served; --overwrite begins anew" in said.err
    assert json.loads(said.out)["ended"] == int((last.ended > 0).sum()) >= len(lengths)


def test_what_ended_beside_the_last_that_is_kept_is_known_as_the_plan_is_stated_anew(tmp_path: Path) -> None:
    path = written(tmp_path, "--keep", "1", most=3)
    first = run_step(path, "tiny:llama", output=tmp_path / "answers.jsonl")
    assert first is not None
    # Three of the first group begin together, are cut at their third token, and one of them is kept.
    assert len(first.completions) == 2
    assert first.plan.ended[:4].tolist() == [3, 3, 3, 0]


@contextmanager
def breaking(left: int, journal: Any) -> Iterator[Callable[[Any, int], None]]:
    def on_stage(stage: Any, done: int) -> None:
        if len(journal.finished) >= 3:
            raise KeyboardInterrupt

    yield on_stage


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_was_interrupted_loses_nothing_that_had_finished(way: list[str], tmp_path: Path) -> None:
    path, output = written(tmp_path, *way), tmp_path / "answers.jsonl"
    first = run_step(path, "tiny:llama", output=output)
    assert first is not None
    with pytest.raises(KeyboardInterrupt):
        run_step(path, "tiny:llama", output=output, watching=breaking)
    journal = tmp_path / "answers.2.jsonl.journal"
    kept = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert kept
    with pytest.raises(InputError, match="belongs to another run"):
        run_step(path, ModelOptions("tiny:llama:1"), output=output)
    rest = steps_of(path, tmp_path)
    assert rest[0].resumed == len(kept)
    assert not journal.exists()
    every = {name: one for k in (1, 2, 3) for name, one in choices(tmp_path / f"answers.{k}.jsonl").items()}
    assert len(every) == GROUPS * (3 if "--keep" in way else SAMPLES)
    if "--restart" not in way:
        for line in kept:
            assert line["answer"]["response"]["body"]["choices"][0] == every[line["id"]]


def test_progress_that_was_written_before_the_end_of_the_process_is_gone_on_with(tmp_path: Path) -> None:
    path, output = written(tmp_path), tmp_path / "answers.jsonl"
    run_step(path, "tiny:llama", output=output)
    left = tmp_path / "answers.1.jsonl.journal"
    left.write_text("of a step that is over")
    second = run_step(path, "tiny:llama", output=output)
    assert second is not None
    assert second.step == 1
    assert not left.exists()
    assert len(StepsProgress.load(tmp_path / "answers.progress.json").steps) == 2


def test_a_step_is_over_before_what_to_expect_is_stated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    path, output = written(tmp_path), tmp_path / "answers.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr("batchbound.running.steps.update_steps_plan", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_step(path, "tiny:llama", output=output)
    second = run_step(path, "tiny:llama", output=output)
    assert second is not None
    assert (second.step, second.resumed) == (1, 0)


def test_what_the_steps_came_to_is_stated_though_the_last_was_cut_off_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    path, output = written(tmp_path), tmp_path / "answers.jsonl"
    for _ in range(2):
        run_step(path, "tiny:llama", output=output)
    with monkeypatch.context() as patched:
        patched.setattr("batchbound.running.steps.update_steps_plan", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_step(path, "tiny:llama", output=output)
    capsys.readouterr()
    assert main(["run", path, "--model", "tiny:llama", "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == GROUPS * SAMPLES


def test_what_a_killed_step_left_half_written_is_gone_with_the_next(tmp_path: Path) -> None:
    path, output = written(tmp_path), tmp_path / "answers.jsonl"
    halves = [f".answers.{name}.json.abcd_123.partial" for name in ("steps", "progress")]
    for half in halves:
        (tmp_path / half).write_text('{"batchbound')
    run_step(path, "tiny:llama", output=output)
    assert not [half for half in halves if (tmp_path / half).exists()]


def test_somebody_elses_file_in_the_place_of_a_later_step_stays(tmp_path: Path) -> None:
    path, output = written(tmp_path), tmp_path / "answers.jsonl"
    run_step(path, "tiny:llama", output=output)
    other = tmp_path / "answers.2.jsonl"
    other.write_text("mine")
    with pytest.raises(InputError, match=r"answers\.2\.jsonl: exists already"):
        run_step(path, "tiny:llama", output=output)
    assert other.read_text() == "mine"


@pytest.mark.slow
def test_beginning_anew_waits_for_a_model_that_loads(tmp_path: Path) -> None:
    path, output = written(tmp_path), tmp_path / "answers.jsonl"
    run_step(path, "tiny:llama", output=output)
    with pytest.raises(InputError):
        run_step(path, "tiny:none", output=output, overwrite=True)
    second = run_step(path, "tiny:llama", output=output)
    assert second is not None
    assert second.step == 1
    run_step(path, "tiny:llama", output=output, overwrite=True)
    assert not (tmp_path / "answers.2.jsonl").exists(), "it was of the run before"
    again = run_step(path, "tiny:llama", output=output)
    assert again is not None
    assert again.step == 1


def test_a_prompt_that_comes_again_in_another_step_is_a_group_of_that_step(tmp_path: Path) -> None:
    written(tmp_path)
    prompts, out = tmp_path / "prompts.jsonl", str(tmp_path / "twice.json")
    lines = [json.loads(line) for line in prompts.read_text().splitlines()[:2]]
    rows = [{**line, "custom_id": f"{line['custom_id']}-{at}", "step": at} for at in (1, 2) for line in lines]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["plan", str(prompts), "--model", "tiny:llama", "--slots", "5", "--policy", "fcfs", "--quiet"]
    words += ["--history", str(tmp_path / "past.csv"), "--longest-completion", "40", "-o", out]
    assert main([*words, "--steps", "step"]) == 0
    plan = StepsPlan.load(out)
    assert plan.step.tolist() == [0] * 8 + [1] * 8
    assert np.unique(plan.fleet.workload.group, return_counts=True)[1].tolist() == [4] * 4
    assert [len(choices(one.files.completions(one.step))) for one in steps_of(out, tmp_path)] == [8, 8]


def test_a_step_is_printed_and_begins_anew_with_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = written(tmp_path, "--ahead", "1"), str(tmp_path / "answers.parquet")
    words = ["run", path, "--model", "tiny:llama", "-o", output]
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["steps"], found["stale_share"]) == (1, 3, 0)
    assert found["output"].endswith("answers.1.parquet")
    assert found["unfinished"] > 0
    assert found["expected"]["total"]["low"] >= found["model_seconds"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "step 2 of 3" in said
    assert "of their tokens are of earlier steps" in said
    assert main([*words, "--overwrite"]) == 0
    assert "step 1 of 3" in capsys.readouterr().out


def test_what_a_run_of_one_step_cannot_carry_out_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "--ahead", "1", "--keep-kv")
    words = ["run", path, "--model", "tiny:llama", "-o", str(tmp_path / "answers.jsonl")]
    if StepsPlan.load(path).way.keep_kv:
        assert main(words) == 2
        assert "keeps the KV cache of what goes on" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    path = written(other)
    words[1] = path
    for option, message in (
        (["--policy", "fcfs"], "--policy has no effect on a plan of several steps"),
        (["--replicas", "2"], "--replicas has no effect"),
        (["--on-error", "stop"], "--on-error has no effect"),
        (["--trace", "t.jsonl"], "--trace has no effect"),
        (["--pinned"], "--pinned needs lengths"),
        (["--slots", "3"], "--slots"),
    ):
        assert main([*words, *option]) == 2
        assert message in capsys.readouterr().err
    assert run_step(path, "tiny:llama", output=tmp_path / "answers.jsonl") is not None
    text = Path(path).read_text()
    Path(path).write_text(text.replace('"seed": 0', '"seed": 1'))
    assert Path(path).read_text() != text
    with pytest.raises(InputError, match="is of another plan"):
        run_step(path, "tiny:llama", RunOptions(), output=tmp_path / "answers.jsonl")
