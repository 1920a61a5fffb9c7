"""Tables of states, a column a field."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from ...data.arrays import FloatArray, IntArray

BoolArray = NDArray[np.bool_]


class Columns:
    """A dataclass of arrays whose last axis is the rows of a table."""

    __slots__ = ()

    @classmethod
    def _names(cls) -> list[str]:
        return [column.name for column in fields(cast(Any, cls))]

    def take(self, rows: IntArray | BoolArray | slice) -> Self:
        """Return some of the rows."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_:
            # Places are found once, not for each column.
            rows = np.flatnonzero(rows)
        return type(self)(*(getattr(self, name)[..., rows] for name in self._names()))

    @classmethod
    def together(cls, parts: list[Self]) -> Self:
        """Return the rows of all parts."""
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in cls._names())
        )


def first_of_equal(columns: Sequence[IntArray], rank: FloatArray) -> IntArray:
    """Return a place of each of the rows that differ in these columns, that of the lowest rank and place."""
    factors = np.random.default_rng(0).integers(1, 2**62, len(columns)) * 2 + 1
    mixed = functools.reduce(np.add, (column * by for column, by in zip(columns, factors, strict=True)))
    order = np.argsort(mixed)
    new: BoolArray = np.ones(len(order), dtype=np.bool_)
    new[1:] = False
    # Equal sums of different rows only mean that one of them may be kept twice.
    for column in columns:
        values = column[order]
        new[1:] |= values[1:] != values[:-1]
    begin, rank = np.flatnonzero(new), rank[order]
    least = np.minimum.reduceat(rank, begin)
    lowest = np.flatnonzero(rank == np.repeat(least, np.diff(begin, append=len(order))))
    found: IntArray = np.minimum.reduceat(order[lowest], np.searchsorted(lowest, begin))
    return found


def total(columns: NDArray[Any]) -> NDArray[Any]:
    """Return the sum over all slots of each state, faster than numpy's for short numbers, shape (states,)."""
    numbers: NDArray[Any] = columns.view(np.int8) if columns.dtype == np.bool_ else columns
    return functools.reduce(np.add, numbers)


def any_of(columns: BoolArray) -> BoolArray:
    """Return whether any of each state's is true, shape (states,)."""
    found: BoolArray = functools.reduce(np.logical_or, columns)
    return found


def all_of(columns: BoolArray) -> BoolArray:
    """Return whether all of each state's are true, shape (states,)."""
    found: BoolArray = functools.reduce(np.logical_and, columns)
    return found
