"""Writer and reader of the OpenAI batch output format."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..files.arrow import reading_arrow, require_arrow
from ..files.disk import InputError, atomic_write, shown
from ..files.jsonl import json_lines
from ..files.kinds import is_of_kind
from ..files.sources import local_file
from ..trace import Trace
from ..workload import LONGEST
from .openai_batch import CHAT, PromptRecord
from .tables import is_table, read_table


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
    """Return the output line of a finished request."""
    name = _name(record.custom_id)
    chat = record.url == CHAT
    said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": record.sample, **said, "logprobs": logprobs, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": record.custom_id, "response": response, "error": None}


def error_line(record: PromptRecord, code: str, message: str) -> dict[str, object]:
    """Return a failed request's output line."""
    return failed_line(record.custom_id, f"batch_req_{_name(record.custom_id)}", code, message)


def failed_line(custom_id: str, line_id: str, code: str, message: str) -> dict[str, object]:
    """Return the output line of a failed request with a line id of its own."""
    error = {"code": code, "message": message}
    return {"id": line_id, "custom_id": custom_id, "response": None, "error": error}


def joined_line(lines: Sequence[dict[str, Any]], samples: int | None = None) -> dict[str, object]:
    """Join the output lines of a request's completions.

    ``samples`` consecutive completions are of one prompt (all by default), and its tokens count once. A line
    holds the completions that succeeded, and the error of the first that failed.
    """
    done = [line["response"] for line in lines if line["response"] is not None]
    failed = [(k, line["error"]) for k, line in enumerate(lines) if line["error"] is not None]
    error: dict[str, str] | None = None
    if failed:
        at, first = failed[0]
        message = f"{len(failed)} of {len(lines)} completions failed; completion {at}: {first['message']}"
        error = {"code": first["code"], "message": message}
    if not done:
        return {**lines[0], "error": error}
    body = done[0]["body"]
    tokens = sum(each["body"]["usage"]["completion_tokens"] for each in done)
    prompts = {
        k // (samples or len(lines)): line["response"]["body"]["usage"]["prompt_tokens"]
        for k, line in enumerate(lines)
        if line["response"] is not None
    }
    read = sum(prompts.values())
    usage = {
        **body["usage"],
        "prompt_tokens": read,
        "completion_tokens": tokens,
        "total_tokens": read + tokens,
    }
    choices = [choice for each in done for choice in each["body"]["choices"]]
    created = max(each["body"]["created"] for each in done)
    response = {**done[0], "body": {**body, "created": created, "choices": choices, "usage": usage}}
    return {**lines[0], "response": response, "error": error}


