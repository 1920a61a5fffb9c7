"""Batch files: every field of a line, and every way it can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from batchbound.data.files.disk import InputError
from batchbound.data.prompts.messages import Message
from batchbound.data.readers.openai_batch import CHAT, COMPLETIONS, PromptRecord, read_batch
from batchbound.data.readers.requests import bundled_prompts_path

Write = Callable[..., Path]


def chat(custom_id: object = "a", **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "body": {"messages": [{"role": "user", "content": "Hi"}], **body}}


def completion(prompt: object, **body: object) -> dict[str, object]:
    return {"custom_id": "a", "url": COMPLETIONS, "body": {"prompt": prompt, **body}}


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


def test_text_parts_stay_parts(write: Write) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    (record,) = read_batch(write(chat(messages=[{"role": "user", "content": parts}])))
    assert record.chat_messages == [{"role": "user", "content": parts}]
    assert record.messages[0].text == "One.\nTwo."


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
        r"line 2, field 'response': is a completion.*completions:FILE",
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
    "texts and token ids": (completion(["x", 3]), r"field 'body.prompt': \['x', 3\] is not a prompt"),
    "an empty one of several prompts": (
        completion(["x", ""]),
        r"field 'body.prompt\[1\]': '' is not a prompt",
    ),
    "an assistant's turn at the end": (
        chat(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        r"field 'body.messages\[1\]': the last message is the assistant's. Set continue_final_message",
    ),
    "a user's turn to continue": (
        chat(continue_final_message=True),
        r"field 'body.continue_final_message': True, but the last message is of the user",
    ),
    "two endings": (
        chat(continue_final_message=True, add_generation_prompt=True),
        r"field 'body.continue_final_message': True contradicts add_generation_prompt",
    ),
    "an old call": (
        chat(messages=[{"role": "assistant", "content": "", "function_call": {"name": "f"}}]),
        r"field 'body.messages\[0\].function_call': is a field no chat template takes. Write it as",
    ),
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
        r"field 'output_tokens': 2 lengths for the 3 completions that the line asks for",
    ),
    "streamed": (chat(stream=True), r"field 'body.stream': True cannot be served"),
    "tools": (
        chat(tools=[{"type": "function"}]),
        r"field 'body.tools\[0\]': .* is not a function with a name",
    ),
    "a tool that must be called": (chat(tool_choice="required"), r"'body.tool_choice': .* cannot be served"),
    "an XML answer": (chat(response_format={"type": "xml"}), r"'body.response_format': .* cannot be"),
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


@pytest.mark.slow
def test_a_hundred_thousand_lines_are_read(write: Write) -> None:
    path = write(*(json.dumps(chat(f"request-{i}", max_tokens=1 + i % 100)) for i in range(100_000)))
    assert len(read_batch(path)) == 100_000


def test_the_bundled_prompts_are_a_batch_of_visibly_different_answer_lengths() -> None:
    records = read_batch(bundled_prompts_path())
    caps = {record.custom_id.rsplit("-", 1)[0]: record.max_tokens for record in records}
    assert len(records) == 48
    assert len({record.messages[-1].content for record in records}) == 48
    assert sorted(cap for cap in caps.values() if cap is not None) == [2, 4, 12, 20, 52, 60, 90]
