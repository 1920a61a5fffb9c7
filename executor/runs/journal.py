"""The answers of a run as they finish, on disk before the run goes on."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ...data.files.disk import InputError

JOURNAL_VERSION = 1

_LOG = logging.getLogger(__name__)


class Journal:
    """
    A file of finished answers, one JSON line each, that survives the process being killed at any moment.

    Its first line says which run it belongs to. A line that the end of the process cut short is dropped: its
    answer is made again. As a context manager, it leaves no file in which no answer stands.

    Parameters
    ----------
    path
        The file; made if it does not exist, else continued.
    run
        What the run depends on, as plain JSON values: a journal of another run is refused.

    Raises
    ------
    InputError
        If the file belongs to another run, which may be under way, is damaged in its middle, or cannot be
        written.
    """

    def __init__(self, path: str | os.PathLike[str], run: Mapping[str, object]) -> None:
        self.path = Path(path)
        self._run = {"batchbound_journal": JOURNAL_VERSION, **run}
        self.finished: dict[str, dict[str, object]] = {}
        try:
            # Unbuffered: a line is handed to the system when `append` returns. Open for the whole run.
            self._stream = open(self.path, "ab+", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._claim()
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.finished:
            self.close()
        else:
            self.remove()

    def append(self, name: str, answer: Mapping[str, object]) -> None:
        """
        Put one finished answer on disk.

        Parameters
        ----------
        name
            The request's ``custom_id``.
        answer
            Its output line.

        Raises
        ------
        InputError
            If the file cannot be written; what it held before is still whole.
        """
        self._write({"id": name, "answer": dict(answer)})
        self.finished[name] = dict(answer)

    def close(self) -> None:
        """Close the file and leave it."""
        self._stream.close()

    def remove(self) -> None:
        """Close the file and delete it: its answers stand elsewhere now."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _claim(self) -> None:
        """Keep the file to this process: two runs that append to it would each do the other's work again."""
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "Wait for it, or choose another output."
            raise InputError("is written by a run under way", file=self.path, hint=hint) from None
        except OSError as error:
            # Some network file systems have no locks; a run goes on without, as two into one file are rare.
            _LOG.warning("%s cannot be locked (%s)", self.path, error.strerror)

    def _recover(self) -> None:
        self._stream.seek(0)
        lines = self._stream.read().split(b"\n")
        whole = sum(len(line) + 1 for line in lines[:-1])
        self._stream.truncate(whole)
        if whole == 0:
            self._write(self._run)
            return
        header = self._parse(lines[0], 1)
        if header != self._run and len(lines) == 2 and "batchbound_journal" in header:
            # Another run that was killed before its first answer: nothing is lost.
            self._stream.truncate(0)
            self._write(self._run)
            return
        if header != self._run:
            changed = sorted(
                key for key in self._run.keys() | header.keys() if self._run.get(key) != header.get(key)
            )
            hint = "Go on with what that run was started with, delete the file, or choose another output."
            raise InputError(
                f"belongs to another run (differs in: {', '.join(changed)})", file=self.path, hint=hint
            )
        for number, line in enumerate(lines[1:-1], 2):
            entry = self._parse(line, number)
            name, answer = entry.get("id"), entry.get("answer")
            if not isinstance(name, str) or not isinstance(answer, dict):
                raise self._damaged(number)
            self.finished[name] = answer

    def _parse(self, line: bytes, number: int) -> dict[str, object]:
        try:
            value = json.loads(line)
        except ValueError:
            raise self._damaged(number) from None
        if not isinstance(value, dict):
            raise self._damaged(number)
        return value

    def _damaged(self, number: int) -> InputError:
        hint = f"Delete line {number} to have its answer made again, or the file to start over."
        return InputError("is not a journal entry", file=self.path, where=f"line {number}", hint=hint)

    def _write(self, value: Mapping[str, object]) -> None:
        whole = self._stream.seek(0, os.SEEK_END)
        line = memoryview(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        try:
            while line:
                line = line[self._stream.write(line) :]
        except OSError as error:
            self._stream.truncate(whole)
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        hint = "Check the folder, the permissions and the free space; finished answers are kept."
        return InputError(f"cannot be written ({error.strerror})", file=self.path, hint=hint)
