"""Jobs for engines that mix prefill and decode, read from files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..data.arrays import IntArray
from ..data.claims.assumptions import COLD_CACHE, COUNTS_ONE, DISTINCT, Assumption, assumed_of
from ..data.files.disk import InputError
from ..data.files.kinds import refuse_other_kinds
from ..data.iteration_plan import least_known
from ..data.iterations import EngineLimits, Sequences
from ..data.prefix_tree import PrefixTree
from ..data.prompts.columns import PromptColumns
from ..data.prompts.table import prompts_digest
from ..data.readers.length_source import LengthSource
from ..data.readers.requests import nothing_to_drop, read_workload
from ..data.readers.server_batch import (
    ServerBatch,
    ServerRequest,
    completion_ids,
    planned_lengths,
    prompt_groups,
    prompt_ids,
    read_server_batch,
    repeated,
)
from ..data.readers.tables import is_table
from ..data.workload import Workload, WorkloadError

if TYPE_CHECKING:
    from ..executor.models.tokenizers import Tokenizer

COUNTS_ALL = Assumption(COLD_CACHE, "stated", "the engine keeps no prompts")
UNCOUNTED = (
    "no tokenizer counts the prompts (--tokenizer or --model): their tokens are estimated, what they share is"
    " left out, and the bound takes one of each"
)


@dataclass(frozen=True, slots=True, eq=False)
class MixedJob:
    """Completions for engines that mix prefill and decode in an iteration.

    Parameters
    ----------
    workload
        A row per completion; arrivals are ignored, as all requests of a batch job are there at the start.
    request
        Number of each completion's request, shape (completions,); None if each has its own. The completions
        of a request are adjacent and sent together.
    exact
        True if lengths are known, False if predicted. The order is fitted only to known lengths.
    counted
        True if the engine's tokenizer counted the prompts; otherwise the bound counts one token of each.
    tree
        Beginnings that prefix caching computes once, with a prompt per completion; None without it.
    assumptions
        Assumptions of the bound about prompts.
    """

    workload: Workload
    request: IntArray | None = None
    exact: bool = True
    counted: bool = True
    tree: PrefixTree | None = None
    assumptions: tuple[Assumption, ...] = ()

    def rows(self, members: IntArray | None = None) -> Sequences:
        """Return the sequences to simulate, for some completions or all."""
        rows = Sequences(self.workload.input_tokens, self.workload.output_tokens, tree=self.tree)
        return rows if members is None else rows.select(members)

    def least(self, limits: EngineLimits) -> Sequences:
        """Return the least work that a bound may assume."""
        return self.rows() if self.counted else least_known(self.workload.output_tokens, limits)

    def requests(self) -> IntArray:
        """Return each completion's request, shape (completions,)."""
        return np.arange(len(self.workload)) if self.request is None else self.request


@dataclass(frozen=True, slots=True, eq=False)
class ReadJob:
    """A job and its source.

    source: Name of the file, or of the generator with its seed.
    lengths: Source of the completions' lengths.
    digest: SHA-256 of the file; None for a job of lengths, which cannot be sent.
    requests: Requests to send; None for a job of lengths.
    """

    job: MixedJob
    source: str
    lengths: LengthSource
    digest: str | None = None
    requests: ServerBatch | None = None


def read_mixed_job(
    spec: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    lengths: str | None = None,
    longest: int | None = None,
    columns: PromptColumns | None = None,
    drop_unanswered: bool = False,
    unit: int | None = 1,
) -> ReadJob:
    """Read a job for a server from a file or a generator.

    Each completion is a row, also where a request asks for several (``n``). Request bodies are not checked:
    the server does that.

    Parameters
    ----------
    spec
        A batch file, a table of prompts or of lengths, or a generator as ``NAME:SEED[:COUNT]``.
    tokenizer
        Tokenizer of the engine; without one, text prompts count as one token per four bytes.
    lengths, longest, columns, drop_unanswered
        As in :func:`~batchbound.data.readers.requests.read_workload`.
    unit
        Tokens by which the engine reuses a beginning; None if it computes each prompt whole.

    Raises
    ------
    InputError
        If the file cannot be read or states no required length.
    """
    name = os.fspath(spec)
    refuse_other_kinds(name, "no requests")
    if columns is None and (is_table(name) or not os.path.exists(name)):
        read = read_workload(name, lengths=lengths, longest=longest, drop_unanswered=drop_unanswered)
        read_work = read.workload.without_arrivals()
        work = replace(read_work, tree=None)
        job = MixedJob(work, exact=read.lengths.kind == "known", assumptions=(COUNTS_ALL,))
        if unit is not None:
            tree = _in_units(read_work, unit)
            job = replace(job, tree=tree, assumptions=(Assumption(DISTINCT, "assumed"), *assumed_of(tree)))
        return ReadJob(job, name, read.lengths)
    if drop_unanswered:
        raise nothing_to_drop(name)
    requests = read_server_batch(name, columns)
    output, source = planned_lengths(requests, lengths, longest)
    job = _sent(requests, output, tokenizer, name, unit)
    job = replace(job, exact=source.kind == "known")
    source = replace(source, sampled=source.kind == "completions" and not requests.repeats)
    return ReadJob(job, name, source, prompts_digest(name), requests)


