"""A finished job on servers goes on with failed, expired, cut and added rows, never with finished ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from fake_server import FakeServer
from server_batches import run_words, write_batch

from batchbound.cli import main
from batchbound.data.readers.completions import BatchCompletion, read_completions
from batchbound.data.readers.server_batch import read_server_batch
from batchbound.executor.jobs.journal import Journal
from batchbound.executor.jobs.params import Patience
from batchbound.run_job import on_servers
from batchbound.run_job.batch_to_send import Batch, ServerOptions, read_batch
from batchbound.run_job.on_servers import _continues

FORMATS = pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait milliseconds where a user would wait seconds."""
    waits = Patience.wait
    monkeypatch.setattr(Patience, "wait", lambda *given: waits(*given) / 50)


def words_of(batch: Path, server: FakeServer, suffix: str = ".jsonl", *more: str) -> list[str]:
    return run_words(batch, server, "--slots", "4", "-o", str(batch.with_name(f"answers{suffix}")), *more)


def rows_of(batch: Path, suffix: str = ".jsonl") -> dict[str, BatchCompletion]:
    rows = read_completions(batch.with_name(f"answers{suffix}"))
    assert len({row.custom_id for row in rows}) == len(rows)
    return {row.custom_id: row for row in rows}


@FORMATS
def test_the_same_command_sends_failed_rows_again_and_only_these(tmp_path: Path, suffix: str) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 8)
    with FakeServer(4, faults={"r2": [400], "r5": [400, 400]}) as server:
        words = words_of(batch, server, suffix)
        assert main(words) == 1
        first = rows_of(batch, suffix)
        assert main(words) == 1
        assert [name for name, row in rows_of(batch, suffix).items() if row.error] == ["r5"]
        assert main(words) == 0
        assert main(words) == 0
        assert [server.attempts[f"r{k}"] for k in range(8)] == [1, 1, 2, 1, 1, 3, 1, 1]
    last = rows_of(batch, suffix)
    assert list(last) == [f"r{k}" for k in range(8)]
    assert all(last[name] == row for name, row in first.items() if row.error is None)
    assert not (tmp_path / "answers.errors.jsonl").exists()
    assert not list(tmp_path.glob("*.journal*"))


@FORMATS
def test_rows_that_expired_are_sent_by_the_same_command(tmp_path: Path, suffix: str) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 6)
    with FakeServer(4, faults={"r1": ["hang"], "r4": [400, 400]}) as server:
        assert main(words_of(batch, server, suffix, "--deadline", "1")) == 1
        assert main(words_of(batch, server, suffix, "--retry", "expired")) == 1
        assert [server.attempts[f"r{k}"] for k in range(6)] == [1, 2, 1, 1, 1, 1]
        assert [name for name, row in rows_of(batch, suffix).items() if row.error] == ["r4"]


def test_a_deadline_without_a_completion_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 2)
    with FakeServer(2, faults={"r0": ["hang"], "r1": ["hang", "hang"]}) as server:
        words = [word for word in words_of(batch, server) if word != "--json"]
        assert main([*words, "--deadline", "1"]) == 1
        told = capsys.readouterr()
        assert "the deadline expired before any completion" in told.err
        assert "2 of 2 rows have no completion\n  next: batchbound run" in told.out
        assert main([*words, "--deadline", "1"]) == 1
        assert main([*words, "--deadline", "0.0001"]) == 1
    told = capsys.readouterr()
    assert "the deadline expired before another completion" in told.err
    assert "1 of 2 rows has no completion" in told.out


def test_rows_that_wait_are_named_before_cut_ones_with_the_command_that_sends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 4)
    cut = ["--retry", "cut", "--longest-completion", "9"]
    with FakeServer(4, faults={"r2": ["hang"], "r3": ["hang"]}) as server:
        words = [word for word in words_of(batch, server) if word != "--json"]
        assert main([*words, "--deadline", "1"]) == 1
        assert main([*words, *cut, "--deadline", "9"]) == 1
        out = capsys.readouterr().out
        # Expired rows are not finished.
        assert "from before" not in out
        rest, _, cut_rows = out.rpartition("rows have no completion")[2].partition("2 of 2 completions were")
        assert cut_rows
        again = shlex.split(rest.replace("next:", "").replace("\\\n", ""))
        assert again == ["batchbound", *words, "--longest-completion", "9"]
        # No cap of a cut row rises, but expired rows are sent.
        assert main([*words, *cut, "--retry", "expired"]) == 0
        assert "kept as they are" in capsys.readouterr().err


def test_a_later_part_is_audited_alone_and_one_without_completions_keeps_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, trace = write_batch(tmp_path / "in.jsonl", [2] * 6), str(tmp_path / "trace.jsonl")
    with FakeServer(4, faults={"r1": [400] * 3, "r4": [400]}) as server:
        words = words_of(batch, server)
        assert main(words) == 1
        assert main(["audit", trace]) == 0
        assert "from before" not in capsys.readouterr().err
        assert main(words) == 1  # r4 gets its completion
        part = Path(trace).read_bytes()
        assert main(words) == 1  # r1 fails again
    assert Path(trace).read_bytes() == part
    capsys.readouterr()
    assert main(["audit", trace]) == 0
    assert "figures are of 2 requests, after 4 from before" in capsys.readouterr().err


def test_rows_that_a_retry_leaves_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 4)
    with FakeServer(4, faults={"r1": ["hang"]}) as server:
        assert main(words_of(batch, server, ".jsonl", "--deadline", "1")) == 1
        capsys.readouterr()
        assert main(words_of(batch, server, ".jsonl", "--retry", "failed")) == 1
    said = capsys.readouterr().err
    assert "1 row has no completion; the same command without --retry sends what is left" in said
    assert "finished" not in said


