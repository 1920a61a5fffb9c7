"""The options of ``plan`` beside the problem's: replicas, predicted lengths, slots, the engine it is for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..data.bound import gap_above
from ..data.costs.cost import IntArray
from ..data.files.disk import InputError
from ..data.fleet import Groups
from ..data.lengths.prediction_error import parse_prediction_error
from ..data.plan import Plan, Provenance
from ..data.workload import LONGEST
from ..heuristics.dispatch import RULES
from ..planning.fleet import fleet_of, make_fleet_plan, make_robust_fleet_plan
from ..planning.plan import make_plan
from ..planning.sweep import device_hours, slots_to_try, sweep
from ..planning.uncertain import make_robust_plan
from ..solvers.params import ParamsError, SearchParams
from ..solvers.result import Limits
from ..solvers.slot_choice import SlotTrial, choose_slots
from ..solvers.solve import DEFAULT_SOLVER, limits_heeded
from .inputs import Inputs, positive, refuse_given, seconds
from .output import note

DEFAULT_OUTPUT = "plan.json"
COMPARED_SLOTS = 3
"""Numbers of slots that are compared when the lengths are uncertain as well."""


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


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan for several replicas."""
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas",
        metavar="N|FILE",
        help="plan for several engines together: their number, or a JSON file that says how they differ:"
        ' {"replicas": [{"count": 2}, {"speed": 0.5, "slots": 16, "kv_capacity": 9000, "busy": 3}]}'
        " (--slots and the other limits are each replica's)",
    )
    group.add_argument(
        "--dispatch",
        choices=sorted(RULES),
        help="share the requests out by this rule: MICO's, Karmarkar and Karp's, Graham's (lpt), in turn or"
        " by hash (default: by what each costs, and what the replicas' schedules lose)",
    )
    group.add_argument(
        "--groups",
        choices=("any", "together", "spread"),
        help="completions of one prompt go to any replica, to one, or to as many as there are (default any)",
    )


def refuse_unused(args: argparse.Namespace) -> None:
    """Raise InputError if an option of ``plan`` has no effect beside the others."""
    if args.sweep is not None:
        _refuse_beside_sweep(args)
    elif args.replicas is None:
        refuse_given(args, ("groups", "dispatch"), "without --replicas", "Give --replicas N.")
    if args.engine is None:
        _refuse_beside_solver(args)
    if args.replicas is None:
        return
    single = {
        "--slots auto": not args.slots,
        f"--solver {args.solver}": args.solver != DEFAULT_SOLVER,
    }
    for option in (name for name, given in single.items() if given):
        raise InputError(f"{option} plans for one replica", hint="Leave it out, or --replicas.")


def _refuse_beside_solver(args: argparse.Namespace) -> None:
    """Raise InputError if an option is given that the solver does not heed."""
    heeded = limits_heeded(args.solver)
    unheeded = {"--threads": args.threads != 1 and "threads" not in heeded}
    if args.slots and not heeded:
        unheeded |= {
            "--time-limit": args.time_limit is not None,
            "--work": args.work is not None,
            # Lengths are drawn with it.
            "--seed": args.seed != 0 and args.length_error is None,
        }
    for option in (name for name, given in unheeded.items() if given):
        raise InputError(f"{option} has no effect on the solver {args.solver}", hint="Leave it out.")


