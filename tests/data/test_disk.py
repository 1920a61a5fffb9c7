"""Files written whole or not at all, and what killed processes leave of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchbound.data.files.disk import InputError, atomic_write
from batchbound.data.files.outputs import refuse_outputs

WRITER = """
import signal, sys
from batchbound.data.files.disk import atomic_write
with atomic_write(sys.argv[1]) as stream:
    stream.write("half")
    stream.flush()
    print("half", flush=True)
    sys.stdin.readline()
    stream.write(" and whole")
"""


def half_written(path: Path) -> subprocess.Popen[str]:
    """Return a process that has written half of a file, and writes the rest after a line of input."""
    started = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=path.parent,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "half\n"
    return started


def test_what_a_killed_process_left_of_a_file_is_gone_as_it_is_written_next(tmp_path: Path) -> None:
    mine = tmp_path / ".plan.json.notes.partial"
    mine.write_text("mine")
    path = tmp_path / "plan.json"
    killed = half_written(path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    left = set(tmp_path.iterdir()) - {mine}
    assert len(left) == 1
    with atomic_write(tmp_path / "other.json") as stream:
        stream.write("{}")
    assert left < set(tmp_path.iterdir())
    with atomic_write(path) as stream:
        stream.write("whole")
    assert path.read_text() == "whole"
    assert set(tmp_path.iterdir()) == {path, mine, tmp_path / "other.json"}


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    other = half_written(path)
    with atomic_write(path) as stream:
        stream.write("ours")
    assert path.read_text() == "ours"
    other.communicate("\n")
    assert other.returncode == 0
    assert path.read_text() == "half and whole"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_nothing_is_no_output(tmp_path: Path) -> None:
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(InputError, match="is a link to a file that does not exist"):
        refuse_outputs([link], overwrite=False)
