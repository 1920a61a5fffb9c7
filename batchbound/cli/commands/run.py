"""``batchbound run``: run prompts or a plan on a model or server."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cost_cache import CostCache, costs_of
from ...data.files.disk import InputError, WriteError, atomic_write
from ...data.files.record import plain
from ...data.plan import Plan
from ...data.readers.openai_batch import PromptRecord, read_batch
from ...gain import Gain, gain_and_plan
from ...heuristics.registry import POLICIES
from ...run_job.earlier import next_plan, plan_beside, trace_of_plan
from ...run_job.options import RunOptions, params_of
from ...run_job.run import RunResult
from ...run_job.run import run as run_plan
from ...screen.gain import gain_lines
from ...screen.report import show_report
from .. import INTERRUPTED, WRONG_BOUND
from ..inputs import columns_of, positive, refuse_given
from ..interrupts import terminating
from ..model import add_model, model_options, silence
from ..output import note, typed_again, warn
from ..parser import Parser, Rule
from ..progress import plan_progress, progress
from ..reporting import note_empty, run_line, show_server, warn_of_other_machine
from ..run_configuration import add_workers, say_reached
from ..run_prompts import PLANNING, add_planning, has_prompts, lengths_repeat, plan_of_prompts, policy_of
from ..server_options import ON_SERVERS, add_server, server_options
from ..streams import say

if TYPE_CHECKING:
    from ...data.trace import Stage
    from ...executor.jobs.journal import Journal
    from ...executor.jobs.plan_clock import Follower


OUTPUT, TRACE = "answers.jsonl", "trace.jsonl"
"""Default files of completions and trace."""


class _AddAdapter(argparse.Action):
    """Action that collects adapters by name."""

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
        help="plan, or file of prompts to plan and run (default %(default)s)",
    )
    parser.add_argument("--prompts", metavar="FILE", help="file of the planned prompts, if moved")
    add_model(parser, required=False)
    add_planning(parser)
    add_server(parser)
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="tokenizer (default: the one that counted the plan's prompts)"
    )
    parser.add_argument(
        "--any-model",
        action="store_true",
        help="run every request on the loaded model, whatever model it names",
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
        help="decode every completion to its planned length, instead of to an end-of-sequence token or"
        " max_tokens",
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
        help="KV capacity of the device in tokens; the rest is offloaded to the host (default: no limit)."
        " With --server: KV capacity of each engine, for models without sliding windows (default: the plan's;"
        " the server's own if --model is a folder whose config has no windows)",
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
        help="seconds without a finished stage until the run stops, as a device call may hang; one of several"
        " replicas is abandoned after half of them (default 1800)",
    )
    parser.add_argument(
        "--params", metavar="FILE", help="TOML file whose table [run] tunes journal, watchdog and retries"
    )
    parser.add_argument(
        "--repeatable",
        action="store_true",
        help="compute each request as if it were alone: repeated runs on the same machine give the same bits,"
        " also after a stop and resume; slower with few slots. The trace has a digest, and `verify TRACE"
        " --same-as TRACE` compares two runs",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "record"),
        help="if a request fails (logits that are not finite) or cannot be served (too long, unknown token):"
        " stop the run, or record an error as its completion, serve the others and exit with 1 (default:"
        " record)",
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
    hint = "Leave it out: the server or the request's body decides."
    parser.rules.append(Rule(ours, conflicts=("--server",), hint=hint))


def run(args: argparse.Namespace) -> int:
    """Run the unfinished requests and print the report."""
    from ...executor.models.faults import RunStoppedError, TerminatedError

    _name_outputs(args)
    running: list[Journal] = []
    try:
        # Up to the end of the run, as it also writes the outputs.
        with terminating():
            failed, count = (_on_servers if args.server else _on_model)(args, running)
    except WrongBoundError:
        return WRONG_BOUND
    except (RunStoppedError, TerminatedError) as error:
        _say_stopped(str(error), running)
        return 1
    except WriteError as error:
        if not running:
            raise
        _say_stopped(str(error), running)
        return 1
    except KeyboardInterrupt:
        if not running:
            raise
        _say_stopped("interrupted", running)
        return INTERRUPTED
    if failed:
        warn(f"{args.output}: {failed} of {count} requests failed; their lines say why")
    return 1 if failed else 0


class WrongBoundError(Exception):
    """Error of a run that beats a bound without open assumptions."""


def _name_outputs(args: argparse.Namespace) -> None:
    if args.trace is None:
        args.trace = TRACE if args.output is None else str(Path(args.output).with_suffix(".trace.jsonl"))
    args.output = args.output or OUTPUT


def _on_model(args: argparse.Namespace, running: list[Journal]) -> tuple[int, int]:
    """Run on a model; return the counts of failed and all requests."""
    if args.model is None:
        hint = "Name a model with --model, or a server with --server."
        raise InputError("there is no model or server to run the requests on", hint=hint)
    rerun: str | None = None
    made = _Made()
    if has_prompts(args):
        made = _Made.of(plan_beside(args.output))
        args.plan, prompts = str(plan_of_prompts(args)), args.plan
        plan = Plan.load(args.plan)
        if args.policy is None and args.replicas in (None, 1):
            args.policy = policy_of(plan)
        unknown = args.lengths is None and plan.provenance.lengths.get("kind") == "cap"
        if unknown and lengths_repeat(_records(prompts, args), args):
            rerun = typed_again("--overwrite")
    else:
        hint = "Give the prompts instead of the plan, or leave it out."
        refuse_given(args, PLANNING, "on a plan, which fixes it", hint, file=args.plan)
    silence()

    @contextmanager
    def watching(plan: Plan, journal: Journal) -> Iterator[Callable[[Stage, int], None]]:
        running.append(journal)
        _say_kept(journal, args.output, "completions")
        with _watched(plan, journal, _stall_seconds(args)) as on_stage:
            yield on_stage

    try:
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
    except Exception:
        if not running:
            made.take_back()
        raise
    _show(result, args, rerun)
    return result.failed, len(result.completions)


@dataclass(frozen=True, slots=True)
class _Made:
    """Plan that a command may have written, and what stood there before it."""

    path: Path | None = None
    before: str | None = None

    @classmethod
    def of(cls, path: Path) -> _Made:
        return cls(path, path.read_text(encoding="utf-8") if path.is_file() else None)

    def take_back(self) -> None:
        """Restore the file, as no run of its plan has begun."""
        if self.path is None:
            return
        if self.before is None:
            self.path.unlink(missing_ok=True)
        elif self.path.read_text(encoding="utf-8") != self.before:
            with atomic_write(self.path) as stream:
                stream.write(self.before)


def _records(prompts: str, args: argparse.Namespace) -> tuple[PromptRecord, ...]:
    return read_batch(prompts, columns_of(args))


def _on_servers(args: argparse.Namespace, running: list[Journal]) -> tuple[int, int]:
    """Run on servers; return the counts of failed and all requests."""

    @contextmanager
    def watching(left: int, journal: Journal) -> Iterator[Callable[[int], None]]:
        running.append(journal)
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
    if show_server(result, args):
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
    return float(args.stall_seconds or params_of(args.params).stall_seconds)


@contextmanager
def _watched(plan: Plan, journal: Journal, seconds: float) -> Iterator[Callable[[Stage, int], None]]:
    """Yield a callback that updates progress and the watchdog."""
    from ...executor.jobs.plan_clock import Follower
    from ...executor.jobs.watchdog import Watchdog

    with (
        Watchdog(seconds, lambda: _abandon(journal, seconds)) as watchdog,
        _progress(plan, journal) as on_progress,
    ):

        def on_stage(stage: Stage, done: int) -> None:
            watchdog.alive()
            on_progress(stage, done)

        def on_part(part: Stage, done: int) -> None:
            watchdog.alive()
            on_progress.on_part(part, done)

        yield Follower(on_stage, on_progress.on_begin, on_part)


def _show(result: RunResult, args: argparse.Namespace, rerun: str | None) -> None:
    report, traces = result.report, result.traces
    if result.finished_before:
        note(f"{args.output}: this job is finished; --overwrite would serve it again")
    elif not report.requests:
        note(f"{args.output}: nothing was left to run")
    else:
        warn_of_other_machine(result.plan, traces[0])
        if result.plan.configuration is not None and args.policy is None:
            say_reached(result.plan.configuration, report.reached, traces[0])
    served = report.requests > 0 and not result.finished_before
    if served:
        source = result.plan.provenance.prompts
        raw = source is not None and source.columns is not None and not source.columns.chat
        note_empty(result.completions, raw=raw)
    gain = _gain(result, args, repeats=rerun is not None) if served else None
    if args.json:
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
        _show_gain(gain, result, args, rerun)
    elif served:
        _show_run(result, args)
    cut = result.endings.line
    if cut is not None and not args.json and served:
        say(f"{cut}: a higher max_tokens lets them end")
    digest = traces[0].engine.get("digest")
    if digest is not None and not args.json:
        say(f"digest of tokens and log-probabilities: {digest}")


def _gain(result: RunResult, args: argparse.Namespace, *, repeats: bool) -> Gain | None:
    """Return a run's gain; save its costs and the next plan."""
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
    resumed = result.report.resumed - result.failed
    if resumed > 0:
        say(f"{args.output}: {gain.requests:,} completions after {resumed:,} from before")
    planned = result.plan.provenance.lengths.get("kind") in ("known", "completions")
    for line in gain_lines(gain, args.model, rerun, planned=planned, repeats=result.report.repeats):
        say(line)
    files = f"{args.output}, {result.files.traces[0]}"
    usual = (trace_of_plan(args.plan), Path(TRACE))
    trace = "" if result.files.traces[0] in usual else f" {result.files.traces[0]}"
    details = f"details: batchbound report {args.plan}{trace}"
    for line in [f"{files}   {details}"] if len(files) + len(details) < 78 else [files, details]:
        say(line)


