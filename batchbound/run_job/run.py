"""Runs of a plan: from prompts to completions and a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.plan import Plan
from ..data.readers.completions import (
    BatchCompletion,
    Endings,
    batch_completions,
    cut_tokens,
    is_parquet_name,
    output_lines,
    read_completions,
)
from ..data.report import Report
from ..data.trace import Trace
from ..judging import report
from ..planning.fleet import shared_out
from .configuration import refuse_unused, serving
from .load import load_job, prompts_path
from .options import ModelOptions, RunOptions
from .outputs import NOTHING_CUT, RunFiles, check_raised, finished_before, run_digest, run_identity

if TYPE_CHECKING:
    from ..data.trace import Stage
    from ..executor.jobs.job import Job, Outcome
    from ..executor.jobs.journal import Journal

Watching = Callable[[Plan, "Journal"], AbstractContextManager[Callable[["Stage", int], None]]]
"""Context manager of a run; yields a callback for each stage."""


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """Result of a run on a model.

    Parameters
    ----------
    plan
        Plan of the run, made for its replicas.
    files
        Output files.
    completions
        Completions in the plan's order, as in the output.
    traces
        Trace of each replica; without stages if nothing was left to run.
    report
        Report of the traces.
    endings
        Count of the completions by their ending.
    finished_before
        True if an earlier run had finished the job; traces and report are those of that run.
    """

    plan: Plan
    files: RunFiles
    completions: tuple[BatchCompletion, ...]
    traces: tuple[Trace, ...]
    report: Report
    endings: Endings = field(default_factory=Endings)
    finished_before: bool = False

    @property
    def failed(self) -> int:
        """Number of requests with an error as completion."""
        return sum(one.error is not None for one in self.completions)


def run_on_model(
    path: Path,
    source: ModelOptions,
    options: RunOptions,
    outputs: tuple[Path, Path],
    *,
    overwrite: bool,
    watching: Watching | None,
    remark: Callable[[str], None],
) -> RunResult:
    """Run a plan on a model; write completions and traces.

    path: File of the plan; paths of prompts are relative to it.
    outputs: Files of completions and trace; several replicas write a trace each.
    Raises InputError if the arguments do not match or an output would be lost, and RunStoppedError if the run
    cannot continue; finished completions are kept.
    """
    from ..executor.jobs.journal import Journal, journal_path

    output, trace = outputs
    is_parquet_name(output)
    begun = time.perf_counter()
    loaded = Plan.load(path)
    chosen = _for_replicas(loaded, path, options, remark)
    files = RunFiles.of(output, trace, chosen, shared=chosen is not loaded)
    prompts = prompts_path(chosen.provenance, path, options)
    read = [path, *options.files(), journal_path(output), *([] if prompts is None else [prompts])]
    # Existing outputs may come from an earlier part of this run, as checked below.
    begun_before = journal_path(files.output).exists() or files.output.is_file()
    refuse_outputs(files.all, overwrite or begun_before, read)
    _refuse_unused(chosen, path, options)
    if not overwrite and files.output.is_file() and not journal_path(files.output).exists():
        # Weights can take minutes to load; a finished job needs none.
        job = load_job(chosen, path, source, options, lambda _: None, weights=False)
        finished = _finished(chosen, files, job, run_identity(loaded, job, source, options), remark)
        if finished is not None:
            return finished
    job = load_job(chosen, path, source, options, remark)
    identity = run_identity(loaded, job, source, options)
    if not overwrite and (finished := _finished(chosen, files, job, identity, remark)) is not None:
        return finished
    if job.cut_cap is not None and not journal_path(files.output).exists():
        raise InputError(NOTHING_CUT, file=files.output, hint="Leave --retry out.")
    serve = _serving(chosen, job, source, options, remark)
    claimed = _journal_identity(identity, job)
    with Journal(journal_path(files.output), claimed, options.tuned.journal_sync_seconds) as journal:
        refuse_outputs(files.all, overwrite or journal.ending, read)
        with nullcontext() if watching is None else watching(chosen, journal) as on_stage:
            outcome = serve(journal, on_stage=on_stage)
            journal.end()
    completions, endings = tuple(batch_completions(job.lines(journal))), _endings(job, journal)
    repeated = _repeated(job, journal, options.tuned.product_rows) | {"endings": endings.facts()}
    traces = tuple(replace(trace, engine={**trace.engine, **repeated}) for trace in outcome.traces)
    files.save(chosen, traces, path.parent, {"run": run_digest(identity), **repeated})
    job.write_answers(journal, files.output)
    traces = traces or tuple(
        replace(Trace.empty(one.slots), engine=repeated) for one in chosen.fleet.replicas
    )
    found = report(chosen, traces, seconds=time.perf_counter() - begun)
    return RunResult(chosen, files, completions, traces, found, endings)


def _repeated(job: Job, journal: Journal, rows: int) -> dict[str, object]:
    """Return the digest and conditions of a repeatable run."""
    if not job.repeatable:
        return {}
    from ..executor.engines.huggingface import facts_of_bits
    from ..executor.jobs.digests import digest_of

    return {"digest": digest_of(job.lines(journal)), **facts_of_bits(job.model, rows)}


def _finished(
    chosen: Plan, files: RunFiles, job: Job, identity: Mapping[str, object], remark: Callable[[str], None]
) -> RunResult | None:
    if not finished_before(files, job, identity):
        return None
    # Planning again for the replicas may give a different plan.
    chosen = Plan.load(files.shared) if files.shared is not None and files.shared.is_file() else chosen
    traces = files.read_traces(chosen, run_digest(identity))
    if job.cut_cap is not None:
        largest = Endings.of(traces[0].engine.get("endings"))
        if _begin_retry(files.output, job, identity, 0 if largest is None else largest.cap, remark):
            return None
    written = read_completions(files.output)
    endings = Endings()
    endings.add(written)
    return RunResult(chosen, files, written, traces, report(chosen, traces), endings, finished_before=True)


def _begin_retry(
    output: Path, job: Job, identity: Mapping[str, object], largest: int, remark: Callable[[str], None]
) -> bool:
    """Write the journal of a finished run again without what was cut below the new cap; return if any was."""
    from ..executor.jobs.journal import Journal, journal_path

    assert job.cut_cap is not None
    again, long = job.cut_below_cap(output_lines(output), largest)
    check_raised(len(again), long, job.cut_cap, output, remark)
    if again:
        kept = job.kept(output_lines(output), again)
        Journal.restore(journal_path(output), _journal_identity(identity, job), kept)
    return bool(again)


def _journal_identity(identity: Mapping[str, object], job: Job) -> Mapping[str, object]:
    """Return what a journal's completions depend on: those of a retry also on the cap."""
    return identity if job.cut_cap is None else {**identity, "retry": {"cut": job.cut_cap}}


