"""Requests with forced lengths, sent to a server in a plan's order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...data.files.disk import InputError
from ...data.iteration_plan import IterationPlan
from ...data.prefix_tree import PrefixTree
from ...data.readers.openai_batch import COMPLETIONS
from ...data.readers.replayed import Replayed
from ...data.readers.server_batch import Sent, encoded
from ...data.readers.server_metrics import ServerMetrics
from ...data.readers.server_run import ServerCount
from .client import ServerClient
from .probe import ServerFacts, Watch, probe
from .reply import Kind
from .sending import run_until_stopped

_FIRST_ID, _IDS = 3, 248
"""Token ids of prompts, which every vocabulary has."""

_READ_SECONDS = 0.02
"""Seconds between readings of the counters; fewer tell the iteration of a completion more exactly."""

_WAVE_SECONDS = 0.05
"""Seconds between the first waves of requests, each of as many as the slots."""

_REQUEST_SECONDS = 3600.0


def forced_prompts(lengths: Sequence[int], tree: PrefixTree | None, seed: int = 0) -> list[list[int]]:
    """Return prompts of random token ids that share the beginnings of a tree, and no others."""
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> list[int]:
        ids: list[int] = (_FIRST_ID + rng.integers(0, _IDS, count)).tolist()
        return ids

    if tree is None:
        return [drawn(length) for length in lengths]
    through = list[list[int]]()
    for parent, tokens in zip(tree.parent.tolist(), tree.tokens.tolist(), strict=True):
        through.append((through[parent] if parent >= 0 else []) + drawn(tokens))
    prompts: list[list[int]] = [[] for _ in lengths]
    # A prompt is made before those that continue it.
    for request in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        leaf, before = int(tree.leaf[request]), int(tree.continues[request])
        begin = through[leaf] if leaf >= 0 else []
        if before >= 0 and len(prompts[before]) > len(begin):
            begin = prompts[before]
        prompts[request] = begin + drawn(lengths[request] - len(begin))
    return prompts


@dataclass(frozen=True, slots=True)
class ForcedRun:
    """Replay of a plan on one server.

    url: Address of the server.
    model: Model to name; None for the first that the server lists.
    """

    url: str
    model: str | None = None

    def facts(self) -> ServerFacts:
        """Return the facts about the server; raise InputError if it cannot be reached."""

        async def ask() -> ServerFacts:
            client = self._client()
            try:
                return await probe(client)
            finally:
                await client.close()

        facts = run_until_stopped(ask())
        if not facts.reachable:
            hint = "Start it, or correct the address."
            raise InputError(f"cannot be reached ({facts.why})", where=self.url, hint=hint)
        return facts

    def run(self, plan: IterationPlan, facts: ServerFacts) -> Replayed:
        """Send all requests; raise InputError if one has no completion."""
        model = self.model or next(iter(facts.models), None)
        work = plan.workload
        prompts = forced_prompts(work.input_tokens.tolist(), plan.tree)
        bodies = [
            _body(str(name), prompt, tokens, model)
            for name, prompt, tokens in zip(work.ids, prompts, work.output_tokens.tolist(), strict=True)
        ]
        return run_until_stopped(self._run(plan, facts, bodies))

    def _client(self) -> ServerClient:
        return ServerClient(self.url, timeout=_REQUEST_SECONDS)

    async def _run(self, plan: IterationPlan, facts: ServerFacts, bodies: Sequence[Sent]) -> Replayed:
        share, client = plan.shares[0], self._client()
        readings = list[tuple[float, ServerMetrics]]()
        loop = asyncio.get_running_loop()
        watch = Watch(client, _READ_SECONDS, lambda metrics: readings.append((loop.time(), metrics)))
        columns = np.zeros((4, len(bodies)))
        waiting = iter(share.requests.tolist())

        async def serve() -> None:
            for request in waiting:
                sent = loop.time()
                reply = await client.send(bodies[request])
                if reply.kind is not Kind.ANSWERED or reply.body is None:
                    name = str(plan.workload.ids[request])
                    hint = "Replay on a server that takes such requests, with nothing else to do."
                    raise InputError(
                        f"{name!r} has no completion: {reply.message}", where=self.url, hint=hint
                    )
                usage: Any = reply.body.get("usage") or {}
                counts = (int(usage.get(f"{kind}_tokens", 0)) for kind in ("prompt", "completion"))
                columns[:, request] = (sent, loop.time(), *counts)

        try:
            await client.open(share.in_flight)
            before, begun = await watch.read(), loop.time()
            reader = asyncio.create_task(watch.run())
            try:
                async with asyncio.TaskGroup() as group:
                    for place in range(share.in_flight):
                        if place and place % share.limits.sequences == 0:
                            await asyncio.sleep(_WAVE_SECONDS)
                        group.create_task(serve())
            except* InputError as errors:
                raise errors.exceptions[0] from None
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            if (after := await watch.read()) is not None:
                readings.append((loop.time(), after))
        finally:
            await client.close()
        return _replayed(plan, facts, columns, (begun, before), readings)


def _body(name: str, prompt: list[int], tokens: int, model: str | None) -> Sent:
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    named = {} if model is None else {"model": model}
    return Sent(COMPLETIONS, encoded({**named, **body, "user": name}), 1, False, model is not None)


def _replayed(
    plan: IterationPlan,
    facts: ServerFacts,
    columns: np.ndarray[Any, np.dtype[np.float64]],
    start: tuple[float, ServerMetrics | None],
    readings: Sequence[tuple[float, ServerMetrics]],
) -> Replayed:
    begun, before = start
    first = None if before is None else before.iterations
    # An iteration is counted when it ends.
    counted = [
        (at - begun, m.iterations) for at, m in readings if m.iterations is not None and first is not None
    ]
    steps = [(0.0, 0), *((at, iterations - (first or 0)) for at, iterations in counted)] if counted else []
    server = ServerCount(facts.url, facts.engine, facts.version)
    if readings and before is not None:
        last = readings[-1][1]

        def during(name: str) -> int | None:
            begin, end = getattr(before, name), getattr(last, name)
            return None if begin is None or end is None else max(0, int(end - begin))

        server = replace(
            server,
            iterations=steps[-1][1] if steps else None,
            preemptions=during("preemptions"),
            cached_tokens=during("cached_tokens"),
            most_running=max(m.running or 0 for _, m in readings),
            kv_tokens=last.kv_tokens,
            block_tokens=last.block_tokens,
            prefix_caching=last.prefix_caching,
            engines=last.engines,
        )
    sent, finished, prompt, completion = columns
    return Replayed(
        plan,
        server,
        sent - begun,
        finished - begun,
        prompt.astype(np.int64),
        completion.astype(np.int64),
        np.array([at for at, _ in steps]),
        np.array([iterations for _, iterations in steps], dtype=np.int64),
    )
