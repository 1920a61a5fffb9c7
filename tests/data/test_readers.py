"""What is read: batch files, tables and traces; what is written: answers. And every way they can be wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from batchbound.data.files.disk import InputError
from batchbound.data.files.jsonl import file_digest
from batchbound.data.readers.completions import (
    BatchCompletion,
    answer_line,
    dump_line,
    error_line,
    read_answer_lengths,
    read_completions,
    write_completions,
)
from batchbound.data.readers.openai_batch import CHAT, COMPLETIONS, Message, PromptRecord, read_batch
from batchbound.data.readers.requests import bundled_prompts_path, read_workload
from batchbound.data.readers.tables import read_lengths
from batchbound.data.workload import Workload

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of the given lines (objects become JSON) and give its path."""

    def write_lines(*lines: object, name: str = "batch.jsonl") -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return path

    return write_lines


def chat(custom_id: object = "a", **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "body": {"messages": [{"role": "user", "content": "Hi"}], **body}}


def completion(prompt: object, **body: object) -> dict[str, object]:
    return {"custom_id": "a", "url": COMPLETIONS, "body": {"prompt": prompt, **body}}


# Batch files.


def test_a_full_chat_line_is_read_field_by_field(write: Write) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 12,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "stop": "END",
        "n": 1,
        "stream": False,
    }
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    assert read_batch(write(line)) == (
        PromptRecord(
            custom_id="a",
            url=CHAT,
            line=1,
            messages=(Message("system", "Be brief."), Message("user", "Hi")),
            max_tokens=12,
            max_tokens_field="max_completion_tokens",
            model="m",
            asked={"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 7, "stop": ("END",), "n": 1},
        ),
    )


def test_method_and_url_may_be_left_out(write: Write) -> None:
    lines = chat("a"), {"custom_id": "b", "body": {"prompt": "Once"}}
    assert [record.url for record in read_batch(write(*lines))] == [CHAT, COMPLETIONS]


def test_a_prompt_is_a_text_or_a_list_of_token_ids(write: Write) -> None:
    assert read_batch(write(completion("Once upon")))[0].prompt == "Once upon"
    assert read_batch(write(completion([5, 0, 7])))[0].prompt == (5, 0, 7)


def test_text_parts_are_joined(write: Write) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    (record,) = read_batch(write(chat(messages=[{"role": "user", "content": parts}])))
    assert record.chat_messages == [{"role": "user", "content": "One.\nTwo."}]


def test_both_names_of_the_cap_are_read(write: Write) -> None:
    lines = chat("a", max_tokens=5), chat("b", max_completion_tokens=6), chat("c"), chat("d", max_tokens=None)
    same = chat("e", max_tokens=3, max_completion_tokens=3)
    records = read_batch(write(*lines, same))
    assert [record.max_tokens for record in records] == [5, 6, None, None, 3]
    assert [record.max_tokens_field for record in records[:2]] == ["max_tokens", "max_completion_tokens"]


def test_a_line_can_pin_its_length(write: Write) -> None:
    assert read_batch(write({**chat(), "output_tokens": 9}))[0].output_tokens == 9


def test_blank_lines_a_byte_order_mark_and_strange_separators_are_passed_over(write: Write) -> None:
    text = json.dumps(chat("b", messages=[{"role": "user", "content": "x\u2028y"}]), ensure_ascii=False)
    records = read_batch(write("\ufeff" + json.dumps(chat("a")), "", "  ", text))
    assert [(record.custom_id, record.line) for record in records] == [("a", 1), ("b", 4)]
    assert records[1].messages[0].content == "x\u2028y"


NESTED = "[" * 100_000
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]

