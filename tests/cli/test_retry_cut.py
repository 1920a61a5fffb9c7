"""Completions that a model's finished run cut are completed again under a higher cap, and these alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from killing import Killed, kill_at

from batchbound import run
from batchbound.cli import main
from batchbound.data.plan import Plan
from batchbound.data.readers.completions import read_completions
from batchbound.data.trace import Trace
from batchbound.executor.jobs.journal import Journal

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

RUN = ["run", "prompts.jsonl", "--model", "tiny:speller", "--slots", "2", "--threads", "1"]
RETRY = [*RUN, "--retry", "cut", "--longest-completion", "8"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[bytes]:
    """Run six prompts, two of which are cut after two tokens; return the lines of the output."""
    monkeypatch.chdir(tmp_path)
    bodies = [{"prompt": f"Spell {k}.", "max_tokens": 2 if k in (0, 3) else 20} for k in range(6)]
    lines = [json.dumps({"custom_id": f"q{k}", "body": body}) for k, body in enumerate(bodies)]
    Path("prompts.jsonl").write_text("\n".join(lines))
    assert main(RUN) == 0
    return Path("answers.jsonl").read_bytes().splitlines()


def texts(output: str = "answers.jsonl") -> dict[str, list[str | None]]:
    rows = read_completions(output)
    return {name: [row.completion for row in rows if row.custom_id == name] for name in ["q0", "q1", "q3"]}


def test_the_command_on_the_end_screen_completes_cut_rows_and_keeps_the_others(
    job: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    assert texts()["q0"] == ["ze"]
    assert "2 of 6 completions were cut at a cap of at most 2 tokens" in screen
    words = shlex.split(screen.partition("under a higher cap: batchbound ")[2])
    assert words[-4:] == ["--retry", "cut", "--longest-completion", "4"]
    assert main(["report"]) == 0
    assert "--retry cut --longest-completion 4 completes these alone" in capsys.readouterr().out
    assert main(words) == 0
    assert "cut at a cap of at most 4 tokens" in capsys.readouterr().out
    assert [texts()[name] for name in ("q0", "q3")] == [["zero"], ["thre"]]
    words[-1] = "8"
    assert main(words) == 0
    after = Path("answers.jsonl").read_bytes().splitlines()
    assert [after[k] for k in (1, 2, 4, 5)] == [job[k] for k in (1, 2, 4, 5)]
    assert [texts()[name] for name in ("q0", "q3")] == [["zero"], ["three"]]
    assert "were cut" not in capsys.readouterr().out.splitlines()[-1]


def test_a_cap_that_raises_none_is_refused(job: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RETRY[:-1], "2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--longest-completion 2 raises no cap: 2 cut completions have at least 2 tokens" in said
    assert Path("answers.jsonl").read_bytes().splitlines() == job
    assert main([*RETRY[:-1], "4"]) == 0
    after = Path("answers.jsonl").read_bytes()
    assert main([*RETRY[:-1], "3"]) == 2
    assert "Give more than 4 tokens" in " ".join(capsys.readouterr().err.split())
    assert main(RUN) == 0
    assert "this job is finished" in capsys.readouterr().err
    assert Path("answers.jsonl").read_bytes() == after


def test_rows_with_more_tokens_than_the_new_cap_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"custom_id": f"q{k}", "body": {"prompt": f"Spell {k}.", "max_tokens": k}} for k in (1, 2, 4)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([*RUN[:-1], "1"]) == 0
    before = [row.completion_tokens for row in read_completions("answers.jsonl")]
    assert before == [1, 2, 4]
    capsys.readouterr()
    assert main([*RETRY[:-1], "3"]) == 0
    said = capsys.readouterr()
    assert "1 cut completion has 3 tokens or more" in " ".join(said.err.split())
    assert "3 of 3 completions were cut at a cap of at most 4 tokens" in said.out
    after = {row.custom_id: row.completion_tokens for row in read_completions("answers.jsonl")}
    assert after == {"q1": 3, "q2": 3, "q4": 4}


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_retry_that_is_killed_goes_on_and_loses_nothing(
    call: int, job: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_at(call, patch)
        with pytest.raises(Killed):
            main(RETRY)
    assert len(Path("answers.jsonl").read_bytes().splitlines()) == 6
    assert main(RETRY) == 0
    after = Path("answers.jsonl").read_bytes().splitlines()
    assert [after[k] for k in (1, 2, 4, 5)] == [job[k] for k in (1, 2, 4, 5)]
    assert [texts()[name] for name in ("q0", "q3")] == [["zero"], ["three"]]
    assert not list(Path().glob("*.journal*"))


def test_a_retry_stopped_between_two_rows_completes_the_other_alone(
    job: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = Journal.append

    def once(journal: Journal, name: str, answer: dict[str, object]) -> None:
        append(journal, name, answer)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", once)
        assert main(RETRY) == 130
    # The plain command does not take a retry's journal for its own.
    assert main(RUN) == 2
    assert "differs in: retry" in " ".join(capsys.readouterr().err.split())
    assert main(RETRY) == 0
    trace = Trace.load("trace.jsonl")
    assert len(trace.ids) == 1
    assert [texts()[name] for name in ("q0", "q3")] == [["zero"], ["three"]]
    assert Plan.load("answers.plan.json").provenance.lengths["kind"] == "cap"


def test_a_request_with_a_cut_sample_is_completed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = {"temperature": 1.0, "seed": 4, "n": 3}
    bodies = [{"prompt": f"Spell {k}.", "max_tokens": 4 if k == 0 else 40, **body} for k in range(4)]
    lines = [json.dumps({"custom_id": f"q{k}", "body": one}) for k, one in enumerate(bodies)]
    Path("prompts.jsonl").write_text("\n".join(lines))
    again = [*RETRY[:-1], "40", "--repeatable"]
    assert main([*RUN, "--repeatable"]) == 0
    first = Path("answers.jsonl").read_bytes().splitlines()
    short = texts()["q0"]
    assert main(again) == 0
    after = Path("answers.jsonl").read_bytes().splitlines()
    assert after[1:] == first[1:]
    assert [str(long)[: len(str(cut))] for long, cut in zip(texts()["q0"], short, strict=True)] == short
    assert all(row.finish_reason == "stop" for row in read_completions("answers.jsonl"))


def test_tables_are_continued_too(job: list[bytes]) -> None:
    assert main([*RUN, "-o", "answers.parquet", "--trace", "t.jsonl"]) == 0
    assert main([*RETRY, "-o", "answers.parquet", "--trace", "t.jsonl"]) == 0
    assert texts("answers.parquet") == {"q0": ["zero"], "q1": texts()["q1"], "q3": ["three"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--retry", "cut"], "Add --longest-completion N, a higher cap"),
        (["--retry", "failed", "--longest-completion", "8"], "--retry failed has no effect without --server"),
        (["--retry", "cut", "--longest-completion", "8", "--overwrite"], "--overwrite has no effect"),
        (["--retry", "cut", "--longest-completion", "8", "-o", "other.jsonl"], "no finished run"),
    ],
)
def test_a_retry_that_could_do_nothing_is_refused(
    words: list[str], said: str, job: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert Path("answers.jsonl").read_bytes().splitlines() == job


def test_the_library_completes_cut_rows_as_the_command_does(job: list[bytes]) -> None:
    result = run("prompts.jsonl", "tiny:speller", slots=2, retry=("cut",), longest_completion=8)
    assert [row.completion for row in result.completions if row.custom_id == "q3"] == ["three"]
    assert result.endings.cut == 0
