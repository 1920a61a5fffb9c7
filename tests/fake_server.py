"""An OpenAI-compatible server for tests: slots, iterations in virtual time, and every way to fail."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ODD: dict[str, dict[str, Any]] = {
    "infinite": {"choices": [{"index": 0, "text": "x", "logprobs": {"token_logprobs": [-math.inf, 1e-5]}}]},
    "half a character": {"choices": [{"index": 0, "text": "x \ud83d"}]},
    "endless counts": {"usage": {"prompt_tokens": 10**30, "completion_tokens": 10**25}},
    "no counts": {"usage": [], "created": 1.5, "model": {"name": "x"}},
    "odd choices": {"choices": [{"index": 10**30, "text": ["x"], "finish_reason": {"type": "stop"}}]},
}
"""What stands in a response in place of what is expected there."""

HEAD = "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}\r\n"


@dataclass(eq=False)
class Running:
    """A request under way: the tokens it lacks, and where its response goes."""

    name: str
    left: int
    body: dict[str, Any]
    done: asyncio.Future[None]
    finished: int = 0


class Connection(asyncio.StreamReaderProtocol):
    """A connection that the server knows of from its first moment until it is lost."""

    def __init__(self, server: FakeServer) -> None:
        super().__init__(asyncio.StreamReader(), server._accept)
        self._known = server._transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._held = transport
        self._known.add(transport)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._known.discard(self._held)
        super().connection_lost(error)


@dataclass(eq=False)
class FakeServer:
    """
    Runs in a thread of its own; an iteration gives each running request a token.

    Parameters
    ----------
    slots
        Requests under way at a time; others wait in the order they came.
    gate
        Iterations run only while so many requests are in flight (or all that are left of ``total``), so
        that their count does not depend on how fast the client is. None: whenever there is work.
    total
        Requests the job has.
    faults
        What to do with the attempts at a request, by its prompt, one after the other: a status, ``hang``,
        ``drop`` (the connection), ``garbage``, ``no gzip``, ``error`` (with status 200), ``no choices``,
        ``ignore n``, ``abort`` (a finish reason), ``choice 429`` (an error in a choice), ``body 429`` (in a
        body of status 200), ``sign in`` (a web page),
        ``thinking`` (cut before its text began), or a key of :data:`ODD`; beyond the list it is served.
    die_after
        Completions after which the server loses all it holds and starts anew, again and again.
    on_completion
        Called with the number of completions so far.
    sent
        The requests' names as they are sent: they are begun in that order, though the connections of some may
        overtake others. None: as they are heard.
    lengths
        Tokens that each request has, by its ``user``, whatever it may have at most. None: as many as it may.
    context
        Most tokens of a prompt and its completion, as it tells. None: it does not.
    """

    slots: int
    gate: int | None = None
    total: int = 0
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    die_after: Sequence[int] = ()
    on_completion: Callable[[int], None] | None = None
    sent: Sequence[str] | None = None
    retry_after: str | None = None
    lengths: Mapping[str, int] | None = None
    model: str = "fake"
    context: int | None = None
    port: int = 0
    iterations: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    completions: Counter[str] = field(default_factory=Counter)
    arrivals: list[str] = field(default_factory=list)
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    most_in_flight: int = 0
    deaths: int = 0

    def __enter__(self) -> FakeServer:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._changed = asyncio.Event()
        self._transports: set[asyncio.Transport] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        await self._listen()
        started.set()
        engine = asyncio.create_task(self._engine())
        await self._stop.wait()
        engine.cancel()
        await self._hang_up()

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(lambda: Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        while True:
            # A connection that was accepted just now is handed over in one of the loop's next steps: closed
            # by then, a server drops it without closing it, and its client would wait for ever.
            for _ in range(5):
                await asyncio.sleep(0)
            if not self._transports and not self._tasks:
                break
            for transport in self._transports:
                transport.abort()
            for task in self._tasks:
                task.cancel()
        self._server.close()

    async def _die(self) -> None:
        """Lose everything, be away for a moment, and come back at the same address."""
        self.deaths += 1
        self._waiting.clear()
        self._running.clear()
        self.iterations = 0
        await self._hang_up()
        await asyncio.sleep(0.02)
        await self._listen()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._talk(reader, writer))
        # Not in the task, which may be cancelled before it has begun.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *headers = head.split("\r\n")
        length = next(
            (int(one.split(":")[1]) for one in headers if one.lower().startswith("content-length")), 0
        )
        data = await reader.readexactly(length)
        method, path, _ = line.split(" ")
        self.heads.append(head)
        path = path.partition("?")[0]
        status, text, extra = self._page(path) if method == "GET" else await self._complete(path, data)
        if status == 0:
            return False
        payload = text.encode()
        writer.write(HEAD.format(status, "X", len(payload), extra).encode() + payload)
        await writer.drain()
        return True

    def _page(self, path: str) -> tuple[int, str, str]:
        if path == "/v1/models":
            entry = {"id": self.model, "owned_by": "vllm", "max_model_len": self.context}
            return 200, json.dumps({"data": [entry]}), ""
        if path == "/metrics":
            return 200, self.metrics(), ""
        return 404, "{}", ""

    def metrics(self) -> str:
        return (
            f"# HELP vllm:num_requests_running running\n"
            f"process_start_time_seconds {self.deaths}\n"
            f'vllm:num_requests_running{{engine="0"}} {len(self._running)}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} {len(self._waiting)}.0\n'
            f'vllm:iteration_tokens_total_count{{engine="0"}} {self.iterations}.0\n'
            f'vllm:num_preemptions_total{{engine="0"}} 0.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} 0.0\n'
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",'
            'num_gpu_blocks="9999"} 1.0\n'
        )

    async def _complete(self, path: str, data: bytes) -> tuple[int, str, str]:
        body = json.loads(data)
        chat = path.endswith("chat/completions")
        name = body["messages"][-1]["content"] if chat else body["prompt"]
        self.attempts[name] += 1
        self.arrivals.append(name)
        self.bodies[name] = body
        planned = self.faults.get(name, [])
        fault = planned[self.attempts[name] - 1] if self.attempts[name] <= len(planned) else None
        if isinstance(fault, int):
            extra = f"Retry-After: {self.retry_after}\r\n" if self.retry_after and fault == 429 else ""
            self.total -= fault < 429 and fault not in (408, 409, 425)
            self._changed.set()
            return fault, json.dumps({"error": {"message": f"fault {fault}", "code": fault}}), extra
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            return 0, "", ""
        if fault == "garbage":
            return 200, "<html>", ""
        if fault == "no gzip":
            return 200, "no gzip", "Content-Encoding: gzip\r\n"
        if fault == "sign in":
            return 200, "<!DOCTYPE html><html>Sign in</html>", ""
        if str(fault).startswith("body "):
            return 200, json.dumps({"error": {"message": "busy", "code": int(str(fault)[5:])}}), ""
        if fault == "error":
            return 200, json.dumps({"error": {"message": "out of blocks"}}), ""
        most = int(body.get("max_tokens", 1))
        tokens = most if self.lengths is None else min(most, self.lengths[body.get("user") or body["prompt"]])
        request = Running(name, tokens, body, self._loop.create_future())
        self._waiting.append(request)
        self.most_in_flight = max(self.most_in_flight, len(self._waiting) + len(self._running))
        self._changed.set()
        await request.done
        choices = 0 if fault == "no choices" else 1 if fault == "ignore n" else int(body.get("n", 1))
        said = {"message": {"role": "assistant", "content": name}} if chat else {"text": name}
        made: list[dict[str, Any]] = [{"index": k, **said, "finish_reason": "length"} for k in range(choices)]
        answer = {
            "id": f"cmpl-{name}",
            "choices": made,
            "usage": {
                "prompt_tokens": self._prompt_tokens(body),
                "completion_tokens": tokens * max(1, choices),
            },
        }
        if fault == "thinking":
            made[-1] |= {"text": "", "finish_reason": "length"}
        if fault == "abort" or str(fault).startswith("choice "):
            # The last completion of several is not whole.
            ended = (
                {"finish_reason": "abort"} if fault == "abort" else {"error": {"code": int(str(fault)[7:])}}
            )
            made[-1] |= ended
        return 200, json.dumps(answer | ODD.get(str(fault), {})), ""

    def _prompt_tokens(self, body: Mapping[str, Any]) -> int:
        return 1

    async def _engine(self) -> None:
        deaths = list(self.die_after)
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting or self._running:
                in_flight = len(self._waiting) + len(self._running)
                if self.gate is not None:
                    left = self.total - sum(self.completions.values())
                    if in_flight < min(self.gate, left):
                        break
                await self._iterate()
                if deaths and sum(self.completions.values()) >= deaths[0]:
                    deaths.pop(0)
                    await self._die()

    async def _iterate(self) -> None:
        if self.sent is not None:
            place = {name: at for at, name in enumerate(self.sent)}
            self._waiting.sort(key=lambda request: place[request.name])
        while self._waiting and len(self._running) < self.slots:
            self._running.append(self._waiting.pop(0))
        self.iterations += 1
        for request in list(self._running):
            request.left -= 1
            if request.left <= 0:
                self._running.remove(request)
                self.completions[request.name] += 1
                if not request.done.done():
                    request.done.set_result(None)
                if self.on_completion is not None:
                    self.on_completion(sum(self.completions.values()))
        await asyncio.sleep(0)
