"""Rows of a table as lines of a batch file, from Parquet, CSV, JSON lines or a folder of a dataset."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.arrow import holds_parquet, reading_arrow, require_arrow
from ..files.disk import InputError, read_json_object, read_text, shown
from ..files.jsonl import file_digest, json_lines
from ..files.record import whole
from ..workload import LONGEST
from .columns import PromptColumns, asking_for_prompts, is_header, listed, separator

if TYPE_CHECKING:
    import pyarrow as pa

_SPLIT = re.compile(r"(.+?)-\d{5}-of-\d{5}")
"""How the hub names the files of a split."""

_WRITTEN = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""How a conversation begins that was made a text of, as CSV does."""

_LONGEST_HEADER = 4096

_BATCH = {"custom_id", "body", "method", "url", "response", "error"}
"""Fields of the lines of batch files: one of them at least stands in each."""


def batch_entries(
    path: str | os.PathLike[str], columns: PromptColumns | None
) -> Iterator[tuple[int, dict[str, object]]]:
    """
    Yield the lines of a batch file, or the rows of a table in the same form, each with its number.

    Parameters
    ----------
    path
        A batch file; or a table: Parquet, CSV, JSON lines, or a folder of a Hugging Face dataset.
    columns
        The table's columns; None for a batch file.

    Raises
    ------
    InputError
        If the table cannot be read, a column is not there, or a value is no prompt, name or number of tokens.
    """
    if columns is None:
        if is_prompt_table(path) or _has_header(path):
            raise _unnamed(path, _read(path, None)[0])
        for number, entry in json_lines(path):
            if not _BATCH & set(entry):
                raise _unnamed(path, list(entry), f"line {number}")
            yield number, entry
        return
    rows = _read(path, columns)[1]
    if not rows:
        raise InputError("there is no row", file=path, hint="Give a table with prompts.")
    row_of: dict[str, _Row] = {}
    for position, (unit, number, values) in enumerate(rows):
        row = _Row(path, f"{unit} {number}", values)
        name = f"request-{position}" if columns.id is None else row.name(columns.id)
        first = row_of.setdefault(name, row)
        if first is not row:
            hint = "Give every request a name of its own."
            raise row.error(columns.id or "", f"{name!r} already names {first.place}", hint)
        body = row.prompt(columns.prompt)
        if columns.max_tokens is not None:
            body["max_tokens"] = row.tokens(columns.max_tokens)
        yield number, {"custom_id": name, "body": body}


def _has_header(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as a table of text does; one that cannot be read is told of elsewhere."""
    try:
        with open(path, "rb") as stream:
            return is_header(stream.readline(_LONGEST_HEADER).rstrip(b"\n"))
    except OSError:
        return False


def _unnamed(path: str | os.PathLike[str], found: Sequence[str], where: str = "") -> InputError:
    """Return what to tell of a table whose column of prompts was not named."""
    what = f"no request of a batch file, but the columns {listed(found)}"
    return InputError(what, file=path, where=where, hint=f"{asking_for_prompts(found)}.")


def is_prompt_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder or a Parquet file, which no batch file is."""
    if Path(path).is_dir():
        return True
    return holds_parquet(path)


def prompts_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file of prompts, or of the names and contents of a dataset's files."""
    if not Path(path).is_dir():
        return file_digest(path)
    whole = hashlib.sha256()
    for file in _dataset_files(Path(path)):
        whole.update(f"{file.name}\0{file_digest(file)}\0".encode())
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class _Row:
    path: str | os.PathLike[str]
    place: str
    values: Mapping[str, Any]

    def error(self, column: str, message: str, hint: str) -> InputError:
        return InputError(message, file=self.path, where=f"{self.place}, column '{column}'", hint=hint)

    def name(self, column: str) -> str:
        value = self.values.get(column)
        text = "" if value is None or isinstance(value, list | dict | float) else str(value)
        if not text.strip() or "\0" in text:
            raise self.error(column, f"{shown(value)} is not a name", "Give every request its own.")
        return text

    def prompt(self, column: str) -> dict[str, object]:
        value = self.values.get(column)
        hint = "Give a text, a list of token ids, or a list of messages with role and content."
        if isinstance(value, str) and _WRITTEN.match(value):
            what = "is a conversation written as text, which would be completed as it stands"
            raise self.error(column, what, "Keep it as a list: in JSON lines or Parquet.")
        if isinstance(value, str) and value:
            return {"prompt": value}
        if not isinstance(value, list) or not value:
            what = "the prompt is missing" if value in (None, "", []) else f"{shown(value)} is not a prompt"
            raise self.error(column, what, hint)
        if all(type(one) is int and 0 <= one <= LONGEST for one in value):
            return {"prompt": value}
        if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value):
            raise self.error(column, f"{shown(value)} is not a conversation", hint)
        wrong = next((one for one in value if not isinstance(one.get("content"), str)), None)
        if wrong is not None:
            raise self.error(column, f"the content {shown(wrong.get('content'))} is not text", hint)
        return {"messages": [{"role": one["role"], "content": one["content"]} for one in value]}

    def tokens(self, column: str) -> int | None:
        value = self.values.get(column)
        if value is None or value == "":
            return None
        if isinstance(value, str) and re.fullmatch(r"\s*\d{1,18}(\.0*)?\s*", value):
            value = int(value.partition(".")[0])
        number = whole(value)
        if number is None or not 1 <= number <= LONGEST:
            hint = f"Give a whole number from 1 to {LONGEST}, or nothing."
            raise self.error(column, f"{shown(value)} is not a number of tokens", hint)
        return number


