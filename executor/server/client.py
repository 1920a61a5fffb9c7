"""Client of a server that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ...data.readers.openai_batch import CHAT, COMPLETIONS
from ...data.readers.server_batch import Sent, decoded, encoded
from ..jobs.params import LARGEST_REPLIES
from .connection import Address, BrokenConnectionError, Connection, ReplyBudget, Response
from .reply import Kind, Reply

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with a server's API key."""

_MODELS = "/v1/models"

_OPENED = 32
"""Connections to open at once, fewer than a socket's backlog."""

_REMEMBERED = 2**16
"""Response names kept to recognise repeated responses."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Surrogate code points, escaped or raw."""

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

_UNFINISHED = ("abort", "error")
"""Finish reasons of completions that the engine ended: it paused, took new weights, or failed."""

_EMPTY_ACCOUNT = re.compile(
    r"insufficient_quota|billing_(?:hard_limit|not_active)|credit balance"
    r"|insufficient (?:funds|balance|credit)",
    re.IGNORECASE,
)
"""Errors of an account that pays for no further request."""

_FLAGGED = re.compile(r"moderat|flagged|content[ _]policy", re.IGNORECASE)
"""Errors of one prompt that carry the status of a rejected key."""


class ServerClient:
    """Connections to one server, each with one request at a time.

    url: Address of the server, with or without ``/v1`` at the end.
    timeout: Seconds from sending a request to its whole response.
    model: Replaces each body's ``model``; None leaves it.
    default_model: Model of bodies that name none.
    largest: Most bytes of all replies in transit.
    headers: Headers of each request beside our own, such as a gateway's key.
    ca: File of certificates to trust.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        model: str | None = None,
        default_model: str | None = None,
        largest: int = LARGEST_REPLIES,
        headers: Mapping[str, str] | None = None,
        ca: str | None = None,
    ) -> None:
        self._address = Address.of(url, os.environ.get(KEY_VARIABLE), headers, ca)
        self.url = self._address.base
        self._timeout, self._model, self._default = timeout, model, default_model
        self._budget = ReplyBudget(largest)
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self._seen: dict[str, None] = {}

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(connection.close() for connection in self._all))
        self._idle.clear()
        self._all.clear()

    async def open(self, count: int) -> None:
        """Open connections, so that a burst of requests arrives in order."""
        opened = [self._new() for _ in range(count - len(self._idle))]
        self._idle += reversed(opened)
        for first in range(0, len(opened), _OPENED):
            pages = [self._page(_MODELS, 10.0, connection) for connection in opened[first : first + _OPENED]]
            if any(isinstance(page, str) for page in await asyncio.gather(*pages)):
                return

    async def text(self, path: str, timeout: float = 10.0) -> str | None:
        """Return the text at a path, or None if missing or late."""
        response = await self._get(path, timeout)
        is_ok = isinstance(response, Response) and response.status == 200
        return response.text if is_ok and isinstance(response, Response) else None

    async def ask(self, path: str, body: bytes, timeout: float = 60.0) -> Any:
        """Return the JSON that a path replies to a body; None for an error or no reply."""
        connection = self._idle.pop() if self._idle else self._new()
        try:
            async with asyncio.timeout(timeout):
                response = await connection.exchange("POST", path, body)
        except (OSError, BrokenConnectionError, TimeoutError):
            connection.hang_up()
            return None
        finally:
            self._idle.append(connection)
        return _parsed(response) if response.status == 200 else None

    async def unreachable(self) -> str | None:
        """Return why the server gives no response but its own errors, or None.

        Offline, ``transformers serve`` cannot list its models, but still completes requests.
        """
        reasons = []
        for path in (_MODELS, "/health"):
            response = await self._get(path, 10.0)
            if isinstance(response, Response):
                if response.status < 500:
                    return None
                reasons.append(f"HTTP {response.status}")
            else:
                reasons.append(response)
        return reasons[0]

    async def send(self, request: Sent) -> Reply:
        """Send a request once; return its reply or connection error."""
        content = request.body
        model = self._model if self._model is not None or request.named else self._default
        if model is not None:
            content = encoded({**decoded(content), "model": model})
        try:
            return await self._complete(request, content)
        except TimeoutError:
            return Reply(Kind.TIMED_OUT, message=f"no completion within {self._timeout:g} s")
        except OSError as error:
            return Reply(
                Kind.UNREACHABLE, message=f"{self.url} cannot be reached ({self._address.reason(error)})"
            )
        except BrokenConnectionError as error:
            return Reply(Kind.BROKEN, message=f"{self.url} broke the connection ({_named(error)})")

    async def _get(self, path: str, timeout: float) -> Response | str:
        # A connection of its own, because a slow page would delay a request.
        connection = self._new()
        try:
            return await self._page(path, timeout, connection)
        finally:
            self._all.remove(connection)
            await connection.close()

    async def _page(self, path: str, timeout: float, connection: Connection) -> Response | str:
        """Return a page, or why there is none."""
        try:
            async with asyncio.timeout(timeout):
                return await connection.exchange("GET", path)
        except TimeoutError:
            return f"no response within {timeout:g} s"
        except OSError as error:
            return self._address.reason(error)
        except BrokenConnectionError as error:
            return _named(error)

    async def _complete(self, request: Sent, content: bytes) -> Reply:
        """Return the server's reply, never a copy of an earlier one."""
        connection = self._idle.pop() if self._idle else self._new()
        asked, completed = connection.asked > 0, connection.completed
        try:
            reply = _reply(request, await connection.exchange("POST", request.url, content))
            if asked and self._is_copy(reply, first=completed == 0):
                # The first response on a new connection cannot be a copy.
                connection.hang_up()
                reply = _reply(request, await connection.exchange("POST", request.url, content))
            if reply.kind is Kind.ANSWERED and self._remember(reply):
                connection.completed += 1
            else:
                # A later copy of this response could not be recognised.
                connection.hang_up()
        finally:
            self._idle.append(connection)
        return reply

    def _new(self) -> Connection:
        connection = Connection(self._address, self._budget, self._timeout)
        self._all.append(connection)
        return connection

    def _is_copy(self, reply: Reply, *, first: bool) -> bool:
        """Return whether a reply may repeat another one.

        ``first`` is true if the connection completed none yet.
        """
        name = _name(reply)
        if first:
            return (
                not name
                and reply.kind is Kind.REFUSED
                and reply.status is None
                and "error" not in (reply.body or {})
            )
        return name in self._seen

    def _remember(self, reply: Reply) -> bool:
        name = _name(reply)
        if not name or name in self._seen:
            return False
        self._seen[name] = None
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return True


