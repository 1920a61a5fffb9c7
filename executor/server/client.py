"""Client of a server that speaks OpenAI's protocol: send a request, classify the reply."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import json
import math
import os
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from ...data.readers.openai_batch import CHAT, COMPLETIONS
from ...data.readers.server_batch import ServerRequest
from ..jobs.params import LARGEST_REPLIES
from .connection import BrokenConnectionError, Connection, ReplyBudget, Response
from .reply import Kind, Reply

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key that servers ask for, if they do."""

_KEEP_SECONDS = 4.0
"""Seconds for which an idle connection is kept: servers close theirs after five."""

_OPENED = 32
"""Connections opened at a time: fewer than the queue of a listening socket holds."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Halves of a character, and pairs of them that make one."""

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class ServerClient:
    """
    Connections to one server, each with one request at a time.

    url: Where it is, with or without ``/v1`` at the end.
    timeout: Seconds a request may take, from its being sent to the whole response.
    model: Replaces each body's ``model``; None to leave it. A body without one gets ``default_model``.
    default_model: Model of bodies that name none.
    largest: Bytes of all replies that arrive at a time.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        model: str | None = None,
        default_model: str | None = None,
        largest: int = LARGEST_REPLIES,
    ) -> None:
        self.url = base_url(url)
        self._timeout, self._model, self._default = timeout, model, default_model
        self._budget = ReplyBudget(largest)
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._address = Address.of(self.url, os.environ.get(KEY_VARIABLE))

    async def close(self) -> None:
        """Close every connection."""
        for connection in list(self._all):
            connection.close()
        # A closed transport says so in the loop's next step.
        await asyncio.sleep(0)
        self._idle.clear()

    async def open(self, count: int) -> None:
        """Open connections beforehand, so that a burst of requests arrives in order."""
        while (lacking := count - len(self._idle)) > 0:
            connects = (self._connect(min(10.0, self._timeout)) for _ in range(min(lacking, _OPENED)))
            made = await asyncio.gather(*connects, return_exceptions=True)
            self._idle += [one for one in made if isinstance(one, Connection)]
            if any(isinstance(one, BaseException) for one in made):
                return

    async def text(self, path: str, timeout: float = 10.0) -> str | None:
        """Return the text at a path of the server, None if there is none or it does not come in time."""
        response = await self._get(path, timeout)
        return response.text if response is not None and response.status == 200 else None

    async def reachable(self) -> bool:
        """
        Return whether the server responds without an error of its own.

        Offline, ``transformers serve`` fails to list its models, and completes requests all the same.
        """
        for path in ("/v1/models", "/health"):
            response = await self._get(path, 10.0)
            if response is not None and response.status < 500:
                return True
        return False

    async def send(self, request: ServerRequest) -> Reply:
        """Return the outcome of one attempt at a request; connection errors are replies, too."""
        body = request.body
        if self._model is not None:
            body = {**body, "model": self._model}
        elif body.get("model") is None and self._default is not None:
            body = {**body, "model": self._default}
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._exchange("POST", request.url, content)
        except TimeoutError:
            return Reply(Kind.TIMED_OUT, message=f"no completion within {self._timeout:g} s")
        except OSError as error:
            return Reply(Kind.UNREACHABLE, message=f"{self.url} cannot be reached ({_named(error)})")
        except BrokenConnectionError as error:
            return Reply(Kind.BROKEN, message=f"{self.url} broke the connection ({_named(error)})")
        return _reply(request, response)

    async def _get(self, path: str, timeout: float) -> Response | None:
        try:
            # Its own connection: a page that trickles would hold up a request.
            async with asyncio.timeout(timeout):
                connection = await self._connect(timeout)
                try:
                    return await connection.exchange(self._address.head("GET", path, None))
                finally:
                    connection.close()
        except (OSError, TimeoutError, BrokenConnectionError):
            return None

    async def _exchange(self, method: str, path: str, content: bytes) -> Response:
        head = self._address.head(method, path, len(content))
        connection = self._free() or await self._connect(min(10.0, self._timeout))
        response = await connection.exchange(head, content)
        if response.repeated:
            # The response before, sent twice? The first one on a new connection can be no copy.
            connection.close()
            connection = await self._connect(min(10.0, self._timeout))
            response = await connection.exchange(head, content)
        if connection.usable:
            self._idle.append(connection)
        return response

    def _free(self) -> Connection | None:
        """Return a connection that is open and was used just now, or None."""
        oldest = asyncio.get_running_loop().time() - _KEEP_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.used_at >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, timeout: float) -> Connection:
        """Return a new connection, or raise OSError."""
        loop, address = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._budget, self._all), address.host, address.port, ssl=address.tls()
                )
        except TimeoutError:
            raise OSError(f"no connection within {timeout:g} s") from None
        connection.used_at = loop.time()
        return connection


@dataclass(frozen=True, slots=True)
class Address:
    """
    Where a server is, and what each request to it says.

    prefix: Path before each request's own.
    headers: Lines of each request, each with its line break.
    """

    host: str
    port: int
    secure: bool
    prefix: str
    headers: str

    @classmethod
    def of(cls, url: str, key: str | None) -> Address:
        """Return the address of a URL, which may hold a name and a password."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        name = parts.netloc.rpartition("@")[2]
        lines = [f"Host: {name}", "Accept: application/json", "Accept-Encoding: gzip, deflate"]
        if key:
            lines.append(f"Authorization: Bearer {key.strip()}")
        elif parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            lines.append(f"Authorization: Basic {base64.b64encode(pair).decode()}")
        headers = "".join(f"{line}\r\n" for line in lines)
        return cls(parts.hostname or "", port, secure, parts.path.rstrip("/"), headers)

    def tls(self) -> ssl.SSLContext | None:
        """Return the checks of the server's certificate, None for plain HTTP."""
        return _tls() if self.secure else None

    def head(self, method: str, path: str, length: int | None) -> bytes:
        """Return a request's lines before its body."""
        sized = "" if length is None else f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n{self.headers}{sized}\r\n".encode()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


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


def _reply(request: ServerRequest, response: Response) -> Reply:
    status, name = response.status, response.headers.get("x-request-id", "")
    body = _parsed(response)
    if not isinstance(body, dict):
        body = {"error": {"message": response.text[:500] or f"HTTP {status}"}}
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


def _parsed(response: Response) -> Any:
    """
    Return the JSON of a response as a file can hold it, None if it is none.

    Numbers that JSON has not (a log-probability of minus infinity) become null, halves of a character the
    replacement character.
    """
    try:
        body = json.loads(response.body, parse_constant=lambda _: None, parse_float=_finite)
        if _HALF.search(response.body):
            text = json.dumps(body, ensure_ascii=False).encode("utf-16", "surrogatepass")
            body = json.loads(text.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None
    return body


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _is_completion(request: ServerRequest, body: Mapping[str, Any]) -> bool:
    if request.url not in (CHAT, COMPLETIONS):
        return not body.get("error")
    choices, chat = body.get("choices"), request.url == CHAT
    return isinstance(choices, list) and bool(choices) and all(_says(choice, chat) for choice in choices)


def _says(choice: object, chat: bool) -> bool:
    """Return whether a choice holds a text, or a message with a member: calls of tools have no content."""
    if not isinstance(choice, Mapping):
        return False
    said = choice.get("message" if chat else "text")
    return isinstance(said, Mapping) and bool(said) if chat else said is not None


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
