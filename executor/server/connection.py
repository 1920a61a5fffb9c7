"""Connection to a server for one request at a time."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
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


_ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/embeddings")
"""Ends of a whole endpoint's address, after its version."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server, and the headers of each request.

    base: URL without user name, password, version, endpoint and query.
    headers: Headers of each request; they may be secret, so no message shows them.
    version: Version in the paths of endpoints: ``/v1``, or empty for a whole endpoint's address without one.
    query: Query of each request, such as ``api-version=2026-01-01``.
    proxy: URL of the proxy that the environment names for the server, or None.
    ca: File of certificates to trust, or None for those of the system.
    """

    base: str
    headers: Mapping[str, str] = field(repr=False)
    auth: aiohttp.BasicAuth | None = field(default=None, repr=False)
    version: str = "/v1"
    query: str = ""
    proxy: str | None = None
    ca: str | None = None

    @classmethod
    def of(
        cls, url: str, key: str | None, headers: Mapping[str, str] | None = None, ca: str | None = None
    ) -> Address:
        """Return a URL's address and its name and password."""
        parts = urlsplit(url)
        sent = {
            "Accept": "application/json",
            "Accept-Encoding": "gzip, deflate",
            "Content-Type": "application/json",
            "User-Agent": "batchbound",
        }
        auth = None
        if key:
            sent["Authorization"] = f"Bearer {key.strip()}"
        elif parts.username is not None:
            auth = aiohttp.BasicAuth(unquote(parts.username), unquote(parts.password or ""), "utf-8")
        if headers:
            replaced = {name.lower() for name in headers}
            sent = {name: value for name, value in sent.items() if name.lower() not in replaced} | dict(
                headers
            )
            auth = None if "authorization" in replaced else auth
        path, version = parts.path.rstrip("/"), "/v1"
        endpoint = next((end for end in _ENDPOINTS if path.endswith(end)), "")
        if path.endswith("/v1" + endpoint):
            path = path.removesuffix("/v1" + endpoint)
        elif endpoint:
            path, version = path.removesuffix(endpoint), ""
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path, query="", fragment="")
        proxy = None if _is_direct(parts.hostname or "") else urllib.request.getproxies().get(parts.scheme)
        return cls(urlunsplit(bare), sent, auth, version, parts.query, proxy, ca)

    def url(self, path: str) -> str:
        """Return the URL of a path such as ``/v1/models``."""
        if path.startswith("/v1/"):
            path = self.version + path.removeprefix("/v1")
        return f"{self.base}{path}?{self.query}" if self.query else self.base + path

    def reason(self, error: OSError) -> str:
        """Return why the server cannot be reached, and the next step."""
        why = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return f"{why}; trust its certificate with --ca FILE or SSL_CERT_FILE"
        if self.proxy is None:
            return why
        proxy, server = self.proxy.rpartition("@")[2].rpartition("//")[2], urlsplit(self.base)
        return f"{why}; by the proxy {proxy} of {server.scheme}_proxy; no_proxy={server.hostname} avoids it"


def _is_direct(host: str) -> bool:
    """Return whether no proxy leads to a host.

    Loopback needs none. Networks such as 10.0.0.0/8 in ``no_proxy`` are ours to check.
    """
    if not host or host == "localhost" or urllib.request.proxy_bypass(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    networks = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    return address.is_loopback or any(_holds(network.strip(), address) for network in networks)


def _holds(network: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return "/" in network and address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


@lru_cache(8)
def _trust(ca: str | None) -> ssl.SSLContext | bool:
    return True if ca is None else ssl.create_default_context(cafile=ca)


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
            connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=_KEEP_SECONDS, ssl=_trust(address.ca)),
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
        taken, url = 0, _url(self._address.url(path))
        try:
            # A payload spares aiohttp the search for the body's type.
            data = None if body is None else aiohttp.BytesPayload(body)
            request = self._session.request(method, url, data=data, allow_redirects=False, timeout=limits)
            async with request as reply:
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
        connections = self._held
        fresh = now <= self._used_at + _KEEP_SECONDS
        return (
            connections is not None and fresh and connections.is_connected() and not connections.should_close
        )


@lru_cache(64)
def _url(text: str) -> yarl.URL:
    return yarl.URL(text)


def _plain(error: aiohttp.ClientError) -> OSError | BrokenConnectionError:
    """Translate an error of aiohttp.

    OSError means that no server was reached.
    """
    why = _reason(error)
    reached = (aiohttp.ClientConnectorError, aiohttp.ClientHttpProxyError, aiohttp.ConnectionTimeoutError)
    return OSError(why) if isinstance(error, reached) else BrokenConnectionError(why)


def _reason(error: aiohttp.ClientError) -> str:
    """Return an error in the system's words, if it has some."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return str(error.certificate_error)
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if cause is not None and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)
    return str(cause or error) or type(error).__name__