def ignored_field(request: Sent, body: Mapping[str, Any]) -> str | None:
    """Return a request's field that the server ignored, or None.

    Servers ignore unknown fields silently; a missing choice or log-probability shows in the response.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    if len(choices) != request.choices:
        return "n"
    if not request.logprobs:
        return None
    shown = [choice.get("logprobs") for choice in choices if isinstance(choice, Mapping)]
    return "logprobs" if any(entry is None for entry in shown) else None


def _reply(request: Sent, response: Response) -> Reply:
    status, name = response.status, response.headers.get("x-request-id", "")
    body = _parsed(response)
    if not isinstance(body, dict):
        if status == 200 and _is_web_page(response):
            page = "the response is a web page, not a JSON object"
            return Reply(
                Kind.BROKEN, message=page, mend="Check --server: a sign-in page may stand before it."
            )
        body = {"error": {"message": response.text[:500] or f"HTTP {status}"}}
        if status == 200:
            return Reply(Kind.BROKEN, message="the response is not a JSON object")
    name = name or str(body.get("id", ""))
    wait = _retry_after(response.headers.get("retry-after"))
    if status != 200:
        return _refusal(status, body, name, wait, f"HTTP {status}: {_message(body)}", request)
    if (choice := _unfinished(body)) is not None:
        return _ended_early(choice, body, name, request)
    if not _is_completion(request, body):
        reason = f": {_message(body)}" if "error" in body else ""
        message = f"the response holds no completion{reason}"
        code = _code(body.get("error"))
        if code is not None:
            return _refusal(code, body, name, wait, message, request)
        return Reply(Kind.REFUSED, None, body, name, message=message)
    if (field := ignored_field(request, body)) is not None:
        return Reply(Kind.REFUSED, None, body, name, message=f"the server ignored the field {field!r}")
    return Reply(Kind.ANSWERED, status, body, name)


def _refusal(
    status: int, body: Mapping[str, Any], name: str, wait: float | None, message: str, request: Sent
) -> Reply:
    """Return the reply of a status other than 200, sent as such or within a body."""
    mend = _mend(status, body, request)
    if status in _RETRIED and not mend:
        return Reply(Kind.BUSY, status, body, name, wait, message)
    return Reply(Kind.REFUSED, status, body, name, message=message, mend=mend)


def _mend(status: int, body: Mapping[str, Any], request: Sent) -> str:
    """Return the next step if all requests of an endpoint and model are refused alike, or nothing."""
    message = json.dumps(body.get("error", body))
    if status == 402 or (status in (400, 403, 429) and _EMPTY_ACCOUNT.search(message)):
        return f"Fill up the account of the key in {KEY_VARIABLE}."
    if status == 401 or (status == 403 and not _FLAGGED.search(message)):
        return f"Set {KEY_VARIABLE} to a key of the server, or give its header with --header NAME=VALUE."
    if status == 404 and "model" in message.lower():
        return "Give --model NAME, a model that the server has, or correct the rows' model."
    if status in (404, 405):
        return f"Check --server: it has no {request.url}."
    if 300 <= status < 400:
        return "Check --server: it leads elsewhere, perhaps to a sign-in page."
    return ""


def _unfinished(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first choice that the engine did not finish, or None."""
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping) and (
            choice.get("error") or choice.get("finish_reason") in _UNFINISHED
        ):
            return choice
    return None


