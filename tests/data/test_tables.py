"""Tables of lengths and published traces, and every way they can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from batchbound.data.files.disk import InputError
from batchbound.data.files.jsonl import file_digest
from batchbound.data.readers.requests import read_workload
from batchbound.data.readers.tables import read_lengths
from batchbound.data.workload import Workload

Write = Callable[..., Path]


TRACES: dict[str, tuple[str, str]] = {
    "plain": ("t.csv", "input_tokens,output_tokens,arrival\n10,3,0\n20,4,1.5\n"),
    "usage": ("t.csv", "custom_id,prompt_tokens,completion_tokens,arrival\na,10,3,0\nb,20,4,1.5\n"),
    "Azure": (
        "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,10,3\n2023-11-16 18:17:05.4799600,20,4\n",
    ),
    "Azure 2024": (
        "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00+00:00,10,3\n2024-05-10 00:00:01.500000+00:00,20,4\n",
    ),
    "Mooncake": (
        "t.jsonl",
        '{"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [0, 1]}\n'
        '{"timestamp": 1500, "input_length": 20, "output_length": 4, "hash_ids": []}\n',
    ),
    "Vidur": ("t.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,3\n1.5,20,4\n"),
    "BurstGPT": (
        "t.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,10,3,13,Conversation log\n6.5,GPT-4,20,4,24,Conversation log\n",
    ),
    "LLMServingSim": (
        "t.jsonl",
        '{"input_toks": 10, "output_toks": 3, "arrival_time_ns": 0}\n'
        '{"input_toks": 20, "output_toks": 4, "arrival_time_ns": 1500000000}\n',
    ),
    "vLLM run": (
        "t.jsonl",
        '{"request_id": "x", "input_toks": 10, "output_toks": 3, "arrival_time": 1787267980.25}\n'
        '{"request_id": "y", "input_toks": 20, "output_toks": 4, "arrival_time": 1787267981.75}\n',
    ),
    "vLLM bench": (
        "t.json",
        '{"duration": 9.5, "input_lens": [10, 20], "output_lens": [3, 4], "start_times": [77.5, 79.0]}\n',
    ),
}


@pytest.mark.parametrize("layout", TRACES)
def test_a_trace_is_recognised_by_its_columns(write: Write, layout: str) -> None:
    name, text = TRACES[layout]
    path = write(text.removesuffix("\n"), name=name)
    job = read_workload(path)
    assert job.workload.input_tokens.tolist() == [10, 20]
    assert job.workload.output_tokens.tolist() == [3, 4]
    assert job.workload.arrival.tolist() == pytest.approx([0.0, 1.5])
    assert (job.lengths.kind, job.digest, job.records) == ("known", file_digest(path), ())


def test_optional_columns_are_read_and_their_gaps_filled(write: Write) -> None:
    text = "id,input_tokens,output_tokens,group,priority,deadline,note\nx,1,2,4,1,9.5,hm\ny,3,4,,,,\n"
    read = read_lengths(write(text, name="t.csv"))
    assert [(r.id, r.group, r.priority, r.deadline) for r in read] == [("x", 4, 1, 9.5), ("y", -1, 0, np.inf)]


def test_groups_may_have_names_which_are_numbered_as_they_appear(write: Write) -> None:
    path = write(
        "input_tokens,output_tokens,group", "1,2,s0_r1", "1,2,s0_r0", "1,2,", "1,2,s0_r1", name="t.csv"
    )
    assert read_lengths(path).group.tolist() == [0, 1, -1, 0]
    mixed = write("input_tokens,output_tokens,group", "1,2,7", "1,2,s0_r0", name="mixed.csv")
    with pytest.raises(InputError, match=r"mixed.csv, line 3, column 'group': 's0_r0' is not a whole number"):
        read_lengths(mixed)


def test_a_parquet_table_reads_like_its_csv(tmp_path: Path) -> None:
    table = pd.DataFrame({"id": ["x", "y"], "input_tokens": [10, 20], "output_tokens": [3, 4]})
    table.to_parquet(tmp_path / "t.data")
    table.to_csv(tmp_path / "t.csv", index=False)
    parquet, csv = (read_workload(tmp_path / name).workload for name in ("t.data", "t.csv"))
    assert list(parquet) == list(csv)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_columns_may_be_set_apart_as_spreadsheets_do(write: Write, mark: str) -> None:
    rows = ("id,input_tokens,output_tokens", "x,10,3")
    (one,) = read_workload(write(*(row.replace(",", mark) for row in rows), name="t.csv")).workload
    assert (one.id, one.input_tokens, one.output_tokens) == ("x", 10, 3)


def test_parquet_may_hold_the_kinds_that_pandas_has_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    tokens = pd.array([1, None], dtype="Int64")
    pd.DataFrame({"input_tokens": tokens, "output_tokens": [1, 2]}).to_parquet(path)
    with pytest.raises(InputError, match=r"t.parquet, row 2, column 'input_tokens': the value is missing"):
        read_workload(path)
    group = pd.Series(["a", "a"], dtype="category")
    pd.DataFrame({"group": group, "input_tokens": [1, 2], "output_tokens": [1, 2]}).to_parquet(path)
    assert read_workload(path).workload.group.tolist() == [0, 0]


def test_rows_without_an_answer_are_left_out_only_when_asked(write: Write) -> None:
    path = write("Request tokens,Response tokens", "5,0", "6,2", "7,0", "8,3", name="burst.csv")
    with pytest.raises(InputError, match=r"burst.csv, line 2, column 'Response tokens': 0 .*drop_unanswered"):
        read_workload(path)
    assert read_workload(path, drop_unanswered=True).workload.input_tokens.tolist() == [6, 8]
    with pytest.raises(InputError, match="no row has a completion"):
        read_workload(write("input_tokens,output_tokens", "5,0", name="t.csv"), drop_unanswered=True)


def test_a_row_without_a_length_is_left_out_as_one_of_no_token_is(write: Write) -> None:
    path = write("id,input_tokens,output_tokens", "a,5,3", "b,6,", "c,7,0", "d,8,4", name="t.csv")
    assert read_workload(path, drop_unanswered=True).workload.ids.tolist() == ["a", "d"]
    with pytest.raises(InputError, match=r"t.csv, line 3, column 'output_tokens': the value is missing"):
        read_workload(path)


HEAD = "id,input_tokens,output_tokens"

BAD_TABLES: dict[str, tuple[tuple[object, ...], str]] = {
    "empty": ((), r"t.x: the file is empty"),
    "header only": ((HEAD,), r"t.x: there is no row below the header"),
    "unknown columns": (
        ("prompt,length", "a,1"),
        r"not those of a table of lengths: prompt, length. For a table of prompts say",
    ),
    "negative": ((HEAD, "a,1,2", "b,-3,2"), r"line 3, column 'input_tokens': -3 must be at least one token"),
    "zero input": ((HEAD, "a,0,2"), r"line 2, column 'input_tokens': 0 must be at least one token"),
    "after a blank line": (
        (HEAD, "a,1,2", "", "b,1,x"),
        r"line 4, column 'output_tokens': 'x' is not a whole",
    ),
    "after a quoted line break": (
        (HEAD, '"a\nb",1,2', "c,1,x"),
        r"row 2, column 'output_tokens': 'x' is not",
    ),
    "fraction": ((HEAD, "a,1,2.5"), r"line 2, column 'output_tokens': '2.5' is not a whole number"),
    "missing": ((HEAD, "a,,2"), r"line 2, column 'input_tokens': the value is missing"),
    "short row": ((HEAD, "a,1"), r"line 2, column 'output_tokens': the value is missing"),
    "long row": (
        (HEAD, "a,1,2", "b,1,2,3"),
        r"not a readable CSV table \(Expected 3 fields in line 3, saw 4",
    ),
    "infinite": ((HEAD, "a,1,inf"), r"line 2, column 'output_tokens': 'inf' is not a whole number"),
    "absurd": ((HEAD, "a,1,9000000000"), r"line 2, column 'output_tokens': 9000000000 is beyond any model"),
    "very absurd": (
        (HEAD, f"a,1,1{'0' * 30}"),
        r"line 2, column 'output_tokens': '10+' is not a whole number",
    ),
    "repeated id": ((HEAD, "a,1,2", "b,1,2", "a,1,2"), r"line 4, column 'id': 'a' also names line 2"),
    "empty id": ((HEAD, "a,1,2", ",1,2"), r"line 3, column 'id': the value is missing"),
    "negative arrival": (
        ("input_tokens,output_tokens,arrival", "1,2,-1"),
        r"line 2, column 'arrival': -1.0 must",
    ),
    "no date": (
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,1,2", "soon,1,2"),
        r"line 3, column 'TIMESTAMP': 'soon' is not a date",
    ),
    "JSON of text": (
        ({"input_length": "many", "output_length": 2},),
        r"line 1, column 'input_length': 'many' is",
    ),
    "JSON of truth": (
        ({"input_length": True, "output_length": 2},),
        r"column 'input_length': True is not a whole",
    ),
    "JSON without": (
        ({"input_length": 1, "output_length": 2}, {"input_length": 1}),
        r"line 2, column 'output_length': the value is missing",
    ),
    "JSON absurd": (({"input_length": 10**400, "output_length": 2},), r"line 1, column 'input_length': 10+"),
    "JSON of a list": (
        ({"input_length": [1], "output_length": 2},),
        r"line 1, column 'input_length': \[1\] is",
    ),
    "JSON cut off": (
        ({"input_length": 1, "output_length": 2}, '{"input'),
        r"line 2, column \d+: not valid JSON",
    ),
    "uneven bench": (
        ({"input_lens": [1, 2], "output_lens": [1]},),
        r"field 'output_lens': has not one value",
    ),
    "bench zero": (
        ({"input_lens": [1, 2], "output_lens": [1, 0]},),
        r"request 2, column 'output_lens': 0 must",
    ),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_bad_table_is_named_with_its_line_column_value_and_mend(write: Write, kind: str) -> None:
    lines, said = BAD_TABLES[kind]
    with pytest.raises(InputError, match=said) as bad:
        read_workload(write(*lines, name="t.x"))
    assert "t.x" in str(bad.value)
    assert bad.value.hint


def test_a_text_named_as_json_lines_is_told_from_a_table_without_rows(write: Write) -> None:
    for lines in (["hello world"], ["hello", "you"]):
        with pytest.raises(InputError, match=r"t.jsonl, line 1: neither JSON, as its name says, nor a table"):
            read_workload(write(*lines, name="t.jsonl"))
    # Some tools call any table so.
    assert read_workload(write("input_tokens,output_tokens", "1,2", name="t.jsonl")).workload.ids.size == 1


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"t.parquet: not a readable Parquet file"):
        read_workload(path)


def test_a_bad_parquet_value_is_named_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"input_tokens": [1, 1], "output_tokens": [2, 0]}).to_parquet(path)
    with pytest.raises(InputError, match=r"t.parquet, row 2, column 'output_tokens': 0 must be at least"):
        read_workload(path)


@pytest.mark.parametrize(
    ("name", "rows", "mean_output"),
    [
        ("azure2023/AzureLLMInferenceTrace_code.csv", 8819, 27.88),
        ("azure2023/AzureLLMInferenceTrace_conv.csv", 19366, 211.13),
        ("mooncake/conversation_trace.jsonl", 12031, 342.62),
        ("vllm_runs/RTX4090-Llama-3.1-8B/requests.jsonl", 300, 652.51),
    ],
)
def test_a_published_trace_is_read(name: str, rows: int, mean_output: float, public_data: Path) -> None:
    workload: Workload = read_workload(public_data / name).workload
    assert len(workload) == rows
    assert workload.output_tokens.mean() == pytest.approx(mean_output, abs=0.01)
    assert workload.arrival[0] == 0