BAD_LINES: dict[str, tuple[object, str]] = {
    "half a line": (
        json.dumps(chat())[:-9],
        r"line 2, column \d+: not valid JSON \(.*\).*complete JSON object",
    ),
    "nonsense": ("{custom_id: a}", r"line 2, column 2: not valid JSON"),
    "too deep": (NESTED, r"line 2: not valid JSON \(it cannot be parsed\): '\[\[\[.* \.\.\. "),
    "an array": ([1], r"line 2: a JSON array, not an object"),
    "a number": (5, r"line 2: a JSON number, not an object"),
    "half a surrogate": ('{"custom_id": "\\ud800"}', r"line 2: half of a Unicode surrogate pair"),
    "no custom_id": ({"body": {"prompt": "x"}}, r"line 2, field 'custom_id': is missing"),
    "empty custom_id": (chat(""), r"line 2, field 'custom_id': '' is not a name"),
    "numeric custom_id": (chat(7), r"line 2, field 'custom_id': 7 is not a text.*in quotes"),
    "repeated custom_id": (chat("first"), r"line 2, field 'custom_id': 'first' already names .*line 1"),
    "an answer": (
        {"custom_id": "a", "response": None},
        r"line 2, field 'response': is a completion.*answers:FILE",
    ),
    "no body": ({"custom_id": "a"}, r"line 2, field 'body': is missing"),
    "body of text": ({"custom_id": "a", "body": "x"}, r"field 'body': 'x' is not an object"),
    "empty body": ({"custom_id": "a", "body": {}}, r"'body': has neither messages nor prompt"),
    "GET": ({**chat(), "method": "GET"}, r"field 'method': 'GET' is not POST"),
    "embeddings": ({**chat(), "url": "/v1/embeddings"}, r"field 'url': '/v1/embeddings' is not an endpoint"),
    "chat without messages": ({**completion("x"), "url": CHAT}, r"field 'body.messages': is missing"),
    "completion without prompt": ({**chat(), "url": COMPLETIONS}, r"field 'body.prompt': is missing"),
    "no message": (chat(messages=[]), r"field 'body.messages': \[\] is not a list of messages"),
    "a message of text": (chat(messages=["Hi"]), r"field 'body.messages\[0\]': 'Hi' is not an object"),
    "no role": (chat(messages=[{"content": "Hi"}]), r"'body.messages\[0\].role': None is not a role"),
    "no content": (chat(messages=[{"role": "user"}]), r"'body.messages\[0\].content': None is not text"),
    "an image": (chat(messages=IMAGE), r"'body.messages\[0\].content\[0\]': 'image_url' is not a text part"),
    "empty prompt": (completion(""), r"field 'body.prompt': '' is not a prompt"),
    "several prompts": (completion(["x", "y"]), r"\['x', 'y'\] is not a prompt.*need a line each"),
    "negative token id": (completion([3, -1]), r"\[3, -1\] is not a prompt"),
    "negative cap": (chat(max_tokens=-4), r"field 'body.max_tokens': -4 is less than one token.*from 1 to"),
    "zero cap": (chat(max_completion_tokens=0), r"'body.max_completion_tokens': 0 is less than one token"),
    "fractional cap": (chat(max_tokens=1.5), r"'body.max_tokens': 1.5 is not a whole number"),
    "cap of text": (chat(max_tokens="9"), r"'body.max_tokens': '9' is not a whole number"),
    "boolean cap": (chat(max_tokens=True), r"'body.max_tokens': True is not a whole number"),
    "absurd cap": (chat(max_tokens=10**30), r"'body.max_tokens': 10+ is beyond any model"),
    "two caps": (chat(max_tokens=3, max_completion_tokens=4), r"4 contradicts max_tokens 3"),
    "pinned to zero": ({**chat(), "output_tokens": 0}, r"field 'output_tokens': 0 is less than one"),
    "no answer": (chat(n=0), r"field 'body.n': 0 is not a number of completions.*Give 1 to 16,384"),
    "lengths of fewer answers": (
        {**chat(n=3), "output_tokens": [1, 2]},
        r"field 'output_tokens': 2 lengths for the 3 answers that n asks for",
    ),
    "streamed": (chat(stream=True), r"field 'body.stream': True cannot be served"),
    "tools": (chat(tools=[{"type": "function"}]), r"field 'body.tools': .* cannot be served"),
    "a JSON answer": (chat(response_format={"type": "json_object"}), r"'body.response_format': .* cannot be"),
    "negative temperature": (
        chat(temperature=-1),
        r"'body.temperature': temperature must be 0 or more and finite, got -1",
    ),
    "no temperature": (
        '{"custom_id": "a", "body": {"prompt": "x", "temperature": NaN}}',
        r"nan is not a number",
    ),
    "huge temperature": (chat(temperature=10**400), r"'body.temperature': 10+\.\.\. is not a number"),
    "zero top_p": (chat(top_p=0), r"'body.top_p': top_p must lie in .0, 1., got 0"),
    "fractional seed": (chat(seed=0.5), r"'body.seed': 0.5 is not a whole number"),
    "stop at nothing": (chat(stop=[""]), r"'body.stop': \[''\] is not text"),
    "model of a number": (chat(model=3), r"'body.model': 3 is not text"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_with_its_field_value_and_mend(write: Write, kind: str) -> None:
    line, said = BAD_LINES[kind]
    with pytest.raises(
        InputError, match=rf"batch\.jsonl, {said if said.startswith('line') else '.*' + said}"
    ) as bad:
        read_batch(write(chat("first"), line))
    assert ", line 2" in str(bad.value)
    assert bad.value.hint
    assert len(str(bad.value)) < 500


def test_an_empty_a_missing_and_a_binary_file_are_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"batch.jsonl: the file is empty"):
        read_batch(write("", " "))
    with pytest.raises(InputError, match=r"nowhere\.jsonl: no such file"):
        read_batch(tmp_path / "nowhere.jsonl")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_batch(binary)


def test_a_hundred_thousand_lines_are_read(write: Write) -> None:
    path = write(*(json.dumps(chat(f"request-{i}", max_tokens=1 + i % 100)) for i in range(100_000)))
    assert len(read_batch(path)) == 100_000


# The prompts that come with the package.


def test_the_bundled_prompts_are_a_batch_of_visibly_different_answer_lengths() -> None:
    records = read_batch(bundled_prompts_path())
    kinds = ("yes-no", "word", "sentence", "paragraph", "list", "story")
    caps: dict[str, list[int]] = {kind: [] for kind in kinds}
    for record in records:
        assert record.max_tokens is not None
        caps[record.custom_id.rsplit("-", 1)[0]].append(record.max_tokens)
    assert len(records) == 48
    assert len({record.messages[-1].content for record in records}) == 48
    ranges = [(min(tokens), max(tokens)) for tokens in caps.values()]
    assert all(shorter[1] < longer[0] for shorter, longer in itertools.pairwise(ranges))
    assert (ranges[0][0], ranges[-1][1]) == (2, 160)


# Tables of lengths.

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


def test_rows_without_an_answer_are_left_out_only_when_asked(write: Write) -> None:
    path = write("Request tokens,Response tokens", "5,0", "6,2", "7,0", "8,3", name="burst.csv")
    with pytest.raises(InputError, match=r"burst.csv, line 2, column 'Response tokens': 0 .*drop_unanswered"):
        read_workload(path)
    assert read_workload(path, drop_unanswered=True).workload.input_tokens.tolist() == [6, 8]
    with pytest.raises(InputError, match="no row has a completion"):
        read_workload(write("input_tokens,output_tokens", "5,0", name="t.csv"), drop_unanswered=True)


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


# One entry for all of them.


def test_a_generator_is_named_with_its_seed_and_count() -> None:
    job = read_workload("exegpt-S:4:25")
    assert (len(job.workload), job.source, job.digest, job.lengths.kind) == (
        25,
        "exegpt-S:4:25",
        None,
        "known",
    )
    assert len(read_workload("table3:0").workload) == 1319
    assert read_workload("table3:0:9", lengths="constant:6").workload.output_tokens.tolist() == [6] * 9


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("table9:0", "'table9' is not a generator of workloads. Did you mean table3?"),
        ("table3", "'table3' is not a generator with its seed. Give NAME:SEED"),
        ("table3:x", "'table3:x' is not a generator with its seed"),
        ("table3:1:2:3", "'table3:1:2:3' is not a generator with its seed"),
        ("table3:-1", "'table3:-1' is not a generator with its seed"),
        ("table3:0:0", "seed 0 and count 0 of 'table3'"),
        ("nowhere.csv", "nowhere.csv: no such file"),
    ],
)
def test_a_name_of_nothing_is_refused(spec: str, said: str) -> None:
    with pytest.raises(InputError) as bad:
        read_workload(spec)
    assert said in str(bad.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder without a dataset"):
        read_workload(tmp_path)


def test_prompts_are_counted_and_take_their_caps_by_default(write: Write) -> None:
    path = write(chat("a", max_tokens=5), chat("b", max_tokens=6))
    job = read_workload(path, count_tokens=lambda records: [len(record.messages) + 3 for record in records])
    assert job.workload.ids.tolist() == ["a", "b"]
    assert job.workload.input_tokens.tolist() == [4, 4]
    assert job.workload.output_tokens.tolist() == [5, 6]
    assert (job.lengths.kind, job.digest, len(job.records)) == ("cap", file_digest(path), 2)


def test_pinned_lengths_are_taken_by_default(write: Write) -> None:
    path = write({**completion([1, 2, 3], max_tokens=9), "output_tokens": 4})
    job = read_workload(path)  # token ids need no tokenizer
    assert job.workload.input_tokens.tolist() == [3]
    assert job.workload.output_tokens.tolist() == [4]
    assert job.lengths.kind == "known"


def test_text_without_a_tokenizer_is_refused(write: Write) -> None:
    with pytest.raises(InputError, match=r"batch.jsonl, line 1: the prompt is text.*its tokenizer"):
        read_workload(write(chat("a", max_tokens=5)))


def test_a_prompt_without_any_token_is_named_by_its_line(write: Write) -> None:
    path = write(chat("a", max_tokens=5), "", chat("b", max_tokens=5))
    with pytest.raises(
        InputError, match=r"batch.jsonl, line 3, field 'input_tokens': 0 must be at least one"
    ):
        read_workload(path, count_tokens=lambda records: [4, 0])


def test_requests_without_a_cap_need_another_source_of_lengths(write: Write) -> None:
    path = write(chat("a", max_tokens=5), chat("b"))
    with pytest.raises(InputError, match="1 of 2 requests have no completion length, first 'b'"):
        read_workload(path, count_tokens=lambda records: [4, 4])
    job = read_workload(path, count_tokens=lambda records: [4, 4], lengths="constant:8")
    assert job.workload.output_tokens.tolist() == [5, 8]


# Answers.


def answered(record: PromptRecord, tokens: int = 2) -> dict[str, object]:
    return answer_line(
        record, "Grüße", prompt_tokens=3, completion_tokens=tokens, finish_reason="stop", model="m"
    )


def test_a_chat_answer_has_the_batch_output_format() -> None:
    line = answered(PromptRecord("a", CHAT, 1))
    name = "ca978112ca1bbdcafac231b3"  # SHA-256 of "a"
    assert line == {
        "id": f"batch_req_{name}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{name}",
            "body": {
                "id": f"chatcmpl-{name}",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Grüße"},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }


def test_a_completion_answer_has_a_text() -> None:
    text = dump_line(answered(PromptRecord("a", COMPLETIONS, 1, prompt="x")))
    body = json.loads(text)["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "Grüße")
    assert text.endswith("}\n")
    assert text.count("\n") == 1


def test_answers_read_back_as_lengths_and_errors_are_passed_over(write: Write) -> None:
    a, b, c = (PromptRecord(name, CHAT, 1) for name in "abc")
    path = write(answered(a, 7), error_line(b, "too_long", "The prompt is too long."), answered(c, 0))
    assert read_answer_lengths(path) == {"a": 7, "c": 1}


A, B = (PromptRecord(name, CHAT, 1) for name in "ab")

BAD_ANSWERS: dict[str, tuple[tuple[object, ...], str]] = {
    "a request": ((answered(A), chat("b")), r"line 2, field 'response': is not a completion"),
    "no name": (({"response": {}},), r"line 1, field 'custom_id': is not a completion"),
    "twice": ((answered(A), answered(A)), r"line 2, field 'custom_id': 'a' is answered a second time"),
    "errors only": ((error_line(A, "x", "y"),), r"no line holds a completion"),
    "no usage": (
        ({"custom_id": "a", "response": {"body": {}}},),
        r"completion_tokens': None is not a number",
    ),
    "absurd usage": ((answered(A, 10**24),), r"completion_tokens': 10+ is not a number of tokens"),
    "half a line": ((answered(A), dump_line(answered(B))[:50]), r"line 2, column \d+: not valid JSON"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_file_of_answers_is_refused(write: Write, kind: str) -> None:
    lines, said = BAD_ANSWERS[kind]
    with pytest.raises(InputError, match=said):
        read_answer_lengths(write(*lines))


# Real traces, where they are at hand.


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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_completions_are_read_as_they_were_written(suffix: str, tmp_path: Path) -> None:
    chat = {
        "choices": [
            {"index": 1, "message": {"role": "assistant", "content": "two"}, "finish_reason": "stop"},
            {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [7]}},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 9},
        "model": "m",
        "created": 12,
    }
    lines: list[dict[str, object]] = [
        answered(PromptRecord("a", COMPLETIONS, 1, prompt="x"), 2),
        {"custom_id": "b", "response": {"status_code": 200, "body": chat}, "error": None},
        error_line(PromptRecord("c", COMPLETIONS, 3, prompt="x"), "model_failed", "Not finite."),
        {"custom_id": "d", "response": {"status_code": 400, "body": {"error": {"message": "Too long."}}}},
    ]
    path = tmp_path / f"out.{suffix}"
    write_completions(path, lines)
    first, *others = read_completions(path)
    assert (first.custom_id, first.completion_tokens, first.error) == ("a", 2, None)
    assert others == [
        BatchCompletion("b", 1, "two", "stop", 3, 9, "m", 12),
        BatchCompletion("b", 0, None, None, 3, 9, "m", 12, details='{"tool_calls": [7]}'),
        BatchCompletion("c", error="Not finite."),
        BatchCompletion("d", error="Too long."),
    ]
    assert read_answer_lengths(path) == {"a": 2, "b": 5}, "the mean of those of one request"


def test_a_table_of_something_else_is_no_output_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("PAR1")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_completions(tmp_path / "a.parquet")
