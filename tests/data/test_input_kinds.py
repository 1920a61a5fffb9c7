"""Files that people have: each kind gets what it states, whatever its format."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from batchbound.data.files.disk import InputError
from batchbound.data.plan import PromptSource
from batchbound.data.prompts.columns import PromptColumns
from batchbound.data.readers.completions import lengths_by_name
from batchbound.data.readers.openai_batch import (
    PromptRecord,
    each_sample,
    model_names,
    read_batch,
    refuse_other_models,
)
from batchbound.data.readers.requests import read_workload
from batchbound.data.readers.server_batch import completion_ids, read_server_batch
from batchbound.data.readers.tables import LengthColumns, read_lengths, read_steps

Write = Callable[..., Path]

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "name": "bob", "content": "2+2?"},
    {"role": "assistant", "content": None, "reasoning_content": "Easy.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}


def chat(**body: Any) -> dict[str, Any]:
    return {"custom_id": "r0", "body": {"messages": [{"role": "user", "content": "Hi"}], **body}}


@pytest.fixture
def inputs(public_data: Path) -> Path:
    folder = public_data / "inputs"
    assert folder.is_dir(), "the public data is here without its folder of inputs"
    return folder


def test_a_message_keeps_every_field(write: Write) -> None:
    path = write(chat(messages=TURNS, tools=[TOOL], tool_choice="auto"))
    (record,) = read_batch(path)
    assert record.chat_messages == TURNS
    assert record.template == {"tools": [TOOL]}
    assert read_server_batch(path)[0].body["messages"] == TURNS


def test_a_null_field_of_a_message_states_nothing(write: Write) -> None:
    turn = {"role": "user", "content": "Hi"}
    (record,) = read_batch(write(chat(messages=[{**turn, "tool_calls": None, "name": None}])))
    assert record.chat_messages == [turn]


def test_a_table_of_tool_calls_reads_as_json_lines_do(tmp_path: Path) -> None:
    rows = [{"messages": TURNS, "tools": json.dumps([TOOL])}, {"messages": TURNS[:1], "tools": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.json").write_text(json.dumps(rows))
    for name in ("t.parquet", "t.jsonl", "t.json"):
        first, second = read_batch(tmp_path / name, PromptColumns("messages"))
        assert first.chat_messages == TURNS
        assert first.template == {"tools": [TOOL]}
        assert (second.chat_messages, second.template) == (TURNS[:1], {})
    sent = read_server_batch(tmp_path / "t.parquet", PromptColumns("messages"))
    assert [one.body["messages"] for one in sent] == [TURNS, TURNS[:1]]


def test_tool_calls_written_as_json_are_parsed(write: Write) -> None:
    turns = [{**TURNS[1], "tool_calls": json.dumps([CALL])}, TURNS[2]]
    (record,) = read_batch(write({"messages": turns}), PromptColumns("messages"))
    assert record.chat_messages[0]["tool_calls"] == [CALL]


def test_options_of_the_template_are_read(write: Write) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure,"}]
    documents = [{"title": "a", "text": "b"}]
    (record,) = read_batch(
        write(
            chat(
                messages=said,
                documents=documents,
                continue_final_message=True,
                chat_template_kwargs={"enable_thinking": False},
            )
        )
    )
    assert record.template == {
        "enable_thinking": False,
        "documents": documents,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert read_batch(write(chat(add_generation_prompt=False)))[0].template == {
        "add_generation_prompt": False
    }
    defaults = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": [],
        "documents": None,
    }
    assert read_batch(write(chat(**defaults)))[0].template == {}


def test_a_conversation_that_ends_with_a_completion_may_drop_it(write: Write) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.", "toxic": False}]
    path = write({"conversation": talk})
    with pytest.raises(InputError, match=r"the last message is the assistant's.*--drop-last-assistant"):
        read_batch(path, PromptColumns("conversation"))
    columns = PromptColumns("conversation", drop_last_assistant=True)
    assert read_batch(path, columns)[0].chat_messages == talk[:1]
    assert read_server_batch(path, PromptColumns("conversation"))[0].body["messages"] == talk


def test_several_prompts_are_completed_in_order(write: Write) -> None:
    path = write({"custom_id": "c", "body": {"prompt": ["a", "b"], "n": 2, "max_tokens": 4}})
    records = each_sample(read_batch(path))
    assert [(one.name, one.prompt, one.sample) for one in records] == [
        ("c#0", "a", 0), ("c#1", "a", 1), ("c#2", "b", 2), ("c#3", "b", 3),
    ]  # fmt: skip
    (sent,) = read_server_batch(path)
    assert sent.body["prompt"] == ["a", "b"]
    assert completion_ids([sent]) == [one.name for one in records]
    (ids,) = read_batch(write({"custom_id": "c", "body": {"prompt": [[1, 2], [3]]}}))
    assert [one.prompt for one in each_sample([ids])] == [(1, 2), (3,)]
    (alone,) = each_sample(read_batch(write({"custom_id": "c", "body": {"prompt": ["a"]}})))
    assert (alone.name, alone.prompt) == ("c", "a")


def test_a_model_that_is_not_loaded_is_refused() -> None:
    records = [PromptRecord("a", "", 1), PromptRecord("b", "", 2, model="Qwen3-8B")]
    refuse_other_models(records, model_names("Qwen/Qwen3-8B"))
    refuse_other_models(records, model_names("./models/Qwen3-8B/"))
    with pytest.raises(
        InputError, match=r"line 2, .*'Qwen3-8B' is not loaded; served: 'tiny:llama', 'llama'"
    ):
        refuse_other_models(records, model_names("tiny:llama"))


def test_requests_without_a_cap_ask_once_for_one(write: Write) -> None:
    path = write(*({**chat(max_tokens=None), "custom_id": name} for name in "abc"))
    with pytest.raises(InputError, match=r"no max_tokens in 'a' and 2 others. Add --longest-completion"):
        read_workload(path, count_tokens=lambda records: [1] * len(records))
    job = read_workload(path, longest=8, count_tokens=lambda records: [1] * len(records))
    assert job.workload.output_tokens.tolist() == [8, 8, 8]


def test_sharegpt_is_refused_by_name_and_read_by_its_column(tmp_path: Path) -> None:
    turns = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi"}]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"id": "x", "conversations": [*turns, {"from": "gpt", "value": "Hello."}]}]))
    with pytest.raises(InputError, match=r"holds ShareGPT conversations.*--prompt-column conversations"):
        read_batch(path)
    (record,) = read_batch(path, PromptColumns("conversations", "id"))
    assert [(one.role, one.content) for one in record.messages] == [("system", "Be kind."), ("user", "Hi")]
    path.write_text(json.dumps([{"conversations": [{"from": "gpt", "value": "Hello."}]}]))
    with pytest.raises(InputError, match=r"row 1, .*has no human turn before its first reply"):
        read_batch(path, PromptColumns("conversations"))


def test_samples_of_lm_eval_are_refused_by_name(write: Write) -> None:
    sample = {"doc_id": 0, "target": "4", "arguments": {"gen_args_0": {"arg_0": "Q"}}, "resps": [["4"]]}
    with pytest.raises(InputError, match=r"line 1: holds samples of lm-eval-harness") as bad:
        read_batch(write(sample))
    assert "--prompt-column target" not in str(bad.value)


@pytest.mark.parametrize("gold", ["target", "answer", "completion", "solution"])
def test_a_column_of_completions_is_never_proposed(write: Write, gold: str) -> None:
    with pytest.raises(InputError, match="say --prompt-column NAME"):
        read_batch(write({"idx": 1, gold: "4"}))


def test_other_columns_of_a_table_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "images": [{"bytes": b"x" * 99, "path": None}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    asked: list[list[str]] = []
    batches = parquet.ParquetFile.iter_batches

    def read(file: parquet.ParquetFile, rows: int, columns: list[str]) -> Any:
        asked.append(columns)
        return batches(file, rows, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", read)
    assert read_batch(tmp_path / "t.parquet", PromptColumns("prompt"))[0].messages[0].content == "Hi"
    assert asked == [["prompt"]]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_column_of_caps_is_read_by_its_name(tmp_path: Path, kind: str, name: str) -> None:
    rows, file = [{"prompt": "Hi", name: 4}, {"prompt": "Ho", name: 40}], tmp_path / f"t.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    elif kind == "csv":
        file.write_text(f"prompt,{name}\nHi,4\nHo,40\n")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert [record.max_tokens for record in read_batch(file, PromptColumns("prompt"))] == [4, 40]


def test_a_table_of_prompts_with_lengths_says_which_column_the_prompts_are_in(write: Write) -> None:
    with pytest.raises(InputError, match="For a table of prompts say --prompt-column prompt"):
        read_workload(write({"prompt": "Hi", "output_tokens": 7}), columns=None)


def test_half_a_prompt_of_alpaca_is_never_proposed(write: Write) -> None:
    with pytest.raises(InputError, match="Join instruction and input into one column"):
        read_batch(write({"instruction": "Translate", "input": "Hallo", "output": "Hello"}))


TRACE = {"input_length": 5, "output_length": 3}


def test_the_unit_of_a_timestamp_follows_from_the_trace(write: Write) -> None:
    def arrivals(mark: Mapping[str, object]) -> list[float]:
        path = write(*({**TRACE, **mark, "timestamp": seconds} for seconds in (61.25, 121.25)))
        return [float(each) for each in read_lengths(path).arrival]

    assert arrivals({"chat_id": 7, "parent_chat_id": -1, "hash_ids": [1]}) == [61.25, 121.25]
    assert arrivals({"hash_ids": [1]}) == [0.06125, 0.12125]


def test_sampled_lengths_are_a_group(write: Write) -> None:
    row = {"step": 0, "rank": 0, "input": 9, "output": [4, 2], "n_sampling": 2}
    path = write(row, {**row, "step": 1, "output": [7, 7]})
    work = read_lengths(path)
    assert work.output_tokens.tolist() == [4, 2, 7, 7]
    assert work.input_tokens.tolist() == [9, 9, 9, 9]
    assert work.group.tolist() == [0, 0, 1, 1]
    assert read_steps(path, "step").tolist() == [0, 0, 1, 1]
    with pytest.raises(InputError, match=r"line 1, column 'output': \[4, 2\] is not a list of 3 lengths"):
        read_lengths(write({**row, "n_sampling": 3}))


def test_one_of_several_benchmark_runs_is_chosen(write: Write) -> None:
    runs = [{"backend": "sglang", "input_lens": [10, 20], "output_lens": [5, k]} for k in (6, 7)]
    assert read_lengths(write(runs[0])).output_tokens.tolist() == [5, 6]
    with pytest.raises(InputError, match=r"holds 2 runs of a serving benchmark.*--benchmark-run 1 to 2"):
        read_lengths(write(*runs))
    chosen = read_lengths(write(*runs), named=LengthColumns(run=2))
    assert chosen.output_tokens.tolist() == [5, 7]
    with pytest.raises(InputError, match="there is no run 3"):
        read_lengths(write(*runs), named=LengthColumns(run=3))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_columns_of_lengths_may_be_named(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": "a", "n_in": 4, "n_out": 6}, {"question": "b", "n_in": 5, "n_out": 7}]
    path = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        path.write_text("question,n_in,n_out\na,4,6\nb,5,7\n")
    elif suffix == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(json.dumps(rows) if suffix == "json" else lines)
    work = read_workload(path, length_columns=LengthColumns("n_in", "n_out")).workload
    assert (work.input_tokens.tolist(), work.output_tokens.tolist()) == ([4, 5], [6, 7])
    with pytest.raises(InputError, match="has no column 'out'"):
        read_lengths(path, named=LengthColumns("n_in", "out"))


OUTPUTS: Mapping[str, dict[str, Any]] = {
    "responses": {
        "custom_id": "r0",
        "response": {"status_code": 200, "body": {"usage": {"input_tokens": 5, "output_tokens": 9}}},
        "error": None,
    },
    "anthropic": {
        "custom_id": "r0",
        "result": {"type": "succeeded", "message": {"usage": {"input_tokens": 5, "output_tokens": 9}}},
    },
    "gemini": {
        "key": "r0",
        "response": {"usageMetadata": {"candidatesTokenCount": 7, "thoughtsTokenCount": 2}},
    },
}


@pytest.mark.parametrize("api", OUTPUTS)
def test_outputs_of_other_apis_are_a_history_of_lengths(write: Write, api: str) -> None:
    failed = {"custom_id": "r1", "result": {"type": "errored", "error": {}}}
    path = write(OUTPUTS[api], *([failed] if api == "anthropic" else []))
    assert lengths_by_name(path) == {"r0": 9}


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/responses", "/v1/rerank"])
def test_other_endpoints_are_refused_with_those_that_are_served(write: Write, url: str) -> None:
    line = {"custom_id": "a", "url": url, "body": {"input": "a text"}}
    with pytest.raises(InputError, match=rf"'{url}' is not an endpoint .*Use /v1/chat/completions or"):
        read_batch(write(line))


def _zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, _zstd])
def test_compressed_files_are_read(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    prompts, lengths = tmp_path / "p.jsonl.x", tmp_path / "l.csv.x"
    prompts.write_bytes(pack(json.dumps(chat()).encode()))
    lengths.write_bytes(pack(b"input_tokens,output_tokens\n3,4\n"))
    assert read_batch(prompts)[0].custom_id == "r0"
    assert read_workload(lengths).workload.output_tokens.tolist() == [4]
    damaged = tmp_path / "d.jsonl.x"
    damaged.write_bytes(prompts.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"d\.jsonl\.x"):
        read_batch(damaged)


def test_urls_are_read_and_stay_as_they_are_in_plans(tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/kinds/p.jsonl", json.dumps(chat()).encode())
    files.pipe("/kinds/l.csv", b"input_tokens,output_tokens\n3,4\n")
    assert read_batch("memory://kinds/p.jsonl")[0].custom_id == "r0"
    assert read_workload("memory://kinds/l.csv").workload.output_tokens.tolist() == [4]
    with pytest.raises(InputError, match=r"memory://kinds/nowhere\.jsonl: no such file"):
        read_batch("memory://kinds/nowhere.jsonl")
    with pytest.raises(InputError, match="nosuch://a: "):
        read_batch("nosuch://a")
    source = PromptSource("memory://kinds/p.jsonl", "", "bytes")
    assert source.seen_from(tmp_path, "/elsewhere").file(tmp_path) == "memory://kinds/p.jsonl"


PUBLIC: Mapping[str, tuple[PromptColumns | None, str]] = {
    "06_embeddings.jsonl": (None, "'/v1/embeddings' is not an endpoint"),
    "08_responses.jsonl": (None, "'/v1/responses' is not an endpoint"),
    "15_tools.jsonl": (None, ""),
    "16_tool_history_only.jsonl": (None, ""),
    "22_response_format.jsonl": (None, ""),
    "26_prompt_list.jsonl": (None, ""),
    "29a_max_tokens.jsonl": (None, ""),
    "31_mixed_models.jsonl": (None, ""),
    "40_prompts.jsonl.gz": (None, ""),
    "44_lora_model.jsonl": (None, ""),
    "46_prefill_assistant.jsonl": (None, ""),
    "48_name_field.jsonl": (None, ""),
    "70_verl.parquet": (PromptColumns("prompt"), ""),
    "73_trl_parts.parquet": (PromptColumns("prompt"), ""),
    "74_images_column.parquet": (PromptColumns("prompt"), ""),
    "78_sharegpt.json": (PromptColumns("conversations", "id"), ""),
    "80_wildchat.parquet": (PromptColumns("conversation", drop_last_assistant=True), ""),
    "81_lm_eval_samples.jsonl": (None, "samples of lm-eval-harness"),
    "B0_tool_history_empty.jsonl": (None, ""),
    "B1_tool_table.parquet": (PromptColumns("messages"), ""),
}
"""Public inputs: the columns of a table, and what a refusal says."""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_prompts_are_read_or_refused_by_name(inputs: Path, name: str) -> None:
    columns, refusal = PUBLIC[name]
    if refusal:
        with pytest.raises(InputError, match=refusal):
            read_batch(inputs / name, columns)
        return
    records = each_sample(read_batch(inputs / name, columns))
    assert records
    if name == "B1_tool_table.parquet":
        assert records[0].chat_messages[2] == {"role": "tool", "content": "4", "tool_call_id": "c1"}


def test_public_bodies_go_to_servers_untouched(inputs: Path) -> None:
    seen = 0
    for path in inputs.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if "body" in rows[0]:
            batch = read_server_batch(path)
            assert [json.loads(batch.sent(k).body) for k in range(len(batch))] == [
                row["body"] for row in rows
            ]
            seen += 1
    assert seen >= 11


def test_public_lengths_are_read(inputs: Path) -> None:
    assert read_lengths(inputs / "95_bailian.jsonl").arrival.tolist() == [61.25, 121.25]
    assert len(read_lengths(inputs / "97_vllm_bench.json", drop_unanswered=True)) == 2
    with pytest.raises(InputError, match="holds 2 runs of a serving benchmark"):
        read_lengths(inputs / "99_sglang_bench_two.jsonl")
    assert read_lengths(inputs / "A1_polytrace.jsonl").group.tolist() == [0] * 8
    assert lengths_by_name(inputs / "62_output_responses.jsonl") == {"r0": 9}
