"""Client of a server that speaks OpenAI's protocol: send a request, classify the reply."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx2

from ...data.readers.openai_batch import CHAT
from ...data.readers.server_batch import ServerRequest

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key that servers ask for, if they do."""

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class Kind(Enum):
    """Outcome of one attempt at a request."""

    ANSWERED = "answered"
    REFUSED = "refused"
    BUSY = "busy"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Reply:
    """
    One attempt at a request, and what came of it.

    kind: Whether a completion came, the server refused the request for good, was busy or failed for now (429,
        5xx), lost the connection, could not be reached, or let the time run out.
    status: HTTP status, or None where no response came.
    body: The response's JSON object, or a substitute.
    request_id: The server's name of the request, or empty.
    wait: Seconds the server asks to wait before another attempt, or None.
    message: What went wrong, in a sentence.
    """

    kind: Kind
    status: int | None = None
    body: Mapping[str, Any] | None = None
    request_id: str = ""
    wait: float | None = None
    message: str = ""


class ServerClient:
    """
    A connection pool to one server.

    url: Where it is, with or without ``/v1`` at the end.
    timeout: Seconds a request may take, from its being sent to the whole response.
    model: What to put in the place of each body's ``model``; None to leave it. A body without one gets
        ``default_model``.
    default_model: Of bodies that name none.
    """

    def __init__(
        self, url: str, *, timeout: float, model: str | None = None, default_model: str | None = None
    ) -> None:
        self.url = base_url(url)
        self._timeout, self._model, self._default = timeout, model, default_model
        key = os.environ.get(KEY_VARIABLE)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout, connect=min(10.0, timeout)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def text(self, path: str, timeout: float = 10.0) -> str | None:
        """Return the text at a path of the server, None if there is none or it does not come in time."""
        try:
            response = await self._http.get(self.url + path, timeout=timeout)
        except (httpx2.HTTPError, httpx2.InvalidURL):
            return None
        return response.text if response.status_code == 200 else None

    async def reachable(self) -> bool:
        """
        Return whether the server responds without an error of its own.

        Offline, ``transformers serve`` fails to list its models, and completes requests all the same.
        """
        for path in ("/v1/models", "/health"):
            try:
                response = await self._http.get(self.url + path, timeout=10.0)
            except httpx2.HTTPError:
                continue
            if response.status_code < 500:
                return True
        return False

    async def send(self, request: ServerRequest) -> Reply:
        """Return what comes of one attempt at a request; errors of the way there are replies, too."""
        body = dict(request.body)
        if self._model is not None:
            body["model"] = self._model
        elif body.get("model") is None and self._default is not None:
            body["model"] = self._default
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._http.post(self.url + request.url, json=body)
        except (TimeoutError, httpx2.ReadTimeout, httpx2.WriteTimeout, httpx2.PoolTimeout):
            return Reply(Kind.TIMED_OUT, message=f"no completion within {self._timeout:g} s")
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return Reply(Kind.UNREACHABLE, message=f"{self.url} cannot be reached ({_named(error)})")
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            return Reply(Kind.BROKEN, message=f"{self.url} broke the connection ({_named(error)})")
        return _reply(request, response)


def base_url(url: str) -> str:
    """Return where a server is, without the version at the end of its address."""
    return url.rstrip("/").removesuffix("/v1")


def ignored_field(request: ServerRequest, body: Mapping[str, Any]) -> str | None:
    """
    Return the field of a request that its completion shows to have been ignored, or None.

    Servers take fields they do not know in silence: the number of choices and the log-probabilities can be
    seen in what comes back.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    if len(choices) != request.choices:
        return "n"
    asked = request.body.get("logprobs")
    if asked is None or asked is False:
        return None
    shown = [choice.get("logprobs") for choice in choices if isinstance(choice, Mapping)]
    return "logprobs" if any(one is None for one in shown) else None


def _reply(request: ServerRequest, response: httpx2.Response) -> Reply:
    status, name = response.status_code, response.headers.get("x-request-id", "")
    body = _parsed(response)
    if not isinstance(body, dict):
        body = {"error": {"message": response.text[:500] or response.reason_phrase}}
        if status == 200:
            return Reply(Kind.BROKEN, message="the response is not a JSON object")
    name = name or str(body.get("id", ""))
    if status in _RETRIED:
        wait = _retry_after(response.headers.get("retry-after"))
        return Reply(Kind.BUSY, status, body, name, wait, f"HTTP {status}: {_message(body)}")
    if status != 200:
        return Reply(Kind.REFUSED, status, body, name, message=f"HTTP {status}: {_message(body)}")
    field = ignored_field(request, body)
    if not _is_completion(request, body):
        told = f": {_message(body)}" if "error" in body else ""
        return Reply(Kind.REFUSED, None, body, name, message=f"the response holds no completion{told}")
    if field is not None:
        return Reply(Kind.REFUSED, None, body, name, message=f"the server ignored the field {field!r}")
    return Reply(Kind.ANSWERED, status, body, name)


def _parsed(response: httpx2.Response) -> Any:
    """
    Return the JSON of a response as a file can hold it, None if it is none.

    Numbers that JSON has not (a log-probability of minus infinity) become null, halves of a character the
    replacement character.
    """
    try:
        body = response.json(parse_constant=lambda _: None, parse_float=_finite)
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            text = json.dumps(body, ensure_ascii=False).encode("utf-16", "surrogatepass")
            body = json.loads(text.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None
    return body


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _is_completion(request: ServerRequest, body: Mapping[str, Any]) -> bool:
    choices, part = body.get("choices"), "message" if request.url == CHAT else "text"
    return (
        isinstance(choices, list)
        and bool(choices)
        and all(isinstance(choice, Mapping) and part in choice for choice in choices)
    )


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    text = error.get("message", error) if isinstance(error, Mapping) else error
    return str(text)[:300]


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


def _retry_after(value: str | None) -> float | None:
    """Return the seconds a Retry-After header asks for, stated as a number or as a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
