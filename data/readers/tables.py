"""Tables of lengths: CSV, Parquet, JSON lines, published traces."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import FloatArray, IntArray, numbered
from ..files.arrow import holds_parquet, reading_arrow, require_arrow
from ..files.disk import InputError, read_text, shown
from ..files.jsonl import json_array, json_lines
from ..files.sources import local_file, reading, refuse_streams
from ..prompts.columns import listed, separator
from ..workload import Workload, WorkloadError, numbered_ids

if TYPE_CHECKING:
    import pandas as pd


class UnknownColumnsError(InputError):
    """Error for a table without columns of lengths."""

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str], hint: str) -> None:
        what = f"the columns are not those of a table of lengths: {listed(columns)}"
        super().__init__(what, file=path, hint=hint)
        self.columns = tuple(map(str, columns))


class NoColumnError(InputError):
    """Error for a table that lacks the requested column."""


@dataclass(frozen=True, slots=True)
class TableFormat:
    """Column names of a kind of table.

    unit: Seconds in a unit of ``arrival``; zero for dates.
    clock: True if ``arrival`` is a time of day; the job then starts with the earliest row.
    marks: Columns of which at least one must exist, to distinguish layouts; none by default.
    """

    name: str
    input_tokens: str
    output_tokens: str
    arrival: str
    unit: float = 1.0
    clock: bool = False
    marks: tuple[str, ...] = ()

    def known_by(self, columns: Collection[str]) -> bool:
        """Return whether a table with these columns may have this layout."""
        return not self.marks or any(mark in columns for mark in self.marks)


FORMATS = (
    TableFormat("plain", "input_tokens", "output_tokens", "arrival"),
    TableFormat("OpenAI usage", "prompt_tokens", "completion_tokens", "arrival"),
    TableFormat("Azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP", unit=0.0, clock=True),
    TableFormat("Mooncake", "input_length", "output_length", "timestamp", unit=1e-3),
    TableFormat("Bailian", "input_length", "output_length", "timestamp", marks=("chat_id", "parent_chat_id")),
    TableFormat("PolyTrace", "input", "output", "arrival", marks=("n_sampling",)),
    TableFormat("Vidur", "num_prefill_tokens", "num_decode_tokens", "arrived_at"),
    TableFormat("BurstGPT", "Request tokens", "Response tokens", "Timestamp", clock=True),
    TableFormat("LLMServingSim", "input_toks", "output_toks", "arrival_time_ns", unit=1e-9),
    TableFormat("vLLM run", "input_toks", "output_toks", "arrival_time", clock=True),
    TableFormat("vLLM bench", "input_lens", "output_lens", "start_times", clock=True),
)
"""Layouts recognised by their columns."""

_IDS = ("id", "custom_id", "request_id")
_OPTIONAL = {"group": -1.0, "priority": 0.0, "deadline": float("inf"), "shared_tokens": 0.0}


@dataclass(frozen=True, slots=True)
class LengthColumns:
    """Custom names of length columns.

    input_tokens, output_tokens: Columns of the lengths; None for those of a known layout.
    run: Number of the run in a file with several benchmark results, from 1; None for a single one.
    """

    input_tokens: str | None = None
    output_tokens: str | None = None
    run: int | None = None

    def layout(self) -> TableFormat | None:
        """Return the layout of the named columns; None without any."""
        if self.input_tokens is None and self.output_tokens is None:
            return None
        return TableFormat(
            "named", self.input_tokens or "input_tokens", self.output_tokens or "output_tokens", "arrival"
        )


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's first line is one of lengths."""
    refuse_streams(path)
    try:
        with reading(path) as stream:
            head = next((line for line in stream if line.strip()), b"").lstrip(b"\xef\xbb\xbf \t")
    except InputError:
        return False
    if not head.startswith((b"{", b"[")):
        return True
    try:
        first = json.loads(head)
    except (ValueError, RecursionError):
        return False
    if isinstance(first, list):
        first = first[0] if first and isinstance(first[0], dict) else {}
    # Prompts may pin their completions' lengths and completions may state them, in a column of the same name.
    known = any(
        layout.known_by(first) and (layout.input_tokens in first or layout.output_tokens in first)
        for layout in FORMATS
    )
    return known and not {"body", "response"} & set(first)


