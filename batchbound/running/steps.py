"""A plan of several steps carried out one step a call, by the weights of then, with nothing finished lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.files.disk import InputError
from ..data.files.outputs import refuse_outputs
from ..data.lengths.steps_plan import StepsPlan
from ..data.lengths.steps_progress import StepsProgress
from ..data.readers.completions import (
    BatchCompletion,
    batch_completions,
    is_parquet_name,
    joined_line,
    write_completions,
)
from ..heuristics.unknown_lengths.queues import group_numbers
from ..planning.steps import history_of, update_steps_plan
from .job import load_steps_job, prompts_path, sampling_asked
from .options import ModelOptions, RunOptions
from .outputs import model_identity

if TYPE_CHECKING:
    from ..data.trace import Stage
    from ..executor.models.prompts import Prompts
    from ..executor.runs.journal import Journal
    from ..executor.runs.steps_job import Ended, LiveSteps, StepsJob

Watching = Callable[[int, "Journal"], AbstractContextManager[Callable[["Stage", int], None]]]
"""Around a step, told what is left and its journal: yields what is told each stage and how many finished."""

_TAKEN = ("prompts", "tokenizer", "temperature", "top_p", "top_k", "kv_tokens", "patience")


@dataclass(frozen=True, slots=True, eq=False)
class StepsFiles:
    """Where the outputs of several steps go, by what ``run -o`` names."""

    output: Path

    def completions(self, step: int) -> Path:
        """Return where the completions of a step, counted from zero, go: ``answers.1.jsonl`` the first's."""
        return self.output.with_suffix(f".{step + 1}{self.output.suffix}")

    @property
    def progress(self) -> Path:
        """Where stands what the next step needs to know."""
        return self.output.with_suffix(".progress.json")

    @property
    def plan(self) -> Path:
        """Where the plan goes as it stands after a step."""
        return self.output.with_suffix(".steps.json")


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """
    What a step came to.

    Parameters
    ----------
    step
        Counted from zero.
    plan
        With what is to be expected now.
    files
        What was written.
    completions
        Of the groups that are complete now and were not before, as they stand in the output.
    seconds, model_seconds
        That the step took, by the clock and by the plan's cost model; of a step gone on with, the clock's are
        of this part.
    unfinished
        Completions that go on in the next step.
    stale_share, staleness
        Share of the kept tokens that were drawn in earlier steps, and steps since the draw, on average.
    resumed
        Completions that an earlier, interrupted part of the step had finished.
    """

    step: int
    plan: StepsPlan
    files: StepsFiles
    completions: tuple[BatchCompletion, ...]
    seconds: float
    model_seconds: float
    unfinished: int
    stale_share: float
    staleness: float
    resumed: int


def run_step(
    plan: str | Path,
    model: ModelOptions | str | os.PathLike[str],
    options: RunOptions | None = None,
    *,
    output: str | Path = "answers.jsonl",
    overwrite: bool = False,
    watching: Watching | None = None,
    remark: Callable[[str], None] | None = None,
) -> StepResult | None:
    """
    Serve the step of a plan that is due, and return what it came to; None where all are served.

    Completions are on disk as they finish, and what is unfinished at the step's end as the step ends: the
    next call goes on with it, by the weights of then. After a stop the same call goes on with the step; what
    had not finished begins it anew.

    Parameters
    ----------
    plan
        A file of ``batchbound plan --steps``.
    model
        The model as it is now, and how it is loaded.
    options
        How completions are drawn, and the KV cache on the device.
    output
        Names the completions of each step, and the plan and the progress beside them.
    overwrite
        Whether to begin with the first step, and replace outputs that exist.
    watching
        Entered around the serving.
    remark
        Told what is worth knowing beside the result.

    Raises
    ------
    InputError
        If plan, prompts, model and options do not go together, or an output would be lost.
    RunStoppedError
        If the run cannot go on; what is finished is kept.
    """
    source = model if isinstance(model, ModelOptions) else ModelOptions(os.fspath(model))
    path, chosen, files = Path(plan), options or RunOptions(), StepsFiles(Path(output))
    is_parquet_name(files.output)
    # The outputs' names are made of it.
    refuse_outputs([files.output], True)
    loaded = StepsPlan.load(path)
    _refuse_unserved(loaded, path, chosen)
    before = _progress(loaded, files, overwrite)
    progress = StepsProgress(loaded.digest()) if before is None or overwrite else before
    step = len(progress.steps)
    read: list[str | Path] = [path, *chosen.files(), *loaded.history]
    prompts = prompts_path(loaded.provenance, path, chosen)
    read += [] if prompts is None else [prompts]
    goes_on = overwrite or _journal(files, step).exists()
    refuse_outputs([files.completions(step)], goes_on, read)
    refuse_outputs([files.plan, files.progress], goes_on or bool(step), read)
    job, encoded = load_steps_job(loaded, path, source, chosen, remark or (lambda _: None))
    if before is not None:
        _clear(files, before, anew=overwrite)
    serving = _Step(job, encoded, files, progress, path)
    return serving.run(_identity(job, step, source, chosen), watching)


