"""Simulation of a whole job, and of a plan's rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..data.arrays import IntArray
from ..data.files.errors import check_type
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..data.trace import Trace
from .loop import execute, schedule_of
from .policy import Policy
from .registry import policy_named
from .simulator import Simulator


def simulate(
    problem: Problem,
    policy: Policy | str,
    output_tokens: IntArray | None = None,
    *,
    swap: float | None = None,
) -> Trace:
    """Simulate a job under a policy.

    Parameters
    ----------
    problem
        Problem with the lengths that the policy knows.
    policy
        Fresh policy, or the name of a built-in one.
    output_tokens
        True length of each completion (tokens, shape (requests,)); the problem's own by default.
    swap
        Seconds to move a token of KV cache to the host or back; None prefills evicted requests again.

    Raises
    ------
    PolicyError
        If the policy returns an impossible step.
    ValueError
        If the policy is unknown, or a true length is not a whole number of at least one.
    """
    check_type("problem", problem, Problem, hint="a Problem, or the path of a file of requests")
    if isinstance(policy, str):
        policy = policy_named(policy, problem)
    if output_tokens is not None:
        output_tokens = np.asarray(output_tokens)
        whole = np.issubdtype(output_tokens.dtype, np.integer)
        if not whole or output_tokens.shape != (len(problem),) or output_tokens.min() < 1:
            raise ValueError(f"output_tokens are not {len(problem)} whole numbers of at least one")
    return execute(problem, policy, Simulator(problem, output_tokens, swap=swap))


def remaining_schedule(problem: Problem, schedule: Schedule, keep: npt.ArrayLike) -> tuple[Problem, Schedule]:
    """Return a plan's remaining problem and schedule.

    The schedule is the plan without the others, or a fresh one (ski-rental rule, longest first or in order)
    if that is shorter. Once much of the job is done, the plan's slots and decode steps no longer fit
    together.

    keep: Positions of the remaining requests, at least one, each once; the new problem has their order.
    """
    rows = np.asarray(keep, dtype=np.int64)
    rest = replace(problem, workload=problem.workload.select(rows))
    thinned = _thinned(rest, schedule.bin_of[rows], schedule.slot_of[rows], schedule.starts)
    if len(rows) == len(problem):
        return rest, thinned
    fresh = (schedule_of(simulate(rest, policy_named(name, rest))) for name in ("lpt-ski", "fcfs-ski"))
    return rest, min(thinned, *fresh, key=lambda candidate: candidate.makespan(rest))


def _thinned(problem: Problem, bin_of: IntArray, slot_of: IntArray, starts: IntArray) -> Schedule:
    """Return a schedule's rest, without empty bins and idle steps."""
    used, new_bin = np.unique(bin_of, return_inverse=True)
    finish = np.zeros(len(used), dtype=np.int64)
    np.maximum.at(finish, new_bin, starts[bin_of] + problem.decode_steps)
    busy_until = np.maximum.accumulate(finish)
    decode_steps = np.append(np.minimum(starts[used][1:], busy_until[:-1]), busy_until[-1]) - starts[used]
    return Schedule(new_bin, slot_of, decode_steps)