def read_lengths(
    path: str | os.PathLike[str],
    *,
    drop_unanswered: bool = False,
    need_output: bool = True,
    named: LengthColumns | None = None,
) -> Workload:
    """Read the workload of a table of lengths.

    The table is CSV, Parquet, JSON lines, a JSON array, or a result of a serving benchmark. Its columns are
    those named or of one of :data:`FORMATS`. Further columns are an id, ``group`` (numbers or names),
    ``priority``, ``deadline`` (seconds), and ``shared_tokens`` (common first tokens of a group's prompts).
    ``drop_unanswered`` leaves out rows without a completion; without ``need_output`` each completion has one
    token. InputError names the line, the column, the value and the hint.
    """
    frame = read_table(path, drop_unanswered=drop_unanswered, need_output=need_output, named=named)
    return Workload.from_frame(frame)


def read_table(
    path: str | os.PathLike[str],
    *,
    drop_unanswered: bool = False,
    need_input: bool = True,
    need_output: bool = True,
    named: LengthColumns | None = None,
) -> pd.DataFrame:
    """Read a table of lengths with a workload's columns.

    Without ``need_input`` prompts have one token where the table does not say.
    """
    import pandas as pd

    named = named or LengthColumns()
    raw, unit = _read(path, *filter(None, (named.input_tokens, named.output_tokens)), run=named.run)
    columns = list(raw.columns)
    read_output = need_output or drop_unanswered
    layout = _layout(path, columns, need_input, read_output, named)
    table = _Table(path, unit, raw)
    names = {"input_tokens": layout.input_tokens}
    if read_output:
        names["output_tokens"] = layout.output_tokens
    names |= {name: name for name in _OPTIONAL if name in columns}
    if layout.arrival in columns:
        names["arrival"] = layout.arrival
    names["id"] = next((name for name in _IDS if name in columns), "id")
    frame = pd.DataFrame(_values(table, layout, names, no_output=0.0 if drop_unanswered else None))
    whole = [name for name in frame.columns if name not in ("arrival", "deadline")]
    frame[whole] = frame[whole].astype("int64")
    frame.insert(0, "id", table.ids(names["id"]) if names["id"] in columns else numbered_ids(len(raw)))
    if drop_unanswered:
        frame = frame[frame["output_tokens"] != 0]
        if frame.empty:
            raise InputError("no row has a completion", file=path, hint="Give a table with completions.")
    try:
        Workload.from_frame(frame)
    except WorkloadError as error:
        raise _refused(error, table, frame, names) from None
    return frame.reset_index(drop=True)


def read_steps(path: str | os.PathLike[str], name: str) -> IntArray:
    """Read each row's step from a column, shape (rows,)."""
    table, labels = _column(path, name)
    steps = numbered(labels)
    back = np.flatnonzero(np.diff(steps) < 0)
    if back.size:
        at = int(back[0]) + 1
        what = f"{labels[at]!r} comes again after {labels[at - 1]!r}"
        where = f"{table.place(at, table.raw)}, column '{name}'"
        raise InputError(what, file=path, where=where, hint="Put the rows of each step one after another.")
    return steps


def read_seconds(path: str | os.PathLike[str], name: str, step: IntArray) -> FloatArray | None:
    """Read a number of each step from a column, shape (steps,); None if there is no such column."""
    raw, unit = _read(path, name)
    if name not in raw.columns:
        return None
    numbers = np.array(_Table(path, unit, raw).numbers(name, absent=0.0), dtype=np.float64)
    seconds: FloatArray = numbers[np.unique(step, return_index=True)[1]]
    return seconds


def _column(path: str | os.PathLike[str], name: str) -> tuple[_Table, list[str]]:
    raw, unit = _read(path, name)
    if name not in raw.columns:
        message = f"has no column {name!r}, but {listed(list(map(str, raw.columns)))}"
        raise NoColumnError(message, file=path, hint="Name one of its columns.")
    table = _Table(path, unit, raw)
    return table, table.ids(name).tolist()


