"""Several jobs on one deployment, with the beginnings that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ..data.arrays import IntArray
from ..data.files.disk import InputError
from ..data.iterations import Sequences
from ..data.lengths.history import LengthHistory
from ..data.prefix_tree import PrefixTree
from ..data.readers.completions import lengths_by_name
from ..data.readers.length_source import LengthSource
from ..data.readers.server_batch import ServerBatch, encoded, repeated
from ..planning.mixed_job import ReadJob, completion_prompts

if TYPE_CHECKING:
    from ..executor.models.tokenizers import Tokenizer

BLOCK, TOKEN_BYTES = 16, 4
"""Tokens by which texts are compared without a tokenizer, and bytes of a token."""

_NORMAL = 1.645
"""Standard deviations on each side of an interval with probability 90 %."""


@dataclass(frozen=True, slots=True, eq=False)
class PooledJob:
    """Completions of several jobs.

    jobs: Completions of each job.
    lengths: Where the lengths come from; of several sources, one that does not know them.
    counted: True if a tokenizer counted the prompts.
    served: Model that the requests name; None if there is no such model, or if there are several.
    sendable: True if the files hold prompts.
    """

    rows: Sequences
    jobs: tuple[IntArray, ...]
    lengths: LengthSource
    counted: bool
    served: str | None
    sendable: bool

    @property
    def proven(self) -> bool:
        """True if the work is known, so that a demand is a proof."""
        return self.counted and self.lengths.kind == "known"

    @property
    def word(self) -> str:
        """Word for figures of these lengths."""
        return "at most" if self.lengths.kind == "cap" else "predicted" if self.proven else "expected"

    def spread(self) -> tuple[float, float]:
        """Return the 90 % interval of the lengths, as factors; 1 if they are stated."""
        source = self.lengths
        if source.file is None:
            return 1.0, 1.0
        of_history = source.kind == "history"
        known = (
            LengthHistory.load(source.file).tokens if of_history else lengths_by_name(source.file).values()
        )
        lengths = np.sort(np.array(list(known), dtype=float))
        count = len(lengths)
        if source.kind == "quantile" and source.value:
            at, apart = count * source.value, _NORMAL * math.sqrt(count * source.value * (1 - source.value))
            low, middle, high = np.clip([at - apart, at, at + apart], 1, count).astype(int) - 1
            return lengths[low] / lengths[middle], lengths[high] / lengths[middle]
        error = _NORMAL * float(lengths.std() / lengths.mean()) / math.sqrt(count)
        return 1 / (1 + error), 1 + error


def pool(files: Sequence[str], read_file: Callable[[str], ReadJob], tokenizer: Tokenizer | None) -> PooledJob:
    """Read the jobs of several files.

    read_file: Function that reads a file, with its tree of beginnings.
    """
    read = [read_file(name) for name in files]
    works, batches = [each.job.workload for each in read], [each.requests for each in read if each.requests]
    if 0 < len(batches) < len(read):
        raise InputError("prompts cannot be pooled with a table of lengths", hint="Give files of one kind.")
    prompt = np.concatenate([work.input_tokens for work in works])
    output = np.concatenate([work.output_tokens for work in works])
    ends = np.cumsum([len(work) for work in works])
    counted = all(each.job.counted for each in read)
    if len(read) == 1 and counted:
        tree = read[0].job.tree
    elif not batches:
        trees = [each.job.tree for each in read if each.job.tree is not None]
        # A table has a tree of one level; each job's groups have numbers of their own.
        groups = [np.where(each.leaf < 0, -1, each.leaf * len(trees) + k) for k, each in enumerate(trees)]
        shared = np.concatenate([each.shared_tokens for each in trees])
        tree = PrefixTree.of_groups(prompt, np.concatenate(groups), shared)
    elif counted:
        tree = PrefixTree.of_prompts(ids for name in files for ids in completion_prompts(name, tokenizer)[1])
    else:
        texts = chain.from_iterable(map(_blocks, batches))
        blocks = [ids[: tokens // BLOCK] for ids, tokens in zip(texts, prompt.tolist(), strict=True)]
        tree = PrefixTree.of_blocks(blocks, prompt, BLOCK)
    models = {name for batch in batches for name in batch.models}
    jobs = tuple(np.arange(end - len(work), end) for end, work in zip(ends, works, strict=True))
    sources = sorted((each.lengths for each in read), key=lambda source: source.kind == "known")
    named = next(iter(models)) if len(models) == 1 else None
    served = named if isinstance(named, str) else None
    return PooledJob(Sequences(prompt, output, tree=tree), jobs, sources[0], counted, served, bool(batches))


def _blocks(batch: ServerBatch) -> Iterator[list[int]]:
    """Yield a number for each block of each completion's prompt, equal for equal texts."""
    size = BLOCK * TOKEN_BYTES

    def of(says: object) -> list[int]:
        text = says.encode() if isinstance(says, str) else encoded(says)
        return [hash(text[at : at + size]) for at in range(0, len(text), size)]

    return repeated((of(request.says) for request in batch), batch.choices)
