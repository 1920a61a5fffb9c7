"""Rows that an earlier part of a job finished, by id and body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...data.files.disk import InputError, shown
from ...data.readers.completions import Endings, batch_completions, ending_of
from ...data.readers.server_batch import ServerBatch


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Rows of a batch with an outcome.

    done: True for rows that are not sent again, shape (requests,).
    failed: Names of all rows whose outcome is an error.
    endings: Endings of the completions that are done.
    """

    done: npt.NDArray[np.bool_]
    failed: frozenset[str]
    endings: Endings


def kept_rows(
    lines: Iterable[Mapping[str, Any]], batch: ServerBatch, retry: Iterable[str], file: Path
) -> KeptRows:
    """Return the rows that output lines finish; refuse lines of other rows.

    retry: Endings of rows to send again, of :func:`.ending_of`.
    file: File of the lines, for errors.
    """
    again, done, failed = frozenset(retry), np.zeros(len(batch), dtype=np.bool_), set[str]()
    changed, endings = list[str](), Endings()
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
        done[place] = ending not in again
        if done[place]:
            endings.add(batch_completions([line]), int(batch.caps[place]) or None)
    if changed:
        and_others = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
        message = f"row {shown(changed[0])}{and_others} had another body when it was finished"
        hint = "Give a changed row a new custom_id, name another output, or say --overwrite."
        raise InputError(message, file=file, hint=hint)
    return KeptRows(done, frozenset(failed), endings)
