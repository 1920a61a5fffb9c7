"""Tables of states, a column a field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from ...data.costs.cost import FloatArray, IntArray

BoolArray = NDArray[np.bool_]


class Columns:
    """A dataclass of arrays whose last axis is the rows of a table."""

    __slots__ = ()

    @classmethod
    def _names(cls) -> list[str]:
        return [column.name for column in fields(cast(Any, cls))]

    def take(self, rows: IntArray | BoolArray | slice) -> Self:
        """Return some of the rows."""
        return type(self)(*(getattr(self, name)[..., rows] for name in self._names()))

    @classmethod
    def together(cls, parts: list[Self]) -> Self:
        """Return the rows of all parts."""
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in cls._names())
        )


def first_of_equal(columns: IntArray, rank: FloatArray) -> IntArray:
    """Return a place of each of the columns that differ, that of the lowest rank, shape (places,)."""
    factors = np.random.default_rng(0).integers(1, 2**62, len(columns)) * 2 + 1
    mixed = (columns * factors[:, None]).sum(axis=0)
    order = np.lexsort((rank, mixed))
    columns = columns[:, order]
    # Equal sums of different columns only mean that one of them may be kept twice.
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    return order[new]
