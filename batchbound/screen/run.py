"""Screen of ``batchbound run``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..data.configuration import PlannedConfiguration, Reached
from ..data.figures import duration, percent
from ..data.files.record import plain
from ..data.plan import KEPT, Plan
from ..data.readers.completions import BatchCompletion, Endings, ended_at_once, read_completions
from ..data.report import Report
from ..data.trace import Trace
from ..gain import Gain
from ..judging import calibration_of
from ..models.exegpt.length_drift import LengthDrift
from ..options.run import TRACE, JobOptions
from ..run_job.earlier import trace_of_plan
from ..run_job.on_servers import errors_path
from ..run_job.outputs import RunFiles
from ..run_job.server_result import ServerResult
from ..running import Ran
from .gain import command_lines, gain_lines
from .report import show_report
from .server import detail_lines, server_lines
from .streams import say
from .terminal import WRONG_BOUND, is_verbose, note, typed_again, typed_rest, typed_retry, warn


def show(ran: Ran | ServerResult, options: JobOptions) -> int:
    """Print a run's figures; return the exit status."""
    if isinstance(ran, Ran):
        _show_ran(ran)
        failed, count = ran.result.failed, len(ran.result.completions)
    else:
        if _show_servers(ran, options):
            return WRONG_BOUND
        failed, count = ran.failed, ran.requests
    if failed:
        rows = Path(options.answers) if isinstance(ran, Ran) else errors_path(Path(options.answers))
        why = next((row.error for row in read_completions(rows) if row.error is not None), "")
        warn(f"{rows}: {failed} of {count} requests failed; their lines say why, the first: {why}")
    return 1 if failed else 0


def _show_ran(ran: Ran) -> None:
    result, options, gain = ran.result, ran.options, ran.gain
    report, traces, output = result.report, result.traces, options.answers
    if result.finished_before:
        note(f"{output}: this job is finished; --overwrite would serve it again")
    elif not report.requests:
        note(f"{output}: nothing was left to run")
    else:
        warn_of_other_machine(result.plan, traces[0])
        if result.plan.configuration is not None and options.policy is None:
            say_reached(result.plan.configuration, report.reached, traces[0])
    if ran.served:
        source = result.plan.provenance.prompts
        raw = source is not None and source.columns is not None and not source.columns.chat
        note_empty(result.completions, raw=raw)
    if options.json:
        say(
            json.dumps(
                {
                    **report.to_json(),
                    "gain": None if gain is None else plain(gain),
                    "endings": result.endings.facts(),
                }
            )
        )
    elif gain is not None:
        _show_gain(gain, ran)
    elif ran.served:
        _show_run(ran)
    if ran.served and not options.json:
        _say_cut(result.endings)
    digest = traces[0].engine.get("digest")
    if digest is not None and not options.json:
        say(f"digest of tokens and log-probabilities: {digest}")


def _show_gain(gain: Gain, ran: Ran) -> None:
    result, options = ran.result, ran.options
    rerun = typed_again("--overwrite") if ran.repeats else None
    resumed = result.report.resumed - result.failed
    if resumed > 0:
        say(f"{options.answers}: {gain.requests:,} completions after {resumed:,} from before")
    planned = result.plan.provenance.lengths.get("kind") in ("known", "completions")
    for line in gain_lines(gain, str(options.model), rerun, planned=planned, repeats=result.report.repeats):
        say(line)
    files = f"{options.answers}, {result.files.traces[0]}"
    usual = (trace_of_plan(options.plan), Path(TRACE))
    trace = "" if result.files.traces[0] in usual else f" {result.files.traces[0]}"
    details = f"details: batchbound report {options.plan}{trace}"
    for line in [f"{files}   {details}"] if len(files) + len(details) < 78 else [files, details]:
        say(line)
    _say_shared(result.files)


def _say_shared(files: RunFiles) -> None:
    """Print the files that the replicas of a run have in common."""
    if files.picture is not None:
        say(f"{files.picture}: all replicas, for ui.perfetto.dev")
    if files.shared is not None:
        say(f"{files.shared}: the plan of each replica")


def _show_run(ran: Ran) -> None:
    result, options = ran.result, ran.options
    report, files, traces = result.report, result.files, result.traces
    # Failed requests are in no trace either; they are reported separately.
    resumed = report.resumed - result.failed
    before = f" after {resumed:,} from before" if resumed > 0 else ""
    where = f" from {len(traces)} replicas" if len(traces) > 1 else ""
    say(f"{options.answers}: {report.requests:,} completions{before}{where} {run_line(report)}")
    if len(traces) > 1:
        show_report(report, as_json=False)
    say(f"{files.traces[0]}: loss by cause: `batchbound report {options.plan} {files.traces[0]}`")
    _say_shared(files)


def warn_of_other_machine(plan: Plan, trace: Trace) -> None:
    """Note that a plan's costs are of another machine or model."""
    calibrated = calibration_of(plan)
    if calibrated is None:
        name = plan.provenance.cost_source.get("name", "unknown")
        if plan.provenance.assumes_costs:
            return  # assumed costs predict no seconds
        note(
            f"the plan's cost model ({name}) was not measured on this machine, so its seconds are not this"
            " run's: measure with `batchbound profile`, then `plan --cost`"
        )
        return
    different = calibrated.differences(trace.engine)
    if different and plan.provenance.cost_source.get("name") == KEPT:
        note("the costs kept by an earlier run are of another engine: this run's own are kept for the next")
    elif different:
        note(f"the plan's cost model is of another machine or model: {'; '.join(different)}")