def _in_units(work: Workload, unit: int) -> PrefixTree:
    """Return the tree of a table's groups in units of the engine."""
    tree = (
        PrefixTree.of_groups(work.input_tokens, work.group, 0 * work.group)
        if work.tree is None
        else work.tree
    )
    return PrefixTree.of_groups(work.input_tokens, tree.leaf, tree.shared_tokens, unit)


def _sent(
    requests: ServerBatch,
    output: IntArray,
    tokenizer: Tokenizer | None,
    name: str,
    unit: int | None,
) -> MixedJob:
    counts, prompts = requests.prompt_tokens, list[IntArray | None]()
    if tokenizer is not None and not requests.ids.all():
        prompts = [_array(_tokens(request, tokenizer, name)) for request in requests]
        counts = np.array(
            [
                known if tokens is None else len(tokens)
                for known, tokens in zip(counts.tolist(), prompts, strict=True)
            ]
        )
    choices = requests.choices
    lengths = np.repeat(output, choices)
    group = prompt_groups(requests)
    try:
        work = Workload(
            np.array(completion_ids(requests), dtype=np.object_),
            np.repeat(counts, choices),
            lengths,
            group=np.repeat(group, choices),
        )
    except WorkloadError as error:
        where = f"field '{error.column}'"
        raise InputError(error.reason, file=name, where=where, hint="Correct the request.") from None
    job = MixedJob(work, np.repeat(np.arange(len(requests)), choices))
    known = [tokens for tokens in prompts if tokens is not None]
    if len(known) < len(requests) and not requests.ids.all():
        return replace(job, counted=False, assumptions=(COUNTS_ONE,))
    if unit is None:
        return replace(job, assumptions=(COUNTS_ALL,))
    # Token ids stay on disk: as lists, a million prompts would not fit into memory.
    of_requests = known or requests.token_ids()
    owners = _owners(requests) if requests.salted else None
    try:
        tree = PrefixTree.of_prompts(repeated(of_requests, choices), owners, unit)
    except (ValueError, OverflowError) as error:
        what = f"its token ids make no tree ({error})"
        raise InputError(what, file=name, hint="Correct the token ids.") from None
    return replace(job, tree=tree, assumptions=assumed_of(tree))


def completion_prompts(
    path: str | os.PathLike[str], tokenizer: Tokenizer | None, columns: PromptColumns | None = None
) -> tuple[list[str], list[Sequence[int]], list[str]]:
    """Return the name, token ids and owner of each completion's prompt.

    Prompts of different owners share nothing. Raises InputError if a prompt cannot be counted.
    """
    name = os.fspath(path)
    requests = read_server_batch(name, columns)
    known = list[Sequence[int]]()
    for request in requests:
        tokens = _tokens(request, tokenizer, name)
        if tokens is None:
            hint = "Plan with --tokenizer, or with token ids as prompts."
            raise InputError("its tokens are unknown", file=name, where=f"line {request.line}", hint=hint)
        known.append(tokens)
    prompts = list(repeated(known, requests.choices))
    return completion_ids(requests), prompts, list(_owners(requests))


def _owners(requests: ServerBatch) -> Iterator[str]:
    """Yield the owner of each completion's prompt."""
    # Models are no owners: a server may know one model by several names.
    salts = (repr(request.body.get("cache_salt")) for request in requests)
    return repeated(salts, requests.choices)


def _array(tokens: Sequence[int] | None) -> IntArray | None:
    return None if tokens is None else np.asarray(tokens, dtype=np.int64)


def _tokens(request: ServerRequest, tokenizer: Tokenizer | None, name: str) -> Sequence[int] | None:
    """Return a prompt's token ids, or None if unknown."""
    try:
        return prompt_ids(request, tokenizer)
    except ValueError as error:
        where = f"line {request.line}, field 'body.messages'"
        raise InputError(str(error), file=name, where=where, hint="Name another tokenizer.") from None
