"""Work counted in iterations, for engines that mix prompts with generated tokens: limits, and a bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from .arrays import IntArray
from .files.record import Count, Positive
from .problem import limit_of

UNLIMITED = 2**40
"""Token budget of an iteration in a bound if unknown."""

TOKENS_PER_ITERATION = 256
"""Tokens that take about as long to compute as reading the weights once, on the devices of these years."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """
    What one iteration of an engine such as vLLM has room for.

    Parameters
    ----------
    sequences
        Most requests in progress (vLLM's ``max_num_seqs``): the slots.
    batched_tokens
        Most tokens computed in an iteration, of prompts and of completions (``max_num_batched_tokens``).
    kv_tokens
        Tokens of KV cache; None for no limit.
    block_tokens
        Tokens of a block of them.

    Raises
    ------
    ValueError
        If a limit is no whole number or below one, or there is not a single block.
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
        """Blocks of KV cache, None for no limit."""
        return None if self.kv_tokens is None else self.kv_tokens // self.block_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """
    What is to be computed: one row per completion, a prompt's several completions a row each.

    prompt: Tokens of each prompt, shape (sequences,).
    output: Tokens of each completion, at least one, shape (sequences,).
    cached: Prompt tokens that may be taken from a prefix cache instead of being computed, at most, once all
        rows before it in some order have computed theirs: fewer than the prompt has, shape (sequences,). By
        default none.
    shared: Prompt tokens that another row may compute, whichever comes first: no fewer than ``cached``, by
        default those, shape (sequences,).
    exact: Whether each row has the length it had; False where only the sum over a prompt's completions is
        known, and rows share it evenly.
    """

    prompt: IntArray
    output: IntArray
    cached: IntArray = None  # type: ignore[assignment]  # filled with zeros below
    shared: IntArray = None  # type: ignore[assignment]  # filled with those cached
    exact: bool = True

    def __post_init__(self) -> None:
        none = np.zeros(len(self.prompt), dtype=np.int64)
        for name in ("prompt", "output", "cached", "shared"):
            given = getattr(self, name)
            if given is None:
                given = self.cached if name == "shared" else none
            column = np.array(given, np.int64)
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        shapes = {column.shape for column in (self.prompt, self.output, self.cached, self.shared)}
        if not len(self.prompt) or len(shapes) > 1:
            raise ValueError("sequences need as many prompts as completions, at least one")
        if (self.prompt < 1).any() or (self.output < 1).any():
            raise ValueError("a prompt and a completion have at least one token each")
        if (self.cached < 0).any() or (self.shared >= self.prompt).any():
            raise ValueError("at least one token of each prompt is computed")
        if (self.shared < self.cached).any():
            raise ValueError("what one row may find cached, another one shares with it")

    def __len__(self) -> int:
        return len(self.prompt)

    def rows(self, limits: EngineLimits) -> IntArray:
        """
        Return the least number of iterations of each sequence, shape (sequences,).

        It draws at most one token an iteration, and the first not before the last chunk of its prompt: of
        what no other row may have computed for it.
        """
        chunks = -(-(self.prompt - self.shared) // limits.batched_tokens)
        rows: IntArray = self.output + chunks - 1
        return rows

    def drafted(self, drafts: int) -> Sequences:
        """Return the sequences with their fewest draws, of ``drafts + 1`` tokens at most, as output."""
        return replace(self, output=-(-self.output // (drafts + 1))) if drafts else self

    def may_run_short(self, limits: EngineLimits, drafts: int = 0) -> bool:
        """Return whether the KV cache can run out, so that an engine has to preempt requests."""
        if limits.blocks is None:
            return False
        peak = -(-(self.prompt + self.output + drafts - 1) // limits.block_tokens)
        return int(np.sort(peak)[::-1][: limits.sequences].sum()) > limits.blocks


def sequences_of(
    prompt: IntArray, output: IntArray, cached: IntArray | None, shared: IntArray | None
) -> Sequences:
    """Return sequences; prompts are computed in full by default."""
    found = Sequences(prompt, output)
    found = found if cached is None else replace(found, cached=cached, shared=cached)
    return found if shared is None else replace(found, shared=shared)


@dataclass(frozen=True, slots=True)
class IterationBound:
    """
    Iterations no order of the requests can go below.

    iterations: The bound.
    source: The argument that gives it, by name.
    certificate: What an independent check needs to derive it again; plain JSON values.
    """

    iterations: Count
    source: str
    certificate: Mapping[str, object] = field(default_factory=dict)

    def gap(self, iterations: int) -> float:
        """Return how far a number of iterations is above the bound, as a fraction of the bound."""
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
    """
    What an engine makes of an order.

    iterations: Until the last token.
    preemptions: Requests preempted for lack of KV cache.
    tokens: Computed in all, with those computed again after a preemption.
    seconds: Until the last token; None without a cost of an iteration.
    """

    iterations: Count
    preemptions: Count = 0
    tokens: Count = 0
    seconds: float | None = None

    @property
    def work(self) -> float:
        """Iterations, with those that the tokens computed would take at the rate of prefilling."""
        return self.iterations + self.tokens / TOKENS_PER_ITERATION
