"""Runs on servers with OpenAI's API, in a simulated best order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from ..data.arrays import IntArray
from ..data.claims.assumptions import WHOLE_CONTEXT, Assumption
from ..data.costs.model_shape import holds_whole_context
from ..data.files.disk import InputError, shown
from ..data.files.outputs import refuse_outputs
from ..data.iteration_plan import IterationPlan
from ..data.iterations import EngineLimits
from ..data.readers.completions import Endings, is_parquet_name, output_lines, write_completions
from ..data.readers.openai_batch import COMPLETIONS
from ..data.readers.request_fields import near_field
from ..data.readers.server_batch import prompt_groups
from ..data.readers.server_metrics import ServerMetrics
from ..data.readers.server_run import ServerCount, ServerRun, WholeJob
from ..planning.release import FILE_ORDER, LONGEST_FIRST, PLAN, best_release, named_release
from .batch_to_send import Batch, ServerOptions, read_batch, run_in, run_of
from .beginnings import Beginnings, keep_rates, queued, read_beginnings, traced, tree_release
from .outputs import NOTHING_CUT, check_raised, run_digest
from .server_result import ServerResult

if TYPE_CHECKING:
    from ..executor.jobs.journal import Journal
    from ..executor.server.kept_rows import KeptRows
    from ..executor.server.probe import ServerFacts
    from ..executor.server.server_job import ServerJob
    from ..heuristics.serving.release import Release

ServerWatching = Callable[[int, "Journal"], AbstractContextManager[Callable[[int], None]]]
"""Context manager of a run; yields a callback for each outcome."""

_LOG = logging.getLogger(__name__)

_NAMES = {"plan": PLAN, "longest": LONGEST_FIRST, "file": FILE_ORDER}

_MISSPELT = 0.85
"""Likeness to a known field from which an unknown one counts as misspelt; a smaller one names more."""

_UNSTATED_BUDGET = 2048
"""Tokens per iteration if unknown: vLLM's default on most devices."""


