"""
What a running batch asks of the place where its keys and values lie, whatever the layout.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True, slots=True, eq=False)
class Suspended:
    """
    A request taken out of a running batch, on the host, to be inserted again as if it had never left.

    Parameters
    ----------
    keys, values
        Of each layer, shape (key-value heads, tokens, head size), in host memory.
    state
        Its next input token, its position, its random stream and the tokens emitted; int64, shape (4,).
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    state: torch.Tensor

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return int(self.keys[0].shape[1])


class KeyValueStore(Cache):
    """Rows of keys and values, one request each; the rows in use come first."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows in use."""

    @property
    @abstractmethod
    def padded_tokens(self) -> int:
        """Columns that attention reads in the next round over the rows that hold something."""

    @abstractmethod
    def tokens_of(self, row: int) -> int:
        """Return the tokens a row holds."""

    @abstractmethod
    def append_row(self) -> None:
        """Take one more row into use; it holds nothing."""

    @abstractmethod
    def drop_row(self) -> None:
        """Put the last row out of use."""

    @abstractmethod
    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another, which has been wiped."""

    @abstractmethod
    def wipe_row(self, row: int) -> None:
        """
        Set what a row holds to zero.

        Masked columns still enter the weighted sum, with weight zero: what a request leaves behind must be
        finite, or 0 * NaN spoils the row's next request.
        """

    @abstractmethod
    def read_row(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of a row's keys and values, each of shape (heads, tokens, head size)."""

    @abstractmethod
    def write_row(self, row: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Embed the keys and values of every layer, each of shape (heads, tokens, head size), in a row."""


def zeros(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """
    Allocate a buffer for what ``like`` holds.

    Zeros, because a masked column still enters the weighted sum: 0 * NaN is NaN.

    Parameters
    ----------
    like
        Keys or values, shape (any, heads, any, head size).
    rows, columns
        What to make room for.

    Returns
    -------
    torch.Tensor
        Shape (rows, heads, columns, head size).
    """
    return torch.zeros(rows, like.shape[1], columns, like.shape[3], dtype=like.dtype, device=like.device)
