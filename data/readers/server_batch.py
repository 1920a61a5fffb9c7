"""The OpenAI batch format for a server: each request's body kept as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..arrays import IntArray
from ..files.record import whole
from ..prompts.columns import PromptColumns
from ..prompts.table import batch_entries
from ..workload import LONGEST
from .length_source import LengthSource
from .openai_batch import COMPLETIONS, BatchLine, refuse_repeated

_CAPS = ("max_completion_tokens", "max_tokens")
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """
    One line of a batch file, to be sent to a server.

    Parameters
    ----------
    custom_id
        The user's name of the request, unique in its file.
    url
        :data:`.CHAT` or :data:`.COMPLETIONS`.
    line
        Where it stands in its file, counted from one.
    body
        What is sent, untouched: the server judges its fields.
    output_tokens
        The completion's length if ``output_tokens`` next to ``body`` states it, or None.
    """

    custom_id: str
    url: str
    line: int
    body: Mapping[str, object]
    output_tokens: int | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts of a completion request that states several; else empty."""
        given = self.body.get("prompt") if self.url == COMPLETIONS else None
        several = isinstance(given, list) and given and all(isinstance(one, str | list) for one in given)
        return list(given) if several and isinstance(given, list) else []

    @property
    def choices(self) -> int:
        """Completions that are asked for, ``n`` of each prompt; each takes a slot of its own."""
        return max(whole(self.body.get("n")) or 1, 1) * max(1, len(self.prompts))

    @property
    def says(self) -> Any:
        """The prompt as it was given: text, token ids, or messages."""
        return self.body.get("prompt", self.body.get("messages"))

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the completion, or None."""
        return next((cap for name in _CAPS if (cap := whole(self.body.get(name))) is not None), None)

    @property
    def expected_tokens(self) -> int | None:
        """Tokens that the completion has as stated, or at most, or None."""
        return self.output_tokens or self.max_tokens

    @property
    def prompt_tokens(self) -> int:
        """
        Tokens of the prompt: exact for token ids, else estimated at four bytes of text a token.

        Of several prompts, the shortest one's: no completion of the request reads fewer.
        """
        return min(map(self._tokens_of, self.prompts or [self.body.get("prompt")]))

    def _tokens_of(self, prompt: object) -> int:
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return len(prompt)
        text = prompt if isinstance(prompt, str) else json.dumps(self.body.get("messages", prompt))
        return max(1, -(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN))


def read_server_batch(
    path: str | os.PathLike[str], columns: PromptColumns | None = None
) -> tuple[ServerRequest, ...]:
    """
    Return the requests of an OpenAI batch file or of a table, with bodies that a server will judge.

    A line may leave out ``method`` and ``url``; then ``messages`` or ``prompt`` decides.
    """
    requests = [
        (number, _Line(path, number).request(entry))
        for number, entry in batch_entries(path, columns, text_only=False)
    ]
    refuse_repeated(((number, request.custom_id) for number, request in requests), path)
    return tuple(request for _, request in requests)


def planned_lengths(
    requests: Sequence[ServerRequest], lengths: str | None, longest: int | None = None
) -> tuple[IntArray, LengthSource]:
    """
    Return the tokens that each completion is planned to have, shape (requests,), and where these come from.

    By default they are those stated, else the caps; InputError if a request lacks what the source needs.
    """
    known = [request.output_tokens for request in requests]
    source = LengthSource.parse(("cap" if None in known else "known") if lengths is None else lengths)
    source = replace(source, longest=longest)
    output = source.resolve(
        [request.custom_id for request in requests],
        caps=[request.max_tokens for request in requests],
        known=known,
        prompts=[request.says for request in requests],
    )
    return output, source


def completion_ids(requests: Sequence[ServerRequest]) -> list[str]:
    """Return the name of each completion: its request's, with its number where that asks for several."""
    return [
        request.custom_id if request.choices == 1 else f"{request.custom_id}#{k}"
        for request in requests
        for k in range(request.choices)
    ]


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
            json.dumps(body, allow_nan=False)
        except ValueError:
            hint = "Write null, or leave the field out."
            raise self.error("body", "holds NaN or an infinite number, which JSON has not", hint) from None
        tokens = self.whole(entry.get("output_tokens"), "output_tokens")
        url = self.url(entry.get("url"), body)
        return ServerRequest(name, url, self.number, body, tokens)

    def whole(self, value: object, field: str) -> int | None:
        if value is None:
            return None
        number = whole(value)
        if number is None or not 1 <= number <= LONGEST:
            raise self.error(field, f"{value!r} is not a whole number from 1", f"Correct {field}.")
        return number
