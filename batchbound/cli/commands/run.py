"""``batchbound run``: a plan's requests served on a HuggingFace model."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cost_cache import CostCache, costs_of
from ...data.files.disk import InputError, WriteError
from ...data.files.record import plain
from ...data.plan import Plan
from ...data.readers.openai_batch import PromptRecord, read_batch
from ...gain import Gain, gain_and_plan
from ...gain_screen import gain_lines
from ...heuristics.registry import POLICIES
from ...run_job.earlier import next_plan, trace_of_plan
from ...run_job.options import RunOptions, params_of
from ...run_job.run import RunResult
from ...run_job.run import run as run_plan
from .. import INTERRUPTED, WRONG_BOUND
from ..inputs import columns_of, positive, refuse_given
from ..interrupts import terminating
from ..model import add_model, model_options, silence
from ..output import note, typed_again, warn
from ..parser import Parser, Rule
from ..progress import plan_progress, progress
from ..reporting import print_report, run_line, show_server, warn_of_other_machine
from ..run_configuration import add_workers, say_reached
from ..run_prompts import PLANNING, add_planning, has_prompts, lengths_repeat, planned_beside, policy_of
from ..server_options import ON_SERVERS, add_server, server_options
from ..streams import say

if TYPE_CHECKING:
    from ...data.trace import Stage
    from ...executor.jobs.journal import Journal
    from ...executor.jobs.plan_clock import Follower


OUTPUT, TRACE = "answers.jsonl", "trace.jsonl"
"""Where completions and trace go if the user does not say."""


class _AddAdapter(argparse.Action):
    """Adds an adapter's folder to those by name."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any
    ) -> None:
        name, sign, folder = values.partition("=")
        known = getattr(namespace, self.dest)
        if not (name and sign and folder):
            parser.error(f"argument --adapter: {values!r} is not NAME=DIR")
        if name in known:
            parser.error(f"argument --adapter: {name!r} is given twice")
        setattr(namespace, self.dest, {**known, name: folder})


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "plan",
        nargs="?",
        default="plan.json",
        metavar="PLAN",
        help="plan, or prompts, which are planned by what is known of them (default %(default)s)",
    )
    parser.add_argument("--prompts", metavar="FILE", help="file of the planned prompts, if it was moved")
    add_model(parser, required=False)
    add_planning(parser)
    add_server(parser)
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="tokenizer (default: the one that counted the plan's prompts)"
    )
    parser.add_argument(
        "--any-model",
        action="store_true",
        help="complete every request by the loaded model, whatever model it names",
    )
    parser.add_argument(
        "--adapter",
        dest="adapters",
        action=_AddAdapter,
        default={},
        metavar="NAME=DIR",
        help="LoRA adapter in PEFT's format, for requests whose model is NAME; may be repeated",
    )
    choice = parser.add_argument_group("completions")
    choice.add_argument(
        "--pinned",
        action="store_true",
        help="decode every completion to its planned length; without it, a completion ends at an"
        " end-of-sequence token or at its max_tokens",
    )
    choice.add_argument(
        "--temperature",
        type=float,
        everyday=True,
        help="sampling temperature; 0 is greedy (default: the batch file's, else 0)",
    )
    choice.add_argument(
        "--top-p", type=float, help="probability mass to sample from (default: the batch file's, else 1)"
    )
    choice.add_argument(
        "--top-k", type=int, help="most likely tokens to sample from (default: the batch file's, else all)"
    )
    parser.add_argument(
        "--kv-tokens",
        type=positive,
        metavar="N",
        help="most tokens of KV cache on the device; the rest is offloaded to the host (default: no limit)."
        " With --server: the KV capacity of each engine, of a model without sliding windows (default: the"
        " plan's; the server's own if --model is a folder whose config has no windows)",
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
        help="number of engines, each a Ray actor (default: as many as the plan is for)",
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="address of a Ray cluster (default: this machine)"
    )
    add_workers(parser)
    parser.add_argument(
        "--stall-seconds",
        type=positive,
        metavar="S",
        help="seconds without a finished stage after which the run stops, as a device call may hang; one of"
        " several replicas is given up after half of them (default 1800)",
    )
    parser.add_argument(
        "--params", metavar="FILE", help="TOML file whose table [run] tunes journal, watchdog and retries"
    )
    parser.add_argument(
        "--repeatable",
        action="store_true",
        help="compute each request as if it were alone, so that runs of the same prompts on the same machine"
        " have the same bits, after a stop and resume too; slower where slots are few. The trace names a"
        " digest, and `verify TRACE --same-as TRACE` compares two runs",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "record"),
        help="if the model fails on a request (logits that are not finite) or cannot serve it (too long, or"
        " an unknown token): stop the run, or record an error in place of its completion, serve the others"
        " and exit with 1 (default: record)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        everyday=True,
        help=f"file of completions: OpenAI's JSONL, or a table if it ends in .parquet (default {OUTPUT})",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help=f"file of the trace (default {TRACE}; with --output NAME.jsonl, NAME.trace.jsonl)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", everyday=True, help="replace the output if it exists"
    )
    parser.add_argument("--json", action="store_true", help="print the whole report as one JSON object")
    ours = parser.names_since(but=ON_SERVERS)
    hint = "Leave it out: the server decides, or the request's body."
    parser.rules.append(Rule(ours, beside=("--server",), hint=hint))


