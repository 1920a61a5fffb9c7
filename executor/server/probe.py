"""Probe of a server: facts before a job, counters during it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from ...data.readers.server_metrics import KINDS, ServerMetrics, parse_metrics
from .client import ServerClient


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a server; None if unknown.

    engine: ``vllm``, ``sglang``, ``llama.cpp`` or ``unknown``.
    models: Names of the models that it serves.
    roots: Where it loaded them from: names, or directories on its machine.
    slots: Requests that it runs at a time.
    context: Most tokens of a prompt and its completion.
    why: Why it cannot be reached; empty if it can.
    """

    url: str
    reachable: bool
    engine: str = "unknown"
    version: str | None = None
    models: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    slots: int | None = None
    context: int | None = None
    metrics: ServerMetrics | None = None
    why: str = ""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the unknown facts, for a message."""
        metrics = self.metrics or ServerMetrics()
        missing = {
            "which engine it is": None if self.engine == "unknown" else self.engine,
            "its slots (max_num_seqs)": self.slots,
            "its room for KV cache": metrics.kv_tokens,
            "how many iterations it runs": metrics.iterations,
            "whether others use it": metrics.running,
            # No engine reports its scheduling policy, and one without priorities ignores the field.
            "whether it heeds priority": None,
        }
        return tuple(name for name, known in missing.items() if known is None)


async def probe(client: ServerClient) -> ServerFacts:
    """Return the facts about a server without a completion request."""
    models, metrics, version, props = await asyncio.gather(
        *(client.text(path) for path in ("/v1/models", "/metrics", "/version", "/props"))
    )
    why = None if models is not None or metrics is not None else await client.unreachable()
    counters = None if metrics is None else parse_metrics(metrics)
    listed = [entry for entry in _list(_object(models).get("data")) if isinstance(entry, dict)]
    engine = "unknown" if counters is None else counters.engine
    owners = {str(entry.get("owned_by")).lower() for entry in listed}
    if engine == "unknown":
        engine = next((kind.name for kind in KINDS if kind.owner and kind.owner in owners), "unknown")
    contexts = [length for entry in listed if type(length := entry.get("max_model_len")) is int]
    slots = _object(props).get("total_slots")
    if engine == "unknown" and type(slots) is int:
        engine = "llama.cpp"
    stated = _object(version).get("version")
    return ServerFacts(
        url=client.url,
        reachable=why is None,
        why=why or "",
        engine=engine,
        version=stated if isinstance(stated, str) else None,
        models=tuple(str(entry["id"]) for entry in listed if "id" in entry),
        roots=tuple(entry["root"] for entry in listed if isinstance(entry.get("root"), str)),
        slots=slots if type(slots) is int else None,
        context=min(contexts, default=None),
        metrics=counters,
    )


class Watch:
    """Regular reader of a server's counters during a job.

    every: Seconds between two readings.
    on_read: Called with the counters of each reading.
    """

    def __init__(
        self,
        client: ServerClient,
        every: float = 1.0,
        on_read: Callable[[ServerMetrics], None] = lambda _: None,
    ) -> None:
        self._client, self._every, self._on_read = client, every, on_read
        self.most_running = 0
        self.most_waiting = 0
        self.plateau = 0
        self.crowded = 0

    async def run(self) -> None:
        """Read the counters until cancelled."""
        while True:
            await asyncio.sleep(self._every)
            metrics = await self.read()
            if metrics is not None:
                self._on_read(metrics)

    async def read(self) -> ServerMetrics | None:
        """Return the current counters; None if the server has none."""
        text = await self._client.text("/metrics")
        if text is None:
            return None
        metrics = parse_metrics(text)
        self.most_running = max(self.most_running, metrics.running or 0)
        self.most_waiting = max(self.most_waiting, metrics.waiting or 0)
        if metrics.waiting:
            # While requests wait, the server runs as many as it can, but for those that ended just now.
            self.crowded += 1
            self.plateau = max(self.plateau, metrics.running or 0)
        return metrics


def _object(text: str | None) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