def _values(
    table: _Table, layout: TableFormat, names: Mapping[str, str], *, no_output: float | None
) -> dict[str, pd.Series[float]]:
    """Return a table's numbers by the workload's columns.

    ``no_output`` replaces missing lengths.
    """
    import pandas as pd

    series: dict[str, pd.Series[float]] = {}
    if "arrival" in names:
        arrival = table.dates(layout.arrival) if layout.unit == 0 else table.numbers(layout.arrival)
        arrival = arrival * (layout.unit or 1.0)
        series["arrival"] = arrival - arrival.min() if layout.clock else arrival
    for name in ("input_tokens", "output_tokens"):
        if names.get(name) in table.raw.columns:
            absent = no_output if name == "output_tokens" else None
            series[name] = table.numbers(names[name], whole=True, absent=absent)
        else:
            series[name] = pd.Series(1.0, index=table.raw.index)
    for name, usual in _OPTIONAL.items():
        if name == "group" and name in names and table.named(name):
            series[name] = table.positions(name, usual)
        elif name in names:
            series[name] = table.numbers(name, whole=name != "deadline", absent=usual)
    return series


def _refused(
    error: WorkloadError, table: _Table, frame: pd.DataFrame, names: Mapping[str, str]
) -> InputError:
    """Return a workload's error with the table's row and column."""
    column = names.get(error.column, error.column)
    if error.row is None:
        return InputError(error.reason, file=table.path, where=f"column '{column}'")
    hint = "Correct the row or remove it."
    if error.column == "output_tokens" and frame["output_tokens"].iloc[error.row] == 0:
        hint = "Remove the row, or leave all such rows out with --drop-unanswered (drop_unanswered=True)."
    reason = error.reason
    if error.column == "id":
        value = frame["id"].iloc[error.row]
        reason = f"{value!r} also names {table.place(list(frame['id']).index(value), frame)}"
    where = f"{table.place(error.row, frame)}, column '{column}'"
    return InputError(reason, file=table.path, where=where, hint=hint)


@dataclass(frozen=True, slots=True)
class _Table:
    path: str | os.PathLike[str]
    unit: str
    raw: pd.DataFrame

    def place(self, row: int, frame: pd.DataFrame) -> str:
        return f"{self.unit} {frame.index[row]}"

    def ids(self, name: str) -> pd.Series[str]:
        column = self.raw[name]
        unnamed = column.map(lambda value: isinstance(value, list | dict) or "\0" in str(value))
        self.refuse(name, column.isna() | (column == "") | unnamed, "a name")
        return column.astype(str)

    def numbers(self, name: str, *, whole: bool = False, absent: float | None = None) -> pd.Series[float]:
        import pandas as pd

        column = self.raw[name]
        numbers = pd.to_numeric(column.map(_number_or_text), errors="coerce").astype(float)
        if absent is not None:
            numbers = numbers.mask((column == "") | column.isna(), absent)
        wrong = numbers.isna()
        if not whole:
            self.refuse(name, wrong, "a number")
            return numbers
        self.refuse(name, wrong | (numbers % 1 != 0) | (numbers.abs() > 2**62), "a whole number")
        return numbers

    def named(self, name: str) -> bool:
        """Return whether all values of a column are words and not numbers."""
        import pandas as pd

        column = self.raw[name]
        column = column[~((column == "") | column.isna())]
        words = column.map(lambda value: isinstance(value, str))
        return bool(len(column) and words.all() and pd.to_numeric(column, errors="coerce").isna().all())

    def positions(self, name: str, absent: float) -> pd.Series[float]:
        """Return each word's number, in order of appearance.

        Missing words get ``absent``.
        """
        import pandas as pd

        column = self.raw[name]
        codes, _ = pd.factorize(column.mask((column == "") | column.isna()))
        return pd.Series(codes, index=column.index, dtype=float).mask(codes < 0, absent)

    def dates(self, name: str) -> pd.Series[float]:
        import pandas as pd

        stamps = pd.to_datetime(self.raw[name], errors="coerce", utc=True, format="ISO8601")
        self.refuse(name, stamps.isna(), "a date and time")
        return (stamps - stamps.min()).dt.total_seconds()

    def refuse(self, name: str, wrong: pd.Series[bool], what: str) -> None:
        if not wrong.any():
            return
        row = int(wrong.to_numpy().argmax())
        value = self.raw[name].iloc[row]
        empty = value is None or value == "" or value != value
        message = "the value is missing" if empty else f"{shown(value)} is not {what}"
        where = f"{self.place(row, self.raw)}, column '{name}'"
        raise InputError(message, file=self.path, where=where, hint="Correct the row or remove it.")