def run_on_servers(
    plan: Path,
    options: ServerOptions,
    outputs: tuple[Path, Path],
    *,
    overwrite: bool,
    watching: ServerWatching | None,
    remark: Callable[[str], None],
) -> ServerResult:
    """Send the unfinished requests; write completions and trace."""
    from ..executor.jobs.journal import Journal, journal_path
    from ..executor.models.faults import RunStoppedError
    from ..executor.server.kept_rows import kept_rows
    from ..executor.server.server_job import ServerJob

    output, trace = outputs
    is_parquet_name(output)
    errors = errors_path(output)
    check_urls(options.urls)
    identity = _identity(options)
    cap = options.longest_completion if "cut" in options.retry else None
    if cap is not None and overwrite:
        raise InputError("--overwrite has no effect with --retry cut", hint="Leave one of the two out.")
    if not overwrite and (finished := _unchanged(plan, options, outputs, run_digest(identity))) is not None:
        return finished
    batch = read_batch(plan, options)
    _remark_fields(batch, options, remark)
    read = [batch.path, plan, *options.files(), journal_path(output)]
    continues = not overwrite and _continues(output, trace, run_digest(identity))
    if cap is not None and not continues and not journal_path(output).exists():
        raise InputError(NOTHING_CUT, file=output, hint="Leave --retry out.")
    if continues:
        kept = kept_rows(
            output_lines(output), batch.requests, options.retry, output, cap, _largest_cap(trace)
        )
        check_raised(int((~kept.done).sum()), kept.long, cap or 0, output, remark)
        ran = run_in(trace)
        if ran is not None and kept.done.all():
            return _finished_before(ran, options, len(batch.requests), len(kept.failed), batch.iterations)
    if cap is None:
        batch = batch.with_earlier(options, output, trace, run_digest(identity))
    elif not batch.lengths_known(options):
        batch = batch.under_cap(cap, ~kept.done if continues else np.zeros(len(batch.requests), np.bool_))
    if batch.earlier:
        remark(f"lengths are those of the earlier run in {output}, as each request is greedy or has a seed")
    # Existing outputs may come from an earlier part of this run, as checked below.
    refuse_outputs((*outputs, errors), overwrite or continues or journal_path(output).exists(), read)
    job = ServerJob(
        batch.requests,
        range(len(batch.requests)),
        options.urls,
        1,
        model=options.model,
        retry=options.retry,
        cap=cap,
        earlier=kept.lines if continues else {},
        headers=options.sent_headers,
        ca=options.ca,
    )
    facts = job.probe()
    slots = _slots(options, batch, facts)
    _check_facts(facts, options.model, batch, remark)
    _remark_uncapped(batch, facts, remark)
    unnamed = _unnamed_model(facts, options.model, batch)
    journaled = identity | ({} if unnamed is None else {"served": unnamed})
    journaled |= {} if cap is None else {"retry": {"cut": cap}}
    options = _as_planned(options, batch, facts, remark)
    metrics = [fact.metrics for fact in facts if fact.metrics is not None]
    # Each engine behind an address has its own slots.
    slots *= max((one.engines or 1 for one in metrics), default=1)
    assumptions = _assumptions(facts, options, batch, remark)
    whole = assumptions[0].basis in ("checked", "stated")
    limits = _limits(options, slots, len(facts), metrics, batch.iterations, whole=whole)
    best_order = options.order == "auto"
    beginnings = read_beginnings(job, batch, options, facts, slots, remark)
    job, release = _in_order(job, batch, options, slots, limits, beginnings, remark)
    if continues:
        _restore(output, batch, kept, journaled)
    with Journal(journal_path(output), journaled, options.tuned.journal_sync_seconds) as journal:
        refuse_outputs((*outputs, errors), overwrite or journal.ending, read)
        kept = job.kept(journal, facts)
        left = int((~kept.done).sum())
        with nullcontext() if watching is None else watching(left, journal) as advance:
            outcome = job.run(journal, facts, kept, on_served=advance, remark=remark)
            if outcome.stopped is None:
                journal.end()
    if outcome.stopped is not None:
        raise RunStoppedError(outcome.stopped)
    name = run_digest(identity)
    ran = traced(outcome.run, beginnings, run_name=name, assumptions=assumptions, remark=remark)
    repeats = best_order and cap is None and not batch.lengths_known(options)
    repeats = repeats and batch.repeated_lengths(journal.finished.lines(journal.finished)) is not None
    _write(plan, batch, ran, outcome.failed, outputs, journal)
    rates = keep_rates(ran, limits, facts)
    stated = options.batched_tokens is not None
    kv_stated = _kv_stated(options, batch.iterations)
    return ServerResult(
        len(batch.requests),
        ran,
        limits,
        stated,
        release,
        kept.completed,
        outcome.failed,
        kv_stated=kv_stated,
        lengths_known=batch.had_lengths(options),
        planned_tokens=batch.output if batch.had_lengths(options) else None,
        repeats=repeats,
        rates=rates,
    )


def _largest_cap(trace: Path) -> int:
    """Return the largest cap that cut a completion of a run; 0 if unknown."""
    endings = Endings.of(ServerRun.header(trace).endings)
    return 0 if endings is None else endings.cap


def _remark_fields(batch: Batch, options: ServerOptions, remark: Callable[[str], None]) -> None:
    """Tell fields that are likely misspelt, and a cap without effect."""
    for name, line in batch.requests.fields.items():
        if (near := near_field(name, _MISSPELT)) is not None:
            remark(f"{batch.path}, line {line}, field 'body.{name}': sent as it is; did you mean {near}?")
    cap = options.longest_completion
    if cap is not None and "cut" not in options.retry and not batch.requests.uncapped.any():
        remark(f"--longest-completion {cap} has no effect: each request has a cap of its own")


