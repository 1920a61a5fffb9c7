"""Load a plan's job: prompts, tokenizer, model, and sampling of each request."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.files.disk import InputError
from ..data.files.sources import local_file
from ..data.plan import Plan, PromptSource, Provenance
from ..data.prompts.messages import FieldError
from ..data.prompts.table import prompts_digest
from ..data.readers.openai_batch import (
    PromptRecord,
    each_sample,
    model_names,
    read_batch,
    refuse_other_models,
)
from ..data.readers.sampling import Sampling, refuse_unused
from .options import ModelOptions, RunOptions

if TYPE_CHECKING:
    from ..executor.engines.adapters import Adapter
    from ..executor.engines.tiers import Tier
    from ..executor.jobs.job import Job
    from ..executor.models.grammar import Grammars
    from ..executor.models.tokenizers import Tokenizer

_SEVERAL = "cannot be served by workers of several processes"
_ONE = "Remove it, or plan for one replica and one process."

SAMPLING = ("temperature", "top_p", "top_k", "seed")
"""Sampling fields that options set for all requests."""


def load_job(
    plan: Plan,
    path: Path,
    source: ModelOptions,
    options: RunOptions,
    remark: Callable[[str], None],
    *,
    weights: bool = True,
) -> Job:
    """Load a plan's prompts, tokenizer and model.

    Several replicas load their own weights.
    """
    from ..executor.models.source import require_engine

    require_engine()
    # They import torch, whose absence is told first.
    from ..executor.engines.huggingface import vocabulary_of
    from ..executor.jobs.job import Job
    from ..executor.models.prompts import Prompts
    from ..executor.models.sampling import Sampler
    from ..executor.models.tokenizers import load_tokenizer

    planned = plan.provenance.prompts
    prompts_at = prompts_path(plan.provenance, path, options)
    records = None if planned is None or prompts_at is None else _planned_records(planned, prompts_at)
    if not options.any_model:
        refuse_other_models(records or (), (*model_names(source.model), *options.adapters), prompts_at)
    _check_adapters(plan, source, options)
    # A configuration's workers cannot record errors.
    record = options.on_error != "stop" and (plan.configuration is None or options.policy is not None)
    asked = _asked(records or (), len(plan.workload), source, options)
    not_carried = _refused_fields(records or (), asked, partial(_not_carried, plan=plan), prompts_at, record)
    alone = weights and len(plan.fleet.replicas) == 1
    _refuse_repeating(plan, options)
    counted = source.model if planned is None else _tokenizer_of(planned.tokenizer, path, source, options)
    model, tier = _loaded(source, options, remark) if alone else (source.shape(), None)
    tokenizer = load_tokenizer(options.tokenizer or counted)
    if records:
        records = _with_declared(records, model, plan, source.model, remark)
        records = _ended_by_tokens(records, model, tokenizer)
        asked = _asked(records, len(records), source, options)
    _refuse_unused(asked, options)
    if records is None:
        vocabulary = min(vocabulary_of(model), tokenizer.vocab_size)
        prompts = Prompts.random(plan.workload, vocabulary, source.seed or 0)
        remark(f"{path}: a plan of lengths without prompts: random tokens replace the prompts")
    else:
        prompts = Prompts.encode(records, tokenizer)
    job = Job(
        plan,
        prompts,
        model,
        tokenizer,
        Sampler(),
        pinned=options.pinned,
        tier=tier,
        kv_tokens=options.kv_tokens,
        policy=options.policy,
        record_failures=record,
        refused=not_carried,
        costs_known=not plan.provenance.assumes_costs,
        repeatable=options.tuned.repeatable,
        adapters=_adapters(options, model if alone else None),
        cut_cap=options.cut_cap,
        late_cap=options.late_cap,
    )
    if job.repeatable:
        # The digest needs log-probabilities for every request.
        asked = [replace(one, logprobs=one.logprobs or 0) for one in asked]
    return _with_rules(job, asked, prompts_at)


def _loaded(source: ModelOptions, options: RunOptions, remark: Callable[[str], None]) -> tuple[Any, Tier]:
    from ..executor.attention.fixed_products import fix_rows
    from ..executor.attention.float_products import settled_arithmetic
    from ..executor.attention.products import fastest_products
    from ..executor.models.source import take_open_format

    model = source.load()
    if options.tuned.repeatable:
        # A timed trial of number formats may end differently in the next run.
        take_open_format(model)
    arithmetic = settled_arithmetic(model)
    if arithmetic is not None:
        remark(f"arithmetic: {arithmetic}")
    widened = arithmetic is not None and arithmetic.widened
    name = str(model.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float32") and not widened and not options.tuned.repeatable:
        remark(f"{name} here: {fastest_products(model.device, model.dtype)}")
    tier = source.tier_of(model)
    if options.tuned.repeatable:
        try:
            fix_rows(model, options.tuned.product_rows, tier.name)
        except ValueError as error:
            hint = "Leave --repeatable out."
            raise InputError(f"--repeatable cannot be kept: {error}", hint=hint) from None
    return model, tier


def _refuse_repeating(plan: Plan, options: RunOptions) -> None:
    several = len(plan.fleet.replicas) > 1 or (plan.configuration is not None and options.policy is None)
    if options.tuned.repeatable and several:
        what = "--repeatable is for a run in one process, without a configuration"
        raise InputError(what, hint="Leave it out.")


def _check_adapters(plan: Plan, source: ModelOptions, options: RunOptions) -> None:
    if not options.adapters:
        return
    for name in model_names(source.model):
        if name in options.adapters:
            raise InputError(f"--adapter {name} has the model's own name", hint="Choose another name.")
    if options.tuned.repeatable:
        raise InputError("--adapter and --repeatable exclude each other", hint="Leave one of them out.")
    if plan.configuration is not None or len(plan.fleet.replicas) > 1:
        raise InputError(f"--adapter {_SEVERAL}", hint="Plan for one replica and one process.")


def _adapters(options: RunOptions, model: Any) -> dict[str, Adapter]:
    from ..executor.engines.adapters import Adapter

    if model is None:
        return {}
    return {name: Adapter.read(os.fspath(folder), model) for name, folder in options.adapters.items()}


def prompts_path(provenance: Provenance, path: Path, options: RunOptions) -> Path | None:
    """Return a plan's prompts file; None for a plan of lengths."""
    if provenance.prompts is None:
        if options.prompts is None:
            return None
        hint = "Leave it out to run random prompts of those lengths, or plan the prompts themselves."
        raise InputError("the plan is of lengths only, and --prompts has no effect", file=path, hint=hint)
    if options.prompts is not None:
        return local_file(options.prompts)
    return local_file(provenance.prompts.file(path.resolve().parent))


