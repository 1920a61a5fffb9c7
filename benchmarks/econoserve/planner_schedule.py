"""A served job as a schedule of prefill stages and decode steps, for the planner to start from."""

from __future__ import annotations

import numpy as np

from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.heuristics.serving.simulation import ServingRun


def serving_schedule(run: ServingRun, problem: Problem) -> Schedule | None:
    """
    Return the schedule in which every answer starts at the decode step it started at, its prompt just before.

    Parameters
    ----------
    run
        Of the problem's requests, all there at the start.
    problem
        Its prefill stages emit the first token.

    Returns
    -------
    Schedule or None
        None if an answer was interrupted, more ran at a time than there are slots, or a prompt that came in
        chunks would not have fitted as a whole: no schedule says so.
    """
    if not problem.prefill_emits_first_token:
        raise ValueError(
            "an iteration that completes a prompt emits its first token; the problem says it does not"
        )
    if run.preempted.any() or run.decodes.max(initial=0) > problem.slots:
        return None
    # Decode steps are the iterations in which anyone generates; and no prompt is computed.
    done = np.cumsum(run.decodes > 0)
    last = np.searchsorted(run.start, run.finished, side="left") - 1
    # The last of the answer's decode steps is the iteration it ended in.
    begin = done[last] - problem.decode_steps
    # Requests without decode steps have a stage for each iteration, before that of the others.
    iteration = np.where(problem.decode_steps == 0, last, np.iinfo(np.int64).max)
    (starts, _), bin_of = np.unique(np.stack((begin, iteration)), axis=1, return_inverse=True)
    bin_of = bin_of.reshape(-1)
    decode_steps = np.diff(np.append(starts, done[-1]))
    decode_steps[-1] = max(int(decode_steps[-1]), int(problem.decode_steps[bin_of == len(starts) - 1].max()))
    schedule = Schedule.from_bins(problem, bin_of.astype(np.int64), decode_steps.astype(np.int64))
    return schedule if schedule.check(problem) is None else None
