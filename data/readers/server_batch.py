"""OpenAI batch format for a server, with unchanged request bodies."""

from __future__ import annotations

import array
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast, overload

import msgspec
import numpy as np

from ..arrays import IntArray
from ..files.disk import InputError, shown
from ..files.record import whole
from ..prompts.columns import PromptColumns
from ..prompts.messages import is_ids
from ..prompts.names import Names
from ..prompts.table import batch_entries
from ..workload import LONGEST
from .length_source import LengthSource
from .openai_batch import CHAT, COMPLETIONS, BatchLine, repeated_name

_CAPS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

RESPONSES = "/v1/responses"

_READING = (
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/rerank",
    "/v2/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Endpoints that read a prompt without generating tokens."""

ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, *_READING)

_PROMPTS = ("prompt", "messages", "input")

_BYTES_PER_TOKEN = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One line of a batch file for a server.

    custom_id: User's name of the request, unique in its file.
    url: One of :data:`ENDPOINTS`.
    line: Number of its line, from one.
    body: Body to send unchanged; the server checks its fields.
    output_tokens: Length of the completion if ``output_tokens`` next to ``body`` states it, or None.
    """

    custom_id: str
    url: str
    line: int
    body: Mapping[str, object]
    output_tokens: int | None = None

    @property
    def prompts(self) -> list[Any]:
        """Prompts of a completion request with several; else empty."""
        given = self.body.get("prompt") if self.url == COMPLETIONS else None
        if not isinstance(given, list) or not given or type(given[0]) is int:
            return []
        return list(given) if all(isinstance(one, str | list) for one in given) else []

    @property
    def choices(self) -> int:
        """Number of completions; each takes a slot of its own."""
        if self.url not in (CHAT, COMPLETIONS):
            return 1
        return max(whole(self.body.get("n")) or 1, 1) * max(1, len(self.prompts))

    @property
    def says(self) -> Any:
        """Prompt as given: text, token ids, or messages; else the whole body."""
        return _prompt_of(self.body)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the completion, or None."""
        return next((cap for name in _CAPS if (cap := whole(self.body.get(name))) is not None), None)

    @property
    def sent(self) -> Sent:
        """The request as it is sent."""
        body, logprobs = self.body, self.body.get("logprobs")
        asked = logprobs is not None and logprobs is not False
        return Sent(self.url, encoded(body), self.choices, asked, body.get("model") is not None)


class Sent(NamedTuple):
    """Request as it is sent.

    body: Body as JSON.
    choices: Number of completions.
    logprobs: True if it asks for log-probabilities.
    named: True if it names a model.
    """

    url: str
    body: bytes
    choices: int
    logprobs: bool
    named: bool


_SEVERAL, _IDS, _LOGPROBS, _NAMED, _OPEN = 1, 2, 4, 8, 16
"""Flags of a request; ``_IDS`` marks a prompt of token ids, ``_OPEN`` a completion without a cap."""