def _refuse_unserved(plan: StepsPlan, path: Path, options: RunOptions) -> None:
    """Refuse what a run of one step cannot carry out."""
    if plan.way.keep_kv:
        what = "keeps the KV cache of what goes on, which is gone as a run of one step ends"
        hint = "Plan without --keep-kv, or serve the steps in one process with batchbound.PlannedSteps."
        raise InputError(what, file=path, where="field 'way.keep_kv'", hint=hint)
    plain = RunOptions()
    for field in fields(RunOptions):
        if field.name not in _TAKEN and getattr(options, field.name) != getattr(plain, field.name):
            option = field.name.replace("_", "-")
            what = f"--{option} has no effect on a plan of several steps"
            raise InputError(what, file=path, hint="Leave it out.")


def _progress(plan: StepsPlan, files: StepsFiles, overwrite: bool) -> StepsProgress | None:
    """Return how far a plan has come, by the file beside the outputs; None if there is none."""
    if not files.progress.exists():
        return None
    found = StepsProgress.load(files.progress)
    if not overwrite and found.plan != plan.digest():
        hint = "Give the plan that it is of, choose another output, or begin anew with --overwrite."
        raise InputError("is of another plan", file=files.progress, hint=hint)
    return found


def _clear(files: StepsFiles, progress: StepsProgress, *, anew: bool) -> None:
    """Remove journals of steps that are over; to begin anew, all that was written of them."""
    for step in range(len(progress.steps) + int(anew)):
        _journal(files, step).unlink(missing_ok=True)
        if anew:
            files.completions(step).unlink(missing_ok=True)
    if anew:
        files.progress.unlink()


def _journal(files: StepsFiles, step: int) -> Path:
    path = files.completions(step)
    return path.with_name(path.name + ".journal")


def _identity(job: StepsJob, step: int, source: ModelOptions, options: RunOptions) -> dict[str, object]:
    """Return what a step's completions depend on: its journal goes on only where all of it is the same."""
    asked = sampling_asked(source, options)
    return {"plan": job.plan.digest(), "step": step, **model_identity(job, source), "sampling": asked}