def note_empty(completions: Sequence[BatchCompletion], *, raw: bool) -> None:
    """Note that most completions are empty, and why they may be."""
    empty = ended_at_once(completions)
    if 2 * empty <= len(completions):
        return
    why = (
        "texts were sent as they are; without --raw each is a user's message"
        if raw
        else "see its chat template"
    )
    note(f"{empty:,} of {len(completions):,} completions are empty: the model ended them at once; {why}")


def _say_cut(endings: Endings | None) -> None:
    """Print how many completions were cut, and the command that repeats them under a higher cap."""
    if endings is None or endings.line is None:
        return
    say(endings.line)
    if endings.retry is not None:
        for line in command_lines("  all under a higher cap:", typed_retry(endings.retry)):
            say(line)


def run_line(report: Report) -> str:
    """Return a run's seconds and gap in one line."""
    took = duration(report.makespan)
    pace = (
        "" if report.pace is None else f" ({report.pace:.2f} x the cost model's seconds in the median stage)"
    )
    if report.run_gap is None or report.run_bound is None:
        return f"in {took}{pace}; it has no bound"
    model, bound = duration(report.model_makespan), duration(report.run_bound)
    gap = percent(report.run_gap, 2)
    return f"in {took}{pace}; {model} by the model, {gap} above the proven bound of {bound}"


def _show_servers(result: ServerResult, options: JobOptions) -> bool:
    """Print a server run's figures; return whether its bound is wrong."""
    output, times, run = options.answers, options.times, result.run
    if not result.finished_before and 2 * int((run.completion_tokens <= run.choices).sum()) > len(run):
        note_empty(read_completions(output), raw=options.raw)
    if result.finished_before and result.failed:
        left = "1 row has" if result.failed == 1 else f"{result.failed:,} rows have"
        note(f"{output}: {left} no completion; the same command without --retry sends what is left")
    elif result.finished_before:
        note(f"{output}: this job is finished; --overwrite would serve it again")
    elif not len(run):
        expired = f"the deadline expired before {'another' if result.resumed else 'any'} completion"
        note(f"{output}: {expired if result.failed else 'every request already has its completion'}")
    if not options.json and not len(run):
        _say_rest(result)
    if not options.json and (result.finished_before or not len(result.run)):
        return False
    figures = result.figures(note) | {"output": output}
    wrong = bool(figures.get("bound_is_wrong"))
    if options.json:
        say(json.dumps(figures))
        return wrong
    if run.only_part is not None:
        say(f"{output}: {run.only_part}")
    servers = options.server[0] if len(options.server) == 1 else f"{len(options.server)} servers"
    lines = server_lines(
        figures | {"slots": result.run.slots},
        servers,
        typed_again("--overwrite") if result.repeats else None,
        planned=result.lengths_known,
    )
    for line in lines + (detail_lines(figures) if is_verbose() else []):
        say(line)
    _say_rest(result)
    _say_cut(Endings.of(result.run.endings))
    files, details = f"{output}, {times}", f"details: batchbound audit {times}"
    for line in [f"{files}   {details}"] if len(files) + len(details) < 78 else [files, details]:
        say(line)
    return wrong


def _say_rest(result: ServerResult) -> None:
    """Print how many rows lack a completion, and the command that sends them."""
    if result.failed:
        rows = f"{result.failed:,} of {result.requests:,} rows {'has' if result.failed == 1 else 'have'}"
        say(f"{rows} no completion")
        for line in command_lines("  next:", typed_rest()):
            say(line)


def say_reached(configuration: PlannedConfiguration, reached: Reached | None, trace: Trace) -> None:
    """Note a run's throughput, latency and lengths against the plan.

    reached: Figures of the run; None if it was too short for a steady state.
    """
    if reached is None:
        note("the run was too short to reach its steady state: nothing to compare with the plan")
    else:
        note(
            f"{configuration.strategy}: {reached.throughput:.2f} requests/s in the steady state, planned"
            f" {reached.planned_throughput:.2f} ({reached.error:+.1%}); 99 % took at most"
            f" {reached.latency:.3f} s, planned {reached.planned_latency:.3f} s"
        )
        _say_speed(reached)
    drift = LengthDrift.of(configuration, np.maximum(1, trace.tokens - 1))
    if drift.drifted:
        decode_steps = (
            f" (and --encode-batch {configuration.encode_batch}, to change the decode steps alone)"
            if not configuration.handed_over
            else ""
        )
        note(f"{drift}: search again with --lengths completions:FILE{decode_steps}")


def _say_speed(reached: Reached) -> None:
    if reached.slowdown is not None:
        note(f"the machine was {reached.slowdown:.2f} times slower than while it was profiled")
    if reached.latency_bound is not None:
        met = "met" if reached.bound_met else "missed"
        note(f"the latency bound of {reached.latency_bound:g} s is {met}")