def _number_or_text(value: object) -> object:
    """Return ``value``, or None if pandas would misread it.

    It reads true as 1, and fails on a huge integer.
    """
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) > 2**63):
        return None
    return value


def _read(path: str | os.PathLike[str], *also: str, run: int | None = None) -> tuple[pd.DataFrame, str]:
    """Read a table indexed by row number; return the number's unit.

    Columns that neither a layout nor ``also`` names are empty in Parquet and left out of JSON. A row with
    several sampled completions becomes a row for each, in a group.
    """
    raw, unit = _read_rows(path, _known_columns() | set(also), run)
    return (_each_sampled(path, raw, unit) if "n_sampling" in raw.columns else raw), unit


def _each_sampled(path: str | os.PathLike[str], raw: pd.DataFrame, unit: str) -> pd.DataFrame:
    """Return a row for each sampled completion, in groups."""
    for number, lengths, count in zip(raw.index, raw["output"], raw["n_sampling"], strict=True):
        if not isinstance(lengths, list) or len(lengths) != count:
            what = f"{shown(lengths)} is not a list of {shown(count)} lengths, as n_sampling says"
            where = f"{unit} {number}, column 'output'"
            raise InputError(what, file=path, where=where, hint="Correct the row or remove it.")
    frame = raw.assign(group=range(len(raw))).explode("output")
    return frame.astype(object).where(frame.notna(), None)


def _read_rows(path: str | os.PathLike[str], wanted: set[str], run: int | None) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    if holds_parquet(path):
        require_arrow()
        from pyarrow import parquet

        with reading_arrow(path):
            names = parquet.read_schema(local_file(path)).names
            table = parquet.read_table(local_file(path), columns=[name for name in names if name in wanted])
            # Converted to Python's values, as pandas has its own types for missing values and words.
            rows = table.to_pydict()
        frame = pd.DataFrame(rows, columns=names, index=range(1, len(table) + 1), dtype=object)
        return _nonempty(path, frame), "row"
    text = read_text(path)
    if text.lstrip().startswith(("{", "[")):
        return _read_json(path, text, wanted, run)
    if not text.strip():
        raise InputError("the file is empty", file=path, hint="Give requests, or a table with a header.")
    mark = separator(text)
    try:
        frame = pd.read_csv(
            io.StringIO(text), sep=mark, dtype=str, keep_default_na=False, skip_blank_lines=False
        )
    except pd.errors.ParserError as error:
        why = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        message = f"not a readable CSV table ({why})"
        raise InputError(message, file=path, hint="Correct the line.") from None
    if not isinstance(frame.index, pd.RangeIndex):
        # pandas would read the first values as row names, and shift all others by a column.
        message = f"more values than the {len(frame.columns)} columns of the header"
        raise InputError(message, file=path, where="line 2", hint="Name every column.")
    header = [name.strip() for name in next(csv.reader(io.StringIO(text), delimiter=mark))]
    if Path(path).suffix in (".jsonl", ".json") and not _known_columns() & set(header):
        message = "neither JSON, as its name says, nor a table of lengths"
        raise InputError(message, file=path, where="line 1", hint="Give one JSON object a line.")
    twice = next((name for name in header if header.count(name) > 1 and name in _known_columns()), None)
    if twice is not None:
        message = f"{header.count(twice)} columns have this name"
        raise InputError(message, file=path, where=f"column '{twice}'", hint="Name each column once.")
    frame.columns = frame.columns.str.strip()
    # A line break inside a quoted value shifts lines against rows, so rows are counted.
    lines = text.count("\n") + (not text.endswith("\n"))
    unit, first = ("line", 2) if lines == len(frame) + 1 else ("row", 1)
    frame = frame.set_axis(range(first, first + len(frame)))
    return _nonempty(path, frame[(frame != "").any(axis=1)]), unit


