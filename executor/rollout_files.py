"""Files of a rollout function: lengths of earlier completions, and a table of steps."""

from __future__ import annotations

import csv
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.lengths.history import LengthHistory
from .completion import Completion
from .partial import Partial

_COLUMNS = (
    *("step", "group", "input_tokens", "output_tokens", "shared_tokens"),
    *("generation_seconds", "seconds_before"),
)

_LOG = logging.getLogger(__name__)

FilePath = str | os.PathLike[str]


class RolloutFiles:
    """Files of a rollout function, with names of their own for each process of a trainer.

    history: File of lengths, or None. A process reads those of all processes, and writes its own.
    log: CSV table with a row for each completion, or None; calls are its steps.

    Raises InputError if a file cannot be written, or the table has other columns.
    """

    def __init__(self, history: FilePath | None, log: FilePath | None) -> None:
        self._history = None if history is None else Path(history)
        self._log = None if log is None else Path(log)
        self._began = self._ended = time.perf_counter()
        # Checked before the call, as a failure after it would lose its completions.
        refuse_outputs([path for path in (self._history, self._log) if path is not None], True)
        if self._log is not None and (steps := _next_step(self._log)):
            _LOG.warning("%s has %d steps of an earlier training: those of this one are added", log, steps)

    def expected(self, prompts: Sequence[Any], longest: int) -> list[int] | None:
        """Return expected tokens of each completion by the history, if there is one."""
        if self._history is None:
            return None
        files = sorted(self._history.parent.glob(f"{self._history.name}.*[0-9]"))
        known = LengthHistory.joined([LengthHistory.at(path) for path in (self._history, *files)])
        return np.minimum(known.expected(prompts), longest).tolist() if len(known) else None

    def begin(self) -> None:
        """Note that a call begins."""
        self._began = time.perf_counter()

    def saw(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        process: int,
        cut: Sequence[Partial] = (),
    ) -> float:
        """Write the completions of a call; return its seconds.

        cut: Unfinished completions, whose tokens so far are in the table.
        """
        if self._history is not None:
            own_file = self._history.with_name(self._history.name + (f".{process}" if process else ""))
            known = LengthHistory.at(own_file)
            known.saw(
                (prompts[completion.index], len(completion.completion_ids)) for completion in completions
            )
            known.save(own_file)
        before, self._ended = self._began - self._ended, time.perf_counter()
        seconds = self._ended - self._began
        self.write_step([*completions, *cut], seconds, before, process)
        return seconds

    def write_step(
        self, drawn: Iterable[Completion | Partial], seconds: float, before: float, process: int = 0
    ) -> None:
        """Add a step to the table: its completions, its seconds, and those before it."""
        rows = [(one.prompt_ids, len(one.completion_ids)) for one in drawn if one.completion_ids]
        if self._log is None or not rows:
            return
        own_file = self._log.with_stem(self._log.stem + (f".{process}" if process else ""))
        step = _next_step(own_file)
        group = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in rows))}
        times = round(seconds, 4), round(before, 4) if step else ""
        with own_file.open("a", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream)
            if not step:
                table.writerow(_COLUMNS)
            for prompt, tokens in rows:
                # The engine computes the last token of each prompt.
                shared = len(prompt) - 1
                table.writerow((step, f"{step}-{group[prompt]}", len(prompt), tokens, shared, *times))


def _next_step(path: Path) -> int:
    """Return the number of steps in a table, which may be missing."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open(newline="", encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    if tuple(header) != _COLUMNS:
        what = f"has the columns {','.join(header)}, a log of rollouts has {','.join(_COLUMNS)}"
        raise InputError(what, file=path, hint="Name another file.")
    return int(rows[-1][0]) + 1 if rows else 0
