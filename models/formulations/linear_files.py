"""Linear models as MPS files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np

from ...data.files.disk import InputError, atomic_write, read_text
from .linear_model import LinearModel


def write_mps(model: LinearModel, path: str | os.PathLike[str]) -> None:
    """Write the model as a free MPS file.

    Raises InputError if the file cannot be written.
    """
    _write(path, _mps_lines(model))


def _write(path: str | os.PathLike[str], lines: Iterator[str]) -> None:
    with atomic_write(path) as stream:
        stream.writelines(f"{line}\n" for line in lines)


def _mps_lines(model: LinearModel) -> Iterator[str]:
    yield "NAME batchbound FREE"
    yield "ROWS"
    yield " N OBJ"
    kinds = [_row_kind(low, high) for low, high in zip(model.row_lower, model.row_upper, strict=True)]
    for kind, name in zip(kinds, model.row_names, strict=True):
        yield f" {kind} {name}"
    yield "COLUMNS"
    by_column = model.matrix.tocsc()
    whole = False
    for j, name in enumerate(model.column_names):
        if bool(model.integer[j]) != whole:
            whole = not whole
            yield f" MARKER 'MARKER' '{'INTORG' if whole else 'INTEND'}'"
        yield f" {name} OBJ {_number(model.objective[j])}"
        for at in range(by_column.indptr[j], by_column.indptr[j + 1]):
            yield f" {name} {model.row_names[by_column.indices[at]]} {_number(by_column.data[at])}"
    if whole:
        yield " MARKER 'MARKER' 'INTEND'"
    yield "RHS"
    if model.offset:
        yield f" RHS OBJ {_number(-model.offset)}"
    for i, (kind, name) in enumerate(zip(kinds, model.row_names, strict=True)):
        side = model.row_lower[i] if kind == "G" else model.row_upper[i]
        if kind != "N" and side:
            yield f" RHS {name} {_number(side)}"
    low, high = model.row_lower, model.row_upper
    ranged = np.flatnonzero(np.isfinite(low) & np.isfinite(high) & (low != high)).tolist()
    if ranged:
        # PuLP's reader knows no such section.
        yield "RANGES"
    for i in ranged:
        yield f" RANGE {model.row_names[i]} {_number(high[i] - low[i])}"
    yield "BOUNDS"
    for j, name in enumerate(model.column_names):
        yield from _mps_bounds(name, model.lower[j], model.upper[j])
    yield "ENDATA"


def _row_kind(low: float, high: float) -> str:
    if low == high:
        return "E"
    if math.isfinite(high):
        return "L"
    return "G" if math.isfinite(low) else "N"


def _mps_bounds(name: str, low: float, high: float) -> Iterator[str]:
    """Yield a column's bounds in full, as readers disagree on defaults."""
    if low == high:
        yield f" FX BOUND {name} {_number(low)}"
        return
    if math.isinf(low) and math.isinf(high):
        yield f" FR BOUND {name}"
        return
    yield f" MI BOUND {name}" if math.isinf(low) else f" LO BOUND {name} {_number(low)}"
    yield f" PL BOUND {name}" if math.isinf(high) else f" UP BOUND {name} {_number(high)}"


def _number(value: float) -> str:
    return repr(float(value))


def read_mps(path: str | os.PathLike[str]) -> LinearModel:
    """Read an MPS file, fixed or free.

    A model to be maximised gets its objective negated: ours are minimised. An integer column without bounds
    is zero or one, as in SCIP and OR-Tools. Raises InputError if the file is unreadable or not MPS, with the
    line.
    """
    reader = _MpsReader(os.fspath(path))
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip() and not line.startswith("*"):
            reader.line(number, line)
    return reader.model()


