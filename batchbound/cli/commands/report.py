"""``batchbound report``: how far a plan or a run is from the bound, and where the time went."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...data.files.disk import InputError
from ...data.plan import Plan
from ...data.trace import Trace
from ...heuristics.loop import execute
from ...heuristics.replay import Replay
from ...heuristics.simulator import Simulator
from ..inputs import refuse_outputs
from ..output import note
from ..report_fleet import fleet_plan_of, run_report_fleet
from ..reporting import print_report, report_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("plan", nargs="?", default="plan.json", metavar="PLAN", help="default %(default)s")
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="of the run (default: trace.jsonl if it is there; else the plan itself is reported); for a"
        " run on replicas, the name that `run --trace` was given, of which each replica has its own",
    )
    parser.add_argument("--gantt", metavar="FILE", action="append", default=[], help="draw it: .png or .svg")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the report, and draw what was asked for."""
    from ...executor.reports.gantt import Panel, save_gantt
    from ...executor.reports.perfetto import save_perfetto

    for picture in args.gantt:
        if Path(picture).suffix not in (".png", ".svg"):
            raise InputError("a picture is .png or .svg", file=picture, hint="Name it so.")
    fleet_plan = fleet_plan_of(args)
    if fleet_plan is not None:
        return run_report_fleet(args, fleet_plan)
    path = args.trace or ("trace.jsonl" if Path("trace.jsonl").exists() else None)
    drawn = [*args.gantt, *([] if args.perfetto is None else [args.perfetto])]
    refuse_outputs(drawn, True, [args.plan, *([] if path is None else [path])])
    plan = Plan.load(args.plan)
    planned = simulated(plan)
    trace = planned if path is None else Trace.load(path)
    report = report_of(plan, trace)
    print_report(report, as_json=args.json)
    panels = [Panel("Plan", planned, report_of(plan, planned))]
    if path is not None:
        panels.append(Panel.of("Run", plan.problem.cost, trace, report))
    for picture in args.gantt:
        save_gantt(picture, *panels)
        note(f"drew {picture}")
    if args.perfetto is not None:
        save_perfetto(args.perfetto, [trace])
        note(f"wrote {args.perfetto}: open it in ui.perfetto.dev")
    return 0


def simulated(plan: Plan) -> Trace:
    """Return the trace of a plan carried out exactly as planned, at its cost model's pace."""
    return execute(plan.problem, Replay(plan.schedule, plan.problem), Simulator(plan.problem))
