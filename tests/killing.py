"""Kills of a command at a change to its files."""

from __future__ import annotations

import os
from typing import Any

import pytest

from batchbound.executor.jobs.journal import Journal


class Killed(BaseException):
    """Ends a command where it stands, as SIGKILL would: nothing is tidied up for it."""


def kill_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Kill the command at its n-th change to the files of its end."""
    seen = [0]

    def counted(function: Any) -> Any:
        def wrapped(*words: Any, **options: Any) -> Any:
            seen[0] += 1
            if seen[0] >= call:
                raise Killed
            return function(*words, **options)

        return wrapped

    patch.setattr(os, "replace", counted(os.replace))
    patch.setattr(os, "unlink", counted(os.unlink))
    patch.setattr(Journal, "remove", counted(Journal.remove))
    patch.setattr(Journal, "end", counted(Journal.end))
