"""Connection to a server for one request at a time."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp
import yarl

_KEEP_SECONDS = 4.0
"""Seconds to keep an idle connection; servers close theirs after five."""

_CONNECT_SECONDS = 10.0


class BrokenConnectionError(Exception):
    """A response that cannot be read to its end."""


@dataclass(slots=True)
class ReplyBudget:
    """Memory for all replies in transit.

    most: Bytes of all replies together; a reply that exceeds it is broken.
    """

    most: int
    used: int = 0

    def take(self, count: int) -> None:
        """Reserve bytes of a reply; raise BrokenConnectionError if too many."""
        if self.used + count > self.most:
            raise BrokenConnectionError(f"the reply is larger than {self.most:,} bytes")
        self.used += count


@dataclass(frozen=True, slots=True)
class Response:
    """Whole response, with a decompressed body and caseless header names."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server, and the headers of each request.

    url: URL without user name, password and ``/v1``.
    proxy: URL of the proxy that the environment names for the server, or None.
    """

    url: str
    headers: Mapping[str, str]
    auth: aiohttp.BasicAuth | None = None
    proxy: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None) -> Address:
        """Return a URL's address and its name and password."""
        parts = urlsplit(url)
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "gzip, deflate",
            "Content-Type": "application/json",
            "User-Agent": "batchbound",
        }
        auth = None
        if key:
            headers["Authorization"] = f"Bearer {key.strip()}"
        elif parts.username is not None:
            auth = aiohttp.BasicAuth(unquote(parts.username), unquote(parts.password or ""), "utf-8")
        host = parts.hostname or ""
        passed = host and not urllib.request.proxy_bypass(host)
        proxy = urllib.request.getproxies().get(parts.scheme) if passed else None
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        return cls(urlunsplit(bare).rstrip("/"), headers, auth, proxy)


class _Tied(aiohttp.ClientResponse):
    """Response that keeps its connection after it is read to its end."""

    held: _Protocol | None = None

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        self.held = connection.protocol
        return await super().start(connection)


_Protocol = aiohttp.client_proto.ResponseHandler


class Connection:
    """
    Connection to a server, opened on first use.

    asked, completed: Requests sent and completed since the connection was opened.
    """

    def __init__(self, address: Address, budget: ReplyBudget, timeout: float) -> None:
        self._address, self._budget = address, budget
        # One session a connection keeps responses away from requests of other connections.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=_KEEP_SECONDS),
            headers=address.headers,
            auth=address.auth,
            proxy=address.proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
            response_class=_Tied,
        )
        # Each limit is a timer a request, so a kept connection has no limit for connecting.
        self._kept = aiohttp.ClientTimeout(total=timeout)
        self._opening = aiohttp.ClientTimeout(total=timeout, connect=min(_CONNECT_SECONDS, timeout))
        self._held: _Protocol | None = None
        self._used_at = 0.0
        self.asked = self.completed = 0

    async def exchange(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Send a request and return its response.

        Raises OSError, BrokenConnectionError, or TimeoutError if it takes too long.
        """
        loop, limits = asyncio.get_running_loop(), self._kept
        if not self._usable(loop.time()):
            limits = self._opening
            self.hang_up()
        taken, url = 0, _url(self._address.url + path)
        try:
            # A payload spares aiohttp the search for the body's type.
            data = None if body is None else aiohttp.BytesPayload(body)
            asked = self._session.request(method, url, data=data, allow_redirects=False, timeout=limits)
            async with asked as reply:
                self.asked += 1
                assert isinstance(reply, _Tied)
                self._held = reply.held
                if (reply.content_length or 0) > self._budget.most:
                    raise BrokenConnectionError(f"the reply is larger than {self._budget.most:,} bytes")
                parts = []
                while not reply.content.at_eof():
                    part = await reply.content.readany()
                    self._budget.take(len(part))
                    taken += len(part)
                    parts.append(part)
            self._used_at = loop.time()
            return Response(reply.status, reply.headers, b"".join(parts))
        except BaseException as error:
            self.hang_up()
            if isinstance(error, aiohttp.ClientError):
                raise _plain(error) from None
            raise
        finally:
            self._budget.used -= taken

    def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        if self._held is not None:
            self._held.abort()
        self._held, self.asked, self.completed = None, 0, 0

    async def close(self) -> None:
        """Close the connection and its session."""
        self.hang_up()
        await self._session.close()

    def _usable(self, now: float) -> bool:
        """Return whether the connection is open, fresh and empty."""
        held = self._held
        fresh = now <= self._used_at + _KEEP_SECONDS
        return held is not None and fresh and held.is_connected() and not held.should_close


@lru_cache(64)
def _url(text: str) -> yarl.URL:
    return yarl.URL(text)


def _plain(error: aiohttp.ClientError) -> OSError | BrokenConnectionError:
    """Translate an error of aiohttp.

    OSError means that no server was reached.
    """
    why = str(error) or type(error).__name__
    reached = (aiohttp.ClientConnectorError, aiohttp.ClientHttpProxyError, aiohttp.ConnectionTimeoutError)
    return OSError(why) if isinstance(error, reached) else BrokenConnectionError(why)
