"""An OpenAI-compatible server with vLLM's prefix cache, block by block: a token is four letters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from block_simulator import BlockEngine
from fake_server import FakeServer, Running


@dataclass(eq=False)
class FakeCachedServer(FakeServer):
    """
    Serves as vLLM schedules.

    Parameters
    ----------
    blocks, block_tokens
        Its KV cache.
    budget
        Tokens of an iteration.
    tokenizes
        True if it has ``/tokenize``.
    """

    blocks: int = 64
    block_tokens: int = 4
    budget: int = 2048
    tokenizes: bool = True

    def __post_init__(self) -> None:
        self.engine = BlockEngine(self.slots, self.budget, self.blocks, self.block_tokens)
        self._numbers: dict[int, Running] = {}
        self._left: dict[str, int] = {}
        self.tokenized: list[Any] = []

    def metrics(self) -> str:
        running, waiting = len(self.engine.running), len(self.engine.waiting)
        text = super().metrics()
        for name, count in (("running", running), ("waiting", waiting + len(self._waiting))):
            line = f'vllm:num_requests_{name}{{engine="0"}} '
            before, _, after = text.partition(line)
            text = f"{before}{line}{count}.0\n" + after.partition("\n")[2]
        hits = 'vllm:prefix_cache_hits_total{engine="0"}'
        text = text.replace(f"{hits} 0.0", f"{hits} {self.engine.hits}.0")
        # One more block than it hands out, as vLLM has.
        cache = f'block_size="{self.block_tokens}",enable_prefix_caching="True",'
        known = 'block_size="16",enable_prefix_caching="False",'
        return text.replace(known, cache).replace('"9999"', f'"{self.blocks + 1}"')

    async def _complete(self, path: str, data: bytes) -> tuple[int, str, str]:
        if path != "/tokenize":
            return await super()._complete(path, data)
        body = json.loads(data)
        self.tokenized.append(body)
        if not self.tokenizes:
            return 404, "{}", ""
        return 200, json.dumps({"tokens": _tokens(body)}), ""

    def _prompt_tokens(self, body: Mapping[str, Any]) -> int:
        return len(_tokens(body))

    async def _iterate(self) -> None:
        if self.sent is not None:
            place = {name: at for at, name in enumerate(self.sent)}
            self._waiting.sort(key=lambda request: place[request.name])
        for request in self._waiting:
            self._running.append(request)
            self._left[request.name] = int(request.body.get("n", 1))
            for _ in range(self._left[request.name]):
                number = len(self._numbers)
                self._numbers[number] = request
                self.engine.add(number, _tokens(request.body), request.left)
        self._waiting.clear()
        for number in self.engine.step():
            request = self._numbers[number]
            self._left[request.name] -= 1
            if self._left[request.name]:
                continue
            self._running.remove(request)
            self.completions[request.name] += 1
            if not request.done.done():
                request.done.set_result(None)
        self.iterations = self.engine.iterations
        await asyncio.sleep(0)


def _tokens(body: Mapping[str, Any]) -> list[int]:
    if "messages" in body:
        text = "".join(f"<{one['role']}>{one['content']}" for one in body["messages"])
    else:
        text = str(body["prompt"])
    return [int.from_bytes(text[at : at + 4].encode()) % 2**24 for at in range(0, len(text), 4)]
