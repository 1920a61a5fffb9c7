"""Problem of a file of requests: workload, costs and limits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .cost_cache import CostCache
from .data.arrays import IntArray
from .data.costs.cost import CalibratedCost, CostModel
from .data.files.disk import InputError
from .data.files.record import plain
from .data.files.sources import is_url
from .data.kept_beginnings import usual_prefix_cache
from .data.plan import ASSUMED, KEPT, PromptSource, Provenance, relative_path
from .data.predictor import prompt_text
from .data.prefix_tree import PrefixTree
from .data.problem import MOST_STEPS, Problem, ProblemError
from .data.prompts.columns import PromptColumns
from .data.prompts.table import holds_texts
from .data.readers.openai_batch import PromptRecord
from .data.readers.requests import JobInput, read_workload
from .data.workload import Workload
from .listening import note
from .options.option import PathText
from .options.problem import LimitOptions, ProblemOptions


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A problem and the sources of its parts."""

    problem: Problem
    job: JobInput
    cost_source: dict[str, object]
    tokenizer: str
    distinct_tokens: int | None = None

    @property
    def prompts(self) -> list[str]:
        """The prompt of each request; empty for a job of lengths."""
        return [prompt_text(entry) for entry in self.job.records or ()]


def read_inputs(
    options: LimitOptions,
    path: PathText,
    *,
    keep_arrivals: bool,
    says_costs: bool = True,
    one_engine: bool = True,
) -> Inputs:
    """Return the problem of a file's requests, under the limits of the options.

    says_costs: True to note that costs were not measured.
    one_engine: True if an engine serves all of them, and computes what their prompts share once.
    """
    tokenizer, slots = options.tokenizer or options.model or "bytes", options.slots
    counter, columns = _Counter(tokenizer, os.fspath(path)), options.columns_of(tokenizer)
    say_texts(path, columns, f"by the chat template of {tokenizer}")
    positions = options.max_position or _positions(options.model)
    job = read_workload(
        path,
        lengths=options.lengths,
        count_tokens=counter,
        drop_unanswered=options.drop_unanswered,
        longest=options.longest_completion,
        columns=columns,
        length_columns=options.length_columns,
        positions=positions,
    )
    _note_uncapped(job)
    # For a job of lengths a model is only useful for its positions.
    check_counted(options, path, counts=bool(job.records), positions=options.max_position is None)
    if job.records and tokenizer == "bytes" and options.tokenizer is None:
        note("no --model: prompts are counted in bytes")
    most = len(job.workload) if slots == "auto" else slots
    cost, source = _cost(options, path, most, says=says_costs)
    first = options.first_token or ("decode" if job.digest is None else "prefill")
    workload = job.workload if keep_arrivals else job.workload.without_arrivals()
    if one_engine and first == "prefill" and counter.tree is not None:
        workload = workload.with_tree(counter.tree.worth_keeping())
    _check_steps(job, most)
    held = options.kv_capacity or (measured_capacity(source) if slots == "auto" else None)
    kept = _prefix_cache(options, job, workload, held)
    try:
        problem = Problem(
            workload,
            cost,
            most,
            kv_capacity=None if held is None else held - kept,
            prefill_token_cap=options.prefill_token_cap,
            max_position=positions,
            prefill_emits_first_token=first == "prefill",
            prefix_cache=kept,
        )
    except ProblemError as error:
        raise _too_long(job, error, stated=options.states(error.limit), kept=kept) from None
    _check_time(problem, str(source["name"]))
    distinct = None if counter.tree is None else counter.tree.distinct_tokens
    return Inputs(problem, job, source, tokenizer, distinct)


def _note_uncapped(job: JobInput) -> None:
    """Note requests of unknown length that no cap limits, and a cap that limits none."""
    longest, caps = job.lengths.longest, [record.max_tokens for record in job.records]
    if (
        job.lengths.kind == "cap"
        and longest
        and caps
        and all(cap is not None and cap <= longest for cap in caps)
    ):
        note(f"--longest-completion {longest} has no effect: each request has a max_tokens of at most that")
    free = sum(cap is None for cap in caps)
    if not free or job.lengths.kind != "cap" or job.lengths.longest is not None:
        return
    which = "" if free == len(job.records) else f" in {free:,} of {len(job.records):,} requests"
    most = int(job.workload.output_tokens.max())
    note(
        f"no max_tokens{which}: completions may take up to {most:,} tokens; --longest-completion limits them"
    )


