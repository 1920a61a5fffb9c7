"""Prompts that are computed once for several requests.

This module needs torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrompt:
    """KV cache and logits of a computed prompt.

    layers: KV cache of each layer, each of shape (key-value heads, tokens, head size).
    logits: Logits of the token that follows, shape (1, vocabulary).
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


class KeptPrompts:
    """Kept prompts, which the caller chooses."""

    def __init__(self) -> None:
        self._kept: dict[Prompt, KeptPrompt] = {}

    @property
    def tokens(self) -> int:
        """Number of prompt tokens in the kept KV caches."""
        return sum(len(prompt) for prompt in self._kept)

    def get(self, prompt: Prompt) -> KeptPrompt | None:
        """Return a kept prompt, or None."""
        return self._kept.get(prompt)

    def keep(
        self, prompt: Prompt, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor
    ) -> None:
        """Copy a prompt's KV cache."""
        copies = [(keys.clone(), values.clone()) for keys, values in layers]
        self._kept[prompt] = KeptPrompt(copies, logits.clone())

    def drop(self, prompt: Prompt) -> None:
        """Drop a prompt that no further request begins with."""
        self._kept.pop(prompt, None)

    def clear(self) -> None:
        """Drop all prompts."""
        self._kept.clear()