def _refuse_beside_sweep(args: argparse.Namespace) -> None:
    beside = {
        "--replicas": args.replicas is not None,
        "--dispatch": args.dispatch is not None,
        "--length-error": args.length_error is not None,
        "--for": args.engine is not None,
        "--slots auto": not args.slots,
        "--work": args.work is not None,
        "--output": args.output != DEFAULT_OUTPUT,
        "--overwrite": args.overwrite,
        f"--solver {args.solver}": args.solver != DEFAULT_SOLVER,
    }
    for option in (name for name, given in beside.items() if given):
        raise InputError(
            f"{option} has no effect beside --sweep, which writes no plan",
            hint=f"Leave out {option} or --sweep.",
        )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a plan is paid for, and that compare numbers of devices."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--price",
        type=seconds,
        metavar="MONEY",
        help="of an hour of a device, one per replica: says what it costs",
    )
    group.add_argument(
        "--sweep",
        type=_numbers,
        metavar="N,N,...",
        help="instead of one plan, a table for these numbers of replicas, each with --slots and its halves"
        " down to an eighth; the time limit is for all together",
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Return different whole numbers of at least one, for argparse."""
    numbers = tuple(positive(part) for part in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text} names a number twice")
    return numbers


def paid(replicas: int, makespan: float, price: float | None) -> dict[str, object]:
    """Return device-hours, and what they cost where the price of one is known, by programs' names."""
    hours = device_hours(replicas, makespan)
    return {"device_hours": hours, "money": None if price is None else price * hours}


def swept(args: argparse.Namespace, inputs: Inputs, limits: Limits) -> list[dict[str, object]]:
    """Return the table of ``--sweep``, a row for each number of replicas and slots, by programs' names."""
    points = sweep(
        inputs.problem,
        slots_to_try(inputs.problem.slots),
        args.sweep,
        limits=limits,
        groups=args.groups or "any",
        prompts=inputs.prompts,
    )
    return [
        {
            "replicas": point.replicas,
            "slots": point.slots,
            "makespan_s": point.makespan,
            "bound_s": point.bound,
            "gap": gap_above(point.makespan, point.bound),
            **paid(point.replicas, point.makespan, args.price),
        }
        for point in points
    ]


def show_sweep(rows: Sequence[Mapping[str, object]]) -> None:
    """Print the table of ``--sweep``."""
    priced = rows[0]["money"] is not None
    print(
        "  replicas   slots      makespan s       bound s      gap   device-hours" + "        money" * priced
    )
    for row in rows:
        bound, gap = row["bound_s"], row["gap"]
        proven = f"{bound:13,.2f} {gap:8.2%}" if bound is not None else f"{'-':>13} {'-':>8}"
        money = f" {row['money']:12,.2f}" if priced else ""
        print(
            f"  {row['replicas']:8,d} {row['slots']:7,d} {row['makespan_s']:15,.2f} {proven}"
            f" {row['device_hours']:14,.4f}{money}"
        )


def planned(args: argparse.Namespace, inputs: Inputs, limits: Limits, provenance: Provenance) -> Plan:
    """
    Return the plan for what the options say: replicas, known or predicted lengths, a number of slots or ours.

    Raises
    ------
    InputError
        If the options do not go together, or the replicas or the prediction error cannot be read.
    PlanningError
        If no plan came out.
    """
    error = None if args.length_error is None else parse_prediction_error(args.length_error)
    if args.replicas is not None:
        fleet = fleet_of(inputs.problem, args.replicas, inputs.prompts)
        groups: Groups = args.groups or "any"
        if error is None:
            return make_fleet_plan(
                fleet, groups=groups, rule=args.dispatch, limits=limits, provenance=provenance
            )
        where = "with --replicas and --length-error: queues are compared"
        refuse_given(args, ("time_limit", "work"), where, "Leave it out.")
        return make_robust_fleet_plan(
            fleet,
            error,
            groups=groups,
            rule=args.dispatch,
            longest=_longest(inputs),
            seed=limits.seed,
            provenance=provenance,
        )
    problem, others, start = inputs.problem, [], None
    if not args.slots:
        trials = _choose(inputs, limits)
        problem, start = replace(problem, slots=trials[0].slots), trials[0].schedule
        others = [trial.slots for trial in trials[1:COMPARED_SLOTS]]
    if error is None:
        return make_plan(
            problem,
            solver=args.solver,
            limits=limits,
            start=start,
            params=_search_params(args),
            provenance=provenance,
        )
    return make_robust_plan(
        problem,
        error,
        longest=_longest(inputs),
        slots=others,
        solver=args.solver,
        limits=limits,
        provenance=provenance,
    )


def _search_params(args: argparse.Namespace) -> SearchParams | None:
    """Return the parameters of a file, or None without one."""
    if args.params is None:
        return None
    try:
        return SearchParams.from_file(args.params)
    except ParamsError as error:
        raise InputError(str(error)) from None


def _choose(inputs: Inputs, limits: Limits) -> tuple[SlotTrial, ...]:
    problem, measured = inputs.problem, inputs.cost_source.get("slots_grid")
    if problem.kv_capacity is None:
        raise InputError(
            "--slots auto needs to know the memory: without it, more slots always look better",
            hint="Give --cost FILE of `batchbound profile`, --kv-capacity TOKENS, or a number of slots.",
        )
    # Beyond the slots that were measured the costs are not known.
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