def say_texts(path: PathText, columns: PromptColumns | None, how: str) -> None:
    """Note that texts of a table are sent as messages; ``how`` names what writes them."""
    if columns is not None and columns.chat and holds_texts(path, columns):
        note(f"each text is sent as a user's message, {how}; --raw sends texts as they are")


def check_counted(options: LimitOptions, path: PathText, *, counts: bool, positions: bool) -> None:
    """Raise InputError if a tokenizer or model is named without effect."""
    named = [f"--{name}" for name in ("tokenizer", "model") if getattr(options, name) is not None]
    if positions and "--model" in named:
        named.remove("--model")
    if named and not counts:
        what = f"{named[0]} has no effect on lengths: there are no prompts to count"
        raise InputError(what, file=path, hint="Leave it out.")
    if len(named) == 2:
        raise InputError(
            "--model has no effect with --tokenizer, which counts", hint="Leave one of them out."
        )


def _prefix_cache(options: LimitOptions, job: JobInput, workload: Workload, kv_capacity: int | None) -> int:
    kept, slots = options.prefix_cache, options.slots
    if kept is None:
        # On the host memory is ample: kept beginnings may take as much again as the slots.
        tried = 0 if slots == "auto" else slots
        return usual_prefix_cache(workload, tried, 1.0) if kv_capacity is None else 0
    if workload.tree is None:
        what = f"--prefix-cache {kept} has no effect: no two requests share a prompt"
        raise InputError(what, file=job.source, hint="Leave it out.")
    if kv_capacity is not None and kept >= kv_capacity:
        what = f"--prefix-cache {kept} leaves nothing of a KV capacity of {kv_capacity} tokens"
        raise InputError(what, hint="Lower it, or raise --kv-capacity.")
    return kept


def _cost(
    options: LimitOptions, path: PathText, most: int, *, says: bool
) -> tuple[CostModel, dict[str, object]]:
    """Return the cost model that is named, else kept by an earlier run, else assumed."""
    if options.cost is not None:
        return read_cost(options.cost)
    model = options.model
    if model is not None:
        kept = CostCache.of_user().find(model, most)
        if kept is not None:
            return kept.cost, {"name": KEPT, **plain(kept)}
    if not (Path(path).exists() or is_url(path)):
        return read_cost("paper")  # a generator: the papers' own jobs
    if says:
        why = "no --cost" if model is None else f"no run of {model} has kept its costs yet"
        note(f"{why}: seconds are those of a LLaMA-65B on GPUs")
    return CostModel.paper(), {"name": ASSUMED}


def assumes_costs(options: ProblemOptions) -> bool:
    """Return whether no cost model is stated, kept, or of the papers' own jobs."""
    return _cost(options, options.workload, options.slots, says=False)[1]["name"] == ASSUMED


def read_cost(path: PathText | CostModel) -> tuple[CostModel, dict[str, object]]:
    """Return the cost model of ``--cost``, and its source."""
    if isinstance(path, CostModel):
        return path, {"name": "stated"}
    if path == "paper":
        return CostModel.paper(), {"name": "paper"}
    if not Path(path).exists():
        raise InputError(
            "no such cost model", file=path, hint="Give paper, or a file of `batchbound profile`."
        )
    calibrated = CalibratedCost.load(path)
    return calibrated.cost, {"name": os.fspath(path), **plain(calibrated)}


