"""A workload by the name of its source: a batch file, a table, a folder or a generator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from batchbound.data.files.disk import InputError
from batchbound.data.files.jsonl import file_digest
from batchbound.data.readers.openai_batch import COMPLETIONS
from batchbound.data.readers.requests import read_workload

Write = Callable[..., Path]


def chat(custom_id: object = "a", **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "body": {"messages": [{"role": "user", "content": "Hi"}], **body}}


def completion(prompt: object, **body: object) -> dict[str, object]:
    return {"custom_id": "a", "url": COMPLETIONS, "body": {"prompt": prompt, **body}}


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
    with pytest.raises(InputError, match=r"no max_tokens in 'b'\. Add --longest-completion"):
        read_workload(path, count_tokens=lambda records: [4, 4])
    job = read_workload(path, count_tokens=lambda records: [4, 4], lengths="constant:8")
    assert job.workload.output_tokens.tolist() == [5, 8]