def _remark_uncapped(batch: Batch, facts: Sequence[ServerFacts], remark: Callable[[str], None]) -> None:
    """Tell how long completions without a cap may get; the completions endpoint has a cap of its own."""
    requests = batch.requests
    open_ended = [k for k, (url, _) in enumerate(requests.kinds) if url != COMPLETIONS]
    free = int(((batch.output == 0) & np.isin(requests.kind, open_ended)).sum())
    if not free:
        return
    which = "" if free == len(requests) else f" in {free:,} of {len(requests):,} requests"
    most = max((fact.context for fact in facts if fact.context is not None), default=None)
    room = (
        "a completion may take as many tokens as the model has room for"
        if most is None
        else f"a prompt and its completion may take up to {most:,} tokens, the model's context"
    )
    remark(f"no max_tokens{which}: {room}; --longest-completion limits them")


def _write(
    requests: Path, batch: Batch, ran: ServerRun, failed: int, outputs: tuple[Path, Path], journal: Journal
) -> None:
    """Write trace, completions and failed rows; remove the journal."""
    from ..executor.server.server_job import completed

    output, trace = outputs
    errors, names = errors_path(output), batch.requests.names
    # A part without completions keeps the trace of the job; without one, an empty trace identifies it.
    if (ran.failed == 0).any() or run_of(trace) != ran.run:
        # A plan has its rows in another file.
        marked = not failed and requests.is_file() and batch.planned is None
        replace(ran, whole=WholeJob.of(requests, len(batch.requests)) if marked else None).save(trace)
    write_completions(output, journal.finished.lines(names))
    marks = ServerRun.header(trace).whole
    if marks is not None:
        marks.mark(output)
    errors.unlink(missing_ok=True)
    if failed:
        write_completions(errors, (line for line in journal.finished.lines(names) if not completed(line)))
    journal.remove()


def _identity(options: ServerOptions) -> dict[str, object]:
    """Return what all completions depend on; rows are known by id and body."""
    identity: dict[str, object] = {"server": "OpenAI", "model": options.model}
    if options.defaults:
        identity["body"] = options.defaults
    if options.columns is not None and not options.columns.chat:
        identity["raw"] = True
    return identity


def errors_path(output: Path) -> Path:
    """Return the path of the failed requests, next to the output."""
    # An empty name is a folder, which is refused with all outputs.
    return output.with_name(f"{output.stem}.errors.jsonl") if output.name else output


def _continues(output: Path, trace: Path, run: str) -> bool:
    """Return whether an output is of an earlier run with the same servers, model and options."""
    from ..executor.jobs.journal import journal_path

    if journal_path(output).exists() or not output.is_file():
        return False
    return run_of(trace) == run


def _restore(output: Path, batch: Batch, kept: KeptRows, identity: Mapping[str, object]) -> None:
    """Write the journal of a finished run again, without the rows to send."""
    from ..executor.jobs.journal import Journal, journal_path

    lines = ((str(line["custom_id"]), line) for line in output_lines(output))
    find = batch.requests.names.find
    done = ((name, line) for name, line in lines if kept.done[find(name)])
    Journal.restore(journal_path(output), identity, done)


def _unchanged(
    requests: Path, options: ServerOptions, outputs: tuple[Path, Path], run: str
) -> ServerResult | None:
    """Return the result of a whole job whose files have not changed since, without reading its rows."""
    output, trace = outputs
    if "cut" in options.retry or not _continues(output, trace, run):
        return None
    whole = ServerRun.header(trace).whole
    if whole is None or not whole.holds(requests, output):
        return None
    ran = run_in(trace)
    return None if ran is None else _finished_before(ran, options, whole.rows, 0, None)


def _finished_before(
    ran: ServerRun, options: ServerOptions, count: int, failed: int, plan: IterationPlan | None
) -> ServerResult:
    """Return the result of a job without a row to send."""
    whole = any(one.name == WHOLE_CONTEXT and one.basis == "checked" for one in ran.assumptions)
    limits = _limits(options, ran.slots, len(ran.servers), ran.servers, plan, whole=whole)
    stated = options.batched_tokens is not None
    return ServerResult(
        count,
        ran,
        limits,
        stated,
        None,
        count - len(ran),
        failed,
        finished_before=True,
        kv_stated=_kv_stated(options, plan),
    )


def _kv_stated(options: ServerOptions, plan: IterationPlan | None) -> bool:
    planned = plan is not None and all(share.limits.kv_tokens is not None for share in plan.shares)
    return options.kv_tokens is not None or planned