class ServerBatch(Sequence[ServerRequest]):
    """Requests of a file; bodies stay on disk until they are read.

    names: ``custom_id`` of each request.
    choices, prompt_tokens, caps, stated: Values of the requests, zero if missing, shape (requests,). A text
        prompt has a token per four bytes; of several prompts the shortest counts.
    prompts: Number of each request's prompt, equal for equal prompts, shape (requests,).
    several, ids: True for requests with several prompts, and for those of token ids, shape (requests,).
    models: Named models, with None if a request names none.
    kind: Number of each request's endpoint and model, shape (requests,).
    kinds: Endpoint and model of each number; None if a request names no model.
    repeats: True if each request is greedy or has a seed, so that lengths repeat in another run.
    salted: True if a request has a ``cache_salt``.
    fields: First line of each field of a body.
    uncapped: True for requests without a cap of their own, shape (requests,).
    """

    def __init__(
        self,
        rows: Iterable[tuple[ServerRequest, Mapping[str, object]]],
        path: str | os.PathLike[str] | None = None,
        longest: int | None = None,
    ) -> None:
        """Store requests with their whole lines.

        ``path`` is their file in errors; ``longest`` caps the completions that have no cap.
        """
        self._longest = longest
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self.names, self.models, self.repeats, self.salted = Names(), set[object](), True, False
        self.fields = dict[str, int]()
        columns = [array.array("q") for _ in range(5)]
        kind, self._kinds = array.array("i"), dict[tuple[str, str | None], int]()
        self._at, self._line = array.array("q", [0]), array.array("q")
        self._flags, self._url, self._urls = bytearray(), bytearray(), dict[str, int]()
        for request, entry in rows:
            first = self.names.add(request.custom_id)
            if first < len(self._line):
                raise repeated_name(request.custom_id, self._line[first], request.line, path)
            self._line.append(request.line)
            self._url.append(self._urls.setdefault(request.url, len(self._urls)))
            model = request.body.get("model")
            self.repeats &= request.body.get("temperature") == 0 or request.body.get("seed") is not None
            self.salted |= "cache_salt" in request.body
            for field in request.body.keys() - self.fields.keys():
                self.fields[field] = request.line
            named = model if isinstance(model, str) else None
            self.models.add(named)
            kind.append(self._kinds.setdefault((request.url, named), len(self._kinds)))
            sent = request.sent
            flags, *values = _measured(request, sent.choices, longest)
            self._flags.append(flags | _LOGPROBS * sent.logprobs | _NAMED * sent.named)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            # Only what JSON has not is encoded as null.
            if b"null" in sent.body:
                _refuse_infinite(request, path)
            for text in (encoded({name: entry[name] for name in entry if name != "body"}), sent.body):
                self._file.write(text)
                self._at.append(self._at[-1] + len(text))
        self._file.flush()
        # Views, because copies would double the memory.
        self.choices, self.prompt_tokens, self.caps, self.stated, self.prompts = (
            np.asarray(column).view(np.int64) for column in columns
        )
        self.kind = np.asarray(kind).view(np.int32)
        said = np.frombuffer(bytes(self._flags), np.uint8)
        self.several, self.ids = (said & _SEVERAL).astype(np.bool_), (said & _IDS).astype(np.bool_)
        self.uncapped = (said & _OPEN).astype(np.bool_)
        self._endpoints, self.kinds = list(self._urls), list(self._kinds)

    @classmethod
    def of(cls, requests: Sequence[ServerRequest]) -> ServerBatch:
        """Return requests as a batch."""
        if isinstance(requests, ServerBatch):
            return requests
        return cls((one, {"custom_id": one.custom_id}) for one in requests)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> ServerRequest: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[ServerRequest]: ...

    def __getitem__(self, at: int | slice) -> ServerRequest | Sequence[ServerRequest]:
        if isinstance(at, slice):
            return [self[k] for k in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        url, body = self._endpoints[self._url[at]], decoded(self._text(2 * at + 1))
        return ServerRequest(self.names[at], url, self._line[at], body, int(self.stated[at]) or None)

    def sent(self, at: int, cap: int | None = None) -> Sent:
        """Return a request as it is sent; a ``cap`` above its own replaces that."""
        flags, choices = self._flags[at], int(self.choices[at])
        url, body = self._endpoints[self._url[at]], self._text(2 * at + 1)
        if cap is not None and cap > self.caps[at] and url not in _READING:
            fields = {name: value for name, value in decoded(body).items() if name not in _CAPS}
            body = encoded({**fields, _cap_name(url): cap})
        elif flags & _OPEN and self._longest is not None:
            comma = b"" if body == b"{}" else b","
            body = b'%b%b"%b":%d}' % (body[:-1], comma, _cap_name(url).encode(), self._longest)
        return Sent(url, body, choices, flags & _LOGPROBS != 0, flags & _NAMED != 0)

    def token_ids(self) -> Iterator[IntArray]:
        """Yield each request's prompt; all are token ids."""
        for at in range(len(self)):
            # Four times as fast as numpy makes an array of a list.
            yield np.array(array.array("q", _prompt_of(decoded(self._text(2 * at + 1)))))

    def line_id(self, at: int) -> str:
        """Return the id of a request's output line, which names its row and body."""
        url = self._endpoints[self._url[at]]
        head = f"{self.names[at]}\0{url}\0".encode("utf-8", "surrogatepass")
        return f"batch_req_{hashlib.sha256(head + self._text(2 * at + 1)).hexdigest()[:24]}"

    def with_priority(self, at: int, priority: int) -> bytes:
        """Return a request's whole line with a priority in its body."""
        line, body = self._text(2 * at), self._text(2 * at + 1)
        if b'"priority"' in body or body == b"{}":
            body = encoded({**decoded(body), "priority": priority})
        else:
            body = b'%b,"priority":%d}' % (body[:-1], priority)
        return b'%b,"body":%b}' % (line[:-1], body)

    def _text(self, part: int) -> bytes:
        start, end = self._at[part], self._at[part + 1]
        return os.pread(self._file.fileno(), end - start, start)


def _prompt_of(body: Mapping[str, object]) -> Any:
    return next((body[name] for name in _PROMPTS if name in body), body)


def _cap_name(url: str) -> str:
    return "max_output_tokens" if url == RESPONSES else "max_tokens"


def _measured(request: ServerRequest, choices: int, longest: int | None) -> tuple[int, ...]:
    """Return a request's flags, choices, prompt tokens, cap, stated length, and its prompt's number."""
    says, prompts = request.says, request.prompts
    # A row without generated tokens takes the iterations of its prompt, as with one token.
    least = 1 if request.url in _READING or request.max_tokens == 0 else 0
    ids = is_ids(says)
    # A text has the hash of its bytes.
    number = hash(says if isinstance(says, str) else tuple(says) if ids else (encoded(says, "sorted"),))
    tokens = min(map(_tokens_of, prompts)) if prompts else len(says) if ids else _tokens_of(says)
    unbounded = request.max_tokens is None and not least
    flags = _SEVERAL * bool(prompts) | _IDS * ids | _OPEN * unbounded
    cap = request.max_tokens or (longest if unbounded else None) or least
    return flags, choices, tokens, cap, request.output_tokens or least, number


def _refuse_infinite(request: ServerRequest, path: str | os.PathLike[str] | None) -> None:
    try:
        json.dumps(request.body, allow_nan=False)
    except ValueError:
        where, hint = f"line {request.line}, field 'body'", "Write null, or leave the field out."
        what = "holds NaN or an infinite number, which JSON has not"
        raise InputError(what, file=path, where=where, hint=hint) from None


def _tokens_of(prompt: Any) -> int:
    if is_ids(prompt):
        return len(prompt)
    if isinstance(prompt, str):
        size = len(prompt) if prompt.isascii() else len(prompt.encode("utf-8", "replace"))
    else:
        size = len(encoded(prompt))
    return max(1, -(-size // _BYTES_PER_TOKEN))


def encoded(value: object, order: Literal["sorted"] | None = None) -> bytes:
    """Return a value as JSON, with lone surrogates escaped."""
    try:
        return msgspec.json.encode(value, order=order)
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=order is not None).encode()


def decoded(text: bytes) -> Any:
    """Return the value of a JSON text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


def read_server_batch(
    path: str | os.PathLike[str],
    columns: PromptColumns | None = None,
    defaults: Mapping[str, object] | None = None,
    longest: int | None = None,
) -> ServerBatch:
    """Read a batch file or table, without checking bodies.

    A line may leave out ``method`` and ``url``; then ``messages`` or ``prompt`` decides. A body that lacks a
    field has that of ``defaults``, and one without a cap is sent with ``longest``.
    """

    def rows() -> Iterator[tuple[ServerRequest, Mapping[str, object]]]:
        for number, entry in batch_entries(path, columns, text_only=False):
            if defaults and isinstance(entry.get("body"), dict):
                entry = {**entry, "body": {**defaults, **cast("Mapping[str, object]", entry["body"])}}
            yield _Line(path, number).request(entry), entry

    return ServerBatch(rows(), path, longest)


def planned_lengths(
    requests: Sequence[ServerRequest], lengths: str | None, longest: int | None = None
) -> tuple[IntArray, LengthSource]:
    """Return each completion's planned tokens, shape (requests,), and their source.

    By default they are those stated, else the caps; InputError if a request lacks what the source needs.
    """
    batch = ServerBatch.of(requests)
    every = bool(batch.stated.all())
    source = LengthSource.parse(("known" if every else "cap") if lengths is None else lengths)
    source = replace(source, longest=longest)
    most = np.where(batch.caps > 0, batch.caps, LONGEST)
    most = most if longest is None else np.minimum(most, longest)
    if source.kind == "known" and every:
        return np.minimum(batch.stated, most), source
    if source.kind == "cap" and (longest is not None or batch.caps.all()):
        return most, source
    known, caps = ([value or None for value in column.tolist()] for column in (batch.stated, batch.caps))
    # Only a history looks at the prompts.
    says = [request.says for request in requests] if source.kind == "history" else None
    output = source.resolve(batch.names, caps=caps, known=known, prompts=says)
    return output, source


def completion_ids(requests: Sequence[ServerRequest]) -> list[str]:
    """Return each completion's name.

    A number follows if its request has several.
    """
    batch = ServerBatch.of(requests)
    return [
        name if count == 1 else f"{name}#{k}"
        for name, count in zip(batch.names, batch.choices.tolist(), strict=True)
        for k in range(count)
    ]


def repeated(of_requests: Iterable[_T], choices: IntArray) -> Iterator[_T]:
    """Yield the value of each completion's request."""
    for value, count in zip(of_requests, choices.tolist(), strict=True):
        yield from repeat(value, count)


def prompt_groups(requests: Sequence[ServerRequest]) -> IntArray:
    """Return each prompt's number, equal for equal prompts."""
    prompts = ServerBatch.of(requests).prompts
    _, first, number = np.unique(prompts, return_index=True, return_inverse=True)
    # Numbers in order of appearance.
    return np.argsort(np.argsort(first))[number]


class Encoder(Protocol):
    """Tokenizer of prompts."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> Sequence[int]:
        """Return the token ids of a conversation; ValueError if its template refuses it."""


def prompt_ids(request: ServerRequest, tokenizer: Encoder | None) -> Sequence[int] | None:
    """Return a prompt's token ids, given or by a tokenizer; None if neither tells.

    Raises ValueError if the chat template refuses the messages.
    """
    prompt = request.says
    if is_ids(prompt):
        return cast("list[int]", prompt)
    if tokenizer is None:
        return None
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not _is_plain_chat(prompt) or request.body.get("tools"):
        # Only the server knows its template for images and tools.
        return None
    template = request.body.get("chat_template_kwargs")
    return tokenizer.encode_chat(prompt, **(template if isinstance(template, Mapping) else {}))


def _is_plain_chat(messages: object) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, Mapping)
        and message.keys() == {"role", "content"}
        and all(isinstance(part, str) for part in message.values())
        for message in messages
    )


class _Line(BatchLine):
    def request(self, entry: dict[str, object]) -> ServerRequest:
        name, body = self.named_body(entry)
        if body.get("stream"):
            hint = "Leave it out: a batch keeps whole completions."
            raise self.error("body.stream", "a streamed completion cannot be kept", hint)
        for field in ("n", *_CAPS):
            # A row that scores its prompt generates nothing.
            if field in body and (field == "n" or body[field] != 0 or body[field] is False):
                self.whole(body[field], f"body.{field}")
        tokens = self.whole(entry.get("output_tokens"), "output_tokens")
        url = self.endpoint(entry.get("url"), body)
        return ServerRequest(name, url, self.number, body, tokens)

    def endpoint(self, given: object, body: Mapping[str, object]) -> str:
        if given in (None, CHAT, COMPLETIONS):
            return self.url(given, body)
        if given not in ENDPOINTS:
            hint = f"Use one of {', '.join(ENDPOINTS)}."
            raise self.error("url", f"{shown(given)} is no endpoint of a server", hint)
        return str(given)

    def whole(self, value: object, field: str) -> int | None:
        if value is None:
            return None
        number = whole(value)
        if number is None or not 1 <= number <= LONGEST:
            raise self.error(field, f"{value!r} is not a whole number from 1", f"Correct {field}.")
        return number
