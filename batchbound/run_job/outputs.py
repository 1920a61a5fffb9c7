"""Files of a run: paths, digests and checks."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.files.disk import InputError
from ..data.plan import Plan
from ..data.readers.completions import read_completions
from ..data.trace import PLANNED, Trace
from .load import sampling_asked
from .options import ModelOptions, RunOptions

if TYPE_CHECKING:
    from ..executor.jobs.job import Job


NOTHING_CUT = "no finished run whose cut completions could run again"


def check_raised(
    sent: int, long: Sequence[int], cap: int, output: Path, remark: Callable[[str], None]
) -> None:
    """Tell the cut rows whose cap a retry does not raise; refuse a retry without a row to send.

    sent: Number of rows to send.
    long: Tokens, or the larger cap, of each of these rows.
    """
    if not long:
        return
    completions = "1 cut completion has" if len(long) == 1 else f"{len(long):,} cut completions have"
    if not sent:
        least = f"at least {min(long)} tokens, or that cap"
        what = f"--longest-completion {cap} raises no cap: {completions} {least}"
        hint = f"Give more than {min(long)} tokens; {2 * max(long)} raises each."
        raise InputError(what, file=output, hint=hint)
    kept = "it is" if len(long) == 1 else "they are"
    remark(f"{completions} {cap} tokens or more, or such a cap: kept as {kept}")


def trace_paths(trace: str, replicas: int) -> list[Path]:
    """Return the paths of a run's traces."""
    return (
        [Path(trace)] if replicas == 1 else [Path(trace).with_suffix(f".{k}.jsonl") for k in range(replicas)]
    )


def shared_plan_path(trace: str) -> Path:
    """Return the path of the plan made for several replicas."""
    return Path(run_trace(trace)).with_suffix(".plan.json")


def run_trace(trace: str) -> str:
    """Return ``run --trace`` for the path of one replica's trace."""
    return re.sub(r"\.\d+(?=\.jsonl$)", "", trace)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Output files of a run.

    output: File of completions.
    traces: Trace of each replica.
    picture: Trace of several replicas for ui.perfetto.dev; None for one.
    shared: Plan made for the replicas; None if the given plan was for as many.
    """

    output: Path
    traces: tuple[Path, ...]
    picture: Path | None
    shared: Path | None

    @classmethod
    def of(cls, output: Path, trace: Path, plan: Plan, *, shared: bool) -> RunFiles:
        """Return the files of a run.

        shared: True if the run made a plan for its replicas.
        """
        count = len(plan.fleet.replicas)
        picture = trace.with_suffix(".perfetto.json") if count > 1 else None
        traces = tuple(trace_paths(str(trace), count))
        return cls(output, traces, picture, shared_plan_path(str(trace)) if shared else None)

    @property
    def all(self) -> list[Path]:
        """All files, the completions first."""
        return [
            self.output,
            *self.traces,
            *(path for path in (self.picture, self.shared) if path is not None),
        ]

    def save(
        self, plan: Plan, traces: Sequence[Trace], planned_in: Path, named: Mapping[str, object]
    ) -> None:
        """Write traces, picture and plan, with relative paths of prompts."""
        from ..executor.reports.perfetto import save_perfetto

        run, named = named["run"], {**named, PLANNED: plan.schedule_digest()}
        for path, trace in zip(self.traces, traces, strict=False):
            replace(trace, engine={**trace.engine, **named}).save(path)
        if not traces:
            # The run was cut off before its trace: an empty one identifies the finished job.
            for path, replica in zip(self.traces, plan.fleet.replicas, strict=True):
                if _run_of(path) != run:
                    replace(Trace.empty(replica.slots), engine=named).save(path)
            return
        if self.picture is not None:
            save_perfetto(self.picture, traces)
        if self.shared is not None:
            source = plan.provenance.prompts
            if source is not None:
                prompts = source.seen_from(self.shared.parent, planned_in)
                moved = replace(plan.provenance, prompts=prompts)
                plan = replace(plan, provenance=moved)
            plan.save(self.shared)

    def read_traces(self, plan: Plan, run: str) -> tuple[Trace, ...]:
        """Read a run's traces; missing ones are empty."""
        planned, found = plan.schedule_digest(), list[Trace]()
        for path, replica in zip(self.traces, plan.fleet.replicas, strict=True):
            trace = Trace.load(path) if _run_of(path) == run else Trace.empty(replica.slots)
            # Traces before 0.2 name no plan.
            mine = trace.engine.get(PLANNED, planned) == planned
            found.append(trace if mine else Trace.empty(replica.slots))
        return tuple(found)


def run_identity(plan: Plan, job: Job, source: ModelOptions, options: RunOptions) -> dict[str, object]:
    """Return all that completions depend on.

    A journal resumes only a run with an equal identity.
    """
    from ..executor.engines.huggingface import facts_of_bits
    from ..executor.models.fingerprint import files_fingerprint
    from ..executor.models.sampling import Sampler

    fixed = facts_of_bits(job.model, options.tuned.product_rows) if job.repeatable else {}
    adapters = {name: files_fingerprint(os.fspath(path)) for name, path in options.adapters.items()}
    return {
        "plan": plan.digest(),
        **model_identity(job, source),
        **fixed,
        "pinned": options.pinned,
        **({"adapters": adapters} if adapters else {}),
        # The digest of the prompts covers each request's own fields.
        "sampling": (
            asdict(job.sampler) if isinstance(job.sampler, Sampler) else sampling_asked(source, options)
        ),
    }


def model_identity(job: Job, source: ModelOptions) -> dict[str, object]:
    """Return all that completions depend on in a model."""
    from ..executor.models.fingerprint import files_fingerprint

    return {
        "model": source.model,
        "weights": files_fingerprint(source.model),
        "load_format": source.load_format,
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "tokenizer": job.tokenizer.name,
        "tokenizer_files": files_fingerprint(job.tokenizer.name, weights=False),
        "weights_seed": source.seed or 0,
    }


def run_digest(identity: Mapping[str, object]) -> str:
    """Return the digest that identifies a run in its traces."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _run_of(path: Path) -> object:
    try:
        return Trace.load(path).engine.get("run") if path.is_file() else None
    except InputError:
        return None


def finished_before(files: RunFiles, job: Job, identity: Mapping[str, object]) -> bool:
    """Return whether the outputs are complete and of this run."""
    if _run_of(files.traces[0]) != run_digest(identity):
        return False
    return is_whole(files.output, [record.custom_id for record in job.prompts.records])


def is_whole(output: Path, names: Sequence[str]) -> bool:
    """Return whether an output has all completions and no journal."""
    from ..executor.jobs.journal import journal_path

    if journal_path(output).exists() or not output.is_file():
        return False
    try:
        named = [one.custom_id for one in read_completions(output)]
    except InputError:
        return False
    return list(dict.fromkeys(named)) == list(dict.fromkeys(names))
