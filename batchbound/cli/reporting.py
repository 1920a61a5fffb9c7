"""Reports of runs that several commands print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..data.plan import Plan
from ..data.readers.completions import BatchCompletion, Endings, ended_at_once, read_completions
from ..data.report import Report
from ..data.trace import Trace
from ..judging import calibration_of
from ..run_job.earlier import ASSUMED
from ..run_job.server_result import ServerResult
from ..screen.gain import command_lines
from ..screen.report import show_report as show_report
from ..screen.server import detail_lines, server_lines
from .output import note, typed_again
from .streams import say

if TYPE_CHECKING:
    pass

FILE_WIDTH = 120
"""Width in columns of a table in a file or a pipe."""


def warn_of_other_machine(plan: Plan, trace: Trace) -> None:
    """Note that a plan's costs are of another machine or model."""
    calibrated = calibration_of(plan)
    if calibrated is None:
        name = plan.provenance.cost_source.get("name", "unknown")
        if name == ASSUMED:
            return  # assumed costs predict no seconds
        note(
            f"the plan's cost model ({name}) was not measured on this machine, so its seconds are not this"
            " run's: measure with `batchbound profile`, then `plan --cost`"
        )
        return
    different = calibrated.differences(trace.engine)
    if different:
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


def say_cut_rows(result: ServerResult) -> None:
    """Print how many completions of servers were cut, and the command that sends them under a higher cap."""
    endings = Endings.of(result.run.endings)
    if endings is None or endings.line is None:
        return
    say(endings.line)
    cap = 2 * int((result.run.completion_tokens // result.run.choices).max(initial=1))
    command = f"{typed_again('--retry')} cut --longest-completion {cap}"
    for line in command_lines("  under a higher cap:", command):
        say(line)


def run_line(report: Report) -> str:
    """Return a run's seconds and gap in one line."""
    from ..executor.reports.tables import duration, percent

    took = duration(report.makespan)
    pace = (
        "" if report.pace is None else f" ({report.pace:.2f} x the cost model's seconds in the median stage)"
    )
    if report.run_gap is None or report.run_bound is None:
        return f"in {took}{pace}; it has no bound"
    model, bound = duration(report.model_makespan), duration(report.run_bound)
    gap = percent(report.run_gap, 2)
    return f"in {took}{pace}; {model} by the model, {gap} above the proven bound of {bound}"


def show_server(result: ServerResult, args: argparse.Namespace) -> bool:
    """Print a server run's figures; return whether its bound is wrong."""
    output, run = args.output, result.run
    if not result.finished_before and 2 * int((run.completion_tokens <= run.choices).sum()) > len(run):
        note_empty(read_completions(output), raw=args.raw)
    if result.finished_before:
        note(f"{output}: this job is finished; --overwrite would serve it again")
    elif not len(result.run):
        note(f"{output}: every request already has its completion")
    if not args.json and (result.finished_before or not len(result.run)):
        return False
    figures = result.figures(note) | {"output": output}
    wrong = bool(figures.get("bound_is_wrong"))
    if args.json:
        say(json.dumps(figures))
        return wrong
    if result.resumed:
        say(f"{output}: {len(result.run):,} requests after {result.resumed:,} from before")
    servers = args.server[0] if len(args.server) == 1 else f"{len(args.server)} servers"
    lines = server_lines(
        figures | {"slots": result.run.slots},
        servers,
        typed_again("--overwrite") if result.repeats else None,
        planned=result.lengths_known,
    )
    for line in lines + (detail_lines(figures) if args.verbose else []):
        say(line)
    say_cut_rows(result)
    files, details = f"{output}, {args.trace}", f"details: batchbound audit {args.trace}"
    for line in [f"{files}   {details}"] if len(files) + len(details) < 78 else [files, details]:
        say(line)
    return wrong
