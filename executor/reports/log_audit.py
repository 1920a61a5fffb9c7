"""Empty slots of an engine by cause, from its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.readers.iteration_log import IterationLog

WORK = "full iterations of the same work"
BEFORE = "empty slots while prompts were still to come"
TAIL = "empty slots after the last prompt"
DECODE = "decode iterations"
MIXED = "iterations with prompts"
AFTER = "iterations after the last prompt"


@dataclass(frozen=True, slots=True)
class LogAudit:
    """Iterations of a log by the use of their slots.

    sequences: Slots of the engine.
    parts: Iterations by cause, with an empty slot as a share of one; they add up to ``counted``.
    seconds: Seconds of the iterations by kind, which add up to the engine's busy seconds.
    """

    counted: int
    sequences: int
    parts: Mapping[str, float]
    seconds: Mapping[str, float]


def audit_log(log: IterationLog, sequences: int) -> LogAudit:
    """Split the empty slots of an engine by cause."""
    rows = log.chunks + log.decodes
    if int(rows.max()) > sequences:
        raise ValueError(f"{int(rows.max())} requests ran in an iteration, more than {sequences}")
    with_prompts = np.flatnonzero(log.chunks)
    last = int(with_prompts[-1]) if with_prompts.size else -1
    after = np.arange(len(log)) > last
    empty = (sequences - rows) / sequences
    mixed = ~after & (log.chunks > 0)
    return LogAudit(
        counted=len(log),
        sequences=sequences,
        parts={
            WORK: float(rows.sum()) / sequences,
            BEFORE: float(empty[~after].sum()),
            TAIL: float(empty[after].sum()),
        },
        seconds={
            MIXED: float(log.seconds[mixed].sum()),
            DECODE: float(log.seconds[~after & ~mixed].sum()),
            AFTER: float(log.seconds[after].sum()),
        },
    )
