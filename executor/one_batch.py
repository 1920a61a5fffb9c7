"""Seconds of a run as one padded batch."""

from __future__ import annotations

import numpy as np

from ..data.problem import Problem
from ..data.trace import Trace


def one_batch_seconds(problem: Problem, trace: Trace) -> float | None:
    """Estimate a run's seconds as one padded batch.

    Every prompt is padded to the longest one, and all rows decode until the longest completion ends. The
    seconds of a decode step are linear in its rows, fitted to the run. It is None if the fit is impossible.
    """
    decodes = [stage for stage in trace.stages if stage.kind == "decode"]
    prefills = [stage for stage in trace.stages if stage.kind == "prefill"]
    active = np.array([stage.active for stage in decodes], dtype=np.float64)
    if len(np.unique(active)) < 2:
        return None
    steps = np.array([stage.decode_steps for stage in decodes], dtype=np.float64)
    seconds = np.array([stage.seconds for stage in decodes])
    per_row, base = np.polyfit(active, seconds / steps, 1, w=np.sqrt(steps))
    tokens = sum(stage.tokens for stage in prefills)
    if per_row < 0 or base < 0:
        return None
    rows, longest = len(trace), int(trace.tokens.max())
    prefill = sum(stage.seconds for stage in prefills) / tokens * rows * int(problem.prompt_tokens.max())
    return float(prefill + (longest - 1) * (base + per_row * rows))
