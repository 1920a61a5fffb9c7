"""Further options of ``plan``: replicas, predicted lengths, slots, devices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..data.arrays import IntArray
from ..data.bound import gap_above
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
from ..solvers.result import Limits
from ..solvers.search.params import SearchParams
from ..solvers.slot_choice import SlotTrial, choose_slots
from ..solvers.solve import DEFAULT_SOLVER, limits_heeded
from .inputs import Inputs, positive, seconds
from .output import note
from .parser import Parser, Rule
from .streams import say

DEFAULT_OUTPUT = "plan.json"
COMPARED_SLOTS = 3
"""Numbers of slots to compare if lengths are uncertain."""


def add_uncertainty(parser: Parser) -> None:
    """Add the options for lengths that are predictions."""
    group = parser.add_argument_group("predicted lengths")
    group.add_argument(
        "--length-error",
        metavar="SD|FILE",
        help="error of predicted lengths: the standard deviation of log(predicted / actual), or a CSV file"
        " with columns predicted and actual; the plan is then the best over sampled lengths, with an interval"
        " of its makespan",
    )


def add_fleet(parser: Parser) -> None:
    """Add the options of a plan for several replicas."""
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas",
        metavar="N|FILE",
        excludes=["--sweep"],
        help="number of engines of one plan, or a JSON file that describes each:"
        ' {"replicas": [{"count": 2}, {"speed": 0.5, "slots": 16, "kv_capacity": 9000, "busy": 3}]}'
        " (--slots and the other limits are each replica's)",
    )
    group.add_argument(
        "--dispatch",
        choices=sorted(RULES),
        needs=["--replicas"],
        help="rule that dispatches requests to replicas: mico, karmarkar-karp, Graham's lpt, round-robin or"
        " hash (default: by the cost of each request and the idle time of the schedules)",
    )
    group.add_argument(
        "--groups",
        choices=("any", "together", "spread"),
        needs=["--replicas", "--sweep"],
        help="placement of a prompt's completions: on any replicas, together on one, or spread over as many"
        " as possible (default any)",
    )


def add_rules(parser: Parser) -> None:
    """Add the cases in which options of ``plan`` have no effect."""
    sweeping = "Leave it out, or --sweep, which writes no plan."
    uncertain = "with --replicas and --length-error: queues are compared"
    solver = "with --solver {solver}"
    parser.rules += [
        Rule(
            ("--length-error", "--for", "--work", "--output", "--overwrite"),
            conflicts=("--sweep",),
            hint=sweeping,
        ),
        Rule(("--solver",), conflicts=("--sweep", "--replicas")),
        Rule(("--slots auto",), when=lambda args: not args.slots and args.sweep, where="with --sweep"),
        Rule(("--slots auto",), when=lambda args: not args.slots and args.replicas, where="with --replicas"),
        Rule(
            ("--work",),
            when=lambda args: not args.slots,
            where="with --slots auto",
            hint="Give --time-limit instead.",
        ),
        Rule(("--threads",), when=lambda args: _ignores(args, "threads"), where=solver),
        Rule(("--time-limit",), when=lambda args: args.slots and _ignores(args, "seconds"), where=solver),
        Rule(("--work",), when=lambda args: _ignores(args, "work"), where=solver),
        Rule(
            ("--seed",),
            # Lengths are drawn with it.
            when=lambda args: args.slots and args.length_error is None and _ignores(args, "seed"),
            where=solver,
        ),
        Rule(
            ("--time-limit", "--work"),
            when=lambda args: args.replicas is not None and args.length_error is not None,
            where=uncertain,
        ),
        Rule(("--params",), conflicts=("--replicas", "--length-error", "--sweep", "--for")),
        Rule(("--params",), when=lambda args: args.solver != DEFAULT_SOLVER, where=solver),
    ]


def _ignores(args: argparse.Namespace, limit: str) -> bool:
    heeded = limits_heeded(args.solver)
    return args.engine is None and (limit not in heeded if limit == "threads" else not heeded)


def add_sweep(parser: Parser) -> None:
    """Add the options of prices and of the sweep."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--price",
        type=seconds,
        metavar="MONEY",
        help="price of one device-hour, with one device per replica; adds the cost of the job",
    )
    group.add_argument(
        "--sweep",
        type=_numbers,
        metavar="N,N,...",
        help="print a table of plans for these numbers of replicas, each with all, half, a quarter and an"
        " eighth of --slots, instead of one plan; --time-limit is for the whole table",
    )


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(positive(part) for part in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text} names a number twice")
    return numbers


def paid(replicas: int, makespan: float, price: float | None) -> dict[str, object]:
    """Return device-hours and their cost, by JSON key."""
    hours = device_hours(replicas, makespan)
    return {"device_hours": hours, "money": None if price is None else price * hours}


def swept(args: argparse.Namespace, inputs: Inputs, limits: Limits) -> list[dict[str, object]]:
    """Return the rows of ``--sweep``, by JSON key."""
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
    say("  replicas   slots      makespan s       bound s      gap   device-hours" + "        money" * priced)
    for row in rows:
        bound, gap = row["bound_s"], row["gap"]
        proven = f"{bound:13,.2f} {gap:8.2%}" if bound is not None else f"{'-':>13} {'-':>8}"
        money = f" {row['money']:12,.2f}" if priced else ""
        say(
            f"  {row['replicas']:8,d} {row['slots']:7,d} {row['makespan_s']:15,.2f} {proven}"
            f" {row['device_hours']:14,.4f}{money}"
        )


def planned(args: argparse.Namespace, inputs: Inputs, limits: Limits, provenance: Provenance) -> Plan:
    """Return the plan for the options; raise PlanningError without one."""
    error = None if args.length_error is None else parse_prediction_error(args.length_error)
    if args.replicas is not None:
        fleet = fleet_of(inputs.problem, args.replicas, inputs.prompts)
        groups: Groups = args.groups or "any"
        if error is None:
            return make_fleet_plan(
                fleet, groups=groups, rule=args.dispatch, limits=limits, provenance=provenance
            )
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
    return None if args.params is None else SearchParams.from_file(args.params)


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
