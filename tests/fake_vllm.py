"""A ``vllm serve`` that computes nothing: it takes vLLM's options, logs as vLLM does, and can be paused."""

from __future__ import annotations

import argparse
import json
import signal

from fake_server import FakeServer


class FakeVllm(FakeServer):
    """Names requests as they name themselves, and prints what vLLM prints of requests and iterations."""

    async def _complete(self, path: str, data: bytes) -> tuple[int, str, str]:
        if path.startswith(("/pause", "/resume")):
            # As many requests as never come.
            self.gate, self.total = (10**9, 10**9) if path.startswith("/pause") else (None, 0)
            self._changed.set()
            return 200, "{}", ""
        if path.startswith("/reset_prefix_cache"):
            return 200, "{}", ""
        body = json.loads(data)
        # A prompt of token ids is no name.
        body["prompt"] = body.setdefault("request_id", str(body.get("user", len(self.arrivals))))
        print(f"Added request cmpl-{body['request_id']}-0", flush=True)
        return await super()._complete(path, json.dumps(body).encode())

    async def _iterate(self) -> None:
        running = len(self._running)
        joining = min(self.slots - running, len(self._waiting))
        print(
            f"Iteration({self.iterations}): {joining} context requests, {joining} context tokens,"
            f" {running} generation requests",
            flush=True,
        )
        await super()._iterate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    options, _ = parser.parse_known_args()
    asked = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    with FakeVllm(options.max_num_seqs, model=options.served_model_name, port=options.port):
        signal.sigwait(asked)


if __name__ == "__main__":
    main()
