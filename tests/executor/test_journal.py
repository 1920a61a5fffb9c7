from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from batchbound.data.files.disk import InputError
from batchbound.executor.runs.journal import Journal

RUN = {"plan": "abc", "model": "tiny"}


def finished(path: Path) -> dict[str, dict[str, object]]:
    with Journal(path, RUN) as journal:
        return journal.finished


def test_what_was_appended_is_there_when_the_journal_is_opened_again(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal", RUN)
    first.append("a", {"text": "one\ntwo"})
    first.append("b", {"text": "drei\u2028ü"})
    first.close()
    second = Journal(tmp_path / "journal", RUN)
    assert second.finished == {"a": {"text": "one\ntwo"}, "b": {"text": "drei\u2028ü"}}
    second.close()


def test_a_journal_that_a_run_is_writing_is_refused_to_another(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, RUN) as first:
        first.append("a", {"text": "mine"})
        with pytest.raises(InputError, match=r"journal: is written by a run under way\. Wait for it"):
            Journal(path, RUN)
        first.append("b", {"text": "mine, too"})
    assert list(finished(path)) == ["a", "b"]


def test_a_journal_is_kept_where_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_locks(stream: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("batchbound.executor.runs.journal.fcntl.flock", without_locks)
    with Journal(tmp_path / "journal", RUN) as journal:
        journal.append("a", {"text": "mine"})
    assert "cannot be locked (No locks available)" in caplog.text
    assert list(finished(tmp_path / "journal")) == ["a"]


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


def test_damage_in_the_middle_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, RUN)
    journal.append("a", {})
    journal.close()
    path.write_bytes(path.read_bytes() + b"not json\n")
    with pytest.raises(InputError, match="line 3: is not a journal entry"):
        Journal(path, RUN)


def test_a_full_disk_keeps_every_finished_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, RUN)
    journal.append("a", {"text": "kept"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(InputError, match="finished answers are kept"):
            journal.append("b", {"text": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.append("c", {"text": "room again"})
    journal.close()
    assert list(finished(path)) == ["a", "c"]
