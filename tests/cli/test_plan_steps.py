"""``plan --steps`` and ``plan --ended``: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.lengths.steps_plan import StepsPlan
from batchbound.planning.steps import history_of

HEADER = "step,group,id,input_tokens,output_tokens\n"


@pytest.fixture(autouse=True)
def few_sets_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect by as few sets of lengths as an interval needs."""
    monkeypatch.setattr("batchbound.planning.steps.SAMPLES", 19)


def table(path: Path, seed: int, prefix: str) -> str:
    """Write a table of two steps of 12 groups of 4."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(24):
        tokens = np.exp(4.5 + 0.5 * rng.standard_normal() + 0.5 * rng.standard_normal(4)).astype(int) + 1
        rows += [
            f"s{group // 12},{prefix}{group},{prefix}{group}-{k},20,{each}" for k, each in enumerate(tokens)
        ]
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def files(tmp_path: Path) -> tuple[str, str, str]:
    """Return the tables of a job of two steps and of two earlier ones, and the plan's name."""
    job, past = table(tmp_path / "job.csv", 1, "g"), table(tmp_path / "past.csv", 2, "h")
    return job, past, str(tmp_path / "steps.json")


def test_a_plan_of_steps_says_what_to_expect_and_is_stated_anew_as_completions_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, past, out = files(tmp_path)
    asked = (job, "--steps", "step", "--history", past, "--slots", "12", "--policy", "fcfs-ski", "-o", out)
    found = printed(capsys, *asked, "--longest-completion", "800")
    total, bound = found["expected"]["total"], found["expected"]["bound"]
    assert total["low"] < total["mean"] < total["high"]
    assert bound["mean"] < total["mean"]
    assert bound["mean"] < found["expected"]["first_come"]["mean"]
    assert (found["steps"], found["coverage"], found["ended"]) == (2, 0.9, 0)
    done = tmp_path / "done.csv"
    done.write_text("\n".join(Path(job).read_text().splitlines()[:49]))
    later = printed(capsys, out, "--ended", str(done), "-o", str(tmp_path / "later.json"))
    assert later["ended"] == 48
    narrow = later["expected"]["total"]
    assert narrow["high"] - narrow["low"] < total["high"] - total["low"]
    assert later["way"] == found["way"]
    assert StepsPlan.load(tmp_path / "later.json").column == "step"
    for words in (["verify", out], ["report", out], ["run", out, "--server", "http://127.0.0.1:9/v1"]):
        assert main(words) == 2
        assert "is a plan of several steps" in capsys.readouterr().err


def test_prompts_are_shared_out_over_a_number_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _job, past, out = files(tmp_path)
    lines = [
        {"custom_id": f"{k}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{k}", "n": 4}}
        for k in range(6)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (str(prompts), "--steps", "3", "--history", past, "--slots", "4", "-o", out, "--quiet")
    assert main(["plan", *words, "--keep", "3", "--policy", "fcfs"]) == 0
    said = capsys.readouterr().out
    assert "24 requests in 3 steps" in said
    assert "3 of a group kept" in said
    done, other = tmp_path / "done.csv", tmp_path / "other"
    other.mkdir()
    done.write_text(f"id,output_tokens\n{StepsPlan.load(out).fleet.workload.ids[0]},5\n")
    assert main(["plan", out, "--ended", str(done), "-o", str(other / "later.json"), "--quiet"]) == 0
    seen = StepsPlan.load(other / "later.json").provenance.prompts
    assert seen is not None
    assert seen.path == "../prompts.jsonl"


def test_a_job_needs_no_lengths_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, past, out = files(tmp_path)
    rows = [line.split(",") for line in Path(job).read_text().splitlines()]
    without, wrong = tmp_path / "without.csv", tmp_path / "wrong.csv"
    without.write_text("\n".join(",".join(row[:4]) for row in rows))
    wrong.write_text("\n".join(",".join([*row[:4], "?" if k else row[4]]) for k, row in enumerate(rows)))
    asked = (
        "--steps",
        "step",
        "--history",
        past,
        "--slots",
        "12",
        "--policy",
        "fcfs",
        "-o",
        out,
        "--overwrite",
    )
    found = [printed(capsys, str(each), *asked) for each in (job, without, wrong)]
    assert found[0] == found[1] == found[2]
    assert main(["plan", str(without), "-o", str(tmp_path / "plan.json")]) == 2
    assert "not those of a table of lengths" in capsys.readouterr().err
    assert main(["plan", str(without), "--lengths", "constant:9", "-o", str(tmp_path / "plan.json")]) == 0


def test_a_field_or_column_of_prompts_says_of_which_step_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _job, past, out = files(tmp_path)
    batch, table_of = tmp_path / "prompts.jsonl", tmp_path / "prompts.csv"
    lines = [
        {"custom_id": f"{k}", "step": f"s{k // 4}", "body": {"prompt": f"p{k}", "n": 2}} for k in range(6)
    ]
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table_of.write_text("text,at\n" + "".join(f"p{k // 2},s{k // 8}\n" for k in range(12)))
    asked = ("--history", past, "--slots", "4", "--policy", "fcfs", "-o", out, "--overwrite")
    printed(capsys, str(batch), "--steps", "step", *asked)
    assert StepsPlan.load(out).step.tolist() == [0] * 8 + [1] * 4
    printed(capsys, str(table_of), "--prompt-column", "text", "--steps", "at", *asked)
    assert StepsPlan.load(out).step.tolist() == [0] * 8 + [1] * 4
    assert main(["plan", str(batch), "--steps", "round", *asked]) == 2
    assert "has no column 'round'" in capsys.readouterr().err
    assert main(["plan", "table3:0:8", "--steps", "step", *asked]) == 2
    assert "--steps COLUMN is for a file" in capsys.readouterr().err