@FORMATS
def test_rows_that_were_added_are_served(tmp_path: Path, suffix: str) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 4)
    with FakeServer(4) as server:
        assert main(words_of(batch, server, suffix)) == 0
        lines = write_batch(tmp_path / "more.jsonl", [2] * 7).read_text().splitlines()
        # A row in front, others behind; reformatted rows are the same rows.
        formatted = [json.dumps(json.loads(line), indent=None, separators=(",", ":")) for line in lines]
        batch.write_text("\n".join([formatted[6], *formatted[:6]]) + "\n")
        assert main(words_of(batch, server, suffix)) == 0
        assert set(server.attempts.values()) == {1}
    assert list(rows_of(batch, suffix)) == ["r6", *(f"r{k}" for k in range(6))]


def test_a_row_with_another_body_is_named_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 4)
    with FakeServer(4) as server:
        words = words_of(batch, server)
        assert main(words) == 0
        before = (tmp_path / "answers.jsonl").read_bytes()
        write_batch(batch, [2, 3, 2, 5])
        assert main(words) == 2
        assert "row 'r1' and 1 others had another body" in " ".join(capsys.readouterr().err.split())
        write_batch(batch, [2] * 3)
        assert main(words) == 2
        assert "holds row 'r3', which the requests lack" in " ".join(capsys.readouterr().err.split())
        assert sum(server.attempts.values()) == 4
    assert (tmp_path / "answers.jsonl").read_bytes() == before


def test_completions_cut_at_their_cap_are_sent_again_under_a_higher_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 4)
    with FakeServer(4, faults={"r1": [400]}) as server:
        assert main(words_of(batch, server)) == 1
        assert main(words_of(batch, server, ".jsonl", "--retry", "cut")) == 2
        assert "Add --longest-completion N, a higher cap" in capsys.readouterr().err
        assert main(words_of(batch, server, ".jsonl", "--retry", "cut", "--longest-completion", "9")) == 1
        assert [server.attempts[f"r{k}"] for k in range(4)] == [2, 1, 2, 2]
        assert [server.bodies[f"r{k}"]["max_tokens"] for k in range(4)] == [9, 2, 9, 9]
    assert [row.completion_tokens for row in rows_of(batch).values()] == [9, None, 9, 9]


def test_an_interrupted_retry_goes_on(tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 6)
    with FakeServer(4, faults={"r1": [400], "r4": [400]}) as server:
        words = words_of(batch, server)
        assert main(words) == 1
        kept = [line for line in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())]
        kept = [line for line in kept if (line["response"] or {}).get("status_code") == 200]
        journal = tmp_path / "answers.jsonl.journal"
        Journal.restore(
            journal, {"server": "OpenAI", "model": None}, ((line["custom_id"], line) for line in kept)
        )
        assert not _continues(tmp_path / "answers.jsonl", tmp_path / "trace.jsonl", "x")
        assert main(words) == 0
        assert [server.attempts[f"r{k}"] for k in range(6)] == [1, 2, 1, 1, 2, 1]


def test_a_journal_with_a_row_that_the_requests_lack_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 3)
    line_id = read_server_batch(batch).line_id(2)
    with Journal(tmp_path / "answers.jsonl.journal", {"server": "OpenAI", "model": None}) as journal:
        journal.append("r2", {"id": line_id, "custom_id": "r2", "response": {"status_code": 200}})
    write_batch(batch, [2] * 2)
    with FakeServer(2) as server:
        assert main(words_of(batch, server)) == 2
    assert "holds row 'r2', which the requests lack" in " ".join(capsys.readouterr().err.split())


def test_completions_that_were_cut_are_counted_with_those_that_said_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [2] * 4)
    with FakeServer(4, faults={"r1": ["thinking"]}) as server:
        words = [word for word in words_of(batch, server) if word != "--json"]
        assert main(words) == 0
        said = " ".join(capsys.readouterr().out.split())
        line = "4 of 4 completions were cut at a cap of at most 2 tokens (1 is empty: all spent on thinking)"
        assert line in said
        assert "under a higher cap:" in said
        assert "--retry cut --longest-completion 4" in said
        assert main(["audit", str(tmp_path / "trace.jsonl"), "--slots", "4"]) == 0
        assert line in " ".join(capsys.readouterr().err.split())
        assert main([*words, "--retry", "cut", "--longest-completion", "4"]) == 0


def test_a_whole_job_is_known_by_the_marks_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def noted(path: Path, options: ServerOptions) -> Batch:
        read.append(path)
        return read_batch(path, options)

    monkeypatch.setattr(on_servers, "read_batch", noted)
    batch = write_batch(tmp_path / "in.jsonl", [2] * 4)
    with FakeServer(4) as server:
        words = words_of(batch, server)
        assert main(words) == 0
        figures = json.loads(capsys.readouterr().out)
        read.clear()
        assert main(words) == 0
        said = capsys.readouterr()
        assert "this job is finished" in said.err
        assert json.loads(said.out) == figures
        assert read == []
        # Edited files are read again.
        output = tmp_path / "answers.jsonl"
        output.write_bytes(output.read_bytes())
        assert main(words) == 0
        batch.write_bytes(batch.read_bytes() + b"\n")
        assert main(words) == 0
        assert len(read) == 2
        assert sum(server.attempts.values()) == 4
