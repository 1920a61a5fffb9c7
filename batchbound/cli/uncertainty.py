"""The options of ``plan`` that leave something open: predicted lengths, and the number of slots."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..data.costs.cost import IntArray
from ..data.files.disk import InputError
from ..data.lengths.prediction_error import parse_prediction_error
from ..data.plan import Plan, PromptSource
from ..data.problem import Problem
from ..data.workload import LONGEST
from ..planning.plan import make_plan
from ..planning.uncertain import make_robust_plan
from ..solvers.result import Limits
from ..solvers.slot_choice import SlotTrial, choose_slots
from .inputs import Inputs
from .output import note

COMPARED_SLOTS = 3
"""Numbers of slots that are compared when the lengths are uncertain as well."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a plan records of where its numbers come from; see :class:`~batchbound.data.plan.Plan`."""

    lengths: Mapping[str, object]
    cost_source: Mapping[str, object]
    prompts: PromptSource | None


def add_uncertainty(parser: argparse.ArgumentParser) -> None:
    """Add the options for lengths that are predictions."""
    group = parser.add_argument_group("predicted lengths")
    group.add_argument(
        "--length-error",
        metavar="SD|FILE",
        help="how far the lengths are from the truth: the standard deviation of log(predicted / actual), or a"
        " CSV file of measured pairs with the columns predicted and actual; the plan then follows what is"
        " best over sampled lengths, and states an interval",
    )


def planned(args: argparse.Namespace, inputs: Inputs, limits: Limits, record: Record) -> Plan:
    """
    Return the plan for what the options say: known or predicted lengths, a number of slots or ours.

    Raises
    ------
    InputError
        If the options do not go together, or the prediction error cannot be read.
    PlanningError
        If no plan came out.
    """
    error = None if args.length_error is None else parse_prediction_error(args.length_error)
    problem, others, start = inputs.problem, [], None
    if not args.slots:
        trials = _choose(problem, limits)
        problem, start = replace(problem, slots=trials[0].slots), trials[0].schedule
        others = [trial.slots for trial in trials[1:COMPARED_SLOTS]]
    if error is None:
        return make_plan(
            problem,
            solver=args.solver,
            limits=limits,
            start=start,
            lengths=record.lengths,
            cost_source=record.cost_source,
            prompts=record.prompts,
        )
    return make_robust_plan(
        problem,
        error,
        longest=_longest(inputs),
        slots=others,
        solver=args.solver,
        limits=limits,
        lengths=record.lengths,
        cost_source=record.cost_source,
        prompts=record.prompts,
    )


def _choose(problem: Problem, limits: Limits) -> tuple[SlotTrial, ...]:
    if problem.kv_capacity is None:
        raise InputError(
            "--slots auto needs to know the memory: without it, more slots always look better",
            hint="Give --kv-capacity TOKENS (`batchbound profile` measures a model), or a number of slots.",
        )
    trials = choose_slots(problem, seconds=limits.seconds or 1.0, seed=limits.seed)
    tried = ", ".join(f"{t.slots} ({t.makespan:,.2f} s)" for t in sorted(trials, key=lambda t: t.slots))
    note(f"slots tried: {tried}")
    return trials


def _longest(inputs: Inputs) -> IntArray | None:
    records = inputs.job.records
    stated = [record.max_tokens for record in records] if records else [None] * len(inputs.problem)
    caps = inputs.job.lengths.capped(stated)
    return np.array([cap or LONGEST for cap in caps], dtype=np.int64) if any(caps) else None
