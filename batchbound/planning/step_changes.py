"""Simulation of a training run's steps, and what would shorten them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ..data.arrays import FloatArray, IntArray
from ..data.files.disk import InputError
from ..data.fleet import Fleet
from ..data.lengths.steps import BARRIER, Way
from ..data.problem import Problem
from ..data.readers.tables import is_table, read_seconds, read_steps
from ..heuristics.queues.queue_policy import QueuedPolicy
from ..heuristics.registry import policy_named
from ..heuristics.unknown_lengths.lengths import Known
from ..heuristics.unknown_lengths.registry import CHOSEN, hidden_policy, without_lengths, without_sharing
from ..heuristics.unknown_lengths.steps import StepsRun, simulate_steps
from ..models.bounds.fleet import work_bound
from ..options.simulate import SimulateOptions

MEASURED, BEFORE = "generation_seconds", "seconds_before"
"""Columns of a log of rollouts: seconds of a step's generation, and between it and the one before."""


def simulate_hidden_steps(
    problem: Problem, step: IntArray, way: Way, policy: str = CHOSEN, known: Known | None = None
) -> StepsRun:
    """Simulate several steps under a policy that sees no length.

    problem: Requests of all steps with true lengths, step by step.
    step: Step of each request, shape (requests,).
    """
    blind = without_lengths(problem)
    made = hidden_policy(policy, without_sharing(blind), Known() if known is None else known)
    return simulate_steps(blind, step, way, made, problem.workload.output_tokens)


def simulate_file_steps(options: SimulateOptions, problem: Problem, known: Known) -> dict[str, Any]:
    """Simulate the steps of a table; return the figures."""
    step, seconds = _columns(options, problem)
    name, truth = options.policy or CHOSEN, problem.workload.output_tokens
    try:
        way = Way(
            options.ahead or 0.0, options.keep, options.restart, options.keep_kv, groups=options.keep_groups
        )
        ran = simulate_hidden_steps(problem, step, way, name, known)
    except ValueError as error:
        raise InputError(str(error), file=options.workload, hint="Correct the table or the option.") from None
    barrier = simulate_hidden_steps(problem, step, BARRIER, "fcfs").makespan
    figures: dict[str, Any] = {
        "policy": name,
        "steps": len(ran.seconds),
        "makespan_s": ran.makespan,
        "fcfs_barrier_s": barrier,
        "saved": 1 - ran.makespan / barrier,
        "step_s": ran.seconds.tolist(),
        "kept": int(ran.kept.sum()),
        "stale_share": ran.stale_share,
        "staleness_steps": ran.staleness,
        "staleness_counts": ran.ages(),
        "kept_length_bias": ran.kept_bias(truth),
        "early_length_bias": ran.early_bias(truth),
        "lost_tokens": ran.lost,
        "requests": len(problem),
        "slots": problem.slots,
    }
    measured, before = seconds
    training = options.training if options.training is not None else before
    scale = 1.0
    if measured is not None:
        figures["measured_s"] = float(measured.sum())
        if len(measured) == len(ran.seconds):
            # Other work, and what costs leave out, slow some steps; the median tells of the others.
            figures["measured_over_simulated"] = scale = float(np.median(measured / ran.seconds))
    if training is not None:
        figures["training_s"] = training
    # Any order, steps that overlap in any way, training hidden behind generation: the work stays.
    free = replace(problem, kv_capacity=None, prefill_token_cap=None, max_position=None)
    figures["bound_s"] = work_bound(Fleet.of(free, 1)).seconds
    figures["most_steps_per_hour"] = 3600 * len(ran.seconds) / figures["bound_s"]
    figures["changes"] = [
        _figures(change, changed, ran, (training or 0.0) * len(ran.seconds) / scale, truth)
        for change, changed in _changes(problem, step, way, name, known)
    ]
    return figures


def _columns(
    options: SimulateOptions, problem: Problem
) -> tuple[IntArray, tuple[FloatArray | None, float | None]]:
    """Return each row's step, the measured seconds of each step, and the mean between two."""
    if options.steps is None or not is_table(options.workload):
        message = "--steps needs a table of lengths with a column of steps"
        raise InputError(message, file=options.workload, hint="Give a table, or leave --steps out.")
    step = read_steps(options.workload, options.steps)
    if len(step) != len(problem):
        raise InputError(
            "rows were left out, so steps do not match the rows",
            file=options.workload,
            hint="Give whole rows.",
        )
    measured, before = (read_seconds(options.workload, name, step) for name in (MEASURED, BEFORE))
    return step, (measured, before[1:].mean() if before is not None and len(before) > 1 else None)


def _changes(
    problem: Problem, step: IntArray, way: Way, policy: str, known: Known
) -> Iterator[tuple[str, StepsRun]]:
    """Yield a name and the simulation of each change that may shorten the steps."""
    wider = replace(problem, slots=2 * problem.slots)
    yield f"{wider.slots} slots", simulate_hidden_steps(wider, step, way, policy, known)
    share = 0.75
    yield "3 of 4 groups", simulate_hidden_steps(problem, step, Way(groups=share), policy, known)
    yield "1 step staler", simulate_hidden_steps(problem, step, Way(ahead=0.25), policy, known)
    longest_first = cast("QueuedPolicy", policy_named("lpt-ski", problem))
    yield "lengths known", simulate_steps(problem, step, way, longest_first)


def _figures(name: str, changed: StepsRun, ran: StepsRun, training: float, truth: IntArray) -> dict[str, Any]:
    """Return a change's figures; ``training`` is in simulated seconds of all steps."""
    before, after = ran.makespan + training, changed.makespan + training
    return {
        "change": name,
        "makespan_s": changed.makespan,
        "saved": 1 - changed.makespan / ran.makespan,
        "saved_of_steps": 1 - after / before,
        "stale_share": changed.stale_share,
        "staleness_counts": changed.ages(),
        "kept_length_bias": changed.kept_bias(truth),
    }
