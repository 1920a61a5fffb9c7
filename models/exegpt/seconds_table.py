"""Seconds at the knots of a table, with bounds for searches."""

from __future__ import annotations

import numpy as np

from ...data.arrays import FloatArray, IntArray


def rising(values: FloatArray) -> FloatArray:
    """Return the largest rising values below the given ones."""
    return np.asarray(np.minimum.accumulate(values[::-1], axis=0)[::-1])


def saving(at: FloatArray, values: FloatArray) -> FloatArray:
    """Return the largest values below with a falling share per unit.

    at: Ascending, shape (points,); the share at 0 counts as the largest.
    values: Shape (points, ...).
    """
    units = at.reshape(-1, *(1,) * (values.ndim - 1))
    shares = np.where(units > 0, values / np.where(units > 0, units, 1.0), np.inf)
    lowest = np.minimum.accumulate(shares, axis=0)
    return np.asarray(np.where(units > 0, units * np.where(units > 0, lowest, 0.0), values))


def saved(values: FloatArray, low: int, high: int) -> float:
    """Return :func:`saving` of position ``high`` from ``low`` on."""
    return float(high * (values[low : high + 1] / np.arange(low, high + 1)).min())


class SecondsTable:
    """Seconds of decoding, by sequences and tokens of each.

    It also holds two lower bounds on the seconds: one never falls with more sequences, the other never rises
    per sequence. The first bounds the seconds of larger batches from below, the second the savings of smaller
    ones from above, however uneven the measured seconds are.

    sequences, contexts: Knots, ascending; outside of them the seconds of the nearest ones hold.
    seconds: Shape (sequences, contexts).
    """

    EXACT, RISING, SAVING = 0, 1, 2

    def __init__(self, sequences: FloatArray, contexts: FloatArray, seconds: FloatArray) -> None:
        self._sequences, self._contexts = sequences, contexts
        self._rows, self._columns = np.arange(float(len(sequences))), np.arange(float(len(contexts)))
        self._width = len(contexts)
        kinds = (seconds, rising(seconds), saving(sequences, seconds))
        # Contiguous, as they are read together.
        self._values = np.stack([kind.ravel() for kind in kinds], axis=-1)
        self._seconds = np.ascontiguousarray(self._values[:, :1])

    def place(self, contexts: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return the knot before each context, and the fraction beyond."""
        column = np.interp(contexts, self._contexts, self._columns)
        lower = np.minimum(column.astype(np.int64), len(self._columns) - 2)
        return lower, (column - lower)[..., None]

    def __call__(self, sequences: FloatArray, contexts: FloatArray) -> FloatArray:
        """Return the seconds, with the arguments broadcast."""
        return self._read(self._seconds, sequences, self.place(contexts))[..., 0]

    def bounded(self, sequences: FloatArray, place: tuple[IntArray, FloatArray]) -> FloatArray:
        """Return the seconds and their two bounds, shape (..., 3)."""
        return self._read(self._values, sequences, place)

    def _read(
        self, values: FloatArray, sequences: FloatArray, place: tuple[IntArray, FloatArray]
    ) -> FloatArray:
        row = np.interp(sequences, self._sequences, self._rows)
        top = np.minimum(row.astype(np.int64), len(self._rows) - 2)
        below, right = place
        corner, down = top * self._width + below, (row - top)[..., None]
        upper = np.take(values, corner, axis=0)
        upper += (np.take(values, corner + 1, axis=0) - upper) * right
        corner += self._width
        lower = np.take(values, corner, axis=0)
        lower += (np.take(values, corner + 1, axis=0) - lower) * right
        return np.asarray(upper + (lower - upper) * down)