def _known_columns() -> set[str]:
    lengths = {
        name
        for layout in FORMATS
        for name in (layout.input_tokens, layout.output_tokens, layout.arrival, *layout.marks)
    }
    return lengths | {*_IDS, *_OPTIONAL}


def _read_json(
    path: str | os.PathLike[str], text: str, wanted: set[str], run: int | None
) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    whole = _benchmark(path, text, run)
    if whole is not None:
        columns = {
            name: whole[name] for name in ("input_lens", "output_lens", "start_times") if name in whole
        }
        count = len(whole["input_lens"])
        for field, column in columns.items():
            if not isinstance(column, list) or len(column) != count:
                message = f"has not one value for each of the {count} requests"
                raise InputError(message, file=path, where=f"field '{field}'", hint="Write the file again.")
        frame = pd.DataFrame(columns, index=range(1, count + 1), dtype=object)
        return _nonempty(path, frame), "request"
    numbers = list[int]()
    names, rows = dict[str, None](), dict[str, list[object]]()
    array = json_array(text, path)
    for number, row in json_lines(path) if array is None else enumerate(array, 1):
        if not row.keys() <= names.keys():
            rows |= {name: [None] * len(numbers) for name in row if name in wanted and name not in names}
            names |= dict.fromkeys(row)
        numbers.append(number)
        for name, values in rows.items():
            values.append(row.get(name))
    frame = pd.DataFrame(rows or None, columns=list(names), index=numbers, dtype=object)
    return frame, "line" if array is None else "row"


def _benchmark(path: str | os.PathLike[str], text: str, run: int | None) -> dict[str, Any] | None:
    try:
        runs = [json.loads(text)]
    except (ValueError, RecursionError):
        first = text.lstrip().partition("\n")[0]
        if '"input_lens"' not in first or '"output_lens"' not in first:
            return None
        runs = [row for _, row in json_lines(path)]
    if not all(isinstance(entry, dict) and isinstance(entry.get("input_lens"), list) for entry in runs):
        return None
    if run is None and len(runs) > 1:
        hint = f"Choose one with --benchmark-run 1 to {len(runs)}."
        raise InputError(f"holds {len(runs)} runs of a serving benchmark", file=path, hint=hint)
    if run is not None and not 1 <= run <= len(runs):
        hint = f"Give 1 to {len(runs)}."
        raise InputError(f"there is no run {run} of a serving benchmark", file=path, hint=hint)
    return dict(runs[(run or 1) - 1])


def _nonempty(path: str | os.PathLike[str], frame: pd.DataFrame) -> pd.DataFrame:
    if frame.empty:
        raise InputError("there is no row below the header", file=path, hint="Give a table with requests.")
    return frame


def _layout(
    path: str | os.PathLike[str],
    columns: list[str],
    need_input: bool,
    need_output: bool,
    named: LengthColumns,
) -> TableFormat:
    chosen = named.layout()
    if chosen is not None:
        needed = (chosen.input_tokens if need_input else None, chosen.output_tokens if need_output else None)
        for name in filter(None, needed):
            if name not in columns:
                raise NoColumnError(
                    f"has no column {name!r}, but {listed(columns)}",
                    file=path,
                    hint="Name one of its columns.",
                )
        return chosen
    fitting = [
        layout
        for layout in FORMATS
        if layout.known_by(columns)
        and (layout.output_tokens in columns or not need_output)
        and (layout.input_tokens in columns or not need_input)
    ]
    if fitting:
        return max(fitting, key=lambda layout: (bool(layout.marks), layout.arrival in columns))
    hint = "For lengths say --input-column and --output-column, or call them input_tokens and output_tokens."
    raise UnknownColumnsError(path, columns, hint)
