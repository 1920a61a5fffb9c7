"""Plan a file of requests for batchbound's own engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .data.arrays import IntArray
from .data.files.disk import shown
from .data.files.errors import InputError, check_type
from .data.files.outputs import can_be_made_again, refuse_outputs
from .data.files.sources import opened_once
from .data.fleet import Groups
from .data.lengths.prediction_error import parse_prediction_error
from .data.objective import Objective
from .data.plan import Plan, Provenance
from .data.problem import Problem
from .data.readers.openai_batch import model_names, other_model
from .data.workload import LONGEST
from .inputs import Inputs, provenance_of, read_inputs, unknown_lengths
from .judging import calibration_of
from .listening import note, working
from .models.formulations.full_model import UnsupportedProblemError
from .options.option import Either, PathText, takes
from .options.plan import DEFAULT_OUTPUT, PlanOptions
from .plan_for_engines import EnginePlan, plan_for_engine
from .planning.fleet import fleet_of, make_fleet_plan, make_robust_fleet_plan
from .planning.plan import make_plan
from .planning.staged import make_aimed_plan
from .planning.uncertain import make_robust_plan
from .solvers.backends.linear import BackendError
from .solvers.result import Limits
from .solvers.search.core.compiled import compiled_core
from .solvers.search.params import SearchParams
from .solvers.slot_choice import SlotTrial, choose_slots
from .solvers.solve import DEFAULT_SOLVER

COMPARED_SLOTS = 3
"""Numbers of slots to compare if lengths are uncertain."""


@takes(PlanOptions)
def plan_file(options: PlanOptions) -> Plan:
    """Plan a file of requests, and save the plan if a file of it is named.

    It takes the options of ``batchbound plan`` as keywords.
    """
    options.refuse(("engine",), "on one plan of batchbound's engine", "Call batchbound.plan_for_engine().")
    if options.output is not None:
        again = not options.overwrite and can_be_made_again(options.output)
        if again:
            note(f"{options.output}: replacing the earlier plan")
        refuse_outputs([options.output], options.overwrite or again, options.read_files())
    inputs = _read(options)
    try:
        with working(f"planning {len(inputs.problem):,} requests"):
            plan = _planned(options, inputs, provenance_of(inputs, options.output or DEFAULT_OUTPUT))
    except (BackendError, UnsupportedProblemError) as error:
        hint = f"The default, {DEFAULT_SOLVER}, takes every job."
        raise InputError(str(error), where=f"--solver {options.solver}", hint=hint) from None
    if options.output is not None:
        plan.save(options.output)
    _note_limitations(plan)
    return plan


def plan_problem(
    problem: Problem,
    *,
    limits: Limits | None = None,
    output: PathText | None = None,
    objective: str | None = None,
    **more: Any,
) -> Plan:
    """Plan a problem, or a file of requests.

    A file takes the options of ``batchbound plan`` as keywords; its plan is saved only if ``output`` names a
    file.

    Parameters
    ----------
    problem
        Problem, or file of prompts, table of lengths, or generator such as ``table3:0``.
    limits
        Stopping criteria of the search, for a problem.
    output
        File of the plan.
    objective
        ``makespan`` (default), ``total``, ``first:K`` or ``groups:K``, as of the command.
    more
        Other arguments of :func:`batchbound.make_plan`, for a problem.

    Raises
    ------
    InputError
        If the requests cannot be read, or an option has no effect.
    """
    check_type("problem", problem, Problem, hint="a Problem, or the path of a file of requests")
    check_type("limits", limits, Limits, type(None), hint="Limits(seconds=...)")
    aim = None if objective is None else Objective.of(objective)
    if aim is None:
        plan = make_plan(problem, limits=limits, **more)
    else:
        plan = make_aimed_plan(problem, aim, limits=limits, **more)
    if output is not None:
        plan.save(output)
    return plan


plan = Either(plan_file, plan_problem)


def plan_for_any(options: PlanOptions) -> Plan | EnginePlan:
    """Return a plan for batchbound's engine or another, as the options say."""
    return plan_file.of(options) if options.engine is None else plan_for_engine.of(options)


def _read(options: PlanOptions) -> Inputs:
    with working(f"reading {options.workload}"), opened_once():
        alone = options.replicas in (None, "1")
        inputs = read_inputs(
            options, options.workload, keep_arrivals=False, says_costs=False, one_engine=alone
        )
    if inputs.job.workload.arrival.any():
        note("arrival times are ignored: a plan has every request at the start")
    if options.tokenizer is None and options.model is None and inputs.job.records:
        note("such a plan runs on no model with a tokenizer of its own: plan with --model MODEL to run it")
    if options.model is not None:
        other = other_model(inputs.job.records or (), model_names(options.model))
        if other is not None:
            where = f"{options.workload}, line {other.line}, field 'body.model'"
            note(f"{where}: {shown(other.model)} is not {options.model}: run the plan with --any-model")
    return inputs