def run(args: argparse.Namespace) -> int:
    """Serve what has no completion yet, write completions and traces, and print the report."""
    from ...executor.models.faults import RunStoppedError, TerminatedError

    _name_outputs(args)
    under_way: list[Journal] = []
    try:
        # To its end: outputs that are being written are no better a moment to die without a word.
        with terminating():
            failed, count = (_on_servers if args.server else _on_model)(args, under_way)
    except WrongBoundError:
        return WRONG_BOUND
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


class WrongBoundError(Exception):
    """A finished run beats its bound though every assumption was checked."""


def _name_outputs(args: argparse.Namespace) -> None:
    """Name the completions and the trace where the user does not: the trace follows the completions."""
    if args.trace is None:
        args.trace = TRACE if args.output is None else str(Path(args.output).with_suffix(".trace.jsonl"))
    args.output = args.output or OUTPUT


def _on_model(args: argparse.Namespace, under_way: list[Journal]) -> tuple[int, int]:
    """Carry the plan out on a model, and return the requests failed, and all."""
    if args.model is None:
        hint = "Name a model with --model, or a server with --server."
        raise InputError("nothing is named to run the requests on", hint=hint)
    rerun: str | None = None
    if has_prompts(args):
        args.plan, prompts = str(planned_beside(args)), args.plan
        plan = Plan.load(args.plan)
        if args.policy is None and args.replicas in (None, 1):
            args.policy = policy_of(plan)
        unknown = args.lengths is None and plan.provenance.lengths.get("kind") == "cap"
        if unknown and lengths_repeat(_records(prompts, args), args):
            rerun = typed_again("--overwrite")
    else:
        hint = "Give the prompts instead of the plan, or leave it out."
        refuse_given(args, PLANNING, "on a plan, which has settled it", hint, file=args.plan)
    silence()

    @contextmanager
    def watching(plan: Plan, journal: Journal) -> Iterator[Callable[[Stage, int], None]]:
        under_way.append(journal)
        _say_kept(journal, args.output, "completions")
        with _watched(plan, journal, _stall_seconds(args)) as on_stage:
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
    _show(result, args, rerun)
    return result.failed, len(result.completions)


def _records(prompts: str, args: argparse.Namespace) -> tuple[PromptRecord, ...]:
    return read_batch(prompts, columns_of(args))


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
        remark=_remark,
    )
    if show_server(result, args.output, as_json=args.json):
        raise WrongBoundError
    return result.failed, result.requests


def _remark(message: str) -> None:
    from ...executor.models.faults import Alert

    (warn if isinstance(message, Alert) else note)(message)


def _options(args: argparse.Namespace) -> RunOptions:
    named = {field.name: getattr(args, field.name) for field in fields(RunOptions) if field.name in args}
    if args.repeatable:
        named["params"] = replace(params_of(args.params), repeatable=True)
    return RunOptions(**named, patience=_stall_seconds(args) / 2)


def _stall_seconds(args: argparse.Namespace) -> float:
    """Return the seconds without a finished stage after which the run stops."""
    return float(args.stall_seconds or params_of(args.params).stall_seconds)


@contextmanager
def _watched(plan: Plan, journal: Journal, seconds: float) -> Iterator[Callable[[Stage, int], None]]:
    """Yield what is told of each stage: progress, and a watchdog."""
    from ...executor.jobs.plan_clock import Follower
    from ...executor.jobs.watchdog import Watchdog

    with (
        Watchdog(seconds, lambda: _abandon(journal, seconds)) as watchdog,
        _progress(plan, journal) as on_progress,
    ):

        def on_stage(stage: Stage, done: int) -> None:
            watchdog.alive()
            on_progress(stage, done)

        yield Follower(on_stage, on_progress.on_begin)


def _show(result: RunResult, args: argparse.Namespace, rerun: str | None) -> None:
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
    served = report.requests > 0 and not result.finished_before
    gain = _gain(result, args, repeats=rerun is not None) if served else None
    if args.json:
        say(json.dumps({**report.to_json(), "gain": None if gain is None else plain(gain)}))
    elif gain is not None:
        _show_gain(gain, result, args, rerun)
    elif served:
        _show_run(result, args)
    digest = traces[0].engine.get("digest")
    if digest is not None and not args.json:
        say(f"digest of tokens and log-probabilities: {digest}")


