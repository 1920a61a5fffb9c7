"""HTTP/1.1 connection for one request at a time; bytes that no request asked for close it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

_HEAD_BYTES = 2**16
"""Most bytes of a response's status line and headers."""

_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class BrokenConnectionError(Exception):
    """A response that cannot be read to its end."""


@dataclass(slots=True)
class ReplyBudget:
    """
    Memory for the replies that arrive at a time.

    most: Bytes of all of them together; a reply that exceeds it is broken.
    """

    most: int
    used: int = 0

    def take(self, count: int) -> None:
        """Reserve bytes of a reply, or raise BrokenConnectionError."""
        if self.used + count > self.most:
            raise BrokenConnectionError(f"the reply is larger than {self.most:,} bytes")
        self.used += count


@dataclass(frozen=True, slots=True)
class Response:
    """
    A whole response.

    headers: Values by names in lower case.
    body: Its bytes, decompressed.
    repeated: Whether it equals the response before it on this connection.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    repeated: bool = False

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")


class Connection(asyncio.Protocol):
    """Connection to a server, whose next request is sent when the response before is complete."""

    def __init__(self, budget: ReplyBudget, known: set[Connection]) -> None:
        self._budget, self._taken, self._known = budget, 0, known
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Response] | None = None
        self._buffer, self._body = bytearray(), bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._length: int | None = None
        self._chunked = self._keep = False
        self._last = b""
        self.used_at = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._waiter is None

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, head: bytes, body: bytes = b"") -> Response:
        """Send a request and return its response, or raise BrokenConnectionError."""
        if self._transport is None or not self.usable:
            raise BrokenConnectionError("it is closed")
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._transport.write(head + body)
        self._keep = False
        try:
            return await self._waiter
        finally:
            self._waiter = None
            self.used_at = loop.time()
            self._budget.used -= self._taken
            self._taken = 0
            self._buffer, self._body, self._head = bytearray(), bytearray(), None
            if not self._keep:
                self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._known.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """End the response that lasts until the connection is closed; break any other."""
        self._known.discard(self)
        if self._head is not None and self._length is None and not self._chunked and error is None:
            self._complete(bytes(self._buffer), keep=False)
        self._fail(str(error) if error else "the server closed it without a whole response")

    def data_received(self, data: bytes) -> None:
        """Read on in the response."""
        if self._waiter is None or self._waiter.done():
            # Taken for the next response, these bytes would put a completion under another custom_id.
            self._keep = False
            self.close()
            return
        try:
            self._budget.take(len(data))
            self._taken += len(data)
            self._buffer += data
            self._read()
        except (BrokenConnectionError, ValueError) as error:
            self._keep = False
            self._fail(str(error))
            self.close()

    def _read(self) -> None:
        while self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _HEAD_BYTES:
                    raise BrokenConnectionError("the headers of the reply do not end")
                return
            head = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            self._begin(head)
        if self._chunked:
            if self._dechunk():
                self._complete(bytes(self._body), keep=not self._buffer)
        elif self._length is not None and len(self._buffer) >= self._length:
            body = bytes(self._buffer[: self._length])
            self._complete(body, keep=len(self._buffer) == self._length)

    def _begin(self, head: bytes) -> None:
        """Note the status and headers; interim responses are passed over."""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or len(code) != 3 or not code.isdecimal():
            raise BrokenConnectionError("the response is not HTTP/1.1")
        status, headers = int(code), dict[str, str]()
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or name != name.strip():
                raise BrokenConnectionError("a header of the response is damaged")
            name, value = name.lower(), value.strip()
            if name in ("content-length", "transfer-encoding") and headers.get(name, value) != value:
                raise BrokenConnectionError(f"the response has two values of {name}")
            headers[name] = value
        if 100 <= status < 200:
            return
        self._head = status, headers
        stays = headers.get("connection", "" if version == "HTTP/1.1" else "close").lower()
        # The body of an error is often the same, so that a copy of it could not be told from a response.
        self._keep = "close" not in stays and status == 200
        self._frame(status, headers)

    def _frame(self, status: int, headers: Mapping[str, str]) -> None:
        """Note where the body ends."""
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        self._chunked, self._length = coding is not None, None
        if coding is not None and coding.lower() != "chunked":
            raise BrokenConnectionError(f"unknown transfer encoding {coding[:40]!r}")
        if self._chunked:
            return
        if status in (204, 304):
            self._length = 0
        elif length is not None:
            if not (length.isascii() and length.isdecimal() and len(length) < 20):
                raise BrokenConnectionError("the content length is no number")
            self._length = int(length)
            if self._length > self._budget.most:
                raise BrokenConnectionError(f"the reply is larger than {self._budget.most:,} bytes")

    def _dechunk(self) -> bool:
        """Move whole chunks to the body, and return whether the last one is read."""
        at, ended = 0, False
        while True:
            end = self._buffer.find(b"\r\n", at)
            if end < 0:
                if len(self._buffer) - at > _HEAD_BYTES:
                    raise BrokenConnectionError("a chunk of the reply has no size")
                break
            size = int(bytes(self._buffer[at:end]).partition(b";")[0], 16)
            if size < 0:
                raise BrokenConnectionError("a chunk of the reply has no size")
            if size == 0:
                # Trailers end at an empty line, which follows at once where there are none.
                last = self._buffer.find(b"\r\n\r\n", end)
                if last >= 0:
                    at, ended = last + 4, True
                break
            if len(self._buffer) < end + 4 + size:
                break
            self._body += self._buffer[end + 2 : end + 2 + size]
            at = end + 4 + size
        del self._buffer[:at]
        return ended

    def _complete(self, body: bytes, *, keep: bool) -> None:
        if self._head is None or self._waiter is None or self._waiter.done():
            return
        status, headers = self._head
        self._keep = self._keep and keep
        try:
            repeated = bool(body) and body == self._last
            self._last = body
            body = self._decoded(body, headers.get("content-encoding", "identity").lower())
        except (zlib.error, BrokenConnectionError) as error:
            self._keep = False
            self._fail(str(error))
            return
        self._waiter.set_result(Response(status, headers, body, repeated))

    def _decoded(self, body: bytes, coding: str) -> bytes:
        """Return the body decompressed, within the memory for replies."""
        if coding in ("", "identity"):
            return body
        if coding not in _WINDOW:
            raise BrokenConnectionError(f"unknown content encoding {coding[:40]!r}")
        room = self._budget.most - self._budget.used
        found = zlib.decompressobj(_WINDOW[coding])
        text = found.decompress(body, max(1, room))
        if found.unconsumed_tail or not found.eof:
            raise BrokenConnectionError(f"the reply is cut off, or larger than {self._budget.most:,} bytes")
        return text

    def _fail(self, why: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(BrokenConnectionError(why))
