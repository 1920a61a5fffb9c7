from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

import pytest

from batchbound.data.files.disk import InputError
from batchbound.executor.jobs.journal import Journal

RUN = {"plan": "abc", "model": "tiny"}


def finished(path: Path) -> dict[str, dict[str, object]]:
    with Journal(path, RUN) as journal:
        return dict(journal.finished)


def test_what_was_appended_is_there_when_the_journal_is_opened_again(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal", RUN)
    first.append("a", {"text": "one\ntwo"})
    first.append("b", {"text": "drei\u2028ü"})
    first.close()
    second = Journal(tmp_path / "journal", RUN)
    assert second.finished == {"a": {"text": "one\ntwo"}, "b": {"text": "drei\u2028ü"}}
    second.close()


def test_completions_written_at_once_are_read_one_by_one(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", RUN) as journal:
        journal.append_all([("a", {"text": "one"}), ("b", {"text": "two"})])
        journal.append_all([])
        assert journal.finished["b"] == {"text": "two"}
    assert finished(tmp_path / "journal") == {"a": {"text": "one"}, "b": {"text": "two"}}


def test_a_journal_that_a_run_is_writing_is_refused_to_another(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, RUN) as first:
        first.append("a", {"text": "mine"})
        with pytest.raises(InputError, match=r"journal: is written by another run\. Wait for it"):
            Journal(path, RUN)
        first.append("b", {"text": "mine, too"})
    assert list(finished(path)) == ["a", "b"]


def test_a_journal_is_kept_where_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_locks(stream: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("batchbound.executor.jobs.journal.fcntl.flock", without_locks)
    with Journal(tmp_path / "journal", RUN) as journal:
        journal.append("a", {"text": "mine"})
    assert "cannot be locked (No locks available)" in caplog.text
    assert list(finished(tmp_path / "journal")) == ["a"]


@pytest.mark.parametrize("written", [0, 20, 10_000])
def test_an_interrupt_at_a_write_counts_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    path = tmp_path / "journal"

    class Stream:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def write(self, line: memoryview) -> int:
            self._real.write(line[:written])
            raise KeyboardInterrupt

    journal = Journal(path, RUN)
    monkeypatch.setattr(journal, "_stream", Stream(journal._stream))
    with journal, pytest.raises(KeyboardInterrupt):
        journal.append("a", {"text": "finished"})
    kept = ["a"] if written > 100 else []
    assert list(journal.finished) == kept
    # With a completion it stays, without one nothing is left behind.
    assert path.exists() == bool(kept)
    assert list(finished(path)) == kept


@pytest.mark.parametrize("kept", range(1, 40, 3))
def test_a_line_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, RUN)
    journal.append("a", {"text": "whole"})
    before = path.stat().st_size
    journal.append("b", {"text": "cut short by the end of the process"})
    journal.close()
    path.write_bytes(path.read_bytes()[: before + kept])
    with Journal(path, RUN) as again:
        assert list(again.finished) == ["a"]
        again.append("b", {"text": "once more"})
    assert finished(path)["b"] == {"text": "once more"}


def test_a_header_cut_short_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, RUN).close()
    path.write_bytes(path.read_bytes()[:10])
    journal = Journal(path, RUN)
    journal.append("a", {})
    journal.close()
    assert list(finished(path)) == ["a"]


def test_a_journal_of_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", RUN) as journal:
        journal.append("a", {"text": "kept"})
    with pytest.raises(InputError, match=r"another run \(differs in: model\)"):
        Journal(tmp_path / "journal", {**RUN, "model": "other"})
    assert finished(tmp_path / "journal") == {"a": {"text": "kept"}}


def test_another_run_killed_before_its_first_answer_is_in_nobodys_way(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", {**RUN, "model": "other"}).close()
    with Journal(tmp_path / "journal", RUN) as journal:
        journal.append("a", {"text": "first"})
    assert finished(tmp_path / "journal") == {"a": {"text": "first"}}


def test_no_file_is_left_in_which_no_answer_stands(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Journal(tmp_path / "journal", RUN):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def written(path: Path, names: str) -> bytes:
    journal = Journal(path, RUN)
    for name in names:
        journal.append(name, {"text": name * 10})
    journal.close()
    return path.read_bytes()


def test_a_bit_flipped_drops_its_own_answer_or_is_refused_and_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchbound.executor.jobs.journal.os.fsync", lambda _: None)
    path = tmp_path / "journal"
    whole = written(path, "abcd")
    expected = {name: {"text": name * 10} for name in "abcd"}
    header = whole.index(b"\n")
    for bit in range(0, 8 * len(whole), 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.unlink()  # or some file systems write each change to the disk at once
        path.write_bytes(damaged)
        if bit // 8 <= header:
            with pytest.raises(InputError, match=r"is damaged in the line|is not a journal|earlier version"):
                Journal(path, RUN)
            assert path.read_bytes() == damaged
            continue
        journal = Journal(path, RUN)
        # A line break that is none any more joins two lines; one more parts a line.
        assert len(expected) - 2 <= len(journal.finished) <= 3
        assert journal.finished.items() <= expected.items()
        assert journal.dropped or bit // 8 == len(whole) - 1
        journal.close()


def test_zeros_in_the_middle_lose_only_what_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = bytearray(written(path, "abcde"))
    lines = bytes(whole).split(b"\n")
    start = whole.index(lines[2]) + 5
    end = whole.index(lines[4]) - 1
    whole[start:end] = bytes(end - start)
    path.write_bytes(whole)
    with Journal(path, RUN) as journal:
        assert list(journal.finished) == ["a", "d", "e"]
        assert journal.dropped == (3,)


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b"\n", b"{}", b'{"batchbound_journaL": 2'])
def test_a_file_of_somebody_else_is_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is not a journal, so it is left unchanged\. Move it away"):
        Journal(path, RUN)
    assert path.read_bytes() == content


def test_a_journal_of_the_earlier_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(
        b'{"batchbound_journal": 1, "plan": "abc", "model": "tiny"}\n{"id": "a", "answer": {}}\n'
    )
    with pytest.raises(InputError, match="line 1: was written by an earlier version"):
        Journal(path, RUN)


def test_answers_are_synced_at_the_interval_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [100.0], []
    monkeypatch.setattr("batchbound.executor.jobs.journal.time.monotonic", lambda: now[0])
    monkeypatch.setattr("batchbound.executor.jobs.journal.os.fsync", lambda _: synced.append(now[0]))
    journal = Journal(tmp_path / "journal", RUN)
    begun = len(synced)
    for step in range(10):
        now[0] = 100.0 + 0.3 * step
        journal.append(str(step), {})
    assert synced[begun:] == pytest.approx([101.2, 102.4])
    journal.close()
    assert synced[-1] == pytest.approx(102.7)


def test_a_full_disk_keeps_every_finished_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, RUN)
    journal.append("a", {"text": "kept"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(InputError, match="finished completions are kept"):
            journal.append("b", {"text": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.append("c", {"text": "room again"})
    journal.close()
    assert list(finished(path)) == ["a", "c"]