def sampling_asked(source: ModelOptions, options: RunOptions) -> dict[str, Any]:
    """Return the sampling options by name; None for those not given."""
    return {**_sampling(options), "seed": source.seed}


def _sampling(options: RunOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SAMPLING if name != "seed"}


def refuse_changed(path: Path, planned: PromptSource) -> None:
    """Raise InputError if a file changed since it was planned."""
    hint = "Give the planned file with --prompts, or plan again."
    if not path.exists():
        raise InputError("the plan's prompts are missing", file=path, hint=hint)
    if prompts_digest(path) != planned.sha256:
        raise InputError("the file has changed since it was planned", file=path, hint=hint)


def _planned_records(planned: PromptSource, path: Path) -> tuple[PromptRecord, ...]:
    refuse_changed(path, planned)
    return each_sample(read_batch(path, planned.columns), path)


def _tokenizer_of(planned: str, path: Path, source: ModelOptions, options: RunOptions) -> str:
    from ..executor.models.source import load_config
    from ..executor.models.tokenizers import counts_alike

    if options.tokenizer:
        return options.tokenizer
    counted = os.path.normpath(path.parent / planned) if planned.startswith(".") else planned
    if planned.startswith(".") and not Path(counted).is_dir():
        if Path(source.model).is_dir():
            # The folder moved with the model; a later check compares token counts with the plan's.
            return source.model
        what = "the folder of the plan's tokenizer is missing"
        raise InputError(what, file=counted, hint="Give it with --tokenizer, or plan again.")
    if not counts_alike(counted, source.model):
        load_config(source.model)  # a model that cannot be loaded is the first thing to correct
        units = "bytes" if planned == "bytes" else f"tokens of {counted}"
        what = f"counts its prompts in {units}, and {source.model} has a tokenizer of its own"
        hint = f"Plan again with --model {source.model}, or insist with --tokenizer {counted}."
        raise InputError(what, file=path, hint=hint)
    return source.model if source.model.startswith("tiny:") else counted


def _asked(
    records: Sequence[PromptRecord],
    count: int,
    source: ModelOptions,
    options: RunOptions,
) -> list[Sampling]:
    given = {name: value for name, value in sampling_asked(source, options).items() if value is not None}
    try:
        plain = Sampling(**given)
    except ValueError as error:
        raise InputError(str(error), hint="Correct the option.") from None
    return [record.sampling(**given) for record in records] or [plain] * count


def _refuse_unused(asked: Sequence[Sampling], options: RunOptions) -> None:
    try:
        refuse_unused(_sampling(options), asked)
    except ValueError as error:
        hint = "Give --temperature above 0 as well, or leave it out."
        raise InputError(f"--{str(error).replace('_', '-', 1)}", hint=hint) from None


def _refused_fields(
    records: Sequence[PromptRecord],
    asked: Sequence[Sampling],
    check: Callable[[Sampling], FieldError | None],
    path: Path | None,
    record_failures: bool,
) -> dict[int, str]:
    """Return refused requests' reasons; raise InputError to stop the run."""
    refused = {}
    for i, (record, one) in enumerate(zip(records, asked, strict=bool(records))):
        found = check(one)
        if found is not None:
            where = f"line {record.line}, field 'body.{found.field}'"
            refused[i] = InputError(found.reason, file=path, where=where, hint=found.hint)
    if refused and not (record_failures and len(refused) < len(records)):
        raise next(iter(refused.values()))
    return {i: str(error) for i, error in refused.items()}