def test_a_step_that_comes_again_and_a_group_of_several_are_named_by_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _job, past, out = files(tmp_path)
    again, torn, batch = tmp_path / "again.csv", tmp_path / "torn.csv", tmp_path / "again.jsonl"
    again.write_text(HEADER + "a,1,p,5,5\nb,2,q,5,5\na,3,r,5,5\n")
    torn.write_text(HEADER + "a,1,p,5,5\na,2,q,5,5\nb,2,r,5,5\n")
    lines = [
        {"custom_id": f"{k}", "step": step, "body": {"prompt": f"p{k}", "n": 2}}
        for k, step in enumerate("aba")
    ]
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ("--steps", "step", "--history", past, "--slots", "4", "-o", out, "--quiet")
    place, mend = "column 'step': 'a' comes again after 'b'", "Put the rows of each step one after another."
    for name, line in ((again, 4), (batch, 3)):
        assert main(["plan", str(name), *asked]) == 2
        assert capsys.readouterr().err == f"batchbound: {name}, line {line}, {place}. {mend}\n"
    assert main(["simulate", str(again), "--hidden-lengths", "--steps", "step"]) == 2
    assert f"{again}, line 4, {place}" in capsys.readouterr().err
    assert main(["plan", str(torn), *asked]) == 2
    assert f"{torn}: a group has requests in several steps, 'q' and 'r' among them" in capsys.readouterr().err


def test_no_longer_completions_are_expected_than_requests_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _job, past, out = files(tmp_path)
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("text,same,most\n" + "".join(f"p{k},7,{k % 3 + 5}\n" for k in range(12)))
    asked = [str(prompts), "--prompt-column", "text", "--steps", "2", "--history", past, "--slots", "4"]
    asked += ["--policy", "fcfs", "-o", out, "--overwrite"]
    free = printed(capsys, *asked)["expected"]["total"]["mean"]
    assert StepsPlan.load(out).longest is None
    seven = printed(capsys, *asked, "--longest-completion", "7")["expected"]["total"]["mean"]
    for column, more, longest, said in (
        ("same", (), 7, ""),
        ("same", ("--longest-completion", "6"), 6, ""),
        (
            "most",
            (),
            7,
            "some requests state fewer tokens: what to expect is said as if every one",
        ),
    ):
        assert main(["plan", *asked, "--max-tokens-column", column, *more, "--json"]) == 0
        output = capsys.readouterr()
        assert StepsPlan.load(out).longest == longest
        assert said in output.err
        assert ("state fewer" in output.err) == bool(said)
        assert json.loads(output.out)["expected"]["total"]["mean"] <= seven < free


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ahead", "0.5"], "--ahead has no effect without --steps"),
        (["--steps", "step"], "--steps needs --history"),
        (["--steps", "step", "--history", "PAST", "--work", "3"], "--work has no effect beside --steps"),
        (["--steps", "step", "--history", "PAST", "--lengths", "cap"], "--lengths has no effect beside"),
        (["--steps", "step", "--history", "PAST", "--slots", "auto"], "--slots auto has no effect"),
        (["--steps", "no", "--history", "PAST"], "has no column 'no'"),
        (["--steps", "99", "--history", "PAST"], "99 steps of 24 groups"),
        (["--steps", "0", "--history", "PAST"], "0 steps of 24 groups"),
        (["--steps", "step", "--history", "PAST", "--keep", "4"], "it has no effect"),
        (["--steps", "step", "--history", "PAST", "--keep-kv"], "keep_kv has no effect"),
        (["--ended", "PAST", "--slots", "3"], "--slots has no effect beside --ended"),
        (["--ended", "PAST"], "it is no plan of several steps"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, past, out = files(tmp_path)
    assert main(["plan", job, *(past if word == "PAST" else word for word in words), "-o", out]) == 2
    assert message in capsys.readouterr().err
    assert not Path(out).exists()


def test_a_plan_finds_its_history_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, past, out = files(tmp_path)
    monkeypatch.chdir(tmp_path)
    asked = ("--history", "past.csv", "--slots", "12", "--policy", "fcfs", "-o", "steps.json")
    printed(capsys, job, "--steps", "step", *asked)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    plan = StepsPlan.load(out)
    plan.save("moved.json")
    assert StepsPlan.load("moved.json").digest() == plan.digest()
    for path in (out, "moved.json"):
        assert len(history_of(StepsPlan.load(path)).workloads) == 2
    Path(past).unlink()
    assert main(["plan", out, "--ended", job, "-o", str(other / "later.json")]) == 2
    assert "and is not there. Put it back there, or plan again." in capsys.readouterr().err


def test_a_history_that_has_changed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, past, out = files(tmp_path)
    printed(capsys, job, "--steps", "step", "--history", past, "--slots", "12", "--policy", "fcfs", "-o", out)
    Path(past).write_text(Path(past).read_text().replace(",20,", ",21,"))
    assert main(["plan", out, "--ended", job, "-o", str(tmp_path / "later.json")]) == 2
    assert "is not as it was when the plan was made" in capsys.readouterr().err
