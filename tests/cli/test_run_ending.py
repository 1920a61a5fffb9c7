"""The last steps of a run, each of them cut off: the same command finishes, and a finished job says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from killing import Killed, kill_at

from batchbound.cli import main
from batchbound.data.readers.completions import read_completions
from batchbound.executor.models.faults import RunStoppedError
from batchbound.executor.processes.engine_spec import EngineSpec
from batchbound.executor.processes.ray_fleet import RayFleet

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes, Path]:
    folder = tmp_path_factory.mktemp("job")
    lines = [{"custom_id": f"r{i}", "body": {"prompt": "abc" * i, "max_tokens": 4}} for i in range(1, 6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = str(folder / "plan.json")
    words = ["plan", str(folder / "prompts.jsonl"), "--model", "tiny:llama", "--slots", "2", "-o", plan]
    assert main([*words, "--time-limit", "0.1"]) == 0
    run = ["run", plan, "--model", "tiny:llama", "--dtype", "float64"]
    out = folder / "reference.jsonl"
    assert main([*run, "-o", str(out), "--trace", str(folder / "reference.trace")]) == 0
    return run, out.read_bytes(), folder


def command(run: list[str], folder: Path) -> list[str]:
    return [*run, "-o", str(folder / "answers.jsonl"), "--trace", str(folder / "trace.jsonl")]


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_the_same_command_finishes_wherever_the_end_of_a_run_was_cut_off(
    call: int,
    planned: tuple[list[str], bytes, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, expected, _ = planned
    words = command(run, tmp_path)
    with monkeypatch.context() as patch:
        kill_at(call, patch)
        with pytest.raises(Killed):
            main(words)
    assert (tmp_path / "answers.jsonl.journal").exists()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        # The resumed command is killed, too.
        kill_at(2, patch)
        with pytest.raises(Killed):
            main(words)
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["resumed"]) == (0, 5)
    assert (tmp_path / "answers.jsonl").read_bytes() == expected
    assert {path.name for path in tmp_path.iterdir()} == {"answers.jsonl", "trace.jsonl"}
    # Finished, also where the run that served it was cut off before its trace.
    capsys.readouterr()
    assert main(words) == 0
    assert "this job is finished" in capsys.readouterr().err


def test_a_finished_job_typed_again_says_so_and_changes_nothing(
    planned: tuple[list[str], bytes, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, expected, _ = planned
    words = command(run, tmp_path)
    assert main(words) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(words) == 0
    assert "answers.jsonl: this job is finished; --overwrite would serve it again" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert (tmp_path / "answers.jsonl").read_bytes() == expected


def test_with_json_a_finished_job_is_reported_as_when_it_was_served(
    planned: tuple[list[str], bytes, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command(planned[0], tmp_path), "--json"]
    assert main(words) == 0
    served = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    again = json.loads(capsys.readouterr().out)
    # The trace names its run and its plan, and what it gained.
    del again["engine"]["run"], again["engine"]["plan"], again["engine"]["gain"]
    # The comparison is made of a run, when it ends.
    assert served.pop("gain")["requests"] == 5
    assert again.pop("gain") is None
    assert again == served | {"seconds": None}


def test_a_trace_is_none_of_a_plan_made_anew_of_the_same_requests(
    planned: tuple[list[str], bytes, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, folder = planned
    assert main(command(run, tmp_path)) == 0
    trace, again = tmp_path / "trace.jsonl", tmp_path / "again.json"
    words = ["plan", str(folder / "prompts.jsonl"), "--model", "tiny:llama", "--slots", "2", "--work", "1"]
    assert main([*words, "--prefill-token-cap", "16", "-o", str(again)]) == 0
    assert main(["report", run[1], str(trace)]) == 0
    capsys.readouterr()
    assert main(["report", str(again), str(trace)]) == 2
    said = "trace.jsonl: it is of another plan of these requests. Give the plan that was run.\n"
    assert capsys.readouterr().err.endswith(said)
    # Traces of before name no plan.
    header, *rest = trace.read_text().splitlines(keepends=True)
    told = json.loads(header)
    del told["engine"]["plan"]
    trace.write_text(json.dumps(told) + "\n" + "".join(rest))
    assert main(["report", str(again), str(trace)]) == 0


def test_a_trace_is_not_written_where_the_run_keeps_what_has_finished(
    planned: tuple[list[str], bytes, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    assert main([*planned[0], "-o", str(out), "--trace", f"{out}.journal", "--overwrite"]) == 2
    assert "answers.jsonl.journal: is read by this command. Name another output" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [["--temperature", "0.5"], ["--pinned"], ["--seed", "3"]])
def test_outputs_of_another_job_are_refused_and_left(
    change: list[str],
    planned: tuple[list[str], bytes, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, expected, _ = planned
    words = command(run, tmp_path)
    assert main(words) == 0
    assert main([*words, *change]) == 2
    assert "answers.jsonl: exists already. Say --overwrite" in capsys.readouterr().err
    assert (tmp_path / "answers.jsonl").read_bytes() == expected
    assert not (tmp_path / "answers.jsonl.journal").exists()


def test_files_of_the_user_named_like_outputs_or_their_parts_are_left(
    planned: tuple[list[str], bytes, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, _ = planned
    mine = {"trace.jsonl": "mine", ".answers.jsonl.original": "mine", ".answers.jsonl.notes.partial": "mine"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    assert main(command(run, tmp_path)) == 2
    assert "trace.jsonl: exists already" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == mine


def test_a_run_that_stops_before_it_has_begun_says_why_in_a_line(
    planned: tuple[list[str], bytes, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RunStoppedError("the device failed")

    monkeypatch.setattr("batchbound.running.run_on_model", fails)
    assert main(command(planned[0], tmp_path)) == 1
    said = capsys.readouterr().err
    begin = "it had not begun; the same command starts it"
    assert said == f"batchbound: stopped: the device failed\nbatchbound: {begin}\n"


def test_a_ray_that_does_not_start_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed (extra 'ray')")
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(Exception("the node timed out")))
    with pytest.raises(RunStoppedError, match=r"^Ray does not start \(the node timed out\)"):
        RayFleet(EngineSpec("tiny:llama"), 2)


def test_completions_that_were_cut_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bodies = [{"prompt": f"Spell {k}.", "max_tokens": 2} for k in range(3)]
    rows = [json.dumps({"custom_id": f"q{k}", "body": body}) for k, body in enumerate(bodies)]
    Path("prompts.jsonl").write_text("\n".join(rows))
    assert main(["run", "prompts.jsonl", "--model", "tiny:speller", "--slots", "2", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    cut = sum(row.finish_reason == "length" for row in read_completions("answers.jsonl"))
    assert cut > 0
    assert f"{cut} of 3 completions" in said
    assert main(["report"]) == 0
    assert f"{cut} of 3 completions" in capsys.readouterr().out
