"""Servers that break HTTP: no response is taken for another's, and none takes all memory or time."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from batchbound.data.readers.server_batch import Sent, ServerRequest
from batchbound.executor.server.client import ServerClient
from batchbound.executor.server.reply import Kind, Reply

T = TypeVar("T")
Answer = Callable[[str, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def request_of(name: str) -> Sent:
    return ServerRequest(name, "/v1/completions", 1, {"model": "m", "prompt": name, "max_tokens": 1}).sent


def completion(name: str) -> bytes:
    return json.dumps({"id": name, "choices": [{"index": 0, "text": name}]}).encode()


def response(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *headers))
    return f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode() + body


def serve(answer: Answer, work: Callable[[ServerClient], Coroutine[Any, Any, T]], **more: Any) -> T:
    """Return what work with a client finds on a server that answers so."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next(
                    (int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0
                )
                body = await reader.readexactly(length)
                await answer(json.loads(body).get("prompt", "") if body else "", writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> T:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = ServerClient(f"http://127.0.0.1:{port}", timeout=more.pop("timeout", 20.0), **more)
        try:
            return await work(client)
        finally:
            await client.close()
            server.close()

    return asyncio.run(main())


async def send_all(client: ServerClient) -> list[Reply]:
    return [await client.send(request_of(f"r{k}")) for k in range(6)]


def texts(replies: list[Reply]) -> list[str | None]:
    return [reply.body["choices"][0]["text"] if reply.body else None for reply in replies]


def test_a_response_sent_twice_at_once_is_not_the_next_ones() -> None:
    async def twice(name: str, writer: asyncio.StreamWriter) -> None:
        writer.write(2 * response(completion(name)))

    assert texts(serve(twice, send_all)) == [f"r{k}" for k in range(6)]


def test_a_copy_that_comes_while_no_request_runs_closes_the_connection() -> None:
    async def twice(name: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(completion(name)))
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(response(completion(name)))

    async def slowly(client: ServerClient) -> list[Reply]:
        found = []
        for k in range(4):
            found.append(await client.send(request_of(f"r{k}")))
            await asyncio.sleep(0.02)
        return found

    assert texts(serve(twice, slowly)) == [f"r{k}" for k in range(4)]


def test_a_copy_that_comes_after_the_next_request_is_recognised() -> None:
    last: dict[asyncio.StreamWriter, bytes] = {}

    async def late(name: str, writer: asyncio.StreamWriter) -> None:
        copy, last[writer] = last.get(writer, b""), response(completion(name))
        # The copy of the response before stands where this request's own is expected.
        writer.write(copy + last[writer])

    assert texts(serve(late, send_all)) == [f"r{k}" for k in range(6)]


def test_completions_without_names_come_on_a_connection_each_and_are_asked_for_once() -> None:
    asked: list[asyncio.StreamWriter] = []

    async def same(_: str, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.write(response(b'{"choices": [{"text": "yes"}]}'))

    assert texts(serve(same, send_all)) == ["yes"] * 6
    assert len(asked) == len(set(asked)) == 6


def test_completions_of_one_name_come_on_a_connection_each() -> None:
    async def same(name: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(completion(name).replace(b'"id": "%b"' % name.encode(), b'"id": "x"')))

    assert texts(serve(same, send_all)) == [f"r{k}" for k in range(6)]


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[str] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        targets.append((await reader.readuntil(b"\r\n\r\n")).decode().split()[1])
        writer.write(response(completion("r0"), "Connection: close"))
        writer.close()

    async def main() -> Reply:
        listening = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "")
        client = ServerClient("http://model.invalid:8000/v1", timeout=20.0)
        try:
            return await client.send(request_of("r0"))
        finally:
            await client.close()
            listening.close()

    assert asyncio.run(main()).kind is Kind.ANSWERED
    assert targets == ["http://model.invalid:8000/v1/completions"]


def test_chunks_and_compressed_bodies_are_read() -> None:
    async def chunked(name: str, writer: asyncio.StreamWriter) -> None:
        body = gzip.compress(completion(name))
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n"
        writer.write(head + b"5;x=y\r\n" + body[:5] + b"\r\n")
        await asyncio.sleep(0)
        writer.write(f"{len(body) - 5:x}\r\n".encode() + body[5:] + b"\r\n0\r\n\r\n")

    assert texts(serve(chunked, send_all)) == [f"r{k}" for k in range(6)]


def test_a_body_without_length_ends_with_the_connection() -> None:
    async def closing(name: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + completion(name))
        writer.close()

    assert texts(serve(closing, send_all)) == [f"r{k}" for k in range(6)]


async def _endless(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b" " * 65536)
        await writer.drain()


async def _bomb(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(response(gzip.compress(b" " * 10**7), "Content-Encoding: gzip"))


async def _headers(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


async def _huge(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")


async def _chunk(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nx")


async def _lengths(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}")


@pytest.mark.parametrize("answer", [_endless, _bomb, _headers, _huge, _chunk, _lengths])
def test_replies_without_end_or_with_false_lengths_are_broken(answer: Answer) -> None:
    async def one(client: ServerClient) -> Reply:
        return await client.send(request_of("r0"))

    assert serve(answer, one, largest=10**6).kind is Kind.BROKEN


def test_a_page_that_trickles_ends_in_time() -> None:
    async def trickle(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async def page(client: ServerClient) -> str | None:
        return await client.text("/metrics", timeout=0.2)

    assert serve(trickle, page) is None


@pytest.mark.parametrize("message", ["null", "{}", '"x"'])
def test_a_choice_without_a_message_is_no_completion(message: str) -> None:
    async def empty(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(response(f'{{"choices": [{{"message": {message}}}]}}'.encode()))

    async def chat(client: ServerClient) -> Reply:
        body = {"model": "m", "messages": [{"role": "user", "content": "r0"}], "max_tokens": 1}
        return await client.send(ServerRequest("r0", "/v1/chat/completions", 1, body).sent)

    assert serve(empty, chat).kind is Kind.REFUSED


def test_a_burst_arrives_in_the_order_it_was_sent() -> None:
    arrived: list[str] = []

    async def note(name: str, writer: asyncio.StreamWriter) -> None:
        if name:
            arrived.append(name)
        writer.write(response(completion(name)))

    async def burst(client: ServerClient) -> None:
        await client.open(50)
        await asyncio.gather(*(client.send(request_of(f"r{k}")) for k in range(50)))

    serve(note, burst)
    assert arrived == [f"r{k}" for k in range(50)]