def _gain(result: RunResult, args: argparse.Namespace, *, repeats: bool) -> Gain | None:
    """Return what a run on one machine gained; its costs and the plan of its lengths are kept."""
    if len(result.traces) > 1 or (result.plan.configuration is not None and args.policy is None):
        return None
    trace = result.traces[0]
    found = costs_of(trace)
    if found is not None:
        CostCache.of_user().keep(args.model, trace.slots, found)
    cost = None if found is None else found.cost
    gain, again = gain_and_plan(result.plan.fleet, trace, cost=cost)
    if again is not None and repeats and len(again.workload) == len(result.plan.workload):
        again.save(next_plan(args.output))
    return gain


def _show_gain(gain: Gain, result: RunResult, args: argparse.Namespace, rerun: str | None) -> None:
    """Print the end screen of a run, and where its files stand."""
    resumed = result.report.resumed - result.failed
    if resumed > 0:
        say(f"{args.output}: {gain.requests:,} completions after {resumed:,} from before")
    planned = result.plan.provenance.lengths.get("kind") in ("known", "completions")
    for line in gain_lines(gain, args.model, rerun, planned=planned):
        say(line)
    files = f"{args.output}, {result.files.traces[0]}"
    usual = (trace_of_plan(args.plan), Path(TRACE))
    trace = "" if result.files.traces[0] in usual else f" {result.files.traces[0]}"
    details = f"details: batchbound report {args.plan}{trace}"
    for line in [f"{files}   {details}"] if len(files) + len(details) < 78 else [files, details]:
        say(line)


def _show_run(result: RunResult, args: argparse.Namespace) -> None:
    """Print for people what a run came to, and where the rest of it stands."""
    report, files, traces = result.report, result.files, result.traces
    # Requests that failed are in no trace either; they are told on their own.
    resumed = report.resumed - result.failed
    before = f" after {resumed:,} from before" if resumed > 0 else ""
    where = f" from {len(traces)} replicas" if len(traces) > 1 else ""
    say(f"{args.output}: {report.requests:,} completions{before}{where} {run_line(report)}")
    if len(traces) > 1:
        print_report(report, as_json=False)
    say(f"{files.traces[0]}: where the time went; `batchbound report {args.plan} {files.traces[0]}` shows it")
    if files.picture is not None:
        say(f"{files.picture}: all replicas, for ui.perfetto.dev")
    if files.shared is not None:
        say(f"{files.shared}: the plan shared out")


@contextmanager
def _progress(plan: Plan, journal: Journal) -> Iterator[Follower]:
    """Yield what is told each stage and the requests finished: by the plan, or by requests for a fleet."""
    from ...executor.jobs.plan_clock import Follower, PlanClock

    names = plan.workload.ids.tolist()
    left = [i for i, name in enumerate(names) if name not in journal.finished]
    if len(plan.fleet.replicas) > 1 or not left:
        with progress(len(left), "requests") as count:
            yield Follower(lambda _, done: count(done), lambda _: None)
        return
    bound = None if plan.claim is None else plan.claim.seconds
    position = {name: i for i, name in enumerate(names)}
    told = len(journal.finished)

    def ended() -> Iterator[tuple[int, int]]:
        nonlocal told
        new = list(journal.finished.latest(len(journal.finished) - told))
        told = len(journal.finished)
        return ((position[name], _tokens(row)) for name, row in new)

    clock = PlanClock(plan.problem, plan.schedule, left, bound, ended)
    with plan_progress(clock.begin) as advance:
        yield Follower(lambda stage, done: advance(clock.after(stage, done)), clock.begun)


def _tokens(row: Mapping[str, Any]) -> int:
    """Return the tokens of a completion by its line, or UNKNOWN of one that failed."""
    from ...executor.jobs.length_estimator import UNKNOWN

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


def _abandon(journal: Journal, seconds: float) -> None:
    """End the process from outside the call that hangs: each finished completion is on disk."""
    _say_stopped(f"no stage ended for {seconds:g} s, a device call may hang (see --stall-seconds)", [journal])
    os._exit(1)


def _say_kept(journal: Journal, output: str, what: str) -> None:
    """Say on stderr what an earlier part of a run left, and what of it is damaged."""
    if journal.finished:
        note(f"{output}: going on after {len(journal.finished)} finished {what}")
    if journal.dropped:
        lines = ", ".join(map(str, journal.dropped[:10])) + (" ..." if len(journal.dropped) > 10 else "")
        warn(f"{journal.path}: damaged in line {lines}; what stood there is done again")
