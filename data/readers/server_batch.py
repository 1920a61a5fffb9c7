"""OpenAI batch format for a server, with unchanged request bodies."""

from __future__ import annotations

import array
import hashlib
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, overload

import msgspec
import numpy as np

from ..arrays import IntArray
from ..files.disk import shown
from ..files.record import whole
from ..prompts.columns import PromptColumns
from ..prompts.table import batch_entries
from ..workload import LONGEST, numbered
from .length_source import LengthSource
from .openai_batch import CHAT, COMPLETIONS, BatchLine, refuse_known

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
        return next((self.body[name] for name in _PROMPTS if name in self.body), self.body)

    @property
    def generates(self) -> bool:
        """True if a completion is generated, not only a prompt read."""
        return self.url not in _READING

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the completion, or None."""
        return next((cap for name in _CAPS if (cap := whole(self.body.get(name))) is not None), None)

    @property
    def expected_tokens(self) -> int | None:
        """Stated tokens of the completion, else its cap, or None."""
        return self.output_tokens or (self.max_tokens if self.generates else 1)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, for text estimated from its bytes.

        Four bytes count as a token. Of several prompts the shortest counts.
        """
        return min(map(self._tokens_of, self.prompts or [self.says]))

    def _tokens_of(self, prompt: object) -> int:
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return len(prompt)
        text = prompt.encode("utf-8", "replace") if isinstance(prompt, str) else encoded(prompt)
        return max(1, -(-len(text) // _BYTES_PER_TOKEN))


class ServerBatch(Sequence[ServerRequest]):
    """Requests of a file; bodies stay on disk until they are read.

    names: ``custom_id`` of each request.
    choices, prompt_tokens, caps, stated: Values of the requests, zero if missing, shape (requests,).
    prompts: Number of each request's prompt, equal for equal prompts, shape (requests,).
    several: True for requests with several prompts, shape (requests,).
    models: Named models, with None if a request names none.
    """

    def __init__(self, rows: Iterable[tuple[ServerRequest, Mapping[str, object]]]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self.names: list[str] = []
        self.models: set[object] = set()
        columns = [array.array("q") for _ in range(6)]
        self._at, self._line = array.array("q", [0]), array.array("q")
        self._url: list[str] = []
        for request, entry in rows:
            self.names.append(request.custom_id)
            self._url.append(sys.intern(request.url))
            model = request.body.get("model")
            self.models.add(model if isinstance(model, str) else None)
            told = hashlib.blake2b(encoded(request.says, "sorted"), digest_size=8).digest()
            prompt = int.from_bytes(told, "big", signed=True)
            # A row without generated tokens takes the iterations of its prompt, as with one token.
            least = 0 if request.generates else 1
            caps = request.max_tokens or least, request.output_tokens or least
            values = request.choices, request.prompt_tokens, *caps, prompt, bool(request.prompts)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            self._line.append(request.line)
            text = encoded(entry)
            self._file.write(text)
            self._at.append(self._at[-1] + len(text))
        self._file.flush()
        self.choices, self.prompt_tokens, self.caps, self.stated, self.prompts, several = (
            np.array(column, dtype=np.int64) for column in columns
        )
        self.several = several.astype(np.bool_)

    @classmethod
    def of(cls, requests: Sequence[ServerRequest]) -> ServerBatch:
        """Return requests as a batch."""
        if isinstance(requests, ServerBatch):
            return requests
        return cls((one, {"custom_id": one.custom_id, "body": one.body}) for one in requests)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> ServerRequest: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[ServerRequest]: ...

    def __getitem__(self, at: int | slice) -> ServerRequest | Sequence[ServerRequest]:
        if isinstance(at, slice):
            return [self[k] for k in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        body = cast("Mapping[str, object]", self.entry(at)["body"])
        stated = int(self.stated[at]) or None
        return ServerRequest(self.names[at], self._url[at], self._line[at], body, stated)

    def entry(self, at: int) -> dict[str, object]:
        """Return a request's whole line."""
        start, end = self._at[at], self._at[at + 1]
        entry: dict[str, object] = _decoded(os.pread(self._file.fileno(), end - start, start))
        return entry


def encoded(value: object, order: Literal["sorted"] | None = None) -> bytes:
    """Return a value as JSON, with lone surrogates escaped."""
    try:
        return msgspec.json.encode(value, order=order)
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=order is not None).encode()


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


def read_server_batch(
    path: str | os.PathLike[str],
    columns: PromptColumns | None = None,
    defaults: Mapping[str, object] | None = None,
) -> ServerBatch:
    """Read a batch file or table, without checking bodies.

    A line may leave out ``method`` and ``url``; then ``messages`` or ``prompt`` decides. A body that lacks a
    field has that of ``defaults``.
    """
    line_of: dict[str, int] = {}

    def rows() -> Iterator[tuple[ServerRequest, Mapping[str, object]]]:
        for number, entry in batch_entries(path, columns, text_only=False):
            if defaults and isinstance(entry.get("body"), dict):
                entry = {**entry, "body": {**defaults, **cast("Mapping[str, object]", entry["body"])}}
            request = _Line(path, number).request(entry)
            refuse_known(line_of, number, request.custom_id, path)
            yield request, entry

    return ServerBatch(rows())


def planned_lengths(
    requests: Sequence[ServerRequest], lengths: str | None, longest: int | None = None
) -> tuple[IntArray, LengthSource]:
    """Return each completion's planned tokens, shape (requests,), and their source.

    By default they are those stated, else the caps; InputError if a request lacks what the source needs.
    """
    batch = ServerBatch.of(requests)
    known, caps = ([value or None for value in column.tolist()] for column in (batch.stated, batch.caps))
    source = LengthSource.parse(("cap" if None in known else "known") if lengths is None else lengths)
    source = replace(source, longest=longest)
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


def prompt_groups(requests: Sequence[ServerRequest]) -> IntArray:
    """Return each prompt's number, equal for equal prompts."""
    return numbered(ServerBatch.of(requests).prompts.tolist())


class _Line(BatchLine):
    def request(self, entry: dict[str, object]) -> ServerRequest:
        name, body = entry.get("custom_id"), entry.get("body")
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            raise self.error("custom_id", f"{name!r} is not a name", "Give every request its own custom_id.")
        if not isinstance(body, dict):
            what = "is missing" if body is None else f"{str(body)[:60]!r} is not an object"
            raise self.error("body", what, "Put messages or prompt into a body object.")
        if entry.get("method", "POST") != "POST":
            raise self.error("method", f"{entry['method']!r} is not POST", "Write POST, or leave it out.")
        if body.get("stream"):
            hint = "Leave it out: a batch keeps whole completions."
            raise self.error("body.stream", "a streamed completion cannot be kept", hint)
        for field in ("n", *_CAPS):
            self.whole(body.get(field), f"body.{field}")
        try:
            # Only what JSON has not is encoded as null.
            if b"null" in encoded(body):
                json.dumps(body, allow_nan=False)
        except ValueError:
            hint = "Write null, or leave the field out."
            raise self.error("body", "holds NaN or an infinite number, which JSON has not", hint) from None
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
