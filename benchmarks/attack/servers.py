"""Servers that mislead: every completion under its own id, an end, little memory, a sound terminal."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .tally import Tally

COUNT = 12
MOST_BYTES = 300 * 2**20
LIMIT = 90.0
"""Seconds after which a run counts as hung: its outage is three."""

_ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(eq=False)
class Talk:
    """A request, and the way to respond; ``before`` is the response before it on this connection."""

    path: str
    name: str
    writer: asyncio.StreamWriter
    number: int
    before: bytes = b""
    said: bytes = b""

    def completion(self, name: str | None = None, **more: object) -> bytes:
        """Return the body of a sound completion."""
        text = self.name if name is None else name
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        return json.dumps({"id": f"c{self.number}", "choices": [choice], "usage": usage, **more}).encode()

    def send(self, body: bytes, *headers: str, status: int = 200) -> None:
        """Send a whole response."""
        lines = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *headers))
        self.said = f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body
        self.writer.write(self.said)

    async def endless(self, head: bytes, part: bytes, pause: float = 0.0) -> None:
        """Send parts without end."""
        self.writer.write(head)
        while True:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(pause)


Kind = Callable[[Talk], Awaitable[None]]


def _body(make: Callable[[Talk], bytes], *headers: str, status: int = 200) -> Kind:
    async def kind(talk: Talk) -> None:
        talk.send(make(talk), *headers, status=status)

    return kind


def _raw(make: Callable[[Talk], bytes], *, close: bool = True) -> Kind:
    async def kind(talk: Talk) -> None:
        talk.writer.write(make(talk))
        await talk.writer.drain()
        if close:
            talk.writer.close()

    return kind


def _endless(head: bytes, part: bytes, pause: float = 0.0) -> Kind:
    async def kind(talk: Talk) -> None:
        await talk.endless(head, part, pause)

    return kind


async def _twice(talk: Talk) -> None:
    talk.send(talk.completion())
    talk.writer.write(talk.said)


async def _twice_later(talk: Talk) -> None:
    talk.send(talk.completion())
    await talk.writer.drain()
    await asyncio.sleep(0.005)
    talk.writer.write(talk.said)


async def _copy_first(talk: Talk) -> None:
    talk.writer.write(talk.before)
    talk.send(talk.completion())


async def _hang(_: Talk) -> None:
    await asyncio.sleep(3600)


def _split(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


_OK = b"HTTP/1.1 200 OK\r\n"
_BOMB = gzip.compress(b" " * 2**27)
_ERROR = json.dumps({"error": {"message": "\x1b]0;owned\x07\x1b[2J\x9b31m"}}).encode()

COMPLETING: Mapping[str, Kind] = {
    "each response twice": _twice,
    "each response twice, the copy later": _twice_later,
    "the response before in front of each": _copy_first,
    "no ids": _body(lambda talk: talk.completion(id=None)),
    "one id for all": _body(lambda talk: talk.completion(id="c")),
    "a body without end": _endless(_OK + b"\r\n", b" " * 65536),
    "a body that trickles": _endless(_OK + b"\r\n", b" ", 0.05),
    "headers without end": _endless(_OK, b"X-More: " + b"x" * 4000 + b"\r\n"),
    "interim responses without end": _endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.001),
    "chunks without end": _endless(_split(b""), b"ffff\r\n" + b" " * 65535 + b"\r\n"),
    "a compressed bomb": _body(lambda _: _BOMB, "Content-Encoding: gzip"),
    "no gzip": _body(lambda talk: talk.completion(), "Content-Encoding: gzip"),
    "an unknown encoding": _body(lambda talk: talk.completion(), "Content-Encoding: xyz"),
    "a length of 10 GB": _raw(lambda _: _OK + b"Content-Length: 9999999999\r\n\r\n{}"),
    "too short a length": _raw(
        lambda talk: _OK + b"Content-Length: 9\r\n\r\n" + talk.completion(), close=False
    ),
    "two lengths": _raw(lambda _: _OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"),
    "a negative chunk": _raw(lambda _: _split(b"-5\r\nx")),
    "half a body": _raw(lambda talk: _OK + b"Content-Length: 999\r\n\r\n" + talk.completion()[:9]),
    "a lost connection": _raw(lambda _: b""),
    "no HTTP": _raw(lambda talk: talk.completion()),
    "another protocol": _raw(lambda _: b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nxx"),
    "a redirect to itself": _body(lambda _: b"", "Location: /v1/completions", status=302),
    "a page": _body(lambda _: b"<html>\x1b[2J</html>"),
    "a list": _body(lambda _: b"[1, 2]"),
    "deep nesting": _body(lambda _: b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
    "a number of 5,000 digits": _body(lambda _: b'{"n": ' + b"9" * 5000 + b"}"),
    "no choices": _body(lambda talk: talk.completion(choices=[])),
    "choices of null": _body(lambda talk: talk.completion(choices=[None])),
    "NaN and half a character": _body(
        lambda talk: talk.completion().replace(b'"length"', b'NaN, "x": "\\ud83d"')
    ),
    "status 200 with an error of escapes": _body(lambda _: _ERROR),
    "status 400 with an error of escapes": _body(lambda _: _ERROR, status=400),
    "status 500": _body(lambda _: _ERROR, status=500),
    "status 503": _body(lambda _: _ERROR, status=503),
    "busy for 31 years": _body(lambda _: _ERROR, "Retry-After: 1e9", status=429),
    "busy until 9999": _body(lambda _: _ERROR, "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT", status=429),
    "silence": _hang,
}
"""Ways to respond to requests."""

_ESCAPES = json.dumps({"version": "\x1b[2J", "data": [{"id": "m"}, {"id": "\x1b]0;x\x07"}]}).encode()

PAGES: Mapping[str, Kind] = {
    "pages that trickle": _endless(_OK + b"\r\n", b"x", 0.2),
    "pages without end": _endless(_OK + b"\r\n", b"x" * 65536),
    "pages of compressed bombs": _body(lambda _: _BOMB, "Content-Encoding: gzip"),
    "pages of escapes": _body(lambda _: _ESCAPES),
    "pages of nonsense": _body(lambda _: b"vllm:num_requests_running -1e400\nvllm:x{ NaN\n\xff"),
}
"""Ways to respond to requests for ``/metrics``, ``/version``, ``/v1/models`` and ``/props``."""


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(eq=False)
class Hostile:
    """Server in a thread of its own that responds in one of these ways."""

    completing: Kind | None = None
    pages: Kind | None = None
    number: int = 0
    port: int = 0

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve, and yield the address."""
        ready, loop = threading.Event(), asyncio.new_event_loop()

        async def listen() -> None:
            server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        def work() -> None:
            loop.run_until_complete(listen())
            loop.run_forever()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        ready.wait(10)
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = b""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"content-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                self.number += 1
                name = str(json.loads(body).get("prompt", "")) if body else ""
                talk = Talk(head.split(" ")[1], name, writer, self.number, before)
                await self._respond(talk)
                await writer.drain()
                before = talk.said
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _respond(self, talk: Talk) -> None:
        if not talk.path.endswith("completions"):
            if self.pages is not None:
                await self.pages(talk)
            else:
                talk.send(b'{"data": []}')
        elif self.completing is not None:
            await self.completing(talk)
        else:
            talk.send(talk.completion())