def _endings(job: Job, journal: Journal) -> Endings:
    """Count the completions by their ending, with the caps that cut them."""
    endings, retries = Endings(), len(job.plan.fleet.replicas) == 1 and not job.pinned
    raised = np.where(retries & (job.most_tokens < job.room), job.most_tokens, 0)
    caps = dict(zip((record.custom_id for record in job.prompts.records), raised.tolist(), strict=True))
    for line in job.lines(journal):
        cap = caps[str(line["custom_id"])]
        # A completion that a retry kept may have more tokens than its cap.
        endings.add(batch_completions([line]), cap and max(cap, cut_tokens(line, cap)))
    return endings


def _for_replicas(plan: Plan, path: Path, options: RunOptions, remark: Callable[[str], None]) -> Plan:
    count = len(plan.fleet.replicas)
    if options.replicas in (None, count):
        return plan
    if count > 1:
        message = f"the plan is for {count} replicas, not {options.replicas}"
        raise InputError(message, file=path, hint="Leave --replicas out, or plan again.")
    assert options.replicas is not None
    remark(f"{path} is for one replica: planning again for {options.replicas}")
    return shared_out(plan, options.replicas)


def _refuse_unused(plan: Plan, path: Path, options: RunOptions) -> None:
    if len(plan.fleet.replicas) == 1:
        refuse_unused(plan, path, options)
        return
    single = {
        "--retry": options.cut_cap,
        "--policy": options.policy,
        "--kv-tokens": options.kv_tokens,
        "--encode-device": options.encode_device,
        "--replan": options.replan,
        "--tensor-parallel": None if options.tensor_parallel == 1 else options.tensor_parallel,
    }
    for option in (name for name, given in single.items() if given is not None):
        raise InputError(f"{option} is for one replica", hint="Leave it out, or plan for one replica.")


def _serving(
    plan: Plan, job: Job, source: ModelOptions, options: RunOptions, remark: Callable[[str], None]
) -> Callable[..., Outcome]:
    """Return the function that runs a job in one or several processes."""
    if len(plan.fleet.replicas) == 1:
        return serving(plan, job, source, options, remark)
    from ..executor.jobs.fleet_run import run_on_replicas

    return partial(
        run_on_replicas,
        job,
        spec=source.spec(job),
        address=options.ray_address,
        patience=options.patience,
    )