class _Step:
    """The step that is due."""

    def __init__(
        self, job: StepsJob, prompts: Prompts, files: StepsFiles, progress: StepsProgress, planned_at: Path
    ) -> None:
        self._job, self._prompts, self._files, self._progress = job, prompts, files, progress
        self._step, self._planned_at = len(progress.steps), planned_at

    def run(self, identity: Mapping[str, object], watching: Watching | None) -> StepResult | None:
        """Serve it, and write what is to be kept."""
        from ..executor.runs.journal import Journal
        from ..executor.runs.steps_job import LiveSteps

        steps, place = LiveSteps(self._job, self._progress), self._places()
        if steps.over:
            # The process may have ended between the last step's end and this.
            if not self._stated(steps):
                self._state(steps)
            return None
        begun = time.perf_counter()
        with Journal(_journal(self._files, self._step), identity) as journal:
            there = {
                place[name]: len(_choice(entry)["token_ids"]) for name, entry in journal.finished.items()
            }
            left = len(place) - sum(steps.run.kept)
            with nullcontext() if watching is None else watching(left, journal) as on_stage:
                steps.advance(partial(self._keep, journal), there, on_stage)
            seconds = time.perf_counter() - begun
            journal.end()
            # All that has ended and was not written before.
            whole, waiting = self._whole(steps, {**self._progress.waiting, **journal.finished})
            lines = list(self._joined(whole))
            write_completions(self._files.completions(self._step), lines)
            # From here on the step is over.
            StepsProgress(self._progress.plan, steps.ends, steps.unfinished, waiting).save(
                self._files.progress
            )
            journal.remove()
        plan = self._state(steps)
        stale, staleness = self._staleness(whole)
        return StepResult(
            self._step,
            plan,
            self._files,
            tuple(batch_completions(lines)),
            seconds,
            float(steps.run.seconds[-1]),
            len(steps.unfinished),
            stale,
            staleness,
            len(there),
        )

    def _places(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self._job.names)}

    def _keep(self, journal: Journal, one: Ended) -> None:
        """Put a finished completion on disk."""
        from ..executor.runs.job import answer_of

        record = self._prompts.records[one.request]
        line: dict[str, Any] = answer_of(
            record,
            len(self._prompts.tokens[one.request]),
            one.tokens,
            self._job.model,
            self._job.tokenizer,
            ends=self._job.ends,
            told=one.told if "logprobs" in record.asked else None,
        )
        choice = line["response"]["body"]["choices"][0]
        choice["token_ids"] = list(one.tokens)
        choice["versions"] = [[step + 1, count] for step, count in one.versions]
        journal.append(self._job.names[one.request], line)

    def _whole(
        self, steps: LiveSteps, lines: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
        """Return the lines kept of groups that are complete, and of those that are not yet."""
        group, groups = group_numbers(self._job.plan.problem)
        kept, keep = steps.run.kept, self._job.plan.way.keep
        size = np.bincount(group, minlength=groups)
        wanted = size if keep is None else np.minimum(size, keep)
        complete = np.bincount(group[kept], minlength=groups) >= wanted
        place = self._places()
        mine = {name: line for name, line in lines.items() if kept[place[name]]}
        whole = {name: line for name, line in mine.items() if complete[group[place[name]]]}
        return whole, {name: line for name, line in mine.items() if name not in whole}

    def _joined(self, whole: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, object]]:
        """Yield a line for each request, with all of its completions that are kept, in the plan's order."""
        records = [record for record in self._prompts.records if record.name in whole]
        for _, answers in groupby(records, key=lambda record: record.custom_id):
            lines = [dict(whole[record.name]) for record in answers]
            yield lines[0] if len(lines) == 1 else joined_line(lines)

    def _staleness(self, whole: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
        """Return the share of kept tokens of earlier steps, and how many steps ago one was drawn."""
        drawn = [tuple(one) for line in whole.values() for one in _choice(line)["versions"]]
        total = max(1, sum(count for _, count in drawn))
        ages = [(self._step + 1 - step, count) for step, count in drawn]
        return (
            sum(count for age, count in ages if age) / total,
            sum(age * count for age, count in ages) / total,
        )

    def _stated(self, steps: LiveSteps) -> bool:
        """Tell whether the plan beside the outputs knows of all that has ended."""
        if not self._files.plan.exists():
            return False
        return int((StepsPlan.load(self._files.plan).ended > 0).sum()) == len(steps.ended)

    def _state(self, steps: LiveSteps) -> StepsPlan:
        """Write the plan with what is to be expected now, its prompts as seen from there, and return it."""
        plan = update_steps_plan(self._job.plan, history_of(self._job.plan), steps.ended)
        plan.seen_from(self._files.plan, self._planned_at).save(self._files.plan)
        return plan


def _choice(line: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = line["response"]["body"]["choices"][0]
    return found
