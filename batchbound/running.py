"""Run prompts or a plan on a model, or send them to servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, overload

from .cost_cache import CostCache, costs_of
from .data.files.disk import InputError, atomic_write
from .data.files.record import plain
from .data.files.sources import opened_once
from .data.plan import Plan
from .data.readers.completions import is_parquet_name
from .data.readers.openai_batch import read_batch
from .data.trace import add_fact
from .gain import KEPT, Gain, gain_and_plan, gain_of_fleet
from .inputs import say_texts
from .judging import may_share
from .listening import remark
from .options.option import PathText, refuse_unknown
from .options.run import PLANNING, JobOptions
from .run_job.batch_to_send import ServerOptions
from .run_job.earlier import next_plan, plan_beside
from .run_job.on_servers import ServerWatching, run_on_servers
from .run_job.options import ModelOptions, RunOptions
from .run_job.outputs import NOTHING_CUT
from .run_job.prompts import has_prompts, lengths_repeat, plan_of_prompts, policy_of
from .run_job.run import RunResult, Watching, run_on_model
from .run_job.server_result import ServerResult

if TYPE_CHECKING:
    from .data.trace import Stage
    from .executor.jobs.journal import Journal

P = ParamSpec("P")


class Watcher(Protocol):
    """Observer of a run, for progress and a watchdog."""

    def on_model(self, plan: Plan, journal: Journal) -> AbstractContextManager[Callable[[Stage, int], None]]:
        """Watch a run on a model; yield a callback for each stage."""

    def on_servers(self, left: int, journal: Journal) -> AbstractContextManager[Callable[[int], None]]:
        """Watch a run on servers; yield a callback for the number of requests done."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run on a model.

    result: Its completions, traces and report.
    options: Its options, with the plan that was run and its policy.
    repeats: True if its lengths were not known, and the next run has the same.
    gain: What the order gained; None for several replicas, and where nothing was run.
    """

    result: RunResult
    options: JobOptions
    repeats: bool
    gain: Gain | None = None

    @property
    def served(self) -> bool:
        """Whether requests were run."""
        return self.result.report.requests > 0 and not self.result.finished_before


def run_or_send(options: JobOptions, watcher: Watcher) -> Ran | ServerResult:
    """Run prompts or a plan on a model, or send them to servers.

    The gain of a run is computed, and its costs and the next plan are kept.
    """
    is_parquet_name(options.answers)
    if not options.server:
        options = replace(options, patience=options.stalled / 2)
        ran = _run_on_model(options, watcher.on_model, remark)
        return replace(ran, gain=_gain(ran)) if ran.served else ran
    servers = options.servers
    with opened_once() as let_go:

        @contextmanager
        def watched(left: int, journal: Journal) -> Iterator[Callable[[int], None]]:
            let_go()
            with watcher.on_servers(left, journal) as advance:
                yield advance

        say_texts(options.plan, servers.columns, "to the chat endpoint")
        return run_on_servers(
            Path(options.plan),
            servers,
            options.written,
            overwrite=options.overwrite,
            watching=watched,
            remark=remark,
        )


def _run_on_model(options: JobOptions, watching: Watching | None, tell: Callable[[str], None]) -> Ran:
    with opened_once() as let_go:
        return _run_once(options, watching, tell, let_go)


def _run_once(
    options: JobOptions,
    watching: Watching | None,
    tell: Callable[[str], None],
    let_go: Callable[[], None],
) -> Ran:
    source, made, repeats = options.source, _Made(), False
    options = _for_retry(options)
    if has_prompts(options):
        made = _Made.of(plan_beside(options.answers))
        if options.cut_cap is not None and not plan_beside(options.answers).exists():
            raise InputError(NOTHING_CUT, file=options.answers, hint="Leave --retry out.")
        path = plan_of_prompts(options)
        plan, policy = Plan.load(path), options.policy
        if policy is None and options.replicas in (None, 1):
            policy = policy_of(plan)
        if options.lengths is None and plan.provenance.lengths.get("kind") == "cap":
            repeats = lengths_repeat(read_batch(options.plan, options.columns_of()), options)
        cap = options.longest_completion
        late = cap if cap is not None and plan.provenance.lengths.get("longest") is None else None
        options = replace(options, plan=path, policy=policy, late_cap=late)
    else:
        hint = "Give the prompts instead of the plan, or leave it out."
        others = tuple(name for name in PLANNING if name != "slots")
        options.refuse(others, "on a plan, which fixes it", hint, file=options.plan)
        if options.slots is not None:
            tell(f"--slots has no effect: the plan fixes its slots; plan again for {options.slots}")
        plan = Plan.load(options.plan)
        if (
            options.policy is None
            and options.replicas in (None, 1)
            and not options.pinned
            and not plan.followed
        ):
            # An order by caps loses to file order where completions end far below them.
            options = replace(options, policy=policy_of(plan))
    if options.repeatable:
        options = replace(options, params=replace(options.tuned, repeatable=True))
    begun = False

    @contextmanager
    def watched(plan: Plan, journal: Journal) -> Iterator[Any]:
        nonlocal begun
        begun = True
        let_go()
        with nullcontext() if watching is None else watching(plan, journal) as on_stage:
            yield on_stage

    try:
        result = run_on_model(
            Path(options.plan),
            source,
            options,
            options.written,
            overwrite=options.overwrite,
            watching=watched,
            remark=tell,
        )
    except Exception:
        if not begun:
            made.take_back()
        raise
    return Ran(result, options, repeats)


def _for_retry(options: JobOptions) -> JobOptions:
    """Return the options of a run that completes cut completions again: the earlier plan, another cap."""
    cap = options.cap_of_retry
    if cap is None:
        return options
    # Planned lengths are those of the completions that were cut.
    return replace(options, longest_completion=None, cut_cap=cap, policy=options.policy or "fcfs-paced")


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


def _gain(ran: Ran) -> Gain | None:
    """Return a run's gain; save it in the trace, its costs and the next plan."""
    result, options = ran.result, ran.options
    if result.plan.configuration is not None and options.policy is None:
        return None
    if len(result.traces) > 1:
        shared = may_share(result.plan, result.traces)
        gain = gain_of_fleet(result.plan.fleet, result.traces, shared=shared)
    else:
        gain = _gain_of_one(ran)
    if gain is not None:
        add_fact(result.files.traces[0], KEPT, plain(gain))
    return gain


