"""Iterations of engines that mix prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from .arrays import IntArray
from .files.record import Count, Positive
from .prefix_tree import PrefixTree
from .problem import limit_of

UNLIMITED = 2**40
"""Token budget that a bound assumes if it is unknown."""

TOKENS_PER_ITERATION = 256
"""Tokens that take as long as reading the weights once."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an iteration of an engine such as vLLM.

    Parameters
    ----------
    sequences
        Most requests in progress (vLLM's ``max_num_seqs``): the slots.
    batched_tokens
        Most tokens of prompts and completions in an iteration (``max_num_batched_tokens``).
    kv_tokens
        Tokens of KV cache; None for no limit.
    block_tokens
        Tokens of a block of the KV cache.

    Raises
    ------
    ValueError
        If a limit is not a whole number of at least one, or the KV cache is smaller than a block.
    """

    sequences: Positive
    batched_tokens: Positive = 2048
    kv_tokens: Positive | None = None
    block_tokens: Positive = 16

    def __post_init__(self) -> None:
        for name in ("sequences", "batched_tokens", "kv_tokens", "block_tokens"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, limit_of(name, value, 1))
        if self.kv_tokens is not None and self.kv_tokens < self.block_tokens:
            raise ValueError(f"{self.kv_tokens} tokens make no block of {self.block_tokens}")

    @property
    def blocks(self) -> int | None:
        """Blocks of KV cache; None for no limit."""
        return None if self.kv_tokens is None else self.kv_tokens // self.block_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Work to compute, one row per completion.

    prompt: Tokens of each prompt, shape (sequences,).
    output: Tokens of each completion, at least one, shape (sequences,).
    cached: Most prompt tokens that a prefix cache may hold once earlier rows are computed, shape
        (sequences,). They are fewer than the prompt's; by default those of the tree, or none.
    shared: Prompt tokens that another row may compute first; at least ``cached``, by default equal.
    tree: Shared beginnings of the prompts; None if unknown, or if the engine keeps none.
    exact: True if each row has its own length; False if only the sum over a prompt's completions is known.
    """

    prompt: IntArray
    output: IntArray
    cached: IntArray = None  # type: ignore[assignment]  # filled with zeros below
    shared: IntArray = None  # type: ignore[assignment]  # filled with those cached
    exact: bool = True
    tree: PrefixTree | None = None

    def __post_init__(self) -> None:
        if self.tree is not None and self.cached is None:
            if not np.array_equal(self.tree.prompt_tokens, self.prompt):
                raise ValueError("the prefix tree is of prompts with other lengths")
            for name, column in zip(("cached", "shared"), self.tree.reused(self.output), strict=True):
                object.__setattr__(self, name, column)
        none = np.zeros(len(self.prompt), dtype=np.int64)
        for name in ("prompt", "output", "cached", "shared"):
            values = getattr(self, name)
            if values is None:
                values = self.cached if name == "shared" else none
            column = np.array(values, np.int64)
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        shapes = {column.shape for column in (self.prompt, self.output, self.cached, self.shared)}
        if not len(self.prompt) or len(shapes) > 1:
            raise ValueError("sequences need equally many prompts and completions, at least one")
        if (self.prompt < 1).any() or (self.output < 1).any():
            raise ValueError("a prompt and a completion have at least one token each")
        if (self.cached < 0).any() or (self.shared >= self.prompt).any():
            raise ValueError("at least one token of each prompt is computed")
        if (self.shared < self.cached).any():
            raise ValueError("cached tokens of a row must be shared with another row")

    def __len__(self) -> int:
        return len(self.prompt)

    def select(self, members: IntArray) -> Sequences:
        """Return some of the sequences."""
        prompt, output = self.prompt[members], self.output[members]
        if self.tree is not None:
            return Sequences(prompt, output, tree=self.tree.select(members), exact=self.exact)
        return Sequences(prompt, output, self.cached[members], self.shared[members], self.exact)

    def rows(self, limits: EngineLimits) -> IntArray:
        """Return the least iterations of each sequence, shape (sequences,).

        A sequence draws at most one token in an iteration, the first one with the last chunk of its own part
        of the prompt.
        """
        chunks = -(-(self.prompt - self.shared) // limits.batched_tokens)
        rows: IntArray = self.output + chunks - 1
        return rows

    def warmed(self) -> Sequences:
        """Return the sequences for a prefix cache that may hold all of each prompt but its last token."""
        return replace(self, cached=self.prompt - 1, shared=self.prompt - 1, tree=None)

    def drafted(self, drafts: int) -> Sequences:
        """Return the sequences with their least draws in place of output tokens.

        A draw has at most ``drafts + 1`` tokens.
        """
        return replace(self, output=-(-self.output // (drafts + 1))) if drafts else self

    def may_run_short(self, limits: EngineLimits, drafts: int = 0) -> bool:
        """Return whether the KV cache can run out, with preemptions."""
        if limits.blocks is None:
            return False
        peak = -(-(self.prompt + self.output + drafts - 1) // limits.block_tokens)
        return int(np.sort(peak)[::-1][: limits.sequences].sum()) > limits.blocks


@dataclass(frozen=True, slots=True)
class IterationBound:
    """Least iterations of any order of the requests.

    source: Name of the argument that proves it.
    certificate: Data from which an independent check derives it again; plain JSON values.
    """

    iterations: Count
    source: str
    certificate: Mapping[str, object] = field(default_factory=dict)

    def gap(self, iterations: int) -> float:
        """Return the gap to the bound, as a fraction."""
        return iterations / self.iterations - 1 if self.iterations else 0.0

    def to_json(self) -> dict[str, object]:
        """Return the bound as plain JSON values."""
        return {
            "iterations": self.iterations,
            "source": self.source,
            "certificate": dict(self.certificate),
        }


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted run of an order on an engine.

    iterations: Iterations until the last token.
    preemptions: Preemptions for lack of KV cache.
    tokens: Computed tokens, including those computed again.
    seconds: Seconds until the last token; None without costs.
    value: Value of the objective in iterations; None for the makespan.
    """

    iterations: Count
    preemptions: Count = 0
    tokens: Count = 0
    seconds: float | None = None
    value: Count | None = None

    @property
    def work(self) -> float:
        """Iterations plus computed tokens, in iterations of :data:`TOKENS_PER_ITERATION`."""
        return self.iterations + self.tokens / TOKENS_PER_ITERATION
