"""Neutral form of a mixed-integer linear model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...data.arrays import FloatArray, IntArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

BoolArray = npt.NDArray[np.bool_]
TOLERANCE = 1e-6
"""Tolerance of a row or bound, relative if it exceeds one."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    r"""Mixed-integer linear model, to be minimised.

    It is :math:`c^T x + c_0` over rows :math:`l \le A x \le u` and columns :math:`l' \le x \le u'`.

    Some columns are whole numbers. The arrays are read-only.

    objective: The costs :math:`c`, shape (columns,).
    matrix: The rows :math:`A`, sparse, shape (rows, columns).
    row_lower, row_upper: Infinite where a row has no such side, shape (rows,).
    lower, upper: Infinite where a column has no such bound, shape (columns,).
    integer: True for columns of whole numbers, shape (columns,).
    column_names, row_names: Unique, without blanks.
    offset: The constant :math:`c_0`.
    raises ValueError: The shapes disagree, a cost, coefficient or bound is not a number, or a name has a
    blank.
    """

    objective: FloatArray
    matrix: csr_array[Any]
    row_lower: FloatArray
    row_upper: FloatArray
    lower: FloatArray
    upper: FloatArray
    integer: BoolArray
    column_names: tuple[str, ...]
    row_names: tuple[str, ...]
    offset: float = 0.0

    def __post_init__(self) -> None:
        rows, columns = self.matrix.shape
        for name, size in (("objective", columns), ("lower", columns), ("upper", columns)):
            self._set(name, np.float64, size)
        for name in ("row_lower", "row_upper"):
            self._set(name, np.float64, rows)
        self._set("integer", np.bool_, columns)
        if len(self.column_names) != columns or len(self.row_names) != rows:
            raise ValueError(f"a model of {rows} rows and {columns} columns needs a name for each")
        for names in (self.column_names, self.row_names):
            if any(not name or any(map(str.isspace, name)) for name in names):
                raise ValueError("a row's or column's name is empty or has a blank")
            if len(set(names)) != len(names):
                raise ValueError("two rows or two columns have the same name")
        if not (np.isfinite(self.objective).all() and np.isfinite(self.matrix.data).all()):
            raise ValueError("a cost or coefficient is not a finite number")

    def _set(self, name: str, kind: type[Any], size: int) -> None:
        column = np.array(getattr(self, name), dtype=kind)
        if column.shape != (size,):
            raise ValueError(f"{name} has the shape {column.shape}; the matrix asks for ({size},)")
        if np.isnan(column).any():
            raise ValueError(f"{name} holds a value that is not a number")
        column.flags.writeable = False
        object.__setattr__(self, name, column)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.objective)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_lower)

    def with_offset_as_column(self) -> LinearModel:
        """Return the model with its constant as a fixed column.

        PuLP reads no constant.
        """
        from scipy.sparse import csr_array, hstack

        if not self.offset:
            return self
        matrix = hstack([self.matrix, csr_array((self.rows, 1))], format="csr")
        return LinearModel(
            np.append(self.objective, self.offset),
            matrix,
            self.row_lower,
            self.row_upper,
            np.append(self.lower, 1.0),
            np.append(self.upper, 1.0),
            np.append(self.integer, True),
            (*self.column_names, "constant"),
            self.row_names,
        )

    def objective_value(self, values: npt.ArrayLike) -> float:
        """Return the objective at ``values``, shape (columns,)."""
        return math.fsum((self.objective * np.asarray(values, dtype=np.float64)).tolist()) + self.offset

    def rounded(self, values: npt.ArrayLike) -> FloatArray:
        """Round integer columns, and keep all within bounds."""
        point = np.array(values, dtype=np.float64)
        point[self.integer] = np.round(point[self.integer])
        near = np.clip(point, self.lower, self.upper)
        close: FloatArray = np.where(np.abs(near - point) <= TOLERANCE * _size(point), near, point)
        return close

    def violation(self, values: npt.ArrayLike) -> str | None:
        """Return the first violation of a solution in words, or None.

        This check is independent of every solver. Integer columns must be whole exactly: see :meth:`rounded`.
        """
        point = np.asarray(values, dtype=np.float64)
        if point.shape != (self.columns,):
            return f"{point.size} values for {self.columns} columns"
        if not np.isfinite(point).all():
            return f"column {self.column_names[int(np.argmin(np.isfinite(point)))]} has no finite value"
        fraction = self.integer & (point != np.round(point))
        if fraction.any():
            at = int(np.argmax(fraction))
            return f"column {self.column_names[at]} is {point[at]:g}, not a whole number"
        if (j := _outside(point, self.lower, self.upper, 1.0)) is not None:
            return (
                f"column {self.column_names[j]} is {point[j]:g}, outside [{self.lower[j]}, {self.upper[j]}]"
            )
        sums = self.matrix @ point
        largest = np.ones(self.rows)
        filled = np.flatnonzero(np.diff(self.matrix.indptr))
        if filled.size:
            starts = self.matrix.indptr[:-1][filled]
            largest[filled] = np.maximum.reduceat(np.abs(self.matrix.data), starts)
        if (i := _outside(sums, self.row_lower, self.row_upper, largest)) is not None:
            sides = f"[{self.row_lower[i]:g}, {self.row_upper[i]:g}]"
            return f"row {self.row_names[i]} is {sums[i]:.9g}, outside {sides}"
        return None


def _size(point: FloatArray) -> FloatArray:
    return np.maximum(1.0, np.abs(point))


def _outside(
    point: FloatArray, lower: FloatArray, upper: FloatArray, scale: float | FloatArray
) -> int | None:
    with np.errstate(invalid="ignore"):
        low = lower - point > TOLERANCE * np.maximum(scale, np.where(np.isinf(lower), 1.0, np.abs(lower)))
        high = point - upper > TOLERANCE * np.maximum(scale, np.where(np.isinf(upper), 1.0, np.abs(upper)))
    wrong = low | high
    return int(np.argmax(wrong)) if wrong.any() else None


class ModelBuilder:
    """Linear model under construction: columns, then rows over them.

    >>> builder = ModelBuilder()
    >>> take = builder.columns("take", (3,), upper=1, integer=True, cost=[-4, -5, -3])
    >>> builder.rows("weight", [([[2, 3, 1]], take[None, :])], upper=4)
    >>> builder.build().columns
    3
    """

    def __init__(self) -> None:
        self._count = 0
        self._costs: list[FloatArray] = []
        self._lower: list[FloatArray] = []
        self._upper: list[FloatArray] = []
        self._integer: list[BoolArray] = []
        self._column_names: list[str] = []
        self._row_names: list[str] = []
        self._row_lower: list[FloatArray] = []
        self._row_upper: list[FloatArray] = []
        self._entries: list[tuple[FloatArray, IntArray, IntArray]] = []

    def columns(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        lower: npt.ArrayLike = 0.0,
        upper: npt.ArrayLike = math.inf,
        integer: bool = False,
        cost: npt.ArrayLike = 0.0,
    ) -> IntArray:
        """Add a block of columns.

        name: The block's name; its columns are called ``name[0,1]`` and so on.
        shape: Shape of the block; empty for a single column.
        lower, upper, cost: Broadcast to ``shape``.
        integer: True for columns of whole numbers.
        Returns: The columns' positions in the model, of the given shape.
        """
        size = math.prod(shape)
        for store, value in ((self._lower, lower), (self._upper, upper), (self._costs, cost)):
            store.append(np.broadcast_to(np.asarray(value, dtype=np.float64), shape).ravel())
        self._integer.append(np.full(size, integer))
        self._column_names.extend(_indexed(name, shape))
        first = self._count
        self._count += size
        return np.arange(first, first + size, dtype=np.int64).reshape(shape)

    def rows(
        self,
        name: str,
        terms: Sequence[tuple[npt.ArrayLike, IntArray]],
        *,
        lower: npt.ArrayLike = -math.inf,
        upper: npt.ArrayLike = math.inf,
    ) -> None:
        """Add a family of rows, each the sum of its terms.

        name: The family's name; its rows are called ``name[0]`` and so on.
        terms: Coefficients and columns. The columns of a term have the shape (rows,), or (rows, entries)
            where a row holds several; the coefficients broadcast to it.
        lower, upper: Broadcast to (rows,).
        """
        count = len(terms[0][1])
        if count == 0:
            return
        first = len(self._row_names)
        for coefficients, columns in terms:
            block = columns.reshape(count, -1)
            values = np.broadcast_to(np.asarray(coefficients, dtype=np.float64), columns.shape)
            at = np.broadcast_to(np.arange(first, first + count)[:, None], block.shape)
            self._entries.append((values.ravel(), at.ravel(), block.ravel()))
        self._row_names.extend(_indexed(name, (count,)))
        for store, value in ((self._row_lower, lower), (self._row_upper, upper)):
            store.append(np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)))

    def build(self, offset: float = 0.0) -> LinearModel:
        """Return the model.

        offset: The objective's constant.
        """
        from scipy.sparse import coo_array

        values, at, columns = (
            np.concatenate(parts) if parts else np.zeros(0)
            for parts in ([entry[n] for entry in self._entries] for n in range(3))
        )
        shape = (len(self._row_names), self._count)
        matrix = coo_array((values, (at.astype(np.int64), columns.astype(np.int64))), shape=shape).tocsr()
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        return LinearModel(
            _joined(self._costs),
            matrix,
            _joined(self._row_lower),
            _joined(self._row_upper),
            _joined(self._lower),
            _joined(self._upper),
            np.concatenate(self._integer) if self._integer else np.zeros(0, dtype=np.bool_),
            tuple(self._column_names),
            tuple(self._row_names),
            offset,
        )


def _joined(parts: list[FloatArray]) -> FloatArray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _indexed(name: str, shape: tuple[int, ...]) -> list[str]:
    if not shape:
        return [name]
    return [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(shape)]