def _assumptions(
    facts: Sequence[ServerFacts], options: ServerOptions, batch: Batch, remark: Callable[[str], None]
) -> tuple[Assumption, ...]:
    """Return the assumption that each request holds its whole context."""
    if _kv_stated(options, batch.iterations):
        return (Assumption(WHOLE_CONTEXT, "stated", "--kv-tokens or the plan's --kv-capacity"),)
    names = [options.model, *(name for fact in facts for name in (*fact.models, *fact.roots))]
    known = [whole for name in names if name is not None and (whole := holds_whole_context(name)) is not None]
    if known:
        windows = "the model's config has sliding windows or layers without KV"
        return (
            Assumption(WHOLE_CONTEXT, "checked")
            if all(known)
            else Assumption(WHOLE_CONTEXT, "broken", windows),
        )
    stating = next((fact for fact in facts if fact.metrics is not None and fact.metrics.kv_tokens), None)
    if stating is not None and stating.metrics is not None:
        remark(
            f"{stating.url}: its KV capacity of {stating.metrics.kv_tokens:,} tokens is left out of the"
            " bound, as sliding windows would need less: give --kv-tokens N for a model without them"
        )
    return (Assumption(WHOLE_CONTEXT, "assumed"),)


def check_urls(urls: Sequence[str]) -> None:
    """Refuse an address that is none, or that is named twice."""
    from ..executor.server.connection import Address

    seen = set[tuple[str, str]]()
    for url in urls:
        if not _is_address(url):
            hint = "Write http://HOST:PORT."
            raise InputError("it is not an http:// or https:// address", where=f"--server {url}", hint=hint)
        address = Address.of(url, None)
        if (address.base, address.query) in seen:
            hint = "Name each server once, as each counts with its slots."
            raise InputError("it is named twice", where=f"--server {url}", hint=hint)
        seen.add((address.base, address.query))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unmatched brackets or an impossible port
        return False


def _as_planned(
    options: ServerOptions, batch: Batch, facts: Sequence[ServerFacts], remark: Callable[[str], None]
) -> ServerOptions:
    """Return the options completed by a plan."""
    plan = batch.iterations
    if plan is None:
        return options
    if len(facts) != len(plan.shares):
        remark(f"the plan is for {len(plan.shares)} replicas, not {len(facts)} servers: they share one queue")
    room = [fact.metrics.kv_tokens for fact in facts if fact.metrics is not None]
    for held, share in zip(room, plan.shares, strict=False):
        if held is not None and held != share.limits.kv_tokens:
            planned = "no limit" if share.limits.kv_tokens is None else f"{share.limits.kv_tokens:,}"
            remark(
                f"the server has {held:,} tokens of KV cache, and the plan {planned}: plan again with"
                f" --kv-capacity {held}"
            )
    held_back = [share.held_back for share in plan.shares if share.held_back is not None]
    return replace(
        options,
        in_flight=options.in_flight or max(held_back, default=None),
        batched_tokens=options.batched_tokens or plan.stated_budget,
    )


def _asked_again(options: ServerOptions, batch: Batch, limits: EngineLimits) -> int:
    """Count repeated prompts, if the order may adapt to them."""
    work = batch.work()
    if work.exact or options.order not in ("auto", "longest") or work.sequences().may_run_short(limits):
        return 0
    return len(batch.requests) - len(np.unique(prompt_groups(batch.requests)))


def _kinds(options: ServerOptions, batch: Batch, remark: Callable[[str], None]) -> IntArray | None:
    """Return the kinds of requests that differ, if no length is known."""
    from ..executor.jobs.kinds import kinds_of_batch
    from ..heuristics.unknown_lengths.kinds import KindParams

    requests, most = batch.requests, KindParams().largest
    if options.order != "auto" or batch.lengths_known(options) or len(requests) > most:
        return None
    # The completions kept are those that ended early: lengths learnt from them mislead.
    if "cut" in options.retry:
        return None
    if requests.choices.max(initial=1) > 1:
        return None
    kind = kinds_of_batch(requests)
    count = len(np.unique(kind))
    if count == 1:
        return None
    remark(f"{count} kinds of prompts: longer ones go first once completions show that it saves")
    return kind