def mislead(scratch: Path, tally: Tally) -> None:
    """Run a batch on each of the servers."""
    kinds = [(name, Hostile(kind)) for name, kind in COMPLETING.items()]
    kinds += [(name, Hostile(pages=kind)) for name, kind in PAGES.items()]
    for number in tally.numbers(len(kinds)):
        name, server = kinds[number]
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            _try(name, server, Path(folder), tally)


def _try(name: str, server: Hostile, folder: Path, tally: Tally) -> None:
    batch, output = folder / "in.jsonl", folder / "out.jsonl"
    rows = [
        {"custom_id": f"r{k}", "body": {"model": "m", "prompt": f"r{k}", "max_tokens": 2}}
        for k in range(COUNT)
    ]
    batch.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with server.serving() as url:
        words = [sys.executable, "-m", "batchbound", "run", str(batch), "--server", url, "--slots", "4"]
        words += ["-o", str(output), "--trace", str(folder / "trace.jsonl"), "--outage", "3"]
        words += ["--timeout", "2", "--attempts", "2"]
        status, text, memory = _watched(words, folder / "said")
    where = f"{name}: status {status}"
    tally.check(status is not None, f"{where}: no end within {LIMIT:.0f} s")
    tally.check(memory < MOST_BYTES, f"{where}: {memory / 2**20:.0f} MiB")
    tally.check(_ODD.search(text.replace("\r", "")) is None, f"{where}: control characters: {text[:200]!r}")
    tally.check("Traceback" not in text, f"{where}: {text[-300:]}")
    journal = output.with_name(output.name + ".journal")
    kept = [json.loads(line).get("answer") for line in _lines(journal)[1:]] if journal.exists() else []
    lines = [json.loads(line) for line in _lines(output)] if output.exists() else kept
    ids = [line["custom_id"] for line in lines if line]
    tally.check(len(ids) == len(set(ids)), f"{where}: an id twice")
    tally.check(not output.exists() or len(ids) == COUNT, f"{where}: {len(ids)} rows")
    done = [
        line for line in lines if line and line["error"] is None and line["response"]["status_code"] == 200
    ]
    wrong = [line["custom_id"] for line in done if _text(line) != line["custom_id"]]
    tally.check(not wrong, f"{where}: completions of others under {wrong}")
    tally.count(
        "all completed" if len(done) == COUNT else "error rows" if output.exists() else "stopped, told"
    )


def _text(line: Mapping[str, dict[str, dict[str, list[dict[str, str]]]]]) -> str:
    return line["response"]["body"]["choices"][0]["text"]


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _watched(words: list[str], said: Path) -> tuple[int | None, str, int]:
    """Return a command's status, None if it did not end, its words, and its most bytes of memory."""
    environment = os.environ | {"NO_PROXY": "*", "OMP_NUM_THREADS": "1"}
    with said.open("wb") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, env=environment)
        end, peak = time.monotonic() + LIMIT, 0
        while (status := process.poll()) is None and time.monotonic() < end:
            peak = max(peak, _peak_bytes(process.pid))
            time.sleep(0.05)
        if status is None:
            process.kill()
            process.wait()
    return status, said.read_text(errors="replace"), peak


def _peak_bytes(pid: int) -> int:
    """Return the most resident memory of a running process, bytes; that of its parent is not counted."""
    # A child's `ru_maxrss` begins with what its parent held when it forked.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0