class _MpsReader:
    """Parts of an MPS file read so far."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.number = 0
        self.section = ""
        self.sign = 1.0
        self.whole = False
        self.kinds: dict[str, str] = {}
        self.row_at: dict[str, int] = {}
        self.objective: str | None = None
        self.column_at: dict[str, int] = {}
        self.integer: list[bool] = []
        self.entries: list[tuple[float, int, int]] = []
        self.costs: dict[int, float] = {}
        self.sides: dict[str, float] = {}
        self.ranges: dict[str, float] = {}
        self.lower: dict[int, float] = {}
        self.upper: dict[int, float] = {}

    def line(self, number: int, line: str) -> None:
        self.number = number
        fields = line.split()
        if not line[0].isspace():
            self.section = fields[0].upper()
            if self.section == "OBJSENSE" and len(fields) > 1:
                self._sense(fields[1:])
            elif self.section not in _SECTIONS and self.section != "OBJSENSE":
                raise self._error(f"{fields[0]!r} is no section that is read here")
        elif self.section == "OBJSENSE":
            self._sense(fields)
        elif self.section in _SECTIONS:
            getattr(self, _SECTIONS[self.section])(fields)

    def _sense(self, fields: list[str]) -> None:
        self.sign = -1.0 if fields[0].upper().startswith("MAX") else 1.0

    def _skip(self, fields: list[str]) -> None:
        raise self._error(f"{' '.join(fields)!r} stands outside a section")

    def _row(self, fields: list[str]) -> None:
        if len(fields) != 2 or fields[0].upper() not in ("N", "E", "L", "G"):
            raise self._error(f"{' '.join(fields)!r} is not a row")
        kind, name = fields[0].upper(), fields[1]
        if name in self.kinds:
            raise self._error(f"the row {name!r} appears twice")
        self.kinds[name] = kind
        if kind != "N":
            self.row_at[name] = len(self.row_at)
        elif self.objective is None:
            self.objective = name

    def _column(self, fields: list[str]) -> None:
        if len(fields) >= 3 and fields[1].strip("'").upper() == "MARKER":
            self.whole = fields[2].strip("'").upper() == "INTORG"
            return
        j = self.column_at.setdefault(fields[0], len(self.column_at))
        if j == len(self.integer):
            self.integer.append(self.whole)
        for name, value in self._pairs(fields[1:]):
            if name == self.objective:
                self.costs[j] = self.costs.get(j, 0.0) + value
            elif self.kinds[name] != "N":
                self.entries.append((value, self.row_at[name], j))

    def _side(self, fields: list[str]) -> None:
        self.sides.update(self._pairs(fields[len(fields) % 2 :]))

    def _range(self, fields: list[str]) -> None:
        self.ranges.update(self._pairs(fields[len(fields) % 2 :]))

    def _bound(self, fields: list[str]) -> None:
        kind = fields[0].upper()
        valued = kind in ("LO", "UP", "FX", "LI", "UI")
        if kind not in ("LO", "UP", "FX", "LI", "UI", "FR", "MI", "PL", "BV"):
            raise self._error(f"{fields[0]!r} is no kind of bound that is read here")
        column_at = 1 if len(fields) == 2 + int(valued) else 2
        if len(fields) < column_at + 1 + int(valued):
            raise self._error("the bound is incomplete")
        name = fields[column_at]
        if name not in self.column_at:
            raise self._error(f"there is no column {name!r}")
        j = self.column_at[name]
        value = self._value(fields[column_at + 1]) if valued else 0.0
        if kind in ("LI", "UI", "BV"):
            self.integer[j] = True
        if kind in ("UP", "UI") and value < 0 and j not in self.lower:
            self.lower[j] = -math.inf
        if kind in ("LO", "LI", "FX", "BV"):
            self.lower[j] = value
        if kind in ("UP", "UI", "FX"):
            self.upper[j] = value
        if kind == "BV":
            self.upper[j] = 1.0
        if kind in ("FR", "MI"):
            self.lower[j] = -math.inf
        if kind in ("FR", "PL", "LO", "LI", "MI"):
            self.upper.setdefault(j, math.inf)
        if kind in ("FR", "PL"):
            self.upper[j] = math.inf

    def _pairs(self, fields: list[str]) -> list[tuple[str, float]]:
        if len(fields) % 2 or not fields:
            raise self._error("a name without its value")
        pairs = []
        for name, text in zip(fields[::2], fields[1::2], strict=True):
            if name not in self.kinds:
                raise self._error(f"there is no row {name!r}")
            pairs.append((name, self._value(text)))
        return pairs

    def _value(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise self._error(f"{text!r} is not a number")
        return math.copysign(math.inf, value) if abs(value) >= 1e30 else value

    def _error(self, message: str) -> InputError:
        return InputError(message, file=self.file, where=f"line {self.number}", hint="Write the file again.")

    def model(self) -> LinearModel:
        from scipy.sparse import coo_array

        if self.objective is None or not self.column_at:
            hint = "Check that this is an MPS file."
            raise InputError("there is no objective row or no column", file=self.file, hint=hint)
        columns = len(self.column_at)
        costs = np.zeros(columns)
        costs[list(self.costs)] = list(self.costs.values())
        upper = np.where(self.integer, 1.0, math.inf)
        lower = np.zeros(columns)
        lower[list(self.lower)] = list(self.lower.values())
        upper[list(self.lower)] = math.inf
        upper[list(self.upper)] = list(self.upper.values())
        row_lower, row_upper = np.zeros(len(self.row_at)), np.zeros(len(self.row_at))
        for name, i in self.row_at.items():
            row_lower[i], row_upper[i] = self._row_sides(name)
        values, at, which = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        matrix = coo_array(
            (np.array(values, dtype=np.float64), (np.array(at, dtype=int), np.array(which, dtype=int))),
            shape=(len(self.row_at), columns),
        ).tocsr()
        matrix.sum_duplicates()
        try:
            return LinearModel(
                self.sign * costs,
                matrix,
                row_lower,
                row_upper,
                lower,
                upper,
                np.array(self.integer, dtype=np.bool_),
                tuple(self.column_at),
                tuple(self.row_at),
                -self.sign * self.sides.get(self.objective, 0.0),
            )
        except ValueError as error:
            hint = "Correct the numbers: an entry given twice is added up."
            raise InputError(str(error), file=self.file, hint=hint) from None

    def _row_sides(self, name: str) -> tuple[float, float]:
        kind, side = self.kinds[name], self.sides.get(name, 0.0)
        low = side if kind in ("E", "G") else -math.inf
        high = side if kind in ("E", "L") else math.inf
        width = self.ranges.get(name)
        if width is None:
            return low, high
        if kind == "E":
            return (side, side + width) if width >= 0 else (side + width, side)
        return (side, side + abs(width)) if kind == "G" else (side - abs(width), side)


_SECTIONS = {
    "NAME": "_skip",
    "ROWS": "_row",
    "COLUMNS": "_column",
    "RHS": "_side",
    "RANGES": "_range",
    "BOUNDS": "_bound",
    "ENDATA": "_skip",
}