def _in_order(
    job: ServerJob,
    batch: Batch,
    options: ServerOptions,
    slots: int,
    limits: EngineLimits,
    beginnings: Beginnings | None,
    remark: Callable[[str], None],
) -> tuple[ServerJob, Release]:
    """Return the job in the order of fewest predicted seconds or iterations, and that order."""
    if beginnings is not None and options.order == "auto" and batch.planned is None:
        found = tree_release(beginnings, batch, options, len(options.urls), remark)
        if found is not None:
            release, home = found
            job = replace(job, waiting=queued(slots, len(options.urls)), home=home)
            return _ordered(job, release, slots, options, None, None), release
    again = 0 if batch.unknown else _asked_again(options, batch, limits)
    if again:
        remark(f"{again:,} requests repeat a prompt: the order adapts as completions arrive")
        # Only this order can adapt to observed lengths.
        options = replace(options, order="longest")
    elif batch.iterations is not None and options.order == "auto":
        options = replace(options, order="plan")
    release = _release(options, batch, limits, remark)
    kind = None if again else _kinds(options, batch, remark)
    return _ordered(job, release, slots, options, batch.output if again else None, kind), release


def _ordered(
    job: ServerJob,
    release: Release,
    slots: int,
    options: ServerOptions,
    planned: IntArray | None,
    kind: IntArray | None,
) -> ServerJob:
    adapts = "" if planned is None and kind is None else ", adapted to lengths seen"
    return replace(
        job,
        order=release.order,
        after=release.after,
        slots=slots,
        in_flight=options.in_flight,
        order_name=f"{release.name}{adapts}",
        planned=planned,
        kind=kind,
        params=options.tuned,
        seed=options.seed,
        deadline=options.deadline,
    )


def _slots(options: ServerOptions, batch: Batch, facts: Sequence[ServerFacts]) -> int:
    unreachable = next((fact for fact in facts if not fact.reachable), None)
    if unreachable is not None:
        hint = "Start it, or correct --server."
        message = f"the server cannot be reached ({unreachable.why})"
        raise InputError(message, where=f"--server {unreachable.url}", hint=hint)
    own = next((fact.slots for fact in facts if fact.slots is not None), None)
    slots = options.slots or batch.slots or own
    if slots is None:
        hint = (
            "Add --slots N, the server's own limit (vLLM's --max-num-seqs, 256 by default on most devices)."
        )
        raise InputError("max_num_seqs of the server is unknown", hint=hint)
    return int(slots)


def _check_facts(
    facts: Sequence[ServerFacts], model: str | None, batch: Batch, remark: Callable[[str], None]
) -> None:
    """Compare the servers with the plan; refuse a model they lack."""
    for fact in facts:
        name = fact.engine if fact.version is None else f"{fact.engine} {fact.version}"
        serves = f", serves {', '.join(fact.models)}" if fact.models else ""
        uncounted = "; no /metrics: iterations cannot be counted" if fact.metrics is None else ""
        remark(f"{fact.url}: {name}{serves}{uncounted}")
        _LOG.info("%s does not tell %s", fact.url, ", ".join(fact.unknown))
        if fact.metrics is not None and fact.metrics.running:
            remark(f"{fact.url}: {fact.metrics.running} requests of other clients run: counts include them")
        named = {model} if model is not None else batch.requests.models
        missing = sorted(str(one) for one in named - {None} if one not in fact.models)
        if fact.models and missing:
            message = f"the server does not serve {missing[0]!r}, only {', '.join(fact.models)}"
            hint = f"Give --model {fact.models[0]}, for every request."
            if model is None:
                numbers = [k for k, (_, name) in enumerate(batch.requests.kinds) if name == missing[0]]
                rows = np.flatnonzero(np.isin(batch.requests.kind, numbers))
                first = batch.requests[int(rows[0])]
                asking = f"{len(rows):,} of {len(batch.requests):,} rows"
                message += f": {asking} {'names' if len(rows) == 1 else 'name'} it, first"
                message += f" {shown(first.custom_id)} in line {first.line} of {batch.path}"
                hint = f"{hint[:-1]}, or correct the {'row' if len(rows) == 1 else 'rows'}."
            raise InputError(message, where=f"--server {fact.url}", hint=hint)


