"""``batchbound report``: print the gap and the losses of a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...auditing import audit
from ...cost_cache import costs_of
from ...data.files.disk import InputError
from ...data.files.kinds import is_of_kind
from ...data.files.outputs import can_be_made_again
from ...data.iteration_plan import KIND, IterationPlan
from ...data.plan import Plan
from ...data.readers.completions import Endings
from ...data.report import Report
from ...data.trace import Trace
from ...executor.reports.report import simulated
from ...gain import gain_of
from ...gain_screen import gain_lines
from ...judging import calibration_of
from ...judging import report as report_of
from ...run_job.earlier import trace_of_plan
from ...run_job.outputs import run_trace, shared_plan_path, trace_paths
from ...screen.audit import show_tables
from ..inputs import check_outputs, refuse_given
from ..iteration_plan import iteration_summary, show_iterations
from ..output import note
from ..parser import Parser
from ..reporting import show_report
from ..streams import say

MOST_PANELS = 32

OUTPUTS = ("html", "gantt", "perfetto")
"""Options that name files to write."""


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "plan",
        nargs="?",
        metavar="PLAN",
        help="plan (default: the newest plan.json or NAME.plan.json in this folder)",
    )
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="trace of the run; for replicas, the name given to `run --trace` (default: NAME.trace.jsonl for"
        " NAME.plan.json, else trace.jsonl; if neither exists, the report is of the plan alone)",
    )
    parser.add_argument(
        "--gantt",
        metavar="FILE",
        action="append",
        default=[],
        help="draw the schedule as .png or .svg; may be repeated",
    )
    parser.add_argument("--html", metavar="FILE", help="write one page for a browser, with a chart to zoom")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        needs=["--html", "--gantt", "--perfetto"],
        help="replace files that exist",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the report and write its pictures."""
    from ...executor.reports.gantt import Panel, save_gantt
    from ...executor.reports.page import save_page
    from ...executor.reports.perfetto import save_perfetto

    for picture in args.gantt:
        if Path(picture).suffix not in (".png", ".svg"):
            raise InputError("a picture is .png or .svg", file=picture, hint="Name a .png or .svg file.")
    _name_newest(args)
    if is_of_kind(args.plan, KIND):
        return _report_iterations(args)
    plan = _plan_of(args)
    count = len(plan.fleet.replicas)
    if args.gantt and count > MOST_PANELS:
        message = f"{count} replicas do not fit into one picture of at most {MOST_PANELS}"
        raise InputError(message, file=args.plan, hint="Use --perfetto.")
    paths = _traces_of(args.trace, count)
    is_page = args.html is not None and Path(args.html).suffix == ".html"
    if is_page and not args.overwrite and can_be_made_again(args.html):
        note(f"{args.html}: replacing the earlier page")
        check_outputs(args, "gantt", "perfetto", read=paths)
    else:
        check_outputs(args, *OUTPUTS, read=paths)
    planned = simulated(plan)
    traces = tuple(Trace.load(path) for path in paths) or planned
    report = _judged(args.plan, plan, paths, traces)
    if paths and report.clock == "measured" and not args.json:
        _say_gain(plan, traces)
    endings = Endings.of(traces[0].engine.get("endings"))
    if endings is not None and endings.line is not None and not args.json:
        say(endings.line)
    show_report(report, as_json=args.json)
    panels = [
        Panel.of(f"Replica {k}", plan.fleet.replicas[k].cost, trace, each)
        for k, (trace, each) in enumerate(zip(traces, report.replicas, strict=False))
        if each is not None
    ]
    if count == 1:
        panels = [Panel("Plan", planned[0], report_of(plan, planned))]
        panels += [Panel.of("Run", plan.problem.cost, traces[0], report)] if paths else []
    for picture in args.gantt:
        save_gantt(picture, *panels)
        note(f"drew {picture}")
    if args.html is not None:
        save_page(args.html, report, panels[::-1] if count == 1 else panels)
        note(f"wrote {args.html}: open it in a browser")
    if args.perfetto is not None:
        save_perfetto(args.perfetto, traces)
        note(f"wrote {args.perfetto}: open it in ui.perfetto.dev")
    return 0


