"""Report a plan or a finished run from their files, and draw it."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .auditing import Audit, audit
from .cost_cache import costs_of
from .data.files.disk import InputError
from .data.files.kinds import is_of_kind
from .data.files.outputs import can_be_made_again
from .data.files.record import record
from .data.iteration_plan import KIND, IterationPlan
from .data.plan import Plan
from .data.problem import ProblemError
from .data.readers.completions import Endings
from .data.readers.server_run import ServerRun
from .data.report import Report
from .data.trace import PLANNED, Trace
from .executor.reports.report import simulated
from .gain import KEPT, Gain, gain_of, gain_of_fleet
from .heuristics.simulate import simulate
from .judging import calibration_of, may_share
from .judging import report as report_of
from .listening import note
from .options.judging import ReportOptions
from .options.option import Either, PathText, takes
from .run_job.earlier import trace_of_plan
from .run_job.outputs import run_trace, shared_plan_path, trace_paths

if TYPE_CHECKING:
    from .executor.reports.gantt import Panel

MOST_PANELS = 32


@dataclass(frozen=True, slots=True)
class Reported:
    """Report of a plan or of a run.

    traces: Trace of each replica, simulated for a plan.
    gain: Gain of a run; None for a plan.
    endings: Endings of the run's completions, if its trace has them.
    """

    plan: Plan
    traces: tuple[Trace, ...]
    report: Report
    gain: Gain | None
    endings: Endings | None

    @property
    def gain_cells(self) -> list[tuple[str, str, str, str, str]]:
        """Cells of the end screen's lines; none without a gain."""
        lines = [] if self.gain is None else self.gain.lines(repeats=False)
        counts = [
            ("", "")
            if line.course is None
            else (f"{line.course.decode_steps:,}", f"{line.course.prefill_stages:,}")
            for line in lines
        ]
        return [
            (line.name, steps, stages, line.duration, line.note)
            for line, (steps, stages) in zip(lines, counts, strict=True)
        ]

    @property
    def model(self) -> str:
        """Model of the run."""
        return str(self.traces[0].engine.get("model", "the model"))


@dataclass(frozen=True, slots=True)
class ReportedServers:
    """A plan for servers, and the audit of its run, if it ran."""

    path: PathText
    plan: IterationPlan
    trace: PathText | None
    audit: Audit | None


@takes(ReportOptions)
def report_file(options: ReportOptions) -> Reported | ReportedServers:
    """Report a plan or a run, and draw it.

    It takes the options of ``batchbound report`` as keywords.
    """
    for picture in options.gantt:
        if Path(picture).suffix not in (".png", ".svg"):
            raise InputError("a picture is .png or .svg", file=picture, hint="Name a .png or .svg file.")
    path = _newest() if options.plan is None else str(options.plan)
    own, trace = trace_of_plan(path), None if options.trace is None else str(options.trace)
    if trace is None and own is not None and own.exists():
        trace = str(own)
    if is_of_kind(path, KIND):
        return _of_servers(options, path, trace)
    plan = _plan_of(path, trace)
    count = len(plan.fleet.replicas)
    if options.gantt and count > MOST_PANELS:
        message = f"{count} replicas do not fit into one picture of at most {MOST_PANELS}"
        raise InputError(message, file=path, hint="Use --perfetto.")
    paths = _traces_of(plan, trace)
    page = options.html if options.html is not None and Path(options.html).suffix == ".html" else None
    if page is not None and not options.overwrite and can_be_made_again(page):
        note(f"{page}: replacing the earlier page")
        options.check_outputs("gantt", "perfetto", read=[path, *paths])
    else:
        options.check_outputs("html", "gantt", "perfetto", read=[path, *paths])
    try:
        planned = simulated(plan)
    except InputError as error:
        raise InputError(str(error), file=path) from None
    traces = tuple(Trace.load(path) for path in paths) or planned
    judged = _judged(path, plan, paths, traces)
    measured = bool(paths) and judged.clock == "measured"
    if not paths:
        stem = Path(path).name.removesuffix(".plan.json")
        journal = next(Path(path).parent.glob(f"{glob.escape(stem)}.*.journal"), None)
        which = (
            "no run is named or in its folder" if journal is None else f"its run has not ended ({journal})"
        )
        note(f"{path}: {which}; these are the plan's own figures, simulated")
    endings = Endings.of(traces[0].engine.get("endings"))
    reported = Reported(plan, traces, judged, _gain_of(plan, traces) if measured else None, endings)
    _draw(options, reported, planned if paths else None)
    return reported


report = Either(report_file, report_of)


def _draw(options: ReportOptions, reported: Reported, planned: Sequence[Trace] | None) -> None:
    """Write the pictures; ``planned`` are the traces of the plan of a run."""
    from .executor.reports.gantt import Panel, save_gantt
    from .executor.reports.page import save_page
    from .executor.reports.perfetto import save_perfetto

    plan, judged, traces = reported.plan, reported.report, reported.traces
    replicas = plan.fleet.replicas
    panels = [
        Panel.of(f"Replica {k}", replicas[k].cost, trace, share)
        for k, (trace, share) in enumerate(zip(traces, judged.replicas, strict=False))
        if share is not None
    ]
    if len(replicas) == 1:
        first = planned or traces
        panels = [Panel("Plan", first[0], report_of(plan, first))]
        panels += [Panel.of("Run", plan.problem.cost, traces[0], judged)] if planned else []
    for picture in options.gantt:
        save_gantt(picture, *panels)
        note(f"drew {picture}")
    if options.html is not None:
        shown = panels[::-1] if len(replicas) == 1 else panels
        shown += _first_come_panel(plan, traces, judged)
        save_page(options.html, judged, shown, reported.gain_cells)
        note(f"wrote {options.html}: open it in a browser")
    if options.perfetto is not None:
        save_perfetto(options.perfetto, traces)
        note(f"wrote {options.perfetto}: open it in ui.perfetto.dev")


