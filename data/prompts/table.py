"""Rows of a table as lines of a batch file."""

from __future__ import annotations

import array
import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.arrow import holds_parquet, reading_arrow, require_arrow
from ..files.disk import InputError, read_json_object, read_text, shown
from ..files.jsonl import file_digest, json_array, json_lines
from ..files.record import whole
from ..files.sources import first_bytes, local_file
from ..workload import LONGEST
from .columns import TEMPLATE_COLUMNS, PromptColumns, asking_for_prompts, is_header, listed, separator
from .messages import (
    FieldError,
    TokenIds,
    is_ids,
    is_sharegpt,
    read_messages,
    sharegpt_prompt,
    without_nulls,
    written_conversation,
)
from .names import Names

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch

_SPLIT = re.compile(r"(.+?)-\d{5}-of-\d{5}")
"""Names of the files of a split on the hub."""

_LONGEST_HEADER = 4096

_ARROW_ROWS = 1024
"""Rows of a Parquet file to hold as Python objects at a time."""

_BATCH = {"custom_id", "body", "method", "url", "response", "error"}
"""Fields of batch files; each line has one at least."""

_KINDS: Sequence[tuple[str, frozenset[str], str]] = (
    (
        "samples of lm-eval-harness",
        frozenset({"doc_id", "arguments", "resps"}),
        "They are results; `jq -c '{prompt: .arguments.gen_args_0.arg_0}'` writes their prompts as a table"
        " for --prompt-column prompt.",
    ),
    (
        "ShareGPT conversations",
        frozenset({"conversations"}),
        "Say --prompt-column conversations: the first human turn is the prompt.",
    ),
    (
        "instructions with inputs, as Alpaca has them",
        frozenset({"instruction", "input", "output"}),
        "Join instruction and input into one column and name it: one alone is half a prompt.",
    ),
)
"""Kinds of files that are no batch files, their fields and next steps."""


def batch_entries(
    path: str | os.PathLike[str], columns: PromptColumns | None, *, text_only: bool = True
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield each line or row with its number, as a batch line.

    ``columns`` is None for a batch file. A table is Parquet, CSV, JSON lines, a JSON array, or a folder of a
    Hugging Face dataset. ``text_only`` refuses messages that our engine cannot serve.
    """
    if columns is None:
        if is_prompt_table(path) or _has_header(path) or _is_array(path):
            names = _read(path, None)[0]
            if not (_is_array(path) and _BATCH & set(names)):
                raise _unnamed(path, names)
        for number, entry in json_lines(path):
            if not _BATCH & set(entry):
                raise _unnamed(path, list(entry), f"line {number}")
            yield number, entry
        return
    names, rows = _read(path, columns)
    cap, known, places = columns.cap(names), Names(), array.array("q")
    for unit, number, values in rows:
        row = _Row(path, f"{unit} {number}", values)
        name = f"request-{len(places)}" if columns.id is None else row.name(columns.id)
        # Numbers differ anyway.
        first = len(places) if columns.id is None else known.add(name)
        if first < len(places):
            hint = "Give every request a name of its own."
            raise row.error(columns.id or "", f"{name!r} already names {unit} {places[first]}", hint)
        places.append(number)
        body = row.body(columns, text_only=text_only)
        if cap is not None:
            body["max_tokens"] = row.tokens(cap)
        yield number, {"custom_id": name, "body": body}
    if not places:
        raise InputError("there is no row", file=path, hint="Give a table with prompts.")


def holds_texts(path: str | os.PathLike[str], columns: PromptColumns) -> bool:
    """Return whether the first row of a table holds a text, not a conversation."""
    _, entry = next(batch_entries(path, replace(columns, chat=False)))
    body = entry["body"]
    return isinstance(body, dict) and isinstance(body.get("prompt"), str)


def _has_header(path: str | os.PathLike[str]) -> bool:
    return is_header(first_bytes(path, _LONGEST_HEADER).partition(b"\n")[0])


def _is_array(path: str | os.PathLike[str]) -> bool:
    return first_bytes(path, _LONGEST_HEADER).lstrip().startswith(b"[")


def _unnamed(path: str | os.PathLike[str], found: Sequence[str], where: str = "") -> InputError:
    for kind, fields, hint in _KINDS:
        if fields <= set(found):
            return InputError(f"holds {kind}, no requests", file=path, where=where, hint=hint)
    what = f"no request of a batch file, but the columns {listed(found)}"
    return InputError(what, file=path, where=where, hint=f"{asking_for_prompts(found)}.")


def is_prompt_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder or Parquet file."""
    if Path(path).is_dir():
        return True
    return holds_parquet(path)


def prompts_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of prompts: a file's or a dataset's."""
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

    def body(self, columns: PromptColumns, *, text_only: bool) -> dict[str, object]:
        """Return a row's request: a prompt, or a chat with options."""
        column = columns.prompt
        value = self.values.get(column)
        hint = "Give a text, a list of token ids, or a list of messages with role and content."
        if isinstance(value, str):
            try:
                value = written_conversation(value) or value
            except ValueError:
                what = "begins as a conversation written as text, and cannot be parsed"
                raise self.error(column, what, "Write it as JSON, or keep it as a list.") from None
        if isinstance(value, str) and value:
            return {"messages": [{"role": "user", "content": value}]} if columns.chat else {"prompt": value}
        if not isinstance(value, list) or not value:
            what = "the prompt is missing" if value in (None, "", []) else f"{shown(value)} is not a prompt"
            raise self.error(column, what, hint)
        known = isinstance(value, TokenIds)
        if known or (is_ids(value) and min(value) >= 0 and max(value) <= LONGEST):
            return {"prompt": value}
        if is_sharegpt(value):
            try:
                value = sharegpt_prompt(value)
            except ValueError as error:
                raise self.error(column, str(error), "Remove the row.") from None
        if not all(isinstance(token, dict) and isinstance(token.get("role"), str) for token in value):
            raise self.error(column, f"{shown(value)} is not a conversation", hint)
        messages = list(value)
        if columns.drop_last_assistant and messages[-1]["role"] == "assistant":
            messages.pop()
        try:
            if text_only:
                read_messages(messages, column)
        except FieldError as error:
            raise self.error(error.field, error.reason, error.hint) from None
        return {"messages": messages, **self.template()}

    def template(self) -> dict[str, object]:
        """Return a chat template's options from columns of their own."""
        columns_found: dict[str, object] = {}
        for name in TEMPLATE_COLUMNS:
            value = self.values.get(name)
            if isinstance(value, str) and value:
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError):
                    hint = "Write it as JSON, or rename the column."
                    raise self.error(name, f"{shown(value)} is not JSON", hint) from None
            if value not in (None, "", []):
                columns_found[name] = value
        return columns_found

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


