"""``batchbound run``: a plan's requests served on a HuggingFace model."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.files.disk import InputError, WriteError
from ...data.files.kinds import is_of_kind
from ...data.lengths.steps_plan import StepsPlan
from ...data.plan import Plan
from ...heuristics.registry import POLICIES
from ...running.options import RunOptions
from ...running.run import RunResult
from ...running.run import run as run_plan
from ...running.steps import StepsFiles, run_step
from .. import INTERRUPTED
from ..inputs import positive
from ..interrupts import terminating
from ..model import add_model, model_options, silence
from ..output import note, warn
from ..progress import plan_progress, progress
from ..reporting import print_report, run_line, show_server, warn_of_other_machine
from ..rollouts.steps_plan import show_served, show_step
from ..run_configuration import add_workers, say_reached
from ..run_prompts import add_planning, has_prompts, planned_beside, refuse_planning
from ..server_options import add_server, refuse_without_server, server_options

if TYPE_CHECKING:
    from ...data.trace import Stage
    from ...executor.runs.journal import Journal
    from ...executor.runs.plan_clock import Follower


TRACE = "trace.jsonl"
"""Where the trace goes if the user does not say."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "plan",
        nargs="?",
        default="plan.json",
        metavar="PLAN",
        help="or the prompts: the model is measured and they are planned first; of a plan of several steps"
        " the one that is due is served (default %(default)s)",
    )
    parser.add_argument("--prompts", metavar="FILE", help="where the planned prompts are now, if they moved")
    add_model(parser, required=False)
    add_planning(parser)
    add_server(parser)
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="default: the one that counted the plan's prompts"
    )
    parser.add_argument(
        "--any-model",
        action="store_true",
        help="complete every request by the loaded model, whatever model it names",
    )
    choice = parser.add_argument_group("completions")
    choice.add_argument(
        "--pinned",
        action="store_true",
        help="decode every completion to its planned length, whatever its tokens; else it ends at an"
        " end-of-sequence token or its max_tokens",
    )
    choice.add_argument("--temperature", type=float, help="0 is greedy (default: the batch file's, else 0)")
    choice.add_argument("--top-p", type=float, help="default: the batch file's, else 1")
    choice.add_argument("--top-k", type=int, help="default: the batch file's, else off")
    parser.add_argument(
        "--kv-tokens",
        type=positive,
        metavar="N",
        help="most tokens of KV cache on the device; more wait on the host (default: no limit)",
    )
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        metavar="NAME",
        help="serve requests by this policy as they arrive, instead of the plan's schedule;"
        " `simulate --help` lists them",
    )
    parser.add_argument(
        "--replicas",
        type=positive,
        metavar="N",
        help="engines, each a Ray actor (default: as many as the plan is for)",
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="a Ray cluster's (default: this machine)")
    add_workers(parser)
    parser.add_argument(
        "--stall-seconds",
        type=positive,
        default=1800,
        metavar="S",
        help="stop if no stage ends for so long, as a hung device call would have it; a replica of several is"
        " given up after half of it (default %(default)s)",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "record"),
        help="when the model fails on one request (its logits are not finite) or cannot serve it (it is too"
        " long, or names a token that there is not): stop the run, or write an error in the place of its"
        " completion, serve the others and exit with 1 (default: record)",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="answers.jsonl",
        metavar="FILE",
        help="completions: OpenAI's JSONL, or a table if it ends in .parquet; of a plan of several steps"
        " those of the first go to answers.1.jsonl, and so on (default %(default)s)",
    )
    parser.add_argument("--trace", default=TRACE, metavar="FILE", help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument("--json", action="store_true", help="print the whole report as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Serve what has no completion yet, write completions and traces, and print the report."""
    from ...executor.models.faults import RunStoppedError, TerminatedError

    under_way: list[Journal] = []
    try:
        # To its end: outputs that are being written are no better a moment to die without a word.
        with terminating():
            failed, count = _serving(args)(args, under_way)
    except (RunStoppedError, TerminatedError) as error:
        _say_stopped(str(error), under_way)
        return 1
    except WriteError as error:
        if not under_way:
            raise
        _say_stopped(str(error), under_way)
        return 1
    except KeyboardInterrupt:
        if not under_way:
            raise
        _say_stopped("interrupted", under_way)
        return INTERRUPTED
    if failed:
        warn(f"{args.output}: {failed} of {count} requests failed; their lines say why")
    return 1 if failed else 0


def _serving(args: argparse.Namespace) -> Callable[[argparse.Namespace, list[Journal]], tuple[int, int]]:
    """Return what serves the plan, by where and by its kind."""
    if args.server:
        return _on_servers
    return _step_on_model if is_of_kind(args.plan, StepsPlan.JSON_HEADER[0]) else _on_model


def _step_on_model(args: argparse.Namespace, under_way: list[Journal]) -> tuple[int, int]:
    """Serve the step of a plan that is due, and return the requests failed, which are none, and all."""
    from ...executor.runs.watchdog import Watchdog

    refuse_without_server(args)
    refuse_planning(args)
    if args.trace != TRACE:
        raise InputError("--trace has no effect on a plan of several steps", hint="Leave it out.")
    if args.pinned:
        raise InputError(
            "--pinned needs lengths, and the plan has none", file=args.plan, hint="Leave it out."
        )
    silence()

    @contextmanager
    def watching(left: int, journal: Journal) -> Iterator[Callable[[Stage, int], None]]:
        under_way.append(journal)
        _say_kept(journal, args.output, "completions")
        stall = args.stall_seconds
        with (
            Watchdog(stall, lambda: _abandon(journal, stall)) as watchdog,
            progress(left, "requests") as advance,
        ):

            def on_stage(stage: Stage, done: int) -> None:
                watchdog.alive()
                advance(len(journal.finished))

            yield on_stage

    result = run_step(
        args.plan,
        model_options(args),
        replace(_options(args), patience=None),
        output=args.output,
        overwrite=args.overwrite,
        watching=watching,
        remark=note,
    )
    if result is None:
        note(f"{args.plan}: all steps are served; --overwrite begins anew")
        if args.json:
            show_served(StepsFiles(Path(args.output)))
        return 0, 0
    show_step(result, as_json=args.json)
    return 0, len(result.completions)


def _on_model(args: argparse.Namespace, under_way: list[Journal]) -> tuple[int, int]:
    """Carry the plan out on a model, and return the requests failed, and all."""
    refuse_without_server(args)
    if has_prompts(args):
        args.plan = str(planned_beside(args))
    else:
        refuse_planning(args)
    silence()

    @contextmanager
    def watching(plan: Plan, journal: Journal) -> Iterator[Callable[[Stage, int], None]]:
        under_way.append(journal)
        _say_kept(journal, args.output, "completions")
        with _watched(plan, journal, args.stall_seconds) as on_stage:
            yield on_stage

    result = run_plan(
        args.plan,
        model_options(args),
        _options(args),
        output=args.output,
        trace=args.trace,
        overwrite=args.overwrite,
        watching=watching,
        remark=note,
    )
    _show(result, args)
    return result.failed, len(result.completions)


def _on_servers(args: argparse.Namespace, under_way: list[Journal]) -> tuple[int, int]:
    """Send the requests to servers, and return those that failed, and all."""

    @contextmanager
    def watching(left: int, journal: Journal) -> Iterator[Callable[[int], None]]:
        under_way.append(journal)
        _say_kept(journal, args.output, "requests")
        with progress(left, "requests") as advance:
            yield advance

    result = run_plan(
        args.plan,
        server_options(args),
        output=args.output,
        trace=args.trace,
        overwrite=args.overwrite,
        watching=watching,
        remark=note,
    )
    show_server(result, args.output, as_json=args.json)
    return result.failed, result.requests


def _options(args: argparse.Namespace) -> RunOptions:
    named = {field.name: getattr(args, field.name) for field in fields(RunOptions) if field.name in args}
    return RunOptions(**named, patience=args.stall_seconds / 2)


@contextmanager
def _watched(plan: Plan, journal: Journal, seconds: int) -> Iterator[Callable[[Stage, int], None]]:
    """Yield what is told of each stage: progress, and a watchdog."""
    from ...executor.runs.plan_clock import Follower
    from ...executor.runs.watchdog import Watchdog

    with (
        Watchdog(seconds, lambda: _abandon(journal, seconds)) as watchdog,
        _progress(plan, journal) as on_progress,
    ):

        def on_stage(stage: Stage, done: int) -> None:
            watchdog.alive()
            on_progress(stage, done)

        yield Follower(on_stage, on_progress.on_begin)


def _show(result: RunResult, args: argparse.Namespace) -> None:
    """Print what a run came to, with its report."""
    report, traces = result.report, result.traces
    if result.finished_before:
        note(f"{args.output}: this job is finished; --overwrite would serve it again")
    elif not report.requests:
        note(f"{args.output}: nothing was left to serve")
    else:
        warn_of_other_machine(result.plan, traces[0])
        if result.plan.configuration is not None and args.policy is None:
            say_reached(result.plan.configuration, report.reached, traces[0])
    if args.json:
        print_report(report, as_json=True)
    elif report.requests and not result.finished_before:
        _show_run(result, args)


def _show_run(result: RunResult, args: argparse.Namespace) -> None:
    """Print for people what a run came to, and where the rest of it stands."""
    report, files, traces = result.report, result.files, result.traces
    # Requests that failed are in no trace either; they are told on their own.
    resumed = report.resumed - result.failed
    before = f" after {resumed:,} from before" if resumed > 0 else ""
    where = f" from {len(traces)} replicas" if len(traces) > 1 else ""
    print(f"{args.output}: {report.requests:,} completions{before}{where} {run_line(report)}")
    if len(traces) > 1:
        print_report(report, as_json=False)
    print(
        f"{files.traces[0]}: where the time went; `batchbound report {args.plan} {files.traces[0]}` shows it"
    )
    if files.picture is not None:
        print(f"{files.picture}: all replicas, for ui.perfetto.dev")
    if files.shared is not None:
        print(f"{files.shared}: the plan shared out")


@contextmanager
def _progress(plan: Plan, journal: Journal) -> Iterator[Follower]:
    """Yield what is told each stage and the requests finished: by the plan, or by requests for a fleet."""
    from ...executor.runs.plan_clock import Follower, PlanClock

    names = plan.workload.ids.tolist()
    left = [i for i, name in enumerate(names) if name not in journal.finished]
    if len(plan.fleet.replicas) > 1 or not left:
        with progress(len(left), "requests") as count:
            yield Follower(lambda _, done: count(done), lambda _: None)
        return
    bound = None if plan.bound is None else plan.bound.seconds
    position = {name: i for i, name in enumerate(names)}
    told = len(journal.finished)

    def ended() -> Iterator[tuple[int, int]]:
        nonlocal told
        new = itertools.islice(reversed(journal.finished.items()), len(journal.finished) - told)
        told = len(journal.finished)
        return ((position[name], _tokens(row)) for name, row in new)

    clock = PlanClock(plan.problem, plan.schedule, left, bound, ended)
    with plan_progress(clock.begin) as advance:
        yield Follower(lambda stage, done: advance(clock.after(stage, done)), clock.begun)


def _tokens(row: Mapping[str, Any]) -> int:
    """Return the tokens of a completion by its line, or UNKNOWN of one that failed."""
    from ...executor.runs.learned_lengths import UNKNOWN

    body = (row.get("response") or {}).get("body") or {}
    return int(body.get("usage", {}).get("completion_tokens", UNKNOWN))


def _say_stopped(reason: str, under_way: Sequence[Journal]) -> None:
    """Say on stderr why a run ended early, and what is left of it; without a journal it had not begun."""
    warn(f"stopped: {reason}")
    kept = [journal for journal in under_way if journal.finished]
    for journal in kept:
        warn(f"{len(journal.finished)} finished completions are in {journal.path}; the same command goes on")
    if not under_way:
        warn("it had not begun; the same command goes on")
    elif not kept:
        warn("no completion was finished")


def _abandon(journal: Journal, seconds: int) -> None:
    """End the process from outside the call that hangs: each finished completion is on disk."""
    _say_stopped(f"no stage ended for {seconds} s, a device call may hang (see --stall-seconds)", [journal])
    os._exit(1)


def _say_kept(journal: Journal, output: str, what: str) -> None:
    """Say on stderr what an earlier part of a run left, and what of it is damaged."""
    if journal.finished:
        note(f"{output}: going on after {len(journal.finished)} finished {what}")
    if journal.dropped:
        lines = ", ".join(map(str, journal.dropped[:10])) + (" ..." if len(journal.dropped) > 10 else "")
        warn(f"{journal.path}: damaged in line {lines}; what stood there is done again")
