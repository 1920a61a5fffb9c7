"""vLLM's log of its iterations, one line each (``--enable-logging-iteration-details``)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import numpy as np

from ..costs.cost import FloatArray, IntArray
from ..files.disk import InputError, read_text

_LINE = re.compile(
    r"Iteration\((?P<index>\d+)\): (?P<chunks>\d+) context requests, (?P<chunk_tokens>\d+) context tokens,"
    r" (?P<decodes>\d+) generation requests, (?P<decode_tokens>\d+) generation tokens,"
    r" iteration elapsed time: (?P<ms>[\d.]+) ms"
)
_SEQUENCES = re.compile(r"'max_num_seqs': (\d+)")
_MILLISECOND = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class IterationLog:
    """
    The iterations of one engine.

    Parameters
    ----------
    chunks, chunk_tokens
        Requests whose prompts were computed in each iteration, and the tokens of them, shape (iterations,).
    decodes
        Requests that drew another token, shape (iterations,).
    seconds
        That each took, shape (iterations,).
    sequences
        Most requests under way as the log's first lines state it (``max_num_seqs``), or None.
    """

    chunks: IntArray
    chunk_tokens: IntArray
    decodes: IntArray
    seconds: FloatArray
    sequences: int | None

    def __len__(self) -> int:
        return len(self.decodes)


def is_iteration_log(text: str) -> bool:
    """Return whether a text holds vLLM's lines of iterations."""
    return _LINE.search(text) is not None


def read_iteration_log(path: str | os.PathLike[str], span: tuple[int, int] | None = None) -> IterationLog:
    """
    Return the iterations in a vLLM server's log; other lines are passed over, and so are empty iterations.

    Parameters
    ----------
    path
        The server's output.
    span
        First and last number of the iterations to return; None for all.

    Raises
    ------
    InputError
        If the log shows no iteration, or those of several engines.
    """
    text = read_text(path)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        found = _LINE.search(line)
        if found is None:
            continue
        if "Engine 00" in line and "Engine 000" not in line:
            hint = "Give the log of one engine."
            raise InputError("is of several engines", file=path, where=f"line {number}", hint=hint)
        row = [int(found[name]) for name in ("chunks", "chunk_tokens", "decodes")]
        inside = span is None or span[0] <= int(found["index"]) <= span[1]
        if inside and row[0] + row[2]:
            rows.append((*row, float(found["ms"]) * _MILLISECOND))
    if not rows:
        hint = "Start vLLM with --enable-logging-iteration-details and keep its output; check --iterations."
        raise InputError("shows no such iteration", file=path, hint=hint)
    stated = _SEQUENCES.search(text)
    chunks, chunk_tokens, decodes, seconds = zip(*rows, strict=True)
    return IterationLog(
        np.array(chunks, dtype=np.int64),
        np.array(chunk_tokens, dtype=np.int64),
        np.array(decodes, dtype=np.int64),
        np.array(seconds),
        None if stated is None else int(stated[1]),
    )