_Rows = Iterable[tuple[str, int, Mapping[str, Any]]]
"""Rows: unit of the number, number from one, values by column."""


def _read(path: str | os.PathLike[str], columns: PromptColumns | None) -> tuple[list[str], _Rows]:
    """Return a table's column names and rows."""
    if is_prompt_table(path):
        return _read_arrow(path, columns)
    text = read_text(path)
    if text.lstrip().startswith(("{", "[")):
        array = json_array(text, path)
        lines = list(json_lines(path)) if array is None else list(enumerate(array, 1))
        names = list(dict.fromkeys(name for _, line in lines for name in line))
        if columns is not None:
            columns.check(names, path)
        unit = "line" if array is None else "row"
        return names, [(unit, number, line) for number, line in lines]
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
    if columns is None:
        return _arrow_columns(files[0]), ()
    columns_of = {file: _arrow_columns(file) for file in files}
    wanted = {}
    for file, names in columns_of.items():
        columns.check(names, file)
        # Other columns are never read: they may hold images.
        columns_read = {*columns.names(), columns.cap(names), *TEMPLATE_COLUMNS}
        wanted[file] = [name for name in names if name in columns_read]
    rows = (row for file in files for row in _arrow_rows(file, wanted[file]))
    return names, (("row", number, without_nulls(row)) for number, row in enumerate(rows, 1))


def _arrow_columns(file: Path) -> list[str]:
    require_arrow()
    import pyarrow as pa
    from pyarrow import ipc, parquet

    with reading_arrow(file):
        if file.suffix != ".arrow":
            return list(parquet.read_schema(local_file(file)).names)
        with pa.memory_map(os.fspath(file)) as source:
            return list(ipc.open_stream(source).schema.names)


def _arrow_rows(file: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file or of ``datasets``' Arrow file, read in batches."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    with reading_arrow(file):
        if file.suffix != ".arrow":
            with parquet.ParquetFile(local_file(file), pre_buffer=False) as table:
                for batch in table.iter_batches(_ARROW_ROWS, columns=columns):
                    yield from _batch_rows(batch)
            return
        with pa.memory_map(os.fspath(file)) as source:
            for batch in ipc.open_stream(source):
                yield from _batch_rows(batch.select(columns))


def _batch_rows(batch: RecordBatch) -> Iterator[dict[str, Any]]:
    columns = [_column_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _column_values(column: Array) -> Iterable[Any]:
    """Return a column's values; token ids one list at a time, and faster than pyarrow makes them."""
    from pyarrow import types

    is_list = types.is_list(column.type) or types.is_large_list(column.type)
    if is_list and types.is_integer(column.type.value_type) and not column.null_count:
        integers = column.flatten()
        if not integers.null_count:
            ends = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
            numbers = integers.to_numpy()
            kind = TokenIds if not len(numbers) or 0 <= numbers.min() <= numbers.max() <= LONGEST else list
            return (kind(numbers[begin:end].tolist()) for begin, end in pairwise(ends))
    values: list[Any] = column.to_pylist()
    return values


def _dataset_files(folder: Path) -> list[Path]:
    """Return a dataset's files, or the Parquet files of one split."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json_object(folder / "dataset_dict.json").get("splits")
        names = ", ".join(str(folder / str(split)) for split in splits) if isinstance(splits, list) else ""
        raise InputError("holds several splits", file=folder, hint=f"Give one: {names}.")
    state = folder / "state.json"
    if state.is_file():
        listed = read_json_object(state).get("_data_files")
        files = [entry.get("filename") for entry in listed] if isinstance(listed, list) else []
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
