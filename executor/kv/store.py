"""Interface of a running batch to its KV cache.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import math
import mmap
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

Place = TypeVar("Place")

Path = Sequence[tuple[int, int]]
"""Names of the shared beginnings of a prompt, one after another, and the tokens through each."""


@dataclass(frozen=True, slots=True, eq=False)
class Suspended:
    """Suspended request in host memory, from which it resumes exactly.

    keys, values: One array per layer, shape (key-value heads, tokens, head size), in host memory.
    state: Next input token, position, random stream and number of emitted tokens; int64, shape (4,).
    shared: Beginnings that it read, which it reads again where they are still held.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    state: torch.Tensor
    shared: Sequence[Any] = ()

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return int(self.keys[0].shape[1])


class StoreLayer(CacheLayerMixin, Generic[Place]):  # type: ignore[no-untyped-call]
    """One layer's KV cache in buffers that stay in place."""

    is_compileable = False

    def __init__(self, place: Place, sliding_window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = place
        self.window = sliding_window

    @abstractmethod
    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        pass

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers like the first keys and values."""
        self.keys, self.values = self._allocated(key_states), self._allocated(value_states)
        self.is_initialized = True

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffers of an initialized layer."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns that new tokens see, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the buffer grows when it has to."""
        return -1


class KeyValueStore(Cache):
    """Rows of KV cache, one request each."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows in use."""

    @abstractmethod
    def tokens_of(self, row: int) -> int:
        """Return the tokens of a row."""

    @abstractmethod
    def append_row(self) -> None:
        """Add an empty row."""

    @abstractmethod
    def drop_row(self) -> None:
        """Remove the last row."""

    @abstractmethod
    def move_row(self, source: int, target: int) -> None:
        """Move a row over another, which was wiped."""

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row over another, which was wiped."""
        self.write_row(target, self.read_row(source))

    @abstractmethod
    def wipe_row(self, row: int) -> None:
        """Zero a row's contents.

        Masked columns still enter the weighted sum, with weight zero: what a request leaves behind must be
        finite, or 0 * NaN spoils the row's next request.
        """

    def keep_row(self, row: int, name: int, begin: int, end: int) -> None:
        """Make some of a row's tokens a beginning of that name; by default only wipe it."""
        self.wipe_row(row)

    def split(self, name: int, tokens: int, head: int) -> None:
        """Give the first tokens of a beginning a name of their own; by default there are no beginnings."""

    @abstractmethod
    def read_row(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of a row's KV cache, (heads, tokens, head size)."""

    def shared_by(self, row: int) -> Sequence[Any]:
        """Return the beginnings that a row shares with others."""
        return ()

    @abstractmethod
    def write_row(
        self, row: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], shared: Sequence[Any] = ()
    ) -> None:
        """Write every layer's KV cache, (heads, tokens, head size), into a row.

        Beginnings of ``shared`` that are still held are read in place.
        """


def zeros(like: torch.Tensor, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate zeros, shape (rows, heads, columns, head size).

    Zeros, because a masked column still enters the weighted sum: 0 * NaN is NaN.
    """
    return untouched_zeros((rows, like.shape[1], columns, like.shape[3]), dtype or like.dtype, like.device)


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros whose unwritten pages take no host memory."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < mmap.PAGESIZE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Torch writes every zero, and calloc those in memory that was used before.
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes of KV cache") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)
