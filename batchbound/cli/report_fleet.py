"""``batchbound report`` of a plan for several replicas: one gap for the fleet, and what each replica did."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from ..data.files.disk import InputError
from ..data.fleet_plan import FleetPlan, is_fleet_plan
from ..data.plan import Plan
from ..data.trace import Trace
from ..executor.reports.fleet_report import FleetReport, fleet_report, simulated_fleet
from .inputs import refuse_outputs
from .output import note
from .reporting import print_rows

MOST_PANELS = 32
"""Replicas that fit into one picture."""


def trace_paths(trace: str, replicas: int) -> list[Path]:
    """
    Return where the replicas' traces stand.

    Parameters
    ----------
    trace
        What ``run --trace`` names: ``trace.jsonl`` for ``trace.0.jsonl``, ``trace.1.jsonl`` and on.
    replicas
        How many.
    """
    return [Path(trace).with_suffix(f".{k}.jsonl") for k in range(replicas)]


def shared_plan_path(trace: str) -> Path:
    """
    Return where a run on several replicas keeps how it shared out a plan for one.

    Parameters
    ----------
    trace
        What ``run --trace`` names, or one replica's trace.
    """
    return Path(_whole(trace)).with_suffix(".plan.json")


def fleet_plan_of(args: argparse.Namespace) -> FleetPlan | None:
    """
    Return the fleet's plan that ``report`` is about: the one named, or what a run on replicas made of it.

    Parameters
    ----------
    args
        The options of ``report``.

    Returns
    -------
    FleetPlan or None
        None if plan and trace are of one replica.

    Raises
    ------
    InputError
        If what the run kept is of another plan.
    """
    if is_fleet_plan(args.plan):
        return FleetPlan.load(args.plan)
    trace = args.trace or "trace.jsonl"
    shared = shared_plan_path(trace)
    if not shared.exists() or (_whole(trace) == trace and Path(trace).exists()):
        return None
    plan, asked = FleetPlan.load(shared), Plan.load(args.plan).problem.workload
    ours = plan.fleet.workload
    same = (ours.ids.tolist(), ours.output_tokens.tolist()) == (
        asked.ids.tolist(),
        asked.output_tokens.tolist(),
    )
    if same:
        return plan
    if args.trace is None:
        return None  # Left over from another run: nobody named it.
    raise InputError(f"is not of the plan {args.plan}", file=shared, hint="Give the plan that was run.")


def run_report_fleet(args: argparse.Namespace, plan: FleetPlan) -> int:
    """
    Print the report of a fleet's plan, or of its run, and draw what was asked for.

    Parameters
    ----------
    args
        The options of ``report``.
    plan
        The fleet's plan.
    """
    from ..executor.reports.perfetto import save_perfetto

    count = len(plan.fleet.replicas)
    if args.gantt and count > MOST_PANELS:
        message = f"{count} replicas do not fit into one picture of at most {MOST_PANELS}"
        raise InputError(message, file=args.plan, hint="Use --perfetto.")
    paths = _paths(args.trace, count)
    drawn = [*args.gantt, *([] if args.perfetto is None else [args.perfetto])]
    refuse_outputs(drawn, True, [args.plan, *(paths or [])])
    traces = simulated_fleet(plan) if paths is None else tuple(Trace.load(path) for path in paths)
    report = report_of_fleet(plan, traces)
    print_fleet_report(report, as_json=args.json)
    for picture in args.gantt:
        _draw(picture, plan, traces, report)
        note(f"drew {picture}")
    if args.perfetto is not None:
        save_perfetto(args.perfetto, traces)
        note(f"wrote {args.perfetto}: open it in ui.perfetto.dev")
    return 0


def report_of_fleet(plan: FleetPlan, traces: tuple[Trace, ...]) -> FleetReport:
    """
    Return the report of a fleet's run.

    Parameters
    ----------
    plan, traces
        What was run, and what each replica did.

    Raises
    ------
    InputError
        If the traces are of another plan.
    """
    try:
        return fleet_report(plan, traces)
    except ValueError as error:
        raise InputError(str(error), hint="Give the plan that was run.") from None


def print_fleet_report(report: FleetReport, *, as_json: bool) -> None:
    """Print a fleet's report on stdout: as one JSON object, or as a table."""
    if as_json:
        print(json.dumps(report.to_json()))
        return
    from ..executor.reports.fleet_tables import fleet_rows

    print_rows(fleet_rows(report))


def _paths(trace: str | None, count: int) -> list[Path] | None:
    """Return the traces that the user names, those of a run with the default name, or None."""
    if trace is None:
        found = trace_paths("trace.jsonl", count)
        return found if found[0].exists() else None
    # One replica's trace stands for all of them.
    return trace_paths(_whole(trace) if Path(trace).exists() else trace, count)


def _whole(trace: str) -> str:
    """Return the name that ``run --trace`` was given, by the name of one replica's trace."""
    return re.sub(r"\.\d+(?=\.jsonl$)", "", trace)


def _draw(picture: str, plan: FleetPlan, traces: tuple[Trace, ...], report: FleetReport) -> None:
    from ..executor.reports.gantt import Panel, save_gantt

    panels = [
        Panel.of(f"Replica {k}", plan.fleet.replicas[k].cost, trace, each)
        for k, (trace, each) in enumerate(zip(traces, report.replicas, strict=True))
        if each is not None
    ]
    save_gantt(picture, *panels)
