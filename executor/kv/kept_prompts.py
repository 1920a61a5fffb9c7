"""
Prompts that are computed once for all requests that begin with them, now or later.

This module needs torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrompt:
    """
    The KV cache and logits of a prompt that was computed before.

    layers: KV cache of each layer, each of shape (key-value heads, tokens, head size).
    logits: Logits of the token that follows, shape (1, vocabulary).
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


class KeptPrompts:
    """Kept prompts that later requests begin with; the caller chooses them."""

    def __init__(self) -> None:
        self._kept: dict[Prompt, KeptPrompt] = {}

    @property
    def tokens(self) -> int:
        """Number of prompt tokens in the kept KV caches."""
        return sum(len(prompt) for prompt in self._kept)

    def get(self, prompt: Prompt) -> KeptPrompt | None:
        """Return what is kept of a prompt."""
        return self._kept.get(prompt)

    def keep(
        self, prompt: Prompt, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor
    ) -> None:
        """Copy a prompt's KV cache."""
        copies = [(keys.clone(), values.clone()) for keys, values in layers]
        self._kept[prompt] = KeptPrompt(copies, logits.clone())

    def drop(self, prompt: Prompt) -> None:
        """Let go of a prompt: no request to come begins with it."""
        self._kept.pop(prompt, None)

    def clear(self) -> None:
        """Let go of all, as memory is needed."""
        self._kept.clear()
