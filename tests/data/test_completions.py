"""Completions written and read back, and every way their file can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batchbound.data.files.disk import InputError
from batchbound.data.readers.completions import (
    BatchCompletion,
    answer_line,
    dump_line,
    error_line,
    lengths_by_name,
    read_answer_lengths,
    read_completions,
    write_completions,
)
from batchbound.data.readers.openai_batch import CHAT, COMPLETIONS, PromptRecord

Write = Callable[..., Path]


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
    "a request": (
        (answered(A), {"custom_id": "b", "body": {"messages": [{"role": "user", "content": "Hi"}]}}),
        r"line 2, field 'response': is not a completion",
    ),
    "no name": (({"response": {}},), r"line 1, field 'custom_id': is not a completion"),
    "twice": ((answered(A), answered(A)), r"line 2, field 'custom_id': 'a' is completed a second time"),
    "errors only": ((error_line(A, "x", "y"),), r"holds no completion"),
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
    assert [replace(row, line_id=None) for row in others] == [
        BatchCompletion("b", 1, "two", "stop", 3, 9, "m", 12),
        BatchCompletion("b", 0, None, None, 3, 9, "m", 12, details='{"tool_calls": [7]}'),
        BatchCompletion("c", error="Not finite."),
        BatchCompletion("d", error="Too long."),
    ]
    assert read_answer_lengths(path) == {"a": 2, "b": 5}, "the mean of those of one request"
    assert lengths_by_name(path) == {"a": 2, "b": 5}
    with pytest.raises(InputError, match="the 2 completions of 'b' together"):
        lengths_by_name(path, apart=True)


def test_a_table_of_something_else_is_no_output_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("PAR1")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_completions(tmp_path / "a.parquet")


@pytest.mark.parametrize("body", ["Bad gateway", ["a", "b"]])
def test_a_body_that_is_no_object_is_refused_by_its_line(tmp_path: Path, body: object) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "response": {"status_code": 200, "body": body}}) + "\n")
    with pytest.raises(InputError, match=r"line 1, field 'response.body': .* is not a completion, though"):
        read_answer_lengths(path)