def _show_run(result: RunResult, args: argparse.Namespace) -> None:
    report, files, traces = result.report, result.files, result.traces
    # Failed requests are in no trace either; they are reported separately.
    resumed = report.resumed - result.failed
    before = f" after {resumed:,} from before" if resumed > 0 else ""
    where = f" from {len(traces)} replicas" if len(traces) > 1 else ""
    say(f"{args.output}: {report.requests:,} completions{before}{where} {run_line(report)}")
    if len(traces) > 1:
        show_report(report, as_json=False)
    say(f"{files.traces[0]}: loss by cause: `batchbound report {args.plan} {files.traces[0]}`")
    if files.picture is not None:
        say(f"{files.picture}: all replicas, for ui.perfetto.dev")
    if files.shared is not None:
        say(f"{files.shared}: the plan of each replica")


@contextmanager
def _progress(plan: Plan, journal: Journal) -> Iterator[Follower]:
    """Yield a callback for progress: by the plan, or by requests."""
    from ...executor.jobs.plan_clock import Follower, PlanClock

    names = plan.workload.ids.tolist()
    left = [i for i, name in enumerate(names) if name not in journal.finished]
    if len(plan.fleet.replicas) > 1 or not left:
        with progress(len(left), "requests") as count:
            yield Follower(lambda _, done: count(done), lambda _: None)
        return
    bound = None if plan.claim is None else plan.claim.seconds
    position = {name: i for i, name in enumerate(names)}
    reported = len(journal.finished)

    def ended() -> Iterator[tuple[int, int]]:
        nonlocal reported
        new = list(journal.finished.latest(len(journal.finished) - reported))
        reported = len(journal.finished)
        return ((position[name], _tokens(row)) for name, row in new)

    clock = PlanClock(plan.problem, plan.schedule, left, bound, ended, unknown=plan.lengths_unknown)
    named = set[int]()
    with plan_progress(clock.begin) as advance:

        def on_part(part: Stage, done: int) -> None:
            advance(clock.during(part, done))
            if plan.lengths_unknown:
                long = [request for request in clock.passing(LONG, part) if request not in named]
                named.update(long)
                _note_long([names[request] for request in long])

        yield Follower(lambda stage, done: advance(clock.after(stage, done)), clock.begun, on_part)


