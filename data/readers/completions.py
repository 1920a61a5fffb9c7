"""The OpenAI batch output format: a line per answer, written, and read back for its lengths."""

from __future__ import annotations

import hashlib
import json
import os

from ..files.disk import InputError
from ..files.jsonl import json_lines
from ..workload import LONGEST
from .openai_batch import CHAT, PromptRecord


def answer_line(
    record: PromptRecord,
    text: str,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    finish_reason: str,
    model: str,
    created: int = 0,
    logprobs: dict[str, object] | None = None,
) -> dict[str, object]:
    """
    Return the output line of a finished request; the same answer always gives the same line.

    Parameters
    ----------
    record
        The request answered.
    text
        The answer.
    prompt_tokens, completion_tokens
        Tokens read and written.
    finish_reason
        ``stop`` or ``length``.
    model
        The model's name.
    created
        Seconds since 1970; zero, not the present, by default, so that a resumed run repeats its lines.
    logprobs
        Log-probabilities of its tokens, as the endpoint gives them.
    """
    name = _name(record.custom_id)
    chat = record.url == CHAT
    said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, **said, "logprobs": logprobs, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": record.custom_id, "response": response, "error": None}


def error_line(record: PromptRecord, code: str, message: str) -> dict[str, object]:
    """Return the output line of a request that could not be answered, with a code and a sentence on why."""
    name = _name(record.custom_id)
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{name}", "custom_id": record.custom_id, "response": None, "error": error}


def dump_line(line: dict[str, object]) -> str:
    """
    Return an output line as the text that is written, with its line break.

    Unicode's own line breaks are escaped: many a reader would end the line there.
    """
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    for separator in ("\x85", "\u2028", "\u2029"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text + "\n"


def read_answer_lengths(path: str | os.PathLike[str]) -> dict[str, int]:
    """
    Return the answers' lengths in an earlier output file, tokens by ``custom_id``.

    Lines that report an error are passed over; an empty answer counts as the one token that ends it.

    Raises
    ------
    InputError
        If the file is not one of answers, an answer does not state its ``usage``, or none does.
    """
    lengths: dict[str, int] = {}
    for number, line in json_lines(path):
        name, response = line.get("custom_id"), line.get("response")
        if not isinstance(name, str) or ("response" not in line and "error" not in line):
            raise InputError(
                "is not an answer in the OpenAI batch output format",
                file=path,
                where=f"line {number}, field '{'response' if isinstance(name, str) else 'custom_id'}'",
                hint="Give the output file of an earlier run.",
            )
        if name in lengths:
            where = f"line {number}, field 'custom_id'"
            hint = "Remove one of the two lines."
            raise InputError(f"{name!r} is answered a second time", file=path, where=where, hint=hint)
        if line.get("error") is not None or not isinstance(response, dict):
            continue
        if response.get("status_code", 200) != 200:
            continue
        tokens = _at(response, "body", "usage", "completion_tokens")
        if type(tokens) is not int or not 0 <= tokens <= LONGEST:
            raise InputError(
                f"{tokens!r} is not a number of tokens an answer can have",
                file=path,
                where=f"line {number}, field 'response.body.usage.completion_tokens'",
                hint="Each answer must state its usage.",
            )
        lengths[name] = max(1, tokens)
    if not lengths:
        raise InputError("no line holds an answer", file=path, hint="Give the output file of an earlier run.")
    return lengths


def _at(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _name(custom_id: str) -> str:
    return hashlib.sha256(custom_id.encode("utf-8")).hexdigest()[:24]
