"""vLLM's log of its iterations (``--enable-logging-iteration-details``)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import numpy as np

from ..arrays import FloatArray, IntArray
from ..costs.cost import LONGEST_TIME
from ..files.disk import InputError, read_text
from ..workload import LONGEST

_LINE = re.compile(
    r"Iteration\((?P<index>\d+)\): (?P<chunks>\d+) context requests, (?P<chunk_tokens>\d+) context tokens,"
    r" (?P<decodes>\d+) generation requests, (?P<decode_tokens>\d+) generation tokens,"
    r" iteration elapsed time: (?P<ms>\d+(?:\.\d+)?) ms"
)
_BEGUN = re.compile(r"Iteration\(\d+\): ")
_SEQUENCES = re.compile(r"'max_num_seqs': (\d+)")
_MILLISECOND = 1e-3
_HINT = "Give the log as vLLM wrote it."


@dataclass(frozen=True, slots=True, eq=False)
class IterationLog:
    """Iterations of one engine.

    chunks, chunk_tokens: Prompts computed in each iteration, and their tokens, shape (iterations,).
    decodes: Decoding requests of each iteration, shape (iterations,).
    seconds: Seconds of each iteration, shape (iterations,).
    sequences: Most requests in progress (``max_num_seqs``) by the log's first lines, or None.
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
    """Read the iterations of a vLLM log, within ``span``."""
    text = read_text(path)
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        match = _LINE.search(line)
        if match is None:
            if _BEGUN.search(line) and number < len(lines):
                what = f"{line[:200]!r} is no whole line of an iteration"
                raise InputError(what, file=path, where=f"line {number}", hint=_HINT)
            continue
        if "Engine 00" in line and "Engine 000" not in line:
            hint = "Give the log of one engine."
            raise InputError("is of several engines", file=path, where=f"line {number}", hint=hint)
        row = [float(match[name]) for name in ("chunks", "chunk_tokens", "decodes")]
        took = float(match["ms"]) * _MILLISECOND
        if max(row) > LONGEST or took > LONGEST_TIME:
            what = f"{match[0][:200]!r} is of more tokens or time than an iteration can have"
            raise InputError(what, file=path, where=f"line {number}", hint=_HINT)
        inside = span is None or span[0] <= float(match["index"]) <= span[1]
        if inside and row[0] + row[2]:
            rows.append((*row, took))
    if not rows:
        hint = "Start vLLM with --enable-logging-iteration-details and keep its output; check --iterations."
        raise InputError("shows no such iteration", file=path, hint=hint)
    stated = _SEQUENCES.search(text)
    if stated is not None and not 1 <= float(stated[1]) <= LONGEST:
        what = f"{stated[0][:200]} is no number of sequences"
        raise InputError(what, file=path, hint=_HINT)
    chunks, chunk_tokens, decodes, seconds = zip(*rows, strict=True)
    return IterationLog(
        np.array(chunks, dtype=np.int64),
        np.array(chunk_tokens, dtype=np.int64),
        np.array(decodes, dtype=np.int64),
        np.array(seconds),
        None if stated is None else int(stated[1]),
    )
