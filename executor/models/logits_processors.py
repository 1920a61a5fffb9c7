"""Functions of users that change the logits of their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...data.readers.sampling import LogitsProcessor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class LogitsProcessors:
    """Functions of a batch's requests, by their random streams; other rows are unchanged.

    begun: Earlier tokens of completions.
    """

    functions: Mapping[int, LogitsProcessor]
    begun: Mapping[int, Sequence[int]]
    _tokens: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    def apply(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the changed logits, shape (rows, vocabulary)."""
        rows = zip(streams.tolist(), indices.tolist(), strict=True)
        changed = [
            (row, self.functions[stream](tuple(self._of(stream)[:index]), logits[row].clone()))
            for row, (stream, index) in enumerate(rows)
            if stream in self.functions
        ]
        if changed:
            logits = logits.clone()
        for row, row_logits in changed:
            logits[row] = row_logits
        return logits

    def note(self, chosen: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> None:
        """Remember the token chosen for each row."""
        for stream, index, token in zip(streams.tolist(), indices.tolist(), chosen.tolist(), strict=True):
            self.give(stream, [token], index)

    def give(self, stream: int, tokens: Sequence[int], first: int) -> None:
        """Remember tokens of a completion from index ``first`` on."""
        if stream in self.functions:
            self._of(stream)[first:] = tokens

    def _of(self, stream: int) -> list[int]:
        return self._tokens.setdefault(stream, list(self.begun.get(stream, ())))
