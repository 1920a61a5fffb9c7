"""Prompts that the window tier computes once for several requests.

This module needs torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

Prompt = tuple[int, int]
"""Name of all but the last token, and the last token."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrompt:
    """KV cache and logits of a computed prompt.

    layers: KV cache of each layer, each of shape (key-value heads, tokens, head size).
    logits: Logits of the token that follows, shape (1, vocabulary).
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


class KeptPrompts:
    """Prompts that further requests have, up to some tokens."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._kept: dict[Prompt, KeptPrompt] = {}

    @property
    def tokens(self) -> int:
        """Number of prompt tokens in the kept KV caches."""
        return sum(kept.layers[0][0].shape[1] for kept in self._kept.values())

    def get(self, prompt: Prompt) -> KeptPrompt | None:
        """Return a kept prompt, or None."""
        return self._kept.get(prompt)

    def keep(
        self, prompt: Prompt, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor
    ) -> None:
        """Copy a prompt's KV cache, in place of the oldest ones if they leave no room."""
        while self._kept and self.tokens + layers[0][0].shape[1] > self._most:
            del self._kept[next(iter(self._kept))]
        if layers[0][0].shape[1] <= self._most:
            copies = [(keys.clone(), values.clone()) for keys, values in layers]
            self._kept[prompt] = KeptPrompt(copies, logits.clone())

    def forget(self, names: Iterable[int] | None) -> None:
        """Drop prompts by name; None drops all."""
        gone = {name for name, _ in self._kept} if names is None else set(names)
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in gone}