def dump_line(line: Mapping[str, object]) -> str:
    """Return an output line as text, with its line break.

    Unicode's own line breaks are escaped, as some readers would end the line there.
    """
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    for separator in ("\x85", "\u2028", "\u2029"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text + "\n"


EXPIRED = "batch_expired"
"""Error code of a request that a deadline ended."""

EXPIRED_MESSAGE = "This request could not be executed before the completion window expired."
"""OpenAI's message for expired requests."""

ENDINGS = ("whole", "cut", "failed", "expired")
"""Endings of a request; ``cut`` at its cap."""


def ending_of(line: Mapping[str, Any]) -> str:
    """Return how the request of an output line ended, one of :data:`ENDINGS`."""
    if _at(line, "response", "status_code") != 200:
        return "expired" if _at(line, "error", "code") == EXPIRED else "failed"
    choices = _at(line, "response", "body", "choices")
    reasons = [_at(choice, "finish_reason") for choice in choices] if isinstance(choices, list) else []
    return "cut" if "length" in reasons else "whole"


@dataclass(frozen=True, slots=True)
class BatchCompletion:
    """One completion of a batch.

    custom_id, index: Name of the request, and number of the completion, from 0.
    completion: Text; None if the request failed or its completion is not text.
    finish_reason: ``stop``, ``length``, or another value of the server.
    prompt_tokens, completion_tokens: Tokens of the prompt, and of all of the request's completions.
    created: End of the completion, in seconds since 1970.
    error: Error message of a failed request.
    details: Other fields of a choice (log-probabilities, tool calls) as JSON; None without any.
    line_id: Id of the output line, the same for the same request and body.
    """

    custom_id: str
    index: int = 0
    completion: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str | None = None
    created: int | None = None
    error: str | None = None
    details: str | None = None
    line_id: str | None = None


def batch_completions(lines: Iterable[Mapping[str, Any]]) -> Iterator[BatchCompletion]:
    """Yield the completions of output lines, with failures' errors.

    The error of a request with several completions comes after those that succeeded.
    """
    for line in lines:
        name, body = str(line["custom_id"]), _at(line, "response", "body")
        line_id = _text(line.get("id"))
        stated = _at(body, "choices")
        choices = [one for one in stated if isinstance(one, dict)] if isinstance(stated, list) else []
        if line.get("error") is not None or not choices:
            said = line.get("error") or _at(line, "response", "body", "error") or "no completion"
            text = _at(said, "message")
            why = text if isinstance(text, str) else json.dumps(said)
            failed = BatchCompletion(name, error=why, line_id=line_id)
        else:
            failed = None
        for place, choice in enumerate(choices):
            message = choice.get("message")
            rest = {key: value for key, value in choice.items() if key not in _SHOWN and value is not None}
            if isinstance(message, dict):
                rest |= {key: value for key, value in message.items() if key not in _SHOWN and value}
            index = _whole(choice.get("index"))
            yield BatchCompletion(
                name,
                place if index is None else index,
                _text(message.get("content") if isinstance(message, dict) else choice.get("text")),
                _text(choice.get("finish_reason")),
                _whole(_at(body, "usage", "prompt_tokens")),
                _whole(_at(body, "usage", "completion_tokens")),
                _text(_at(body, "model")),
                _whole(_at(body, "created")),
                details=json.dumps(rest) if rest else None,
                line_id=line_id,
            )
        if failed is not None:
            yield failed


def cut_tokens(line: Mapping[str, Any], cap: int) -> int:
    """Return the most tokens that a cut completion of an output line has.

    cap: Largest cap that may have cut it; 0 if unknown. A line tells the tokens of its completions together.
    """
    rows = [row for row in batch_completions([line]) if row.error is None]
    tokens = (rows[0].completion_tokens or 0) if rows else 0
    cut = sum(row.finish_reason == "length" for row in rows)
    if len(rows) < 2 or not cut or not tokens:
        return tokens or cap
    most = (tokens - len(rows) + cut) // cut
    return min(most, cap) if cap else most


def output_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of an output file; those of a table hold what it keeps of them."""
    if is_parquet_name(path):
        rows = read_completions(path)
        yield from (_line_of(name, list(group)) for name, group in groupby(rows, lambda row: row.custom_id))
        return
    for number, line in json_lines(path):
        if not isinstance(line.get("custom_id"), str):
            where = f"line {number}, field 'custom_id'"
            raise InputError("is missing", file=path, where=where, hint="Give the output of a run.")
        yield line


def _line_of(name: str, rows: Sequence[BatchCompletion]) -> dict[str, Any]:
    """Return the output line of a request's rows in a table."""
    line: dict[str, Any] = {"id": rows[0].line_id, "custom_id": name, "response": None, "error": None}
    if rows[-1].error is not None:
        code = EXPIRED if rows[-1].error == EXPIRED_MESSAGE else "failed"
        line["error"] = {"code": code, "message": rows[-1].error}
    done = [row for row in rows if row.error is None]
    if done:
        choices = [
            {"index": row.index, "text": row.completion, "finish_reason": row.finish_reason}
            | json.loads(row.details or "{}")
            for row in done
        ]
        usage = {"prompt_tokens": done[0].prompt_tokens, "completion_tokens": done[0].completion_tokens}
        body = {"model": done[0].model, "created": done[0].created, "choices": choices, "usage": usage}
        line["response"] = {"status_code": 200, "request_id": "", "body": body}
    return line


@dataclass(slots=True)
class Endings:
    """Count of completions by their ending.

    reasons: Completions of each finish reason, as the engine names it.
    empty: Completions cut at their cap before a text began, as of a model that still thinks.
    cap: Largest cap that cut a completion, in tokens; 0 if none or nothing but the model's context did.
    room: Largest cap that the model's context allows for each completion that a cap cut; 0 if unknown.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    cap: int = 0
    room: int = 0

    @classmethod
    def of(cls, facts: object) -> Endings | None:
        """Return the endings that :meth:`facts` gave, or None."""
        reasons, empty, cap, room = (_at(facts, name) for name in ("reasons", "empty", "cap", "room"))
        if not isinstance(reasons, dict) or type(empty) is not int:
            return None
        return cls(Counter(reasons), empty, *(most if type(most) is int else 0 for most in (cap, room)))

    def add(
        self, completions: Iterable[BatchCompletion], cap: int | None = None, context: int | None = None
    ) -> None:
        """Count completions; those with an error have no ending.

        cap: Most tokens of each; None if unknown, 0 if a higher cap could not lengthen them.
        context: Most tokens of a prompt and its completion; None if unknown.
        """
        for row in completions:
            if row.error is None:
                self.reasons[row.finish_reason or "unknown"] += 1
                if row.finish_reason == "length":
                    self.empty += not (row.completion or "tool_calls" in (row.details or ""))
                    # All completions of a request together have no fewer tokens than the longest.
                    most = (row.completion_tokens or 0) if cap is None else cap
                    room = 0 if context is None else max(0, context - (row.prompt_tokens or 0))
                    if not room or most < room:
                        self.cap = max(self.cap, most)
                        self.room = min(self.room or room, room)

    def facts(self) -> dict[str, object]:
        """Return the counts for a trace."""
        return {"reasons": dict(self.reasons), "empty": self.empty, "cap": self.cap, "room": self.room}

    @property
    def retry(self) -> str | None:
        """Options of ``run`` that complete cut rows under twice the cap; None where it would not help."""
        most = min(2 * self.cap, self.room or 2 * self.cap)
        return f"--retry cut --longest-completion {most}" if self.cut and most > self.cap else None

    @property
    def cut(self) -> int:
        """Number of completions that ended at their cap."""
        return self.reasons["length"]

    @property
    def line(self) -> str | None:
        """Sentence about cut completions, or None without any."""
        if not self.cut:
            return None
        total, empty = self.reasons.total(), ""
        if self.empty:
            empty = f" ({self.empty:,} {'is' if self.empty == 1 else 'are'} empty: all spent on thinking)"
        were = "was" if self.cut == 1 else "were"
        cap = f"a cap of at most {self.cap:,} tokens" if self.cap else "max_tokens or the model's context"
        return f"{self.cut:,} of {total:,} completions {were} cut at {cap}{empty}"


_HINT = "Give the output file of an earlier run."
_COLUMNS = [column.name for column in fields(BatchCompletion)]
_SHOWN = {"index", "text", "message", "finish_reason", "role", "content"}


def _whole(value: object) -> int | None:
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**63 else None


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def is_parquet_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's suffix names a Parquet table."""
    suffix = Path(path).suffix.lower()
    if suffix in (".csv", ".tsv", ".xlsx", ".arrow"):
        hint = "Name a .jsonl or a .parquet file."
        raise InputError(f"completions are not written as {suffix}", file=path, hint=hint)
    return suffix == ".parquet"


def write_completions(path: str | os.PathLike[str], lines: Iterable[Mapping[str, Any]]) -> None:
    """Write output lines as JSON lines or, by the suffix, as Parquet."""
    if not is_parquet_name(path):
        with atomic_write(path) as stream:
            for line in lines:
                stream.write(dump_line(line))
        return
    require_arrow()
    import pyarrow as pa
    from pyarrow import parquet

    text, whole = pa.string(), pa.int64()
    numbers = {"index", "prompt_tokens", "completion_tokens", "created"}
    schema = pa.schema([(name, whole if name in numbers else text) for name in _COLUMNS])
    rows = [asdict(one) for one in batch_completions(lines)]
    with atomic_write(path, binary=True) as stream:
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), stream)


