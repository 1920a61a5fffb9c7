"""Rows that an earlier part of a job finished, by id and body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...data.files.disk import InputError, shown
from ...data.readers.completions import Endings, batch_completions, cut_tokens, ending_of
from ...data.readers.server_batch import ServerBatch


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Rows of a batch with an outcome.

    done: True for rows that are not sent again, shape (requests,).
    failed: Names of all rows whose outcome is an error.
    endings: Endings of the completions that are done.
    cut: True for rows to complete again under a higher cap, shape (requests,).
    long: Tokens of the cut completions that such a cap would not lengthen.
    lines: Lines of the completions to complete again, by row; they stay if that fails.
    completed: Number of done rows with a completion.
    """

    done: npt.NDArray[np.bool_]
    failed: frozenset[str]
    endings: Endings
    cut: npt.NDArray[np.bool_]
    long: tuple[int, ...] = ()
    lines: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    completed: int = 0


def kept_rows(
    lines: Iterable[Mapping[str, Any]],
    batch: ServerBatch,
    retry: Iterable[str],
    file: Path,
    cap: int | None = None,
    largest: int = 0,
    context: int | None = None,
) -> KeptRows:
    """Return the rows that output lines finish; refuse lines of other rows.

    retry: Endings of rows to send again, of :func:`.ending_of`.
    file: File of the lines, for errors.
    cap: New cap of cut rows; those that have as many tokens, or a cap of their own as large, are done.
    largest: Largest cap that cut a row before.
    context: Most tokens of a prompt and its completion; None if unknown.
    """
    again, done, failed = frozenset(retry), np.zeros(len(batch), dtype=np.bool_), set[str]()
    changed, endings = list[str](), Endings()
    cut, long, cut_lines = np.zeros_like(done), list[int](), dict[int, Mapping[str, Any]]()
    for line in lines:
        name, ending = str(line["custom_id"]), ending_of(line)
        place = batch.names.find(name)
        if place is None:
            hint = "Put the row back, name another output, or say --overwrite."
            raise InputError(f"holds row {shown(name)}, which the requests lack", file=file, hint=hint)
        if line.get("id") != batch.line_id(place):
            changed.append(name)
        if ending in ("failed", "expired"):
            failed.add(name)
        else:
            failed.discard(name)
        own = 0 if batch.uncapped[place] else int(batch.caps[place])
        done[place] = ending not in again
        if ending == "cut":
            tokens = cut_tokens(line, max(own, largest))
            if cap is not None and ending in again:
                cut[place] = max(tokens, own) < cap
                done[place] = not cut[place]
                if cut[place]:
                    cut_lines[place] = line
                long += [] if cut[place] else [max(tokens, own)]
            own = max(own, tokens)
        if done[place]:
            endings.add(batch_completions([line]), own or None, context)
    if changed:
        and_others = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
        message = f"row {shown(changed[0])}{and_others} had another body when it was finished"
        hint = "Give a changed row a new custom_id, name another output, or say --overwrite."
        raise InputError(message, file=file, hint=hint)
    completed = int(done.sum()) - sum(bool(done[batch.names.find(name)]) for name in failed)
    return KeptRows(done, frozenset(failed), endings, cut, tuple(long), cut_lines, completed)