def _note_limitations(plan: Plan) -> None:
    """Note a missing compiled search, a solver's message and extrapolated costs."""
    if plan.maker.solver == DEFAULT_SOLVER and compiled_core() is None:
        note("no compiled search is installed: install a C++ compiler, then batchbound again")
    if plan.followed is not None:
        note(
            f"the plan follows {plan.followed.policy}, which evicts {plan.followed.evictions:,} requests and"
            f" takes {plan.seconds:,.3f} s; the best schedule found without evictions takes"
            f" {plan.makespan:,.3f} s"
        )
    if plan.maker.message:
        note(f"{plan.maker.solver}: {plan.maker.message}")
    for place in _beyond(plan):
        note(f"the cost model extrapolates: {place}; `batchbound profile` measures it")


def _beyond(plan: Plan) -> tuple[str, ...]:
    """Return the ways in which a plan leaves the measured grid."""
    calibrated, fleet = calibration_of(plan), plan.fleet
    if calibrated is None:
        return ()
    held = int(fleet.kv_token_steps.sum()) / max(1, int(fleet.decode_steps.sum()))
    slots = max(replica.slots for replica in fleet.replicas)
    return calibrated.beyond(slots, int(plan.workload.input_tokens.max()), held)


def _planned(options: PlanOptions, inputs: Inputs, provenance: Provenance) -> Plan:
    """Return the plan for the options; raise PlanningError without one."""
    limits, stated = options.limits, options.length_error
    error = None if stated is None else parse_prediction_error(stated)
    if options.replicas is not None:
        fleet = fleet_of(inputs.problem, options.replicas, inputs.prompts)
        groups: Groups = options.groups or "any"
        if error is None:
            return make_fleet_plan(
                fleet, groups=groups, rule=options.dispatch, limits=limits, provenance=provenance
            )
        return make_robust_fleet_plan(
            fleet,
            error,
            groups=groups,
            rule=options.dispatch,
            longest=_longest(inputs),
            seed=limits.seed,
            provenance=provenance,
        )
    problem, others, start = inputs.problem, [], None
    if (aim := options.aim) is not None:
        if inputs.job.lengths.kind == "cap":
            raise unknown_lengths(options.workload)
        try:
            return make_aimed_plan(problem, aim, limits=limits, provenance=provenance)
        except ValueError as failure:
            hint = "Ask for fewer of them."
            raise InputError(str(failure), where="--objective", hint=hint) from None
    if options.slots == "auto":
        trials = _choose(inputs, limits)
        problem, start = replace(problem, slots=trials[0].slots), trials[0].schedule
        others = [trial.slots for trial in trials[1:COMPARED_SLOTS]]
    if error is None:
        return make_plan(
            problem,
            solver=options.solver,
            limits=limits,
            start=start,
            params=_search_params(options),
            provenance=provenance,
        )
    return make_robust_plan(
        problem,
        error,
        longest=_longest(inputs),
        slots=others,
        solver=options.solver,
        limits=limits,
        provenance=provenance,
    )


def _search_params(options: PlanOptions) -> SearchParams | None:
    return None if options.params is None else SearchParams.from_file(options.params)


def _choose(inputs: Inputs, limits: Limits) -> tuple[SlotTrial, ...]:
    problem, measured = inputs.problem, inputs.cost_source.get("slots_grid")
    if problem.kv_capacity is None:
        raise InputError(
            "--slots auto needs the KV capacity: without a limit, more slots always look better",
            hint="Give --cost FILE of `batchbound profile`, --kv-capacity TOKENS, or a number of slots.",
        )
    # Costs are unknown beyond the measured numbers of slots.
    most = max(measured) if isinstance(measured, list | tuple) and measured else None
    trials = choose_slots(problem, seconds=limits.seconds or 1.0, seed=limits.seed, most=most)
    tried = ", ".join(f"{t.slots} ({t.makespan:,.2f} s)" for t in sorted(trials, key=lambda t: t.slots))
    note(f"slots tried: {tried}")
    return trials


def _longest(inputs: Inputs) -> IntArray | None:
    records = inputs.job.records
    stated = [record.max_tokens for record in records] if records else [None] * len(inputs.problem)
    caps = inputs.job.lengths.capped(stated)
    return np.array([cap or LONGEST for cap in caps], dtype=np.int64) if any(caps) else None
