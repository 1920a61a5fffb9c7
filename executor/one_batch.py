"""Seconds of a run as one padded batch."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from ..data.problem import Problem
from ..data.trace import Trace


def one_batch_seconds(problem: Problem, trace: Trace) -> float | None:
    """Estimate a run's seconds as one padded batch.

    Every prompt is padded to the longest one, and all rows decode until the longest completion ends. The
    seconds of a decode step are linear in its rows, fitted to the run. It is None if all steps had the same
    number of rows, and fewer than the batch.
    """
    decodes = [stage for stage in trace.stages if stage.kind == "decode"]
    prefills = [stage for stage in trace.stages if stage.kind == "prefill"]
    active = np.array([stage.active for stage in decodes], dtype=np.float64)
    rows, longest = len(trace), int(trace.tokens.max())
    if not decodes or (len(set(active)) == 1 and active[0] != rows):
        return None
    steps = np.array([stage.decode_steps for stage in decodes], dtype=np.float64)
    seconds = np.array([stage.seconds for stage in decodes])
    # Noise may slope the other way, but more rows never take less.
    weight = np.sqrt(steps)
    (base, per_row), _ = nnls(np.column_stack([weight, weight * active]), weight * seconds / steps)
    tokens = sum(stage.tokens for stage in prefills)
    prefill = sum(stage.seconds for stage in prefills) / tokens * rows * int(problem.prompt_tokens.max())
    return float(prefill + (longest - 1) * (base + per_row * rows))