def _unnamed_model(facts: Sequence[ServerFacts], model: str | None, batch: Batch) -> str | None:
    """Return the servers' model for requests without one."""
    if model is not None or None not in batch.requests.models:
        return None
    given = sorted({fact.models[0] for fact in facts if fact.models})
    if len(given) > 1:
        hint = f"Give --model for every request, such as --model {given[0]}."
        raise InputError(f"requests name no model, and the servers have {', '.join(given)}", hint=hint)
    return given[0] if given else None


def _limits(
    options: ServerOptions,
    slots: int,
    count: int,
    metrics: Sequence[ServerMetrics | ServerCount],
    plan: IterationPlan | None,
    *,
    whole: bool,
) -> EngineLimits:
    engines = sum(one.engines or 1 for one in metrics) + count - len(metrics)
    room = [one.kv_tokens for one in metrics if one.kv_tokens is not None]
    if options.kv_tokens is not None:
        room = [options.kv_tokens * engines] + [0] * (count - 1)
    elif not whole:
        room = []
    blocks = {one.block_tokens for one in metrics} - {None}
    if plan is not None and options.kv_tokens is None and not room:
        # The servers do not state it: take the plan's.
        each = plan.shares[0].limits
        room = [] if each.kv_tokens is None else [each.kv_tokens] * count
        blocks = {each.block_tokens}
    return EngineLimits(
        sequences=slots * count,
        batched_tokens=(options.batched_tokens or _UNSTATED_BUDGET) * engines,
        kv_tokens=sum(room) if len(room) == count else None,
        block_tokens=next(iter(blocks)) or 16 if len(blocks) == 1 else 1,
    )


def _release(
    options: ServerOptions, batch: Batch, limits: EngineLimits, remark: Callable[[str], None]
) -> Release:
    from ..heuristics.serving.release import Release, predict

    if batch.unknown:
        remark(
            f"order: file order; {batch.unknown:,} requests have no max_tokens, so iterations cannot be"
            " predicted: give --lengths to order them"
        )
        return Release(FILE_ORDER, np.arange(len(batch.requests)), None)
    work = batch.work()
    flying = None if options.in_flight is None else options.in_flight * len(options.urls)
    unknown = not batch.lengths_known(options)
    if options.order != "auto":
        found = named_release(work, limits, _NAMES[options.order], batch.planned, flying)
    elif unknown:
        by_cap = LONGEST_FIRST if np.ptp(batch.output) else FILE_ORDER
        found = named_release(work, limits, by_cap, None, flying)
    else:
        found = best_release(work, limits, batch.planned, options.seed, flying)
    if unknown:
        order = found.name
        if order == LONGEST_FIRST:
            order = "larger caps first" if np.ptp(batch.output) else FILE_ORDER
        remark(f"order: {order}; lengths are unknown, so no iterations are predicted")
        if not batch.requests.repeats:
            remark(
                "requests without temperature 0 or a seed: the next run cannot know their lengths;"
                " --temperature 0 makes those greedy that state none"
            )
        return replace(found, predicted=None)
    if found.predicted is None:
        remark(
            f"order: {found.name}; iterations cannot be predicted: the job is too large, or a request does"
            " not fit the KV cache"
        )
        return found
    preempted = f", {found.predicted.preemptions} preempted" if found.predicted.preemptions else ""
    sequences = work.sequences()
    given = predict(sequences, limits, np.arange(len(sequences)))
    saved = ""
    if given is not None and found.name != FILE_ORDER:
        change = found.predicted.iterations / given.iterations - 1
        saved = f", {abs(change):.1%} {'more' if change > 0 else 'fewer'} than in file order"
        saved = saved if change else ", as many as in file order"
    remark(f"order: {found.name}, {found.predicted.iterations:,} iterations predicted{preempted}{saved}")
    return found
