"""Requests per second of ``run --server`` and of a plain aiohttp client on an idle server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

CHOICE = {"index": 0, "text": " a b c d e f", "logprobs": None, "finish_reason": "length"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 6}


class Stub(asyncio.Protocol):
    """Completes each request at once with six tokens."""

    served = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            Stub.served += 1
            metrics = head.startswith(b"get /metrics")
            answer = {
                "id": f"cmpl-{Stub.served}",
                "created": 1,
                "model": "m",
                "choices": [CHOICE],
                "usage": USAGE,
            }
            body = b"vllm:num_requests_waiting 1.0\n" if metrics else json.dumps(answer).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def plain(url: str, slots: int, batch: Path, output: Path) -> None:
    """Send the rows as a short script would, with a worker for each request in flight."""
    rows = iter([json.loads(line) for line in batch.read_text().splitlines()])
    start = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        with output.open("w") as stream:

            async def work() -> None:
                for row in rows:
                    async with session.post(f"{url}/v1/completions", json=row["body"]) as reply:
                        body = await reply.json(content_type=None)
                    line = {"custom_id": row["custom_id"], "response": {"status_code": 200, "body": body}}
                    stream.write(json.dumps(line) + "\n")

            await asyncio.gather(*(work() for _ in range(slots + max(4, slots // 8))))
    print(json.dumps({"makespan_s": time.perf_counter() - start}))


@contextlib.contextmanager
def stub() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, __file__, "--stub"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait()


def timed(words: list[str]) -> tuple[float, float]:
    """Return the seconds that a command was sending, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"NO_PROXY": "*"}
    said = subprocess.run(words, check=True, capture_output=True, env=environment, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(json.loads(said)["makespan_s"]), cpu


def compare(rows: int, slots: int, folder: Path) -> None:
    """Print what both clients do with the same rows, one after the other."""
    batch, short, answers = (folder / f"{name}.jsonl" for name in ("batch", "short", "answers"))
    lines = []
    for k in range(rows):
        body = {"model": "m", "prompt": [*range(9), k], "max_tokens": 6}
        lines.append(json.dumps({"custom_id": f"r{k}", "url": "/v1/completions", "body": body}) + "\n")
    batch.write_text("".join(lines))
    short.write_text("".join(lines[:16]))
    with stub() as url:
        own = [sys.executable, "-m", "batchbound", "run", str(batch), "--server", url, "--slots", str(slots)]
        own += ["-o", str(answers), "--trace", str(folder / "trace.jsonl"), "--order", "file"]
        own += ["--overwrite", "--quiet", "--json"]
        other = [sys.executable, __file__, "--plain", url, str(slots), str(batch), str(answers)]
        results = []
        for words in (other, own):
            seconds, cpu = timed(words)
            # A few rows take what the start of Python and its imports take.
            started = timed([str(short) if word == str(batch) else word for word in words])[1]
            results.append((rows / seconds, cpu - started))
    (other_rate, other_cpu), (rate, cpu) = results
    print(
        f"{slots:5} slots: plain {other_rate:6,.0f}/s {other_cpu:5.1f} CPU s, batchbound {rate:6,.0f}/s"
        f" {cpu:5.1f} CPU s; {rate / other_rate:.2f} of the requests/s, {cpu / other_cpu:.2f} of the CPU s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        asyncio.run(serve())
    elif options.plain:
        url, slots, batch, output = options.plain
        asyncio.run(plain(url, int(slots), Path(batch), Path(output)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for slots in options.slots:
                compare(options.rows, slots, Path(folder))


if __name__ == "__main__":
    main()