_Rows = Sequence[tuple[str, int, Mapping[str, Any]]]
"""What the number counts (line or row), the number from one, and the values by column."""


def _read(path: str | os.PathLike[str], columns: PromptColumns | None) -> tuple[list[str], _Rows]:
    """Return a table's columns, and the rows of those that are read."""
    if is_prompt_table(path):
        return _read_arrow(path, columns)
    text = read_text(path)
    if text.lstrip().startswith(("{", "[")):
        lines = list(json_lines(path))
        names = list(dict.fromkeys(name for _, line in lines for name in line))
        if columns is not None:
            columns.check(names, path)
        return names, [("line", number, line) for number, line in lines]
    return _read_csv(path, text, columns)


def _read_csv(
    path: str | os.PathLike[str], text: str, columns: PromptColumns | None
) -> tuple[list[str], _Rows]:
    csv.field_size_limit(2**31 - 1)
    if not text.strip():
        raise InputError("the file is empty", file=path, hint="Give a table with prompts.")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator(text), strict=True)
    rows: list[tuple[str, int, Mapping[str, Any]]] = []
    try:
        names = [name.strip() for name in next(reader, [])]
        if columns is not None:
            columns.check(names, path)
        for number, values in enumerate((row for row in reader if row), 1):
            if len(values) != len(names):
                what = f"{len(values)} values for the {len(names)} columns of the header"
                hint = "Quote values that hold commas or line breaks."
                raise InputError(what, file=path, where=f"row {number}", hint=hint)
            rows.append(("row", number, dict(zip(names, values, strict=True))))
    except csv.Error as error:
        hint = "Quote values that hold commas, quotes or line breaks."
        what = f"not a readable CSV table ({error})"
        raise InputError(what, file=path, where=f"line {reader.line_num}", hint=hint) from None
    return names, rows


def _read_arrow(path: str | os.PathLike[str], columns: PromptColumns | None) -> tuple[list[str], _Rows]:
    folder = Path(path)
    files = _dataset_files(folder) if folder.is_dir() else [folder]
    names: list[str] = []
    rows: list[tuple[str, int, Mapping[str, Any]]] = []
    for file in files:
        table = _arrow_table(file)
        names = list(table.column_names)
        if columns is None:
            break
        columns.check(names, file)
        wanted = table.select(list(dict.fromkeys(columns.names()))).to_pylist()
        rows += [("row", number, values) for number, values in enumerate(wanted, len(rows) + 1)]
    return names, rows


def _arrow_table(file: Path) -> pa.Table:
    """Return the table of a Parquet file, or of an Arrow file as datasets are kept on disk."""
    require_arrow()
    import pyarrow as pa
    from pyarrow import ipc, parquet

    with reading_arrow(file):
        if file.suffix != ".arrow":
            return parquet.read_table(file)
        with pa.memory_map(os.fspath(file)) as source:
            return ipc.open_stream(source).read_all()


def _dataset_files(folder: Path) -> list[Path]:
    """Return the files of a dataset: as ``datasets`` saves one, or the Parquet files of one split."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json_object(folder / "dataset_dict.json").get("splits")
        named = ", ".join(str(folder / str(split)) for split in splits) if isinstance(splits, list) else ""
        raise InputError("holds several splits", file=folder, hint=f"Give one: {named}.")
    state = folder / "state.json"
    if state.is_file():
        listed = read_json_object(state).get("_data_files")
        files = [one.get("filename") for one in listed] if isinstance(listed, list) else []
        if not files or not all(isinstance(name, str) for name in files):
            raise InputError("names no data files", file=state, hint="Save the dataset again.")
        return [folder / name for name in files]
    files = sorted(folder.glob("*.parquet"))
    if not files and (folder / "data").is_dir():
        return _dataset_files(folder / "data")
    if not files:
        hint = "Give a dataset as save_to_disk wrote it, or a folder of Parquet files."
        raise InputError("is a folder without a dataset", file=folder, hint=hint)
    splits = sorted({split[1] for file in files if (split := _SPLIT.fullmatch(file.stem))})
    if len(splits) > 1:
        hint = f"Give one file, such as {files[0]}."
        raise InputError(f"holds several splits: {', '.join(splits)}", file=folder, hint=hint)
    return files
