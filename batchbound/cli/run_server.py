"""``batchbound run --server``: a batch sent to servers in the order of fewest iterations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.costs.cost import IntArray
from ..data.files.disk import InputError, read_text
from ..data.files.outputs import refuse_outputs
from ..data.iterations import EngineLimits
from ..data.plan import Plan, PromptSource
from ..data.prompts.table import is_prompt_table, prompts_digest
from ..data.readers.completions import is_parquet_name, write_completions
from ..data.readers.length_source import LengthSource
from ..data.readers.server_batch import ServerRequest, read_server_batch
from ..planning.release import (
    FILE_ORDER,
    LONGEST_FIRST,
    PLAN,
    Releasable,
    best_release,
    named_release,
    plan_order,
)
from . import INTERRUPTED
from .inputs import columns_of, named_files
from .output import note
from .progress import progress
from .server_options import refuse_with_server

if TYPE_CHECKING:
    from ..executor.engines.server_probe import ServerFacts
    from ..executor.runs.journal import Journal
    from ..executor.runs.server_job import ServerJob, ServerOutcome
    from ..executor.serving.release import Release

_NAMES = {"plan": PLAN, "longest": LONGEST_FIRST, "file": FILE_ORDER}
"""The orders that ``--order`` names."""

_UNSTATED_BUDGET = 2048
"""Tokens of an iteration taken where nobody says: vLLM's default on most devices."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """
    What is to be sent.

    Parameters
    ----------
    path
        The file of the requests.
    requests
        In its order.
    output
        Planned tokens of each completion, shape (requests,).
    planned
        Positions in the plan's order; None without a plan.
    slots
        Of the plan; None without one.
    """

    path: Path
    requests: tuple[ServerRequest, ...]
    output: IntArray
    planned: IntArray | None
    slots: int | None

    def work(self) -> Releasable:
        """Return the requests as the server will compute them, by the planned lengths."""
        return Releasable(
            np.array([request.prompt_tokens for request in self.requests]),
            self.output,
            np.array([request.choices for request in self.requests]),
            exact=all(request.output_tokens is not None for request in self.requests),
        )


def run_server(args: argparse.Namespace) -> int:
    """
    Send what has no completion yet, write completions and trace, and print the report.

    Parameters
    ----------
    args
        The options of ``run``.
    """
    from ..executor.runs.job import journal_path
    from ..executor.runs.journal import Journal
    from ..executor.runs.server_job import ServerJob
    from .commands.run import say_kept

    refuse_with_server(args, _defaults())
    is_parquet_name(args.output)
    batch = _read(args)
    outputs = [args.output, args.trace]
    refuse_outputs(outputs, args.overwrite, [batch.path, *named_files(args, "output", "trace")])
    job = ServerJob(batch.requests, range(len(batch.requests)), args.server, 1, model=args.model)
    facts = job.probe()
    slots = _slots(args, batch, facts)
    _say_facts(facts, args.model, batch)
    limits = _limits(args, slots, facts)
    release = _release(args.order or "auto", batch, limits, args.seed or 0)
    job = replace(
        job,
        order=release.order.tolist(),
        slots=slots,
        in_flight=args.in_flight,
        order_name=release.name,
        timeout=args.timeout or job.timeout,
        patience=replace(
            job.patience,
            attempts=args.attempts or job.patience.attempts,
            outage=args.outage or job.patience.outage,
        ),
        seed=args.seed or 0,
    )
    journal = Journal(
        journal_path(args.output),
        {"batch": prompts_digest(batch.path), "server": "OpenAI", "model": args.model},
    )
    resumed = len(journal.finished)
    say_kept(journal, args.output, "requests")
    outcome = _serve(job, journal, facts)
    if isinstance(outcome, int):
        return outcome
    if len(outcome.run):
        outcome.run.save(args.trace)
    write_completions(args.output, (journal.finished[request.custom_id] for request in batch.requests))
    journal.remove()
    return _report(args, batch, limits, release, outcome, resumed)


def _serve(job: ServerJob, journal: Journal, facts: Sequence[ServerFacts]) -> ServerOutcome | int:
    """Return the outcome of a whole run, or the exit status of one that stopped."""
    from ..executor.models.faults import TerminatedError
    from .commands.run import say_stopped
    from .interrupts import terminating

    left = sum(request.custom_id not in journal.finished for request in job.requests)
    try:
        with journal, terminating(), progress(left, "requests") as advance:
            outcome = job.run(journal, facts, on_served=advance)
    except TerminatedError as error:
        say_stopped(str(error), journal)
        return 1
    except KeyboardInterrupt:
        say_stopped("interrupted", journal)
        return INTERRUPTED
    if outcome.stopped is not None:
        say_stopped(outcome.stopped, journal)
        return 1
    return outcome


def _defaults() -> argparse.Namespace:
    from .commands.run import configure

    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args([])


def _read(args: argparse.Namespace) -> _Batch:
    """Return the batch that a plan names, or a batch file itself."""
    if columns_of(args) is not None or not _is_plan(args.plan):
        if args.prompts is not None:
            raise InputError("--prompts is for a plan", hint="Leave it out.")
        if args.order == "plan":
            hint = "Plan first with `batchbound plan`, or choose another order."
            raise InputError("there is no plan whose order could be kept", file=args.plan, hint=hint)
        requests = read_server_batch(args.plan, columns_of(args))
        known = [request.output_tokens for request in requests]
        source = LengthSource.parse(args.lengths or ("cap" if None in known else "known"))
        ids = [request.custom_id for request in requests]
        output = source.resolve(ids, caps=[request.max_tokens for request in requests], known=known)
        return _Batch(Path(args.plan), requests, output, None, None)
    if args.lengths is not None:
        raise InputError("the plan says how long completions are", hint="Leave --lengths out, or plan again.")
    plan = Plan.load(args.plan)
    slots = {replica.slots for replica in plan.fleet.replicas}
    if len(slots) > 1 and args.slots is None:
        raise InputError("its replicas differ in slots", file=args.plan, hint="Say --slots.")
    work = plan.workload
    return _planned(args, plan.provenance.prompts, work.ids, work.output_tokens, plan_order(plan), max(slots))


def _planned(
    args: argparse.Namespace,
    source: PromptSource | None,
    ids: np.ndarray[tuple[int], np.dtype[np.str_]],
    output: IntArray,
    order: IntArray,
    slots: int,
) -> _Batch:
    if source is None:
        hint = "Plan a batch file of prompts: a server needs something to complete."
        raise InputError("the plan is of lengths only", file=args.plan, hint=hint)
    path = Path(args.prompts) if args.prompts else Path(args.plan).resolve().parent / source.path
    hint = "Give the planned file with --prompts, or plan again."
    if not path.exists():
        raise InputError("the plan's prompts are not there", file=path, hint=hint)
    if prompts_digest(path) != source.sha256:
        raise InputError("the file is not what was planned: it has changed since", file=path, hint=hint)
    requests = read_server_batch(path, source.columns)
    if [request.custom_id for request in requests] != ids.tolist():
        raise InputError("its requests are not those of the plan", file=path, hint="Plan again.")
    return _Batch(path, requests, output, order, slots)


def _is_plan(path: str) -> bool:
    """Return whether a file is a plan: one object, where a batch file has one a line with ``body``."""
    if is_prompt_table(path):
        return False
    first = read_text(path).lstrip().partition("\n")[0]
    try:
        value = json.loads(first)
    except ValueError:
        return True
    return not (isinstance(value, dict) and ("body" in value or "custom_id" in value))


def _slots(args: argparse.Namespace, batch: _Batch, facts: Sequence[ServerFacts]) -> int:
    unreachable = next((fact for fact in facts if not fact.reachable), None)
    if unreachable is not None:
        hint = "Start it, or correct --server."
        raise InputError("the server cannot be reached", where=f"--server {unreachable.url}", hint=hint)
    told = next((fact.slots for fact in facts if fact.slots is not None), None)
    slots = args.slots or batch.slots or told
    if slots is None:
        hint = "Say --slots, the server's own limit (vLLM's --max-num-seqs, 256 by default on most devices)."
        raise InputError("nobody says how many requests the server works on at a time", hint=hint)
    return int(slots)


def _say_facts(facts: Sequence[ServerFacts], model: str | None, batch: _Batch) -> None:
    for fact in facts:
        name = fact.engine if fact.version is None else f"{fact.engine} {fact.version}"
        serves = f", serves {', '.join(fact.models)}" if fact.models else ""
        note(f"{fact.url}: {name}{serves}; it does not say {', '.join(fact.unknown)}")
        if fact.metrics is not None and fact.metrics.running:
            note(f"{fact.url}: {fact.metrics.running} requests of others are under way: counts include them")
        named = {model} if model is not None else {request.body.get("model") for request in batch.requests}
        missing = sorted(str(one) for one in named - {None} if one not in fact.models)
        if fact.models and missing:
            message = f"the server does not serve {missing[0]!r}, only {', '.join(fact.models)}"
            hint = f"Say --model {fact.models[0]}, which goes into every request."
            raise InputError(message, where=f"--server {fact.url}", hint=hint)


def _limits(args: argparse.Namespace, slots: int, facts: Sequence[ServerFacts]) -> EngineLimits:
    """Return the limits of all servers as if they were one: what they do side by side, it could do."""
    metrics = [fact.metrics for fact in facts if fact.metrics is not None]
    room = [one.kv_tokens for one in metrics if one.kv_tokens is not None]
    blocks = {one.block_tokens for one in metrics} - {None}
    return EngineLimits(
        sequences=slots * len(facts),
        batched_tokens=(args.batched_tokens or _UNSTATED_BUDGET) * len(facts),
        kv_tokens=sum(room) if len(room) == len(facts) else None,
        block_tokens=next(iter(blocks)) or 16 if len(blocks) == 1 else 1,
    )


def _release(asked: str, batch: _Batch, limits: EngineLimits, seed: int) -> Release:
    """Return the order asked for, or the one of fewest simulated iterations, and say what it promises."""
    from ..executor.serving.release import predict

    work = batch.work()
    if asked == "auto":
        found = best_release(work, limits, batch.planned, seed)
    else:
        found = named_release(work, limits, _NAMES[asked], batch.planned)
    if found.predicted is None:
        note(
            f"order: {found.name}; iterations cannot be predicted: the job is too large, or one of its"
            " requests for the KV cache"
        )
        return found
    put_back = f", {found.predicted.preemptions} put back" if found.predicted.preemptions else ""
    sequences = work.sequences()
    given = predict(sequences, limits, np.arange(len(sequences)))
    saved = ""
    if given is not None and found.name != FILE_ORDER:
        change = found.predicted.iterations / given.iterations - 1
        saved = f" ({change:+.1%} of the file's order)"
    note(f"order: {found.name}, {found.predicted.iterations:,} iterations predicted{put_back}{saved}")
    return found


def _report(
    args: argparse.Namespace,
    batch: _Batch,
    limits: EngineLimits,
    release: Release,
    outcome: ServerOutcome,
    resumed: int,
) -> int:
    """Print what the run came to, and return the exit status."""
    from .server_report import server_summary, show_server

    if not len(outcome.run):
        note(f"{args.output}: every request had its completion already")
        return 1 if outcome.failed else 0
    stated = args.batched_tokens is not None
    summary = server_summary(outcome.run, limits, batched_stated=stated)
    if release.predicted is not None and not resumed:
        summary["predicted_iterations"] = release.predicted.iterations
    summary |= {"resumed": resumed, "failed": outcome.failed, "output": args.output}
    show_server(summary, as_json=args.json)
    if outcome.failed:
        note(f"{args.output}: {outcome.failed} of {len(batch.requests)} requests failed; their lines say why")
    return 1 if outcome.failed else 0