def _first_come_panel(plan: Plan, traces: Sequence[Trace], judged: Report) -> list[Panel]:
    """Return first come, first served on the completions of a whole run on one replica; else nothing."""
    from .executor.reports.gantt import Panel

    if len(traces) != 1 or judged.resumed or judged.clock == "model":
        return []
    tokens = dict(zip(traces[0].ids, traces[0].tokens.tolist(), strict=True))
    true = np.array([tokens[name] for name in plan.workload.ids.tolist()])
    try:
        problem = replace(plan.problem, workload=plan.workload.with_output_tokens(true))
    except ProblemError:
        return []  # a completion outgrew a limit of the plan
    trace = simulate(problem, "fcfs")
    return [Panel.of("First come, first served", problem.cost, trace, report_of(plan, (trace,)))]


def _gain_of(plan: Plan, traces: Sequence[Trace]) -> Gain | None:
    """Return the gain of a run without an execution configuration, as it was kept or computed now."""
    if plan.configuration is not None:
        return None
    if (kept := traces[0].engine.get(KEPT)) is not None:
        return record(Gain, kept)
    if len(traces) > 1:
        return gain_of_fleet(plan.fleet, traces, shared=may_share(plan, traces))
    costs = costs_of(traces[0])
    return gain_of(plan.fleet, traces[0], cost=None if costs is None else costs.cost)


def _newest() -> str:
    plans = [*Path().glob("plan.json"), *Path().glob("*.plan.json")]
    return str(max(plans, key=lambda path: path.stat().st_mtime)) if plans else "plan.json"


def _of_servers(options: ReportOptions, path: str, named: str | None) -> ReportedServers:
    where, hint = "on a plan for servers", "Draw the run with --html."
    options.refuse(("gantt", "perfetto"), where, hint, file=path)
    plan = IterationPlan.load(path)
    trace = named or ("trace.jsonl" if is_of_kind("trace.jsonl", "batchbound_server_run") else None)
    if trace is not None and (strangers := _strangers(plan, trace)):
        what = f"{trace}: the run of {strangers}, which {path} does not plan"
        if named is not None:
            raise InputError(what, hint="Name the trace of the plan's run.")
        note(f"{what}: left out")
        trace = None
    options.check_outputs("html", read=[path] if trace is None else [path, trace])
    if trace is None:
        if options.html is not None:
            hint = "Name the trace of the run."
            raise InputError("--html draws a run on servers", file=path, hint=hint)
        return ReportedServers(path, plan, None, None)
    audited = audit(trace, batched_tokens=plan.stated_budget)
    if options.html is not None:
        audited.save_html(options.html, Path(trace).name)
        note(f"wrote {options.html}: open it in a browser")
    return ReportedServers(path, plan, trace, audited)


def _strangers(plan: IterationPlan, trace: PathText) -> str:
    """Return the requests of a run that a plan does not have, in words; empty for none."""
    # A number follows the name of a request with several completions.
    names = {str(name) for name in plan.workload.ids.tolist()}
    names |= {name.rsplit("#", 1)[0] for name in names}
    ids = ServerRun.load(trace).ids
    others = [name for name in ids if name not in names]
    if not others:
        return ""
    return f"{others[0]!r}" + (f" and {len(others) - 1:,} other requests" if len(others) > 1 else "")


def _judged(name: PathText, plan: Plan, paths: Sequence[Path], traces: Sequence[Trace]) -> Report:
    """Return a run's report; raise an error that names the file."""
    try:
        calibration_of(plan)
    except InputError as error:
        raise InputError(str(error), file=name) from None
    try:
        return report_of(plan, traces)
    except InputError as error:
        raise InputError(str(error), file=paths[0] if paths else name) from None


def _plan_of(path: PathText, named: str | None) -> Plan:
    plan, trace = Plan.load(path), named or "trace.jsonl"
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
    if named is None:
        return plan  # A trace of another run, found by its default name.
    raise InputError(f"is not of the plan {path}", file=shared, hint="Give the plan that was run.")


def _traces_of(plan: Plan, trace: str | None) -> list[Path]:
    count = len(plan.fleet.replicas)
    if trace is None:
        found = trace_paths("trace.jsonl", count)
        if not is_of_kind(found[0], "batchbound_trace"):
            return []
        ran = Trace.header(found[0]).engine.get(PLANNED)
        if ran not in (None, plan.schedule_digest()):
            note(f"{found[0]}: the run of another plan is left out")
            return []
        return found
    # One replica's name implies the traces of all.
    return trace_paths(run_trace(trace) if count > 1 and Path(trace).exists() else trace, count)