def measured_capacity(source: Mapping[str, object]) -> int | None:
    """Return the KV capacity measured with the costs, or None."""
    tokens = source.get("kv_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def provenance_of(inputs: Inputs, plan_path: str | os.PathLike[str]) -> Provenance:
    """Return the sources of a plan's lengths, costs and prompts."""
    return Provenance(inputs.job.lengths.to_json(), inputs.cost_source, _prompt_source(inputs, plan_path))


def _prompt_source(inputs: Inputs, plan_path: str | os.PathLike[str]) -> PromptSource | None:
    if not inputs.job.records or inputs.job.digest is None:
        return None
    folder = Path(plan_path).resolve().parent
    path = relative_path(inputs.job.source, folder).removeprefix("./")
    tokenizer = inputs.tokenizer
    if Path(tokenizer).is_dir():
        tokenizer = relative_path(tokenizer, folder)
    return PromptSource(path, inputs.job.digest, tokenizer, inputs.job.columns, inputs.distinct_tokens)


def each_once(files: Iterable[PathText]) -> list[str]:
    """Return files without repetitions.

    A repeated file would make intervals too narrow.
    """
    names: dict[str, str] = {}
    for name in files:
        names.setdefault(os.path.realpath(name), os.fspath(name))
    return list(names.values())


def _place(job: JobInput, request: int) -> str:
    if not job.records:
        return f"request {request}"
    in_lines = job.columns is None or Path(job.source).suffix in (".json", ".jsonl")
    return f"{'line' if in_lines else 'row'} {job.records[request].line}"


def _too_long(job: JobInput, error: ProblemError, *, stated: bool, kept: int) -> InputError:
    what = error.what
    where, length = _place(job, error.request), "output_tokens"
    if job.records and job.lengths.kind == "cap":
        if job.columns is None:
            length = job.records[error.request].max_tokens_field
            where = f"{where}, field 'body.{length}'"
        elif job.columns.max_tokens is not None:
            length = job.columns.max_tokens
            where = f"{where}, column {length!r}"
    room = error.allowed - int(job.workload.input_tokens[error.request])
    if room < 1 or error.limit == "prefill_token_cap":
        remedies = ["shorten its prompt"]
    else:
        remedies = [f"lower its {length}"] if job.lengths.kind in ("cap", "known") else []
        remedies.append(f"cap every completion with --longest-completion ({room} fit this one)")
    if stated:
        remedies.append(f"raise --{error.limit.replace('_', '-')}")
    if kept and error.limit == "kv_capacity":
        what += f", the rest of {error.allowed + kept} after --prefix-cache"
        remedies.append("lower --prefix-cache")
    hint = f"{', '.join(remedies)} or leave the request out."
    return InputError(what, file=job.source, where=where, hint=hint[0].upper() + hint[1:])


def _check_time(problem: Problem, source: str) -> None:
    cost, hint = problem.cost, "Measure a model with `batchbound profile`."
    decoding = problem.decode_steps.any() and cost.decode_seconds(1, 1) > 0
    if cost.prefill_seconds(1) == 0 and not decoding:
        raise InputError("no stage of this job takes any time", file=source, hint=hint)


def _check_steps(job: JobInput, slots: int) -> None:
    """Raise InputError if every schedule is too long for memory."""
    lengths, hint = job.workload.output_tokens, "Correct the lengths, or plan a part of the job."
    longest = int(lengths.argmax())
    if lengths[longest] > MOST_STEPS:
        what = f"a completion of {lengths[longest]:,} tokens, beyond {MOST_STEPS:,} decode steps"
        raise InputError(what, file=job.source, where=_place(job, longest), hint=hint)
    decode_steps = int(lengths.sum()) // slots
    if decode_steps > MOST_STEPS:
        what = f"{slots} slots need at least {decode_steps:,} decode steps, beyond {MOST_STEPS:,}"
        raise InputError(what, file=job.source, hint=hint)


@dataclass(slots=True)
class _Counter:
    """Counter of prompts' tokens.

    tree: Beginnings that the prompts share; None before they are counted, and for jobs too large for it.
    """

    tokenizer: str
    path: str
    tree: PrefixTree | None = None

    def __call__(self, records: Sequence[PromptRecord]) -> Sequence[int]:
        from .executor.models.prompts import encoded, ignored_fields
        from .executor.models.tokenizers import load_tokenizer

        loaded = load_tokenizer(self.tokenizer)
        counts, prompts = list[int](), list[IntArray]()
        for tokens in encoded(records, loaded, self.path):
            counts.append(len(tokens))
            if len(prompts) < MOST_COMPARED:
                prompts.append(np.array(tokens, dtype=np.int64))
        for ignored in ignored_fields(records, loaded):
            note(ignored)
        self.tree = PrefixTree.of_prompts(prompts) if 0 < len(prompts) == len(counts) else None
        return counts


MOST_COMPARED = 100_000
"""Most prompts whose beginnings are compared; a larger job takes more memory."""


def _positions(model: str | None) -> int | None:
    if model is None:
        return None
    from .executor.models.source import positions_of

    return positions_of(model)


def unknown_lengths(path: PathText) -> InputError:
    """Return the error of an objective without lengths of the completions."""
    hint = "Give --lengths, a column of lengths, or an earlier run's completions; or plan the makespan."
    return InputError("the lengths of its completions are unknown", file=path, hint=hint)