def _with_declared(
    records: Sequence[PromptRecord], model: Any, plan: Plan | None, name: str, remark: Callable[[str], None]
) -> tuple[PromptRecord, ...]:
    """Return requests with the model's own generation settings filled in."""
    from ..executor.models.request_rules import declared_sampling

    try:
        declared = declared_sampling(model)
        wrong = None if plan is None else _not_carried(Sampling(**declared), plan=plan)
        if wrong is not None:
            raise ValueError(f"generation_config.json asks for {wrong.field}, which {wrong.reason}")
    except ValueError as error:
        hint = "Take it out of the model's generation_config.json."
        raise InputError(str(error), file=name, hint=hint) from None
    if not declared:
        return tuple(records)
    settings = ", ".join(f"{field} {value}" for field, value in declared.items())
    remark(f"{name}: its generation_config.json sets {settings}: used for requests without these fields")
    return tuple(replace(record, asked={**declared, **record.asked}) for record in records)


def _ended_by_tokens(
    records: Sequence[PromptRecord], model: Any, tokenizer: Tokenizer
) -> tuple[PromptRecord, ...]:
    """Return requests whose stop texts are special tokens, as stop tokens."""
    from ..executor.engines.huggingface import vocabulary_of
    from ..executor.models.request_rules import special_stops

    vocabulary = vocabulary_of(model)
    ended: dict[tuple[str, ...], tuple[int, ...]] = {(): ()}
    found = []
    for record in records:
        stop = record.asked.get("stop", ())
        if stop not in ended:
            ended[stop] = special_stops(stop, tokenizer, vocabulary)
        ids = (*record.asked.get("stop_token_ids", ()), *ended[stop])
        found.append(
            replace(record, asked={**record.asked, "stop_token_ids": ids}) if ended[stop] else record
        )
    return tuple(found)


def _not_carried(asked: Sampling, *, plan: Plan) -> FieldError | None:
    """Return the error of a field that several processes cannot serve."""
    several = len(plan.fleet.replicas) > 1
    parted = plan.configuration is not None and plan.configuration.handed_over
    if (several or parted) and asked.logprobs is not None:
        return FieldError("logprobs", _SEVERAL, _ONE)
    if (several or parted) and asked.structured_outputs is not None:
        return FieldError(asked.structured_outputs.field, _SEVERAL, _ONE)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words")
    for name in names:
        if parted and getattr(asked, name) != getattr(Sampling(), name):
            return FieldError(name, _SEVERAL, _ONE)
    return None


def _unservable(asked: Sampling, *, vocabulary: int, grammars: Grammars | None) -> FieldError | None:
    """Return the error of unknown tokens or a faulty structure."""
    from ..executor.models.request_rules import check_tokens

    hint = "Use the model's tokens."
    try:
        check_tokens(asked, vocabulary)
        if grammars is not None and asked.structured_outputs is not None:
            hint = "Correct it, or leave it out."
            grammars.matcher(asked.structured_outputs)
    except ValueError as error:
        return FieldError(str(error).split(" ", 1)[0], str(error), hint)
    return None


def _with_rules(job: Job, asked: Sequence[Sampling], path: Path | None) -> Job:
    from ..executor.engines.huggingface import vocabulary_of
    from ..executor.models.request_rules import rules_of

    records = job.prompts.records
    grammars = _grammars(job, asked, path)
    check = partial(_unservable, vocabulary=vocabulary_of(job.model), grammars=grammars)
    refused = {**_refused_fields(records, asked, check, path, job.record_failures), **job.refused}
    served = [Sampling() if i in refused else one for i, one in enumerate(asked)]
    by_name = {record.name: one for record, one in zip(records, served, strict=True)}
    most = job.most_tokens.tolist()
    eos = job.decoding.eos_ids
    rule = rules_of(
        by_name, job.prompts.tokens, most, job.tokenizer, eos, pinned=job.pinned, grammars=grammars
    )
    return dataclasses.replace(job, sampler=rule, refused=refused)


def _grammars(job: Job, asked: Sequence[Sampling], path: Path | None) -> Grammars | None:
    from ..executor.models.grammar import Grammars
    from ..executor.models.tokenizers import end_tokens

    i = next((i for i, one in enumerate(asked) if one.structured_outputs is not None), None)
    if i is None:
        return None
    structure, line = asked[i].structured_outputs, job.prompts.records[i].line
    assert structure is not None
    where = f"line {line}, field 'body.{structure.field}'"
    try:
        return Grammars(job.tokenizer, end_tokens(job.model, job.tokenizer))
    except ImportError as error:
        raise InputError(
            str(error), file=path, where=where, hint="Install it, or remove the field."
        ) from None
    except ValueError as error:
        raise InputError(str(error), file=path, where=where, hint="Remove the field.") from None