def _gain_of_one(ran: Ran) -> Gain | None:
    result, options = ran.result, ran.options
    trace = result.traces[0]
    costs = costs_of(trace)
    if costs is not None:
        CostCache.of_user().keep(str(options.model), trace.slots, costs)
    gain, again = gain_and_plan(result.plan.fleet, trace, cost=None if costs is None else costs.cost)
    if again is not None and ran.repeats and len(again.workload) == len(result.plan.workload):
        again.save(next_plan(options.answers))
    return gain


class Run(Generic[P]):
    """Run prompts or a plan on a model or on servers.

    Each finished completion is on disk. After a stop, the same call resumes the run. A model by name takes
    the options of ``batchbound run`` as keywords.

    Parameters
    ----------
    plan
        File of prompts, or a plan.
    model
        Name of a model; a model and its loading; or servers.
    options
        Options of a run on a model.
    output, trace
        Files to write, by default ``answers.jsonl`` and ``trace.jsonl``. For an output ``NAME.jsonl`` the
        trace is ``NAME.trace.jsonl`` by default.
    overwrite
        True to replace existing outputs.
    slots
        Maximum number of requests in progress, for prompts.
    watching, remark
        Context manager of the run, for progress; function that receives remarks.

    Raises
    ------
    InputError
        If prompts, plan, model and options do not match, or an output would be lost.
    RunStoppedError
        If the run cannot continue; finished completions are kept.
    """

    def __init__(self, record: Callable[P, JobOptions]) -> None:
        self._record = record

    @overload
    def __call__(
        self,
        plan: PathText,
        model: ModelOptions | PathText,
        options: RunOptions | None = None,
        *,
        output: PathText | None = ...,
        trace: PathText | None = ...,
        overwrite: bool = ...,
        slots: int | None = ...,
        watching: Watching | None = ...,
        remark: Callable[[str], None] | None = ...,
    ) -> RunResult: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        plan: PathText,
        model: ServerOptions,
        options: None = None,
        *,
        output: PathText | None = ...,
        trace: PathText | None = ...,
        overwrite: bool = ...,
        watching: ServerWatching | None = ...,
        remark: Callable[[str], None] | None = ...,
    ) -> ServerResult: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> RunResult: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run prompts or a plan; see the class."""
        model = args[1] if len(args) > 1 else kwargs.get("model")
        if isinstance(model, ServerOptions):
            return _send(*args, **kwargs)
        if (
            isinstance(model, ModelOptions)
            or len(args) > 2
            or kwargs.keys() & {"options", "watching", "remark"}
        ):
            return _run_records(*args, **kwargs)
        refuse_unknown("run", self._record, kwargs)
        job = self._record(*args, **kwargs)
        if job.server:
            hint = "Give batchbound.ServerOptions((URL,)) in place of the model."
            raise InputError("a model by name runs on no server", hint=hint)
        return _run_on_model(job, None, remark).result


run = Run(JobOptions)


def _send(
    plan: PathText,
    model: ServerOptions,
    options: None = None,
    *,
    output: PathText | None = None,
    trace: PathText | None = None,
    overwrite: bool = False,
    watching: ServerWatching | None = None,
    remark: Callable[[str], None] = remark,
) -> ServerResult:
    if options is not None:
        raise InputError("options of a run on a model have no effect on servers", hint="Leave them out.")
    files = JobOptions(plan, output=output, trace=trace).written
    return run_on_servers(Path(plan), model, files, overwrite=overwrite, watching=watching, remark=remark)


def _run_records(
    plan: PathText,
    model: ModelOptions | PathText,
    options: RunOptions | None = None,
    *,
    watching: Watching | None = None,
    remark: Callable[[str], None] = remark,
    **more: Any,
) -> RunResult:
    source = model if isinstance(model, ModelOptions) else ModelOptions(model=os.fspath(model))
    chosen = options or RunOptions()
    stated = {field.name: getattr(source, field.name) for field in fields(source)}
    stated |= {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    return _run_on_model(JobOptions(plan, **stated, **more), watching, remark).result