LONG = 2_000
"""Tokens of a completion of unknown length from which it is named."""


def _note_long(names: Sequence[str]) -> None:
    if names:
        more = "" if len(names) <= 3 else f" and {len(names) - 3:,} others"
        note(f"{', '.join(names[:3])}{more} passed {LONG:,} tokens; --longest-completion limits completions")


def _tokens(row: Mapping[str, Any]) -> int:
    from ...executor.jobs.length_estimator import UNKNOWN

    body = (row.get("response") or {}).get("body") or {}
    return int(body.get("usage", {}).get("completion_tokens", UNKNOWN))


def _say_stopped(reason: str, running: Sequence[Journal]) -> None:
    """Print why a run stopped and how much it finished."""
    warn(f"stopped: {reason}")
    kept = [journal for journal in running if journal.finished]
    for journal in kept:
        warn(f"{len(journal.finished)} finished completions are in {journal.path}; the same command resumes")
    if not running:
        warn("it had not begun; the same command starts it")
    elif not kept:
        warn("no completion was finished")


def _abandon(journal: Journal, seconds: float) -> None:
    """End the process of a hanging call; completions are on disk."""
    _say_stopped(f"no stage ended for {seconds:g} s, a device call may hang (see --stall-seconds)", [journal])
    os._exit(1)


def _say_kept(journal: Journal, output: str, what: str) -> None:
    """Print how much an earlier run finished, and damaged lines."""
    if journal.finished:
        note(f"{output}: continuing after {len(journal.finished)} finished {what}")
    if journal.dropped:
        lines = ", ".join(map(str, journal.dropped[:10])) + (" ..." if len(journal.dropped) > 10 else "")
        warn(f"{journal.path}: damaged in line {lines}; their requests run again")