def _say_gain(plan: Plan, traces: Sequence[Trace]) -> None:
    """Print the end screen of a run on one replica."""
    trace = traces[0]
    if len(traces) > 1 or plan.configuration is not None:
        return
    found = costs_of(trace)
    gain = gain_of(plan.fleet, trace, cost=None if found is None else found.cost)
    if gain is not None:
        model = str(trace.engine.get("model", "the model"))
        for line in gain_lines(gain, model, None, repeats=plan.repeats_in([trace.distinct_tokens])):
            say(line)


def _judged(name: str, plan: Plan, paths: Sequence[Path], traces: Sequence[Trace]) -> Report:
    """Return a run's report; raise an error that names the file."""
    try:
        calibration_of(plan)
    except InputError as error:
        raise InputError(str(error), file=name) from None
    try:
        return report_of(plan, traces)
    except InputError as error:
        raise InputError(str(error), file=paths[0] if paths else name) from None


def _name_newest(args: argparse.Namespace) -> None:
    if args.plan is None:
        plans = [*Path().glob("plan.json"), *Path().glob("*.plan.json")]
        args.plan = str(max(plans, key=lambda path: path.stat().st_mtime)) if plans else "plan.json"
    trace = trace_of_plan(args.plan)
    if args.trace is None and trace is not None and trace.exists():
        args.trace = str(trace)


def _plan_of(args: argparse.Namespace) -> Plan:
    plan = Plan.load(args.plan)
    trace = args.trace or "trace.jsonl"
    shared = shared_plan_path(trace)
    if (
        len(plan.fleet.replicas) > 1
        or not shared.exists()
        or (run_trace(trace) == trace and Path(trace).exists())
    ):
        return plan
    ran = Plan.load(shared)
    ours, asked = ran.workload, plan.workload
    if (ours.ids.tolist(), ours.output_tokens.tolist()) == (asked.ids.tolist(), asked.output_tokens.tolist()):
        return ran
    if args.trace is None:
        return plan  # A trace of another run, found by its default name.
    raise InputError(f"is not of the plan {args.plan}", file=shared, hint="Give the plan that was run.")


def _traces_of(trace: str | None, count: int) -> list[Path]:
    if trace is None:
        found = trace_paths("trace.jsonl", count)
        return found if found[0].exists() else []
    # One replica's name implies the traces of all.
    return trace_paths(run_trace(trace) if count > 1 and Path(trace).exists() else trace, count)


def _report_iterations(args: argparse.Namespace) -> int:
    where, hint = "on a plan for servers", "Draw the run with --html."
    refuse_given(args, ("gantt", "perfetto"), where, hint, file=args.plan)
    plan = IterationPlan.load(args.plan)
    trace = args.trace or ("trace.jsonl" if is_of_kind("trace.jsonl", "batchbound_server_run") else None)
    check_outputs(args, "html", read=[] if trace is None else [trace])
    if trace is None:
        if args.html is not None:
            hint = "Name the trace of the run."
            raise InputError("--html draws a run on servers", file=args.plan, hint=hint)
        summary = iteration_summary(plan)
        if args.json:
            say(json.dumps(summary))
        else:
            say(f"{args.plan}: planned, not run")
            show_iterations(summary)
        return 0
    found = audit(trace, batched_tokens=plan.stated_budget)
    if args.html is not None:
        found.save_html(args.html, Path(trace).name)
        note(f"wrote {args.html}: open it in a browser")
    for assumption in found.assumptions:
        note(assumption)
    if args.json:
        say(json.dumps({"planned": iteration_summary(plan), "run": found.tables}))
        return 0
    say(f"{args.plan}: planned")
    show_iterations(iteration_summary(plan))
    say(f"{trace}: run")
    show_tables(found.tables)
    return 0
