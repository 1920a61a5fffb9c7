"""``batchbound run``: a plan's requests served on a HuggingFace model."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.files.disk import InputError, discard_partial
from ...data.files.jsonl import file_digest, json_lines
from ...data.plan import Plan
from ...data.readers.openai_batch import PromptRecord, read_batch
from ...data.readers.sampling import Sampling
from ...data.trace import Trace
from ...heuristics.registry import POLICIES
from ...judging import report as report_of
from ...planning.fleet import shared_out
from .. import INTERRUPTED
from ..inputs import named_files, positive, refuse_outputs
from ..interrupts import terminating
from ..model import add_model, engine_spec, load, shape_of, tier_of
from ..output import note, warn
from ..progress import plan_progress, progress
from ..reporting import (
    print_report,
    run_line,
    shared_plan_path,
    trace_paths,
    warn_of_other_machine,
)
from ..run_configuration import add_workers, refuse_unused, say_reached, serving
from ..server_options import add_server, refuse_without_server

if TYPE_CHECKING:
    from ...data.trace import Stage
    from ...executor.runs.job import Job, Outcome
    from ...executor.runs.journal import Journal

SAMPLING = ("temperature", "top_p", "top_k", "seed")
"""What the command line says of the choice of tokens for all requests, and a batch file for each."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("plan", nargs="?", default="plan.json", metavar="PLAN", help="default %(default)s")
    parser.add_argument("--prompts", metavar="FILE", help="where the planned prompts are now, if they moved")
    add_model(parser, required=False)
    add_server(parser)
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="default: the one that counted the plan's prompts"
    )
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--pinned",
        action="store_true",
        help="decode every answer to its planned length, whatever its tokens; else it ends at an"
        " end-of-sequence token or its max_tokens",
    )
    answers.add_argument("--temperature", type=float, help="0 is greedy (default: the batch file's, else 0)")
    answers.add_argument("--top-p", type=float, help="default: the batch file's, else 1")
    answers.add_argument("--top-k", type=int, help="default: the batch file's, else off")
    parser.add_argument(
        "--kv-tokens",
        type=positive,
        metavar="N",
        help="most tokens of keys and values on the device; more wait on the host (default: no limit)",
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
        default=1,
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
        help="when the model fails on one request (its logits are not finite): stop the run, or write an"
        " error in the place of its completion, serve the others and exit with 1 (default: record)",
    )
    parser.add_argument("-o", "--output", default="answers.jsonl", metavar="FILE", help="default %(default)s")
    parser.add_argument("--trace", default="trace.jsonl", metavar="FILE", help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument("--json", action="store_true", help="print the whole report as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Serve what is not answered yet, write the completions and the traces, and print the report."""
    from ...executor.models.faults import RunStoppedError, TerminatedError
    from ...executor.runs.job import journal_path
    from ...executor.runs.journal import Journal
    from ...executor.runs.watchdog import Watchdog

    if args.server:
        from ..run_server import run_server

        return run_server(args)
    refuse_without_server(args)
    begun = time.perf_counter()
    loaded = Plan.load(args.plan)
    plan = _for_replicas(loaded, args)
    files = _Files.of(args, plan, shared=plan is not loaded)
    outputs, read = [args.output, *files.all], named_files(args, "output", "trace")
    refuse_outputs(outputs, args.overwrite or _begun_before(args), read)
    _refuse_unused(plan, args)
    job = load_job(plan, args, None if len(plan.fleet.replicas) == 1 else shape_of(args))
    identity = run_identity(loaded, job, args)
    if not args.overwrite and finished_before(loaded, args, identity):
        note(f"{args.output}: this job is finished; --overwrite would serve it again")
        return _say_failed(args.output, [line for _, line in json_lines(args.output)])
    journal = Journal(journal_path(args.output), identity)
    _going_on(journal, outputs, args.overwrite, read)
    try:
        with (
            journal,
            terminating(),
            Watchdog(args.stall_seconds, lambda: _abandon(journal, args.stall_seconds)) as watchdog,
            _progress(plan, journal) as on_progress,
        ):

            def on_stage(stage: Stage, done: int) -> None:
                watchdog.alive()
                on_progress(stage, done)

            outcome = _serving(plan, job, args)(journal, on_stage=on_stage)
            journal.end()
    except (RunStoppedError, TerminatedError) as error:
        say_stopped(str(error), journal)
        return 1
    except KeyboardInterrupt:
        say_stopped("interrupted", journal)
        return INTERRUPTED
    files.save(plan, outcome.traces, Path(args.plan).parent, run_digest(identity))
    job.write_answers(journal, args.output)
    if outcome.traces:
        _show(plan, outcome.traces, files, args, begun)
    else:
        note(f"{args.output}: nothing was left to serve")
    return _say_failed(args.output, list(journal.finished.values()))


def _say_failed(output: str, lines: Sequence[Mapping[str, object]]) -> int:
    """Return the exit status of a finished run, and say how many of its requests failed."""
    from ...executor.runs.job import failures

    failed = failures(lines)
    if failed:
        warn(f"{output}: {failed} of {len(lines)} requests failed; their lines say why")
    return 1 if failed else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """Where a run's traces go; for several replicas also one picture, and the plan as it was shared out."""

    traces: list[Path]
    picture: Path | None
    shared: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace, plan: Plan, *, shared: bool) -> _Files:
        """Return the files of a run of a plan, which may have been shared out anew."""
        count = len(plan.fleet.replicas)
        picture = Path(args.trace).with_suffix(".perfetto.json") if count > 1 else None
        return cls(trace_paths(args.trace, count), picture, shared_plan_path(args.trace) if shared else None)

    @property
    def all(self) -> list[Path]:
        return [*self.traces, *(path for path in (self.picture, self.shared) if path is not None)]

    def save(self, plan: Plan, traces: Sequence[Trace], planned_in: Path, run: str) -> None:
        """Write what there is to write, prompts named as seen from there; traces name the run."""
        from ...executor.reports.perfetto import save_perfetto

        for path in self.all:
            discard_partial(path)
        for path, trace in zip(self.traces, traces, strict=False):
            dataclasses.replace(trace, engine={**trace.engine, "run": run}).save(path)
        if not traces:
            return
        if self.picture is not None:
            save_perfetto(self.picture, traces)
        if self.shared is not None:
            source = plan.provenance.prompts
            if source is not None:
                prompts = source.seen_from(self.shared.parent, planned_in)
                moved = dataclasses.replace(plan.provenance, prompts=prompts)
                plan = dataclasses.replace(plan, provenance=moved)
            plan.save(self.shared)


def _for_replicas(plan: Plan, args: argparse.Namespace) -> Plan:
    """Return the plan for as many replicas as the options say; one for a single machine is shared out."""
    count = len(plan.fleet.replicas)
    if args.replicas in (1, count):
        return plan
    if count > 1:
        message = f"the plan is for {count} replicas, not {args.replicas}"
        raise InputError(message, file=args.plan, hint="Leave --replicas out, or plan again.")
    note(f"{args.plan} is for one replica: shared out over {args.replicas}")
    return shared_out(plan, args.replicas)


def _refuse_unused(plan: Plan, args: argparse.Namespace) -> None:
    if len(plan.fleet.replicas) == 1:
        refuse_unused(plan, args)
        return
    single = {
        "--policy": args.policy,
        "--kv-tokens": args.kv_tokens,
        "--encode-device": args.encode_device,
        "--replan": args.replan,
        "--tensor-parallel": None if args.tensor_parallel == 1 else args.tensor_parallel,
        "--on-error": args.on_error,
    }
    for option in (name for name, given in single.items() if given is not None):
        raise InputError(f"{option} is for one replica", hint="Leave it out, or plan for one replica.")


def _serving(plan: Plan, job: Job, args: argparse.Namespace) -> Callable[..., Outcome]:
    """Return what serves a plan's job: replicas on Ray, a configuration's workers, or this process."""
    if len(plan.fleet.replicas) == 1:
        return serving(plan, job, args)
    from ...executor.runs.fleet_run import run_on_replicas

    spec, patience = engine_spec(args, job), args.stall_seconds / 2
    return partial(run_on_replicas, job, spec=spec, address=args.ray_address, patience=patience)


def _show(plan: Plan, traces: Sequence[Trace], files: _Files, args: argparse.Namespace, begun: float) -> None:
    """Print what a run came to, with its report."""
    for trace in traces[:1]:
        warn_of_other_machine(plan, trace)
    report = report_of(plan, traces, seconds=time.perf_counter() - begun)
    if plan.configuration is not None and args.policy is None:
        say_reached(plan.configuration, report.reached, traces[0])
    if args.json:
        print_report(report, as_json=True)
        return
    before = f" after {report.resumed:,} from before" if report.resumed else ""
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
def _progress(plan: Plan, journal: Journal) -> Iterator[Callable[[Stage, int], None]]:
    """Yield what is told each stage and the requests finished: by the plan, or by requests for a fleet."""
    from ...executor.runs.plan_clock import PlanClock

    names = plan.workload.ids.tolist()
    left = [i for i, name in enumerate(names) if name not in journal.finished]
    if len(plan.fleet.replicas) > 1 or not left:
        with progress(len(left), "requests") as count:
            yield lambda _, done: count(done)
        return
    bound = None if plan.bound is None else plan.bound.seconds
    clock = PlanClock(plan.problem, plan.schedule, left, bound)
    with plan_progress(clock.begin) as advance:
        yield lambda stage, done: advance(clock.after(stage, done))


def say_stopped(reason: str, journal: Journal) -> None:
    """Say on stderr why a run ended early, and what is left of it."""
    warn(f"stopped: {reason}")
    if journal.finished:
        warn(f"{len(journal.finished)} finished answers are in {journal.path}; the same command goes on")
    else:
        warn("no answer was finished")


def _abandon(journal: Journal, seconds: int) -> None:
    """End the process from outside the call that hangs: every finished answer is with the system already."""
    say_stopped(f"no stage ended for {seconds} s, a device call may hang (see --stall-seconds)", journal)
    os._exit(1)


def load_job(plan: Plan, args: argparse.Namespace, shape: Any | None = None) -> Job:
    """
    Return the plan's job with model, tokenizer and prompts loaded.

    Parameters
    ----------
    plan, args
        The plan, and the options of ``run``.
    shape
        A model without weights where others load it; nothing is loaded then.

    Raises
    ------
    InputError
        If the prompts changed since they were planned, or plan, prompts and model do not go together.
    """
    from ...executor.engines.huggingface import vocabulary_of
    from ...executor.models.prompts import Prompts
    from ...executor.models.sampling import Sampler
    from ...executor.models.tokenizers import load_tokenizer
    from ...executor.runs.job import Job

    source = plan.provenance.prompts
    if source is None and args.prompts is not None:
        hint = "Leave it out: prompts of those lengths are drawn; or plan the prompts themselves."
        raise InputError("the plan is of lengths only, and --prompts says nothing", file=args.plan, hint=hint)
    records = None if source is None else _planned_records(plan, args)
    path = None if source is None else _prompts_path(plan, args)
    asked = _asked(records or (), plan, args, path)
    model = load(args) if shape is None else shape
    planned = args.model if source is None else _tokenizer_of(source.tokenizer, args)
    tokenizer = load_tokenizer(args.tokenizer or planned)
    if records is None:
        vocabulary = min(vocabulary_of(model), tokenizer.vocab_size)
        prompts = Prompts.random(plan.workload, vocabulary, args.seed or 0)
    else:
        prompts = Prompts.encode(records, tokenizer)
    job = Job(
        plan,
        prompts,
        model,
        tokenizer,
        Sampler(),
        pinned=args.pinned,
        tier=tier_of(model, args) if shape is None else None,
        kv_tokens=args.kv_tokens,
        policy=args.policy,
        record_failures=args.on_error != "stop",
    )
    if shape is None:
        _name_unused_settings(model, asked, args)
    return _with_rules(job, asked, path)


def run_identity(plan: Plan, job: Job, args: argparse.Namespace) -> dict[str, object]:
    """Return what the answers depend on: a journal goes on only where all of it is the same."""
    from ...executor.models.fingerprint import files_fingerprint
    from ...executor.models.sampling import Sampler

    return {
        "plan": plan.digest(),
        "model": args.model,
        "weights": files_fingerprint(args.model),
        "load_format": args.load_format,
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "tokenizer": job.tokenizer.name,
        "tokenizer_files": files_fingerprint(job.tokenizer.name, weights=False),
        "pinned": args.pinned,
        # What requests ask each for itself stands in the prompts, of which the plan holds the digest.
        "sampling": (
            dataclasses.asdict(job.sampler)
            if isinstance(job.sampler, Sampler)
            else {name: getattr(args, name) for name in SAMPLING}
        ),
        "weights_seed": args.seed or 0,
    }


def run_digest(identity: Mapping[str, object]) -> str:
    """Return what names a run in its traces."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def finished_before(plan: Plan, args: argparse.Namespace, identity: Mapping[str, object]) -> bool:
    """Return whether the outputs are whole and of this very run: its trace says so, nothing is left to do."""
    from ...executor.runs.job import journal_path

    trace = trace_paths(args.trace, max(len(plan.fleet.replicas), args.replicas))[0]
    if journal_path(args.output).exists() or not trace.is_file() or not Path(args.output).is_file():
        return False
    try:
        named = [line.get("custom_id") for _, line in json_lines(args.output)]
        found = Trace.load(trace).engine.get("run")
    except InputError:
        return False
    return found == run_digest(identity) and named == plan.workload.ids.tolist()


def _begun_before(args: argparse.Namespace) -> bool:
    """Return whether outputs that exist may be an earlier part's of this run, which is looked into later."""
    from ...executor.runs.job import journal_path

    return journal_path(args.output).exists() or Path(args.output).is_file()


def _going_on(journal: Journal, outputs: Sequence[str | Path], overwrite: bool, read: Sequence[str]) -> None:
    """Say what a journal holds; refuse outputs that exist and that this run had not begun to write."""
    try:
        refuse_outputs(outputs, overwrite or journal.ending, read)
    except InputError:
        with journal:
            raise
    say_kept(journal, str(outputs[0]), "completions")


def say_kept(journal: Journal, output: str, what: str) -> None:
    """Say on stderr what an earlier part of a run left, and what of it is damaged."""
    if journal.finished:
        note(f"{output}: going on after {len(journal.finished)} finished {what}")
    if journal.dropped:
        lines = ", ".join(map(str, journal.dropped[:10])) + (" ..." if len(journal.dropped) > 10 else "")
        warn(f"{journal.path}: damaged in line {lines}; what stood there is done again")


def _prompts_path(plan: Plan, args: argparse.Namespace) -> Path:
    assert plan.provenance.prompts is not None
    return (
        Path(args.prompts)
        if args.prompts
        else Path(args.plan).resolve().parent / plan.provenance.prompts.path
    )


def _planned_records(plan: Plan, args: argparse.Namespace) -> tuple[PromptRecord, ...]:
    assert plan.provenance.prompts is not None
    path = _prompts_path(plan, args)
    for output in (args.output, args.trace):
        refuse_outputs([output], True, [path])
    hint = "Give the planned file with --prompts, or plan again."
    if not path.is_file():
        raise InputError("the plan's prompts are not there", file=path, hint=hint)
    if file_digest(path) != plan.provenance.prompts.sha256:
        raise InputError("the file is not what was planned: it has changed since", file=path, hint=hint)
    return read_batch(path)


def _tokenizer_of(planned: str, args: argparse.Namespace) -> str:
    """Return the tokenizer that counted the plan's prompts; tiny models all count bytes."""
    if args.tokenizer or (planned.startswith("tiny:") and args.model.startswith("tiny:")):
        return str(args.tokenizer or args.model)
    if not planned.startswith("."):
        return planned
    folder = Path(args.plan).parent / planned
    if folder.is_dir():
        return os.path.normpath(folder)
    if Path(args.model).is_dir():
        # It has moved with the model: the prompts it counts are compared with the plan's.
        return str(args.model)
    what = "the folder whose tokenizer counted the plan's prompts is not there"
    raise InputError(what, file=folder, hint="Give it with --tokenizer, or plan again.")


def _asked(
    records: Sequence[PromptRecord], plan: Plan, args: argparse.Namespace, path: Path | None
) -> list[Sampling]:
    """Return what each request asks: as the command line says, else as its line of the batch file does."""
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    try:
        plain = Sampling(**given)
    except ValueError as error:
        raise InputError(str(error), hint="Correct the option.") from None
    asked = [record.sampling(**given) for record in records]
    for record, one in zip(records, asked, strict=True):
        field = _not_carried(one, plan)
        if field is not None:
            raise InputError(
                "cannot be served by workers of several processes",
                file=path,
                where=f"line {record.line}, field 'body.{field}'",
                hint="Remove it, or plan for one replica and one process.",
            )
    return asked or [plain] * len(plan.workload)


def _name_unused_settings(model: Any, asked: Sequence[Sampling], args: argparse.Namespace) -> None:
    """Say which of the model's own generation settings no request asks for: other engines heed them."""
    from ...executor.models.request_rules import declared_sampling

    plain = Sampling()
    unused = {
        name: value
        for name, value in declared_sampling(model).items()
        if all(getattr(one, name) == getattr(plain, name) for one in asked)
    }
    if unused:
        said = ", ".join(f"{name} {value:g}" for name, value in unused.items())
        note(f"{args.model}: its generation_config.json asks for {said}; not used, as no request asks for it")


def _not_carried(asked: Sampling, plan: Plan) -> str | None:
    """Return a field that depends on what one process saw of a completion, where several make it."""
    several = len(plan.fleet.replicas) > 1
    parted = plan.configuration is not None and plan.configuration.handed_over
    if (several or parted) and asked.logprobs is not None:
        return "logprobs"
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words")
    return next(
        (name for name in names if parted and getattr(asked, name) != getattr(Sampling(), name)), None
    )


def _with_rules(job: Job, asked: Sequence[Sampling], path: Path | None) -> Job:
    """Return the job with what its requests ask."""
    from ...executor.engines.huggingface import vocabulary_of
    from ...executor.models.request_rules import check_tokens, rules_of

    vocabulary = vocabulary_of(job.model)
    for record, one in zip(job.prompts.records, asked, strict=True):
        try:
            check_tokens(one, vocabulary)
        except ValueError as error:
            where = f"line {record.line}, field 'body.{str(error).split(' ', 1)[0]}'"
            raise InputError(str(error), file=path, where=where, hint="Use the model's tokens.") from None
    by_name = {record.custom_id: one for record, one in zip(job.prompts.records, asked, strict=True)}
    most = job.most_tokens.tolist()
    eos = job.decoding.eos_ids
    rule = rules_of(by_name, job.prompts.tokens, most, job.tokenizer, eos, pinned=job.pinned)
    return dataclasses.replace(job, sampler=rule)
