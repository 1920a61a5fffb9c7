"""``batchbound plan --replicas``: one plan and one bound for several engines."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from ..data.files.disk import InputError
from ..data.fleet_plan import FleetPlan
from ..data.predictor import prompt_text
from ..planning.fleet import fleet_of, make_fleet_plan
from ..solvers.result import Limits
from ..solvers.solve import DEFAULT_SOLVER
from .output import proven_summary, show

if TYPE_CHECKING:
    from .inputs import Inputs
    from .uncertainty import Record


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan for several replicas."""
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas",
        metavar="N|FILE",
        help="plan for so many engines together; or a JSON file that says how they differ:"
        ' {"replicas": [{"count": 2}, {"speed": 0.5, "slots": 16, "kv_capacity": 9000, "busy": 3}]}'
        " (--slots and the other limits are each replica's)",
    )
    group.add_argument(
        "--groups",
        choices=("any", "together", "spread"),
        help="answers to one prompt go to any replica, to one, or to as many as there are (default any)",
    )


def refuse_unused(args: argparse.Namespace) -> None:
    """
    Raise InputError if an option of ``plan`` would be passed over: one of the other kind of plan.

    Parameters
    ----------
    args
        The options of ``plan``.
    """
    if args.replicas is None:
        if args.groups is not None:
            raise InputError("--groups says nothing without --replicas", hint="Give --replicas N.")
        return
    single = {
        "--length-error": args.length_error is not None,
        "--slots auto": not args.slots,
        f"--solver {args.solver}": args.solver != DEFAULT_SOLVER,
    }
    for option in (name for name, given in single.items() if given):
        raise InputError(f"{option} plans for one replica", hint="Leave it out, or --replicas.")


def run_plan_fleet(
    args: argparse.Namespace, inputs: Inputs, limits: Limits, record: Record, begun: float
) -> int:
    """
    Make the plan for the replicas that the options of :func:`add_fleet` describe, write it, and show it.

    Parameters
    ----------
    args, inputs
        The options of ``plan``, and what they read.
    limits
        When to stop.
    record
        What the plan records of where its numbers come from.
    begun
        When the command began, on the clock of :func:`time.perf_counter`.

    Raises
    ------
    InputError
        If the replicas' file is wrong.
    PlanningError
        If no plan came out.
    """
    records = inputs.job.records or ()
    fleet = fleet_of(inputs.problem, args.replicas, [prompt_text(entry) for entry in records])
    plan = make_fleet_plan(
        fleet,
        groups=args.groups or "any",
        limits=limits,
        lengths=record.lengths,
        cost_source=record.cost_source,
        prompts=record.prompts,
    )
    plan.save(args.output)
    summary = fleet_summary(plan, time.perf_counter() - begun)
    title = f"{args.output}: {len(fleet):,} requests on {len(fleet.replicas)} replicas"
    show(summary, as_json=args.json, title=title)
    return 0


def fleet_summary(plan: FleetPlan, seconds: float) -> dict[str, object]:
    """
    Return what there is to say about a fleet's plan, by the names that programs know.

    Parameters
    ----------
    plan, seconds
        As of :func:`~batchbound.cli.output.plan_summary`.
    """
    fleet, schedules = plan.fleet, [one for one in plan.schedule.schedules if one is not None]
    return {
        "requests": len(fleet),
        "replicas": len(fleet.replicas),
        "slots": sum(replica.slots for replica in fleet.replicas),
        "replica_ends_s": list(plan.schedule.finishes(fleet)),
        "prefill_stages": sum(one.prefill_stages() for one in schedules),
        "decode_rounds": sum(int(one.rounds.sum()) for one in schedules),
        "output_tokens_per_s": float(fleet.workload.output_tokens.sum()) / plan.makespan,
        **proven_summary(plan, seconds),
    }