def read_completions(path: str | os.PathLike[str]) -> tuple[BatchCompletion, ...]:
    """Read the completions that :func:`write_completions` wrote."""
    if not is_parquet_name(path):
        return tuple(batch_completions(output_lines(path)))
    require_arrow()
    from pyarrow import parquet

    hint = "Give the output of a run."
    with reading_arrow(path, hint):
        table = parquet.read_table(local_file(path))
    missing = next((name for name in _COLUMNS if name not in table.schema.names), None)
    if missing is not None:
        raise InputError(f"there is no column {missing!r}", file=path, hint=hint)
    with reading_arrow(path, hint):
        rows = table.select(_COLUMNS).to_pylist()
    return tuple(BatchCompletion(**row) for row in rows)


def ended_at_once(completions: Sequence[BatchCompletion]) -> int:
    """Return how many completions ended without any text."""
    return sum(
        one.error is None and one.finish_reason == "stop" and not one.completion and one.details is None
        for one in completions
    )


def is_output(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is batch output or a trace."""
    if not is_table(path):
        return True
    if Path(path).suffix.lower() != ".parquet":
        return False
    require_arrow()
    from pyarrow import parquet

    with reading_arrow(path, _HINT):
        return "finish_reason" in parquet.read_schema(local_file(path)).names


def lengths_by_name(path: str | os.PathLike[str], *, apart: bool = False) -> dict[str, int]:
    """Read completions' lengths, tokens by name.

    The file is a table, a trace or an output file.
    """
    if is_of_kind(path, "batchbound_trace"):
        trace = Trace.load(path)
        ended = np.flatnonzero(~np.isnan(trace.finished)).tolist()
        if not ended:
            raise InputError("no request has finished", file=path, hint="Give the trace of a whole run.")
        return {trace.ids[request]: max(1, int(trace.tokens[request])) for request in ended}
    if is_output(path):
        return read_answer_lengths(path, apart=apart)
    table = read_table(path, need_input=False)
    return dict(zip(table["id"].tolist(), table["output_tokens"].tolist(), strict=True))


def read_answer_lengths(path: str | os.PathLike[str], *, apart: bool = False) -> dict[str, int]:
    """Read the lengths in an output file, tokens by ``custom_id``.

    Lines with an error are skipped; an empty completion counts as the one token that ends it. ``apart`` names
    each completion of a request by its ``token_ids``, and refuses a request that states only their sum; by
    default they count as their mean.
    """
    lengths: dict[str, int] = {}
    rows = _table_tokens(path) if Path(path).suffix.lower() == ".parquet" else _line_tokens(path, apart=apart)
    for where, name, tokens, answers in rows:
        if apart and answers > 1:
            what = f"states the tokens of the {answers} completions of {name!r} together, not of each"
            hint = "Give the trace of the run (trace.jsonl) instead."
            raise InputError(what, file=path, where=where, hint=hint)
        lengths[name] = max(1, -(-tokens // answers))
    if not lengths:
        raise InputError("holds no completion", file=path, hint=_HINT)
    return lengths


def _table_tokens(path: str | os.PathLike[str]) -> Iterator[tuple[str, str, int, int]]:
    answered = [one for one in read_completions(path) if one.error is None]
    several = Counter(one.custom_id for one in answered)
    for row, one in enumerate(answered, 1):
        if one.completion_tokens is not None:
            yield f"row {row}", one.custom_id, one.completion_tokens, several[one.custom_id]


def _line_tokens(path: str | os.PathLike[str], *, apart: bool) -> Iterator[tuple[str, str, int, int]]:
    """Yield each completion's name and tokens in OpenAI's, Anthropic's or Gemini's output."""
    seen = set[str]()
    for number, line in json_lines(path):
        name = line.get("custom_id", line.get("key"))
        if not isinstance(name, str) or not {"response", "error", "result"} & set(line):
            raise InputError(
                "is not a completion in a batch output format",
                file=path,
                where=f"line {number}, field '{'response' if isinstance(name, str) else 'custom_id'}'",
                hint=_HINT,
            )
        if name in seen:
            where = f"line {number}, field 'custom_id'"
            hint = "Remove one of the two lines."
            raise InputError(f"{name!r} is completed a second time", file=path, where=where, hint=hint)
        body = _succeeded(line, number, path)
        if body is None:
            continue
        seen.add(name)
        place, tokens = _usage(body)
        if type(tokens) is not int or not 0 <= tokens <= LONGEST:
            raise InputError(
                f"{tokens!r} is not a number of tokens a completion can have",
                file=path,
                where=f"line {number}, field '{place}'",
                hint="Each completion must state its usage.",
            )
        choices = _at(body, "choices")
        yield from ((f"line {number}", *each) for each in _completions_of(name, tokens, choices, apart=apart))


def _succeeded(
    line: Mapping[str, Any], number: int, path: str | os.PathLike[str]
) -> Mapping[str, Any] | None:
    if line.get("error") is not None:
        return None
    result = line.get("result")
    if isinstance(result, dict):  # Anthropic
        message = result.get("message")
        return message if result.get("type") == "succeeded" and isinstance(message, dict) else None
    response = line.get("response")
    if not isinstance(response, dict) or response.get("status_code", 200) != 200:
        return None
    if "usageMetadata" in response:
        return response
    body = response.get("body") or {}
    if not isinstance(body, dict):
        what = f"{shown(body)} is not a completion, though its status is 200"
        where = f"line {number}, field 'response.body'"
        raise InputError(what, file=path, where=where, hint="Remove the line, or run the request again.")
    return body


def _usage(body: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of a completion's token count."""
    usage = body.get("usage")
    if isinstance(usage, dict) and "completion_tokens" not in usage and "output_tokens" in usage:
        return "usage.output_tokens", usage["output_tokens"]
    usage = body.get("usageMetadata")
    if isinstance(usage, dict):  # Gemini counts reasoning tokens separately.
        counts = [usage.get(name) or 0 for name in ("candidatesTokenCount", "thoughtsTokenCount")]
        return "usageMetadata", sum(counts) if all(type(one) is int for one in counts) else counts
    return "response.body.usage.completion_tokens", _at(body, "usage", "completion_tokens")


def _completions_of(name: str, tokens: int, choices: object, *, apart: bool) -> list[tuple[str, int, int]]:
    """Return a request's name, tokens and completions.

    With ``apart``, a row for each completion with token ids.
    """
    listed = choices if isinstance(choices, list) and choices else [None]
    ids = [_at(choice, "token_ids") for choice in listed]
    if not apart or len(listed) == 1 or not all(isinstance(each, list) for each in ids):
        return [(name, tokens, len(listed))]
    return [
        (f"{name}#{choice.get('index', place)}", len(each), 1)
        for place, (choice, each) in enumerate(zip(listed, ids, strict=True))
    ]


def _at(value: object, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _name(custom_id: str) -> str:
    return hashlib.sha256(custom_id.encode("utf-8")).hexdigest()[:24]
