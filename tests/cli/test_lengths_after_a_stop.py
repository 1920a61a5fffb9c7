"""A second run knows the lengths of a first one that was stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_server import FakeServer
from killing import Killed, kill_at
from server_batches import run_words, write_batch

from batchbound.cli import main
from batchbound.data.readers.server_run import ServerRun
from batchbound.executor.jobs.journal import Journal

LENGTHS = {f"r{k}": 1 + 7 * (k == 4) for k in range(5)}
KNOWN = "lengths are those of the earlier run"


def words_of(batch: Path, server: FakeServer, *more: str) -> list[str]:
    return [
        word
        for word in run_words(batch, server, "--slots", "2", "--in-flight", "2", *more)
        if word != "--json"
    ]


def test_lengths_come_from_all_completions_and_not_from_the_last_leg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [9] * 5, temperature=0)
    append = Journal.append_all

    def once(journal: Journal, entries: list[tuple[str, dict[str, object]]]) -> None:
        append(journal, entries)
        raise KeyboardInterrupt

    with FakeServer(1, lengths=LENGTHS) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append_all", once)
            assert main(words_of(batch, server)) == 130
        capsys.readouterr()
        assert main(words_of(batch, server)) == 0
        before = 5 - len(ServerRun.load(tmp_path / "trace.jsonl"))
        assert 0 < before < 5
        several = "s" if before > 1 else ""
        assert f"continuing after {before} finished request{several}\n" in capsys.readouterr().err
        capsys.readouterr()
        assert main(words_of(batch, server, "--overwrite")) == 0
        said = capsys.readouterr().err
        assert KNOWN in said
        assert "lengths are unknown" not in said
        # Another file with as many rows has no lengths yet.
        write_batch(batch, [10] * 5, temperature=0)
        assert main(words_of(batch, server, "--overwrite")) == 0
        assert KNOWN not in capsys.readouterr().err


def test_lengths_are_known_where_all_rows_had_finished_before_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [9] * 5, temperature=0)
    with FakeServer(2, lengths=LENGTHS) as server:
        with monkeypatch.context() as patch:
            kill_at(2, patch)
            with pytest.raises(Killed):
                main(words_of(batch, server))
        assert main(words_of(batch, server)) == 0
        assert len(ServerRun.load(tmp_path / "trace.jsonl")) == 0
        capsys.readouterr()
        assert main(words_of(batch, server, "--overwrite")) == 0
        assert KNOWN in capsys.readouterr().err


def test_completions_cut_at_a_lower_cap_tell_no_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write_batch(tmp_path / "in.jsonl", [9] * 5, temperature=0)
    batch.write_text(batch.read_text().replace('"max_tokens": 9, ', ""))
    with FakeServer(2) as server:
        assert main(words_of(batch, server, "--longest-completion", "4")) == 0
        for cap, known in (("8", False), ("6", True)):
            capsys.readouterr()
            assert main(words_of(batch, server, "--longest-completion", cap, "--overwrite")) == 0
            assert (KNOWN in capsys.readouterr().err) == known
