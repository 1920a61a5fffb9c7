"""Finished completions of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Completion:
    """Finished completion.

    index: Position of its prompt.
    prompt_ids, completion_ids: Tokens of prompt and completion, with the final end-of-sequence token.
    text: Text of the completion, without special tokens.
    finish_reason: ``stop`` for an end-of-sequence token, ``length`` at ``max_tokens``, ``error`` for a prompt
        that ``on_error="skip"`` left out.
    log_probabilities: Log-probability of each token; None unless requested.
    likeliest: Likeliest tokens at each position with their log-probabilities; None unless requested.
    sample: Number among its prompt's completions, from 0.
    versions: Pairs (version of the weights, tokens drawn by it), in order. Each call begins a version, and so
        does a change of weights between two completions; running completions then get a new KV cache.
    given: Index ranges of tokens that a tool returned; their log-probabilities are 0.
    seed: Seed of its sampling; None for greedy decoding. Prompts in the same order with this seed repeat it.
    error: Reason why the prompt was left out, or None.
    """

    index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length", "error"]
    log_probabilities: tuple[float, ...] | None = None
    likeliest: tuple[tuple[tuple[int, float], ...], ...] | None = None
    sample: int = 0
    versions: tuple[tuple[int, int], ...] = ()
    given: tuple[range, ...] = ()
    seed: int | None = None
    error: str | None = None
