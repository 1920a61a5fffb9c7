"""Prompts in tables: whatever the kind of file, the same rows are the same requests."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from batchbound.cli import main
from batchbound.data.files.disk import InputError
from batchbound.data.plan import Plan
from batchbound.data.prompts.columns import PromptColumns
from batchbound.data.prompts.messages import Message
from batchbound.data.prompts.table import batch_entries, prompts_digest
from batchbound.data.readers.openai_batch import read_batch
from batchbound.data.readers.server_batch import read_server_batch

ROWS: list[dict[str, Any]] = [
    {"uid": "a", "question": 'Two lines,\nand "quotes".', "cap": 5},
    {"uid": "b", "question": "12", "cap": 7},
]
COLUMNS = PromptColumns("question", "uid", "cap")


def write_csv(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "t.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "t.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_dataset(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as ``datasets`` does in ``save_to_disk``: a file a shard, named in order by the state."""
    path = folder / "saved"
    path.mkdir()
    names = [f"data-{k:05d}-of-{len(rows):05d}.arrow" for k in range(len(rows))]
    for name, row in zip(names, rows, strict=True):
        table = pa.Table.from_pylist([row])
        with pa.OSFile(str(path / name), "wb") as stream, ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


def write_hub(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as the hub keeps a dataset: Parquet files of a split in the folder ``data``."""
    path = folder / "hub" / "data"
    path.mkdir(parents=True)
    for k, row in enumerate(rows):
        parquet.write_table(pa.Table.from_pylist([row]), path / f"train-{k:05d}-of-{len(rows):05d}.parquet")
    return path.parent


WRITERS = {
    "csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet,
    "saved": write_dataset, "hub": write_hub,
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
def test_the_same_rows_are_the_same_requests(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path, ROWS)
    records = read_batch(path, COLUMNS)
    assert [(one.custom_id, one.prompt, one.max_tokens) for one in records] == [
        (row["uid"], row["question"], row["cap"]) for row in ROWS
    ]
    sent = read_server_batch(path, COLUMNS)
    assert [one.body for one in sent] == [
        {"prompt": row["question"], "max_tokens": row["cap"]} for row in ROWS
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "hub"])
def test_a_column_of_conversations_is_chats(kind: str, tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a prime."}]
    path = WRITERS[kind](tmp_path, [{"messages": talk}, {"messages": talk[1:]}])
    first, second = read_batch(path, PromptColumns("messages"))
    assert first.messages == (Message("system", "Be brief."), Message("user", "Name a prime."))
    assert second.messages == first.messages[1:]
    assert [first.custom_id, second.custom_id] == ["request-0", "request-1"]
    assert first.max_tokens is None


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint64())])
def test_token_ids_of_parquet_are_those_of_the_same_lists(tmp_path: Path, kind: pa.DataType) -> None:
    prompts = [[*range(k % 7), 100_000 + k] for k in range(3000)]
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"question": pa.array(prompts, kind)}), path, row_group_size=700)
    batch = read_server_batch(path, PromptColumns("question"))
    assert [request.says for request in batch] == prompts
    assert [ids.tolist() for ids in batch.token_ids()] == prompts
    assert batch.ids.all()


@pytest.mark.parametrize("wrong", [[5, -1], [5, 2**62], [5, None], [], None])
def test_what_is_no_token_id_is_refused_in_parquet(tmp_path: Path, wrong: list[int | None] | None) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"question": pa.array([[1, 2], wrong], pa.list_(pa.int64()))}), path)
    with pytest.raises(InputError, match="row 2, column 'question'"):
        read_server_batch(path, PromptColumns("question"))


def test_token_ids_are_prompts_too(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [{"ids": [3, 1, 4]}, {"ids": [1, 5]}])
    assert [one.prompt for one in read_batch(path, PromptColumns("ids"))] == [(3, 1, 4), (1, 5)]


_FIRST = r"(row|line) 1, column 'q': "
_SECOND = r"(row|line) 2, column "

BAD: Mapping[str, tuple[list[dict[str, Any]], PromptColumns, str]] = {
    "a column that is not there": (
        ROWS, PromptColumns("qestion"), r"no column 'qestion'. Found uid, .*did you mean question\?",
    ),
    "an id that is not there": (ROWS, PromptColumns("question", "id"), r"no column 'id'. Found .*mean uid"),
    "no prompt": ([{"q": "a"}, {"q": None}], PromptColumns("q"), _SECOND + "'q': the prompt is missing"),
    "a number": ([{"q": 5}], PromptColumns("q"), _FIRST + "5 is not a prompt"),
    "a name twice": (
        [{"q": "a", "n": 7}, {"q": "b", "n": 7}],
        PromptColumns("q", "n"),
        _SECOND + r"'n': '7' already names (row|line) 1",
    ),
    "no name": ([{"q": "a", "n": " "}], PromptColumns("q", "n"), r"column 'n': ' ' is not a name"),
    "half a token": (
        [{"q": "a", "m": 1.5}], PromptColumns("q", None, "m"), r"column 'm': 1.5 is not a number of tokens",
    ),
    "no token": (
        [{"q": "a", "m": 0}], PromptColumns("q", None, "m"), r"column 'm': 0 is not a number of tokens",
    ),
    "no role": ([{"q": [{"content": "a"}]}], PromptColumns("q"), _FIRST + ".* is not a conversation"),
    "no content": (
        [{"q": [{"role": "user", "content": None}]}],
        PromptColumns("q"),
        r"1, column 'q\[0\].content': None is not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_wrong_is_named_by_row_and_column(case: str, kind: str, tmp_path: Path) -> None:
    rows, columns, said = BAD[case]
    with pytest.raises(InputError, match=said):
        read_batch(WRITERS[kind](tmp_path, rows), columns)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_spreadsheet_is_read_with_lengths_as_pandas_writes_them(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("q,m\na,12.0\nb,\n".replace(",", mark))
    records = read_batch(path, PromptColumns("q", None, "m"))
    assert [(one.prompt, one.max_tokens) for one in records] == [("a", 12), ("b", None)]


@pytest.mark.parametrize("written", [str, json.dumps])
def test_a_conversation_written_as_text_is_a_conversation(
    tmp_path: Path, written: Callable[[object], str]
) -> None:
    rows = [{"q": written([{"role": "user", "content": "It's 5\nor 6"}])}]
    (record,) = read_batch(write_csv(tmp_path, rows), PromptColumns("q"))
    assert record.messages == (Message("user", "It's 5\nor 6"),)


def test_half_a_conversation_written_as_text_is_refused(tmp_path: Path) -> None:
    rows = [{"q": "[{'role': 'user', 'content': 'Hi'} {'role'"}]
    with pytest.raises(InputError, match=r"row 1, column 'q': begins as a conversation written as text"):
        read_batch(write_csv(tmp_path, rows), PromptColumns("q"))


def test_an_empty_table_is_told_from_one_without_the_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("")
    with pytest.raises(InputError, match=r"t.csv: the file is empty"):
        read_batch(tmp_path / "t.csv", PromptColumns("q"))


def test_a_csv_row_of_another_width_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("q,n\na,1\nb,c,2\n")
    with pytest.raises(InputError, match=r"row 2: 3 values for the 2 columns"):
        read_batch(tmp_path / "t.csv", PromptColumns("q"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "hub"])
def test_a_table_without_its_column_named_says_which_it_may_be(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"columns uid, question, cap. For .* say --prompt-column question"):
        list(batch_entries(WRITERS[kind](tmp_path, ROWS), None))


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    hub = write_hub(tmp_path, ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), hub / "data" / "test-00000-of-00001.parquet")
    with pytest.raises(InputError, match=r"holds several splits: test, train. Give one file, such as"):
        read_batch(hub, COLUMNS)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"holds several splits. Give one: .*/train, .*/test"):
        read_batch(tmp_path, COLUMNS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is a folder without a dataset"):
        read_batch(tmp_path / "empty", COLUMNS)


def test_the_digest_of_a_dataset_is_of_its_files(tmp_path: Path) -> None:
    saved = write_dataset(tmp_path, ROWS)
    before = prompts_digest(saved)
    (saved / "README.md").write_text("not read")
    assert prompts_digest(saved) == before
    shard = saved / "data-00000-of-00002.arrow"
    shard.write_bytes(shard.read_bytes() + b"x")
    assert prompts_digest(saved) != before


def test_a_table_is_planned_and_its_plan_knows_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path, ROWS)
    words = ["plan", "t.csv", "--slots", "1", "--work", "5", "--tokenizer", "bytes", "--quiet"]
    columns = ["--prompt-column", "question", "--id-column", "uid", "--max-tokens-column", "cap"]
    assert main([*words, *columns]) == 0
    plan = Plan.load("plan.json")
    assert plan.workload.ids.tolist() == ["a", "b"]
    assert plan.workload.output_tokens.tolist() == [5, 7]
    assert plan.provenance.prompts is not None
    assert plan.provenance.prompts.columns == COLUMNS
    assert main([*words, "--id-column", "uid", "--overwrite"]) == 2
    assert "--id-column has no effect without --prompt-column" in capsys.readouterr().err