def _ended_early(choice: Mapping[str, Any], body: Mapping[str, Any], name: str, request: Sent) -> Reply:
    """Return the reply with a completion that is not whole."""
    error = choice.get("error")
    if not error:
        message = f"the engine ended a completion early (finish_reason {choice['finish_reason']!r})"
        return Reply(Kind.ABORTED, None, body, name, message=message)
    message = f"a completion failed: {_message({'error': error})}"
    code = _code(error)
    if code is not None and code not in _RETRIED:
        return Reply(
            Kind.REFUSED, None, body, name, message=message, mend=_mend(code, {"error": error}, request)
        )
    return Reply(Kind.ABORTED, None, body, name, message=message)


def _code(error: object) -> int | None:
    """Return the HTTP status that an error object names, or None."""
    if not isinstance(error, Mapping):
        return None
    for key in ("code", "status", "status_code"):
        code = error.get(key)
        if isinstance(code, str) and code.isdigit():
            code = int(code)
        if type(code) is int and 300 <= code < 600:
            return code
    return None


def _is_web_page(response: Response) -> bool:
    kind = response.headers.get("content-type", "")
    return "html" in kind.lower() or response.body[:200].lstrip()[:9].lower().startswith(
        (b"<html", b"<!doctype")
    )


def _name(reply: Reply) -> str:
    name = (reply.body or {}).get("id")
    return name if isinstance(name, str) else ""


def _parsed(response: Response) -> Any:
    """Return the JSON of a response, or None.

    Infinite numbers become null, lone surrogates the replacement character, so that a file can hold it.
    """
    try:
        return msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
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


def _is_completion(request: Sent, body: Mapping[str, Any]) -> bool:
    if request.url not in (CHAT, COMPLETIONS):
        return not body.get("error")
    choices, chat = body.get("choices"), request.url == CHAT
    return isinstance(choices, list) and bool(choices) and all(_says(choice, chat) for choice in choices)


def _says(choice: object, chat: bool) -> bool:
    """Return whether a choice holds a text or a message.

    A tool call has no content.
    """
    if not isinstance(choice, Mapping):
        return False
    message = choice.get("message" if chat else "text")
    return isinstance(message, Mapping) and bool(message) if chat else message is not None


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    text = error.get("message", error) if isinstance(error, Mapping) else error
    return str(text)[:300]


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header.

    It holds a number or a date.
    """
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
