"""Reader of requests: batch files, tables of lengths, generators."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..arrays import IntArray
from ..files.disk import InputError
from ..files.jsonl import file_digest
from ..files.kinds import refuse_other_kinds
from ..prompts.columns import PromptColumns, asking_for_prompts
from ..prompts.table import prompts_digest
from ..workload import Workload, WorkloadError
from .generators import GENERATORS, generate
from .length_source import LengthSource
from .openai_batch import PromptRecord, each_sample, read_batch
from .tables import LengthColumns, UnknownColumnsError, is_table, read_lengths

TokenCounter = Callable[[Sequence[PromptRecord]], Sequence[int]]
"""Function that returns the tokens of each request's prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class JobInput:
    """Requests and their source.

    workload: Lengths of the requests.
    source: Name of the file, or of the generator with its seed.
    lengths: Source of the completions' lengths.
    digest: SHA-256 of the file; None for a generator.
    records: Prompts in the workload's order; empty for lengths only.
    columns: Columns of a table of prompts; None for a batch file.
    """

    workload: Workload
    source: str
    lengths: LengthSource
    digest: str | None = None
    records: tuple[PromptRecord, ...] = ()
    columns: PromptColumns | None = None


def read_workload(
    spec: str | os.PathLike[str],
    *,
    lengths: str | None = None,
    count_tokens: TokenCounter | None = None,
    drop_unanswered: bool = False,
    longest: int | None = None,
    columns: PromptColumns | None = None,
    length_columns: LengthColumns | None = None,
    positions: int | None = None,
) -> JobInput:
    """Read the requests of a file, or draw them from a generator.

    Parameters
    ----------
    spec
        A batch file of prompts, a table of prompts or of lengths (CSV, Parquet, JSON lines, a folder of a
        dataset), or ``NAME:SEED[:COUNT]`` of a generator.
    lengths
        Where the completions' lengths come from, as :meth:`.LengthSource.parse` reads it. By default
        ``known`` where every request carries its own, else ``cap``.
    count_tokens
        Gives the prompts' lengths; needed for a batch file with text.
    drop_unanswered
        Leave out the rows of a table without a completion.
    longest
        Most tokens of any completion, whatever its request allows; None for no such limit.
    columns
        Columns of a table of prompts; None for anything else.
    length_columns
        Columns of a table of lengths with other names than usual, and the run of a benchmark's file.
    positions
        Positions of the model: a request without a cap may take what its prompt leaves of them.

    Raises
    ------
    InputError
        If there is no such file or generator, or what it holds cannot be planned.
    """
    name = os.fspath(spec)
    refuse_other_kinds(name, "no requests")
    drawn = None if columns is not None else _drawn(name)
    of_lengths = columns is None and drawn is None and (length_columns is not None or is_table(name))
    if drop_unanswered and not of_lengths:
        raise nothing_to_drop(name)
    if drawn is None and not of_lengths:
        return _read_prompts(name, lengths, longest, count_tokens, columns, positions)
    source = replace(LengthSource.parse("known" if lengths is None else lengths), longest=longest)
    try:
        workload = drawn or read_lengths(
            name,
            drop_unanswered=drop_unanswered,
            need_output=source.kind == "known",
            named=length_columns,
        )
    except UnknownColumnsError as error:
        hint = f"{asking_for_prompts(error.columns)}. {error.hint}"
        raise UnknownColumnsError(name, error.columns, hint) from None
    if workload.tree is None:
        workload = workload.with_shared_prompts()
    if source.kind != "known" or longest is not None:
        known = workload.output_tokens.tolist()
        workload = workload.with_output_tokens(source.resolve(workload.ids.tolist(), known=known))
    return JobInput(workload, name, source, None if drawn else file_digest(name))


def nothing_to_drop(source: str) -> InputError:
    """Return the error of --drop-unanswered without a table of lengths."""
    hint = "Leave --drop-unanswered (drop_unanswered=True) out."
    return InputError("only tables of lengths have rows without a completion", file=source, hint=hint)


def _drawn(spec: str) -> Workload | None:
    if Path(spec).exists():
        return None
    name, *numbers = spec.split(":")
    if name not in GENERATORS and not re.fullmatch(r"[A-Za-z][\w-]*(:\d+){1,2}", spec):
        return None
    if not 1 <= len(numbers) <= 2 or not all(re.fullmatch(r"\d{1,18}", number) for number in numbers):
        hint = f"Give NAME:SEED or NAME:SEED:COUNT, such as {name}:0."
        raise InputError(f"{spec!r} is not a generator with its seed", where="workload", hint=hint)
    return generate(name, *map(int, numbers))


def _read_prompts(
    path: str,
    lengths: str | None,
    longest: int | None,
    count_tokens: TokenCounter | None,
    columns: PromptColumns | None = None,
    positions: int | None = None,
) -> JobInput:
    records = each_sample(read_batch(path, columns), path)
    known = [record.output_tokens for record in records]
    source = LengthSource.parse(("cap" if None in known else "known") if lengths is None else lengths)
    drawn = source.kind == "completions" and not all(record.repeats for record in records)
    source = replace(source, longest=longest, sampled=drawn)
    ids = [record.custom_id for record in records]
    caps, contents = [record.max_tokens for record in records], [record.says for record in records]
    names = [record.name for record in records]
    inputs = _counted(records, count_tokens, path) if positions is not None else None
    if inputs is not None and positions is not None:
        rooms = [max(1, positions - tokens) for tokens in inputs]
        caps = [room if cap is None else cap for cap, room in zip(caps, rooms, strict=True)]
    outputs = source.resolve(ids, caps=caps, known=known, prompts=contents, names=names)
    if inputs is None:
        inputs = _counted(records, count_tokens, path)
    try:
        workload = Workload(
            np.array(names, dtype=np.object_),
            np.array(inputs, dtype=np.int64),
            outputs,
            group=_alike(records),
        )
        workload = workload.with_shared_prompts()
    except WorkloadError as error:
        where = "" if error.row is None else f"line {records[error.row].line}, field '{error.column}'"
        raise InputError(error.reason, file=path, where=where, hint="Correct the request.") from None
    return JobInput(workload, path, source, prompts_digest(path), records, columns)


def _counted(records: Sequence[PromptRecord], count_tokens: TokenCounter | None, path: str) -> Sequence[int]:
    if count_tokens is not None:
        return count_tokens(records)
    inputs = [len(record.prompt) if isinstance(record.prompt, tuple) else 0 for record in records]
    if 0 in inputs:
        where = f"line {records[inputs.index(0)].line}"
        hint = "Name the model, so that its tokenizer can count the prompts' tokens."
        raise InputError("the prompt is text, and its tokens are unknown", file=path, where=where, hint=hint)
    return inputs


def _alike(records: Sequence[PromptRecord]) -> IntArray:
    """Return a number for requests with a repeated prompt, else -1."""
    where: dict[tuple[object, ...], list[int]] = {}
    for index, record in enumerate(records):
        key = (record.url, repr(record.messages), record.prompt, repr(sorted(record.template.items())))
        where.setdefault(key, []).append(index)
    group = np.full(len(records), -1, dtype=np.int64)
    for number, members in enumerate(members_of for members_of in where.values() if len(members_of) > 1):
        group[members] = number
    return group


def bundled_prompts_path() -> Path:
    """Return the path of the package's example prompts."""
    return Path(__file__).parent.parent / "bundled" / "prompts.jsonl"
