"""Bounds on the makespan that need no search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.bound import Bound
from ...data.problem import Problem
from ..deadline import Deadline
from .argument import Known, Task
from .difference_set import DifferenceBound
from .least_counts import ALL_ON, Counts, least_counts
from .prove import certified


def trivial_bound(problem: Problem, counts: Counts | None = None) -> Bound:
    """Return the bound of fewest stages and fewest decode steps."""
    return certified(Known.of(problem, least_counts(problem) if counts is None else counts))


def paper_bound(problem: Problem, levels: Sequence[tuple[int, float]], decode_steps: int) -> Bound:
    r"""Return the hybrid paper's "lower bound" as printed, which is not one.

    .. math::
        t^{p*} \ge T^p_L \lfloor \sum_i N^p_i / N^{cap}_L \rfloor \quad (31), \qquad
        T^{LB} = t^{p*} + t^{d*} \quad (32)

    with :math:`L` the prefill level of the largest capacity and :math:`t^{d*}` the optimum of (26)-(30), in
    which every decode step takes :math:`T^d`, a step with all slots active. Neither holds in general:

    - (31) fails when the largest level is not the cheapest per token: levels of 10 tokens at 1 s and 20
      tokens at 3 s and 20 prompt tokens give 3 s, and two stages of the small level take 2 s;
    - (32) charges full steps even when slots are idle: requests of 512, 300, 200, 100, 50 and 20 tokens on
      200 slots give 36.35 s at the paper's costs, and a schedule of 15.17 s exists.
    """
    if not levels:
        raise ValueError("levels: the formula needs at least one prefill level")
    capacity, seconds = max(levels)
    full_step = problem.cost.decode_seconds(problem.slots)
    terms = {
        "prefill (31)": seconds * (int(problem.prompt_tokens.sum()) // capacity),
        "decode (26)-(30)": full_step * decode_steps,
    }
    certificate = {
        "kind": "printed formula",
        "level_tokens": capacity,
        "level_seconds": seconds,
        "decode_steps": decode_steps,
    }
    return Bound(sum(terms.values()), "hybrid paper (31)-(32) as printed", terms, certificate, valid=False)


def best_bound(problem: Problem) -> Bound:
    """Return the strongest valid bound that needs no search."""
    return certified(with_differences(Known.of(problem, least_counts(problem))).pruned())


def difference_set_bound(problem: Problem) -> Bound:
    """Return the bound of counts and differences of start times."""
    return certified(with_differences(Known.of(problem, least_counts(problem))))


def with_differences(known: Known) -> Known:
    """Add the curves of the difference-set argument."""
    argument = DifferenceBound.of(Task(known.problem, known.counts, np.inf, ALL_ON))
    while argument is not None and (curve := argument.prove(known, Deadline(np.inf))) is not None:
        known = known.with_curves((*known.curves, curve))
    return known
