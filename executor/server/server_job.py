"""A batch on existing servers: from request bodies to completions on disk."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np

from ...data.arrays import IntArray
from ...data.lengths.repair import LengthRepair
from ...data.readers.server_batch import ServerRequest
from ...data.readers.server_metrics import ServerMetrics
from ...data.readers.server_run import ServerCount, ServerRun
from ...data.workload import LONGEST, numbered
from ..jobs.journal import Journal
from ..jobs.params import RunParams, running_of
from ..models.faults import Alert
from .client import Kind, Reply, ServerClient
from .dispatch import Dispatch, Served, in_flight_of
from .probe import ServerFacts, Watch, probe
from .sending import Outage, Sender, run_until_stopped


@dataclass(frozen=True, slots=True, eq=False)
class ServerOutcome:
    """
    Outcome of a run on servers.

    run: Of the requests this run served.
    failed: Requests that have no completion, of this run and of an earlier part of it.
    stopped: Why the run ended early, or None.
    """

    run: ServerRun
    failed: int
    stopped: str | None


@dataclass(frozen=True, slots=True, eq=False)
class ServerJob:
    """
    A batch, the order to release it in, and the servers.

    requests: In the order of their file.
    order: Positions of all requests, first to be sent first, shape (requests,).
    urls: The servers: replicas of one another.
    slots: Requests each of them works on at a time.
    in_flight: Completions to keep in flight on each; by default as :func:`.in_flight_of` says, and up to four
        times as many where a server's queue is seen to run empty.
    order_name: Name of the order.
    model: Goes in the place of every body's ``model``; None to leave them.
    params: Time limits and retries.
    seed: Of the random waits between attempts.
    planned: Tokens each completion is planned to have, shape (requests,): what is left to send is put in
        order again, longest first, as the lengths of other completions of the same prompts are seen. None to
        keep to the order.
    """

    requests: Sequence[ServerRequest]
    order: Sequence[int]
    urls: Sequence[str]
    slots: int
    in_flight: int | None = None
    order_name: str = "plan"
    model: str | None = None
    params: RunParams = field(default_factory=RunParams)
    seed: int = 0
    planned: IntArray | None = None

    @property
    def flying(self) -> int:
        """Completions kept in flight on each server."""
        if self.in_flight is not None:
            return self.in_flight
        largest = max((request.choices for request in self.requests), default=1)
        return in_flight_of(self.slots, running_of(largest, self.params.running_share))

    def probe(self) -> tuple[ServerFacts, ...]:
        """Return what the servers tell of themselves."""

        async def ask() -> tuple[ServerFacts, ...]:
            async with contextlib.AsyncExitStack() as stack:
                clients = [self._client(url) for url in self.urls]
                for client in clients:
                    stack.push_async_callback(client.close)
                return tuple(await asyncio.gather(*map(probe, clients)))

        return run_until_stopped(ask())

    def run(
        self,
        journal: Journal,
        facts: Sequence[ServerFacts],
        *,
        on_served: Callable[[int], None] | None = None,
        remark: Callable[[str], None] = lambda _: None,
    ) -> ServerOutcome:
        """Send every request that has no outcome in the journal yet."""
        return run_until_stopped(self._run(journal, facts, on_served, _Voice(facts, remark)))

    def _client(self, url: str, default: str | None = None, model: str | None = None) -> ServerClient:
        return ServerClient(
            url,
            timeout=self.params.request_seconds,
            model=model,
            default_model=default,
            largest=self.params.largest_replies,
        )

    async def _run(
        self,
        journal: Journal,
        facts: Sequence[ServerFacts],
        on_served: Callable[[int], None] | None,
        voice: _Voice,
    ) -> ServerOutcome:
        left = [i for i in self.order if self.requests[i].custom_id not in journal.finished]
        served: list[Served] = []
        mending = self._mending(journal)

        def keep(one: Served) -> None:
            request = self.requests[one.request]
            journal.append(request.custom_id, output_line(request, one.reply))
            served.append(one)
            if mending is not None and one.reply.kind is Kind.ANSWERED:
                mending.saw(one.request, one.reply.body)
                if mending.due(len(left) - len(served)):
                    dispatch.reorder(mending.order())
            if on_served is not None:
                on_served(len(served))

        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for fact in facts:
                default = fact.models[0] if fact.models else None
                client = self._client(fact.url, default, self.model)
                stack.push_async_callback(client.close)
                clients.append(client)
            rng, patience = random.Random(self.seed), self.params.patience
            dispatch = Dispatch(
                self.requests,
                len(clients),
                self.flying,
                self.params,
                rng,
                proven=any(completed(line) for line in journal.finished.values()),
                slots=self.slots if self.in_flight is None else None,
                on_wait=voice.waits,
            )
            sender = Sender(
                dispatch,
                self.requests,
                clients,
                patience,
                lambda failures: patience.wait(failures, rng),
                voice.outage,
            )
            watches = [
                Watch(client, self.params.metrics_seconds, partial(_watched, sender, k))
                for k, client in enumerate(clients)
            ]
            before = await asyncio.gather(*(watch.read() for watch in watches))
            readers = [asyncio.create_task(watch.run()) for watch in watches]
            try:
                stopped = await sender.run(left, keep)
            finally:
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)
            after = await asyncio.gather(*(watch.read() for watch in watches))
        counts = [
            _count(fact, watch, first, last, interrupted=interrupted)
            for fact, watch, first, last, interrupted in zip(
                facts, watches, before, after, dispatch.interrupted, strict=True
            )
        ]
        failed = sum(not completed(line) for line in journal.finished.values())
        return ServerOutcome(self._record(served, counts, dispatch), failed, stopped)

    def _mending(self, journal: Journal) -> _Mending | None:
        if self.planned is None:
            return None
        mending = _Mending(self.requests, self.order, self.planned, self.params.reorder_share)
        for position, request in enumerate(self.requests):
            line = journal.finished.get(request.custom_id)
            if line is not None and completed(line):
                mending.saw(position, cast("Mapping[str, Mapping[str, Any]]", line["response"])["body"])
        return mending if mending.useful else None

    def _record(self, served: list[Served], counts: list[ServerCount], dispatch: Dispatch) -> ServerRun:
        served = sorted(served, key=lambda one: one.sent)
        usage = [usage_of(one.reply.body if one.reply.kind is Kind.ANSWERED else None) for one in served]
        requests = [self.requests[one.request] for one in served]
        return ServerRun(
            ids=tuple(request.custom_id for request in requests),
            choices=np.array([request.choices for request in requests], dtype=np.int64),
            # The server counts all prompts of a request together; a completion reads at least a token of one.
            prompt_tokens=np.array(
                [
                    min(prompt, 1) if request.prompts else prompt
                    for request, (prompt, _) in zip(requests, usage, strict=True)
                ],
                dtype=np.int64,
            ),
            completion_tokens=np.array([completion for _, completion in usage], dtype=np.int64),
            position=np.array([one.request for one in served], dtype=np.int64),
            sent=np.array([one.sent for one in served]),
            finished=np.array([one.finished for one in served]),
            server_of=np.array([one.server for one in served], dtype=np.int64),
            failed=np.array([one.reply.kind is not Kind.ANSWERED for one in served], dtype=np.int64),
            slots=self.slots,
            in_flight=dispatch.in_flight,
            order=self.order_name,
            retries=dispatch.retries,
            servers=tuple(counts),
        )


def _watched(sender: Sender, k: int, metrics: ServerMetrics) -> None:
    sender.counters_read(k, metrics.running, metrics.waiting)


@dataclass(frozen=True, slots=True)
class _Voice:
    """Remarks of a run on its servers, passed to ``remark``."""

    facts: Sequence[ServerFacts]
    remark: Callable[[str], None]

    def waits(self, k: int, reply: Reply, wait: float) -> None:
        """Say that a server asks for a long wait."""
        asked = "" if reply.wait is None or reply.wait <= wait else f" of the {reply.wait:,.0f} s it asks for"
        does = f"the run waits {wait:,.0f} s{asked} (--outage)" if asked else ""
        does = does or f"it asks to wait {wait:,.0f} s, and the run does"
        self.remark(f"{self.facts[k].url}: {reply.message}; {does}")

    def outage(self, outage: Outage) -> None:
        """Say since when a server is unreachable, how often it was tried, and when the run stops."""
        url, now = self.facts[outage.server].url, time.time()
        if outage.over:
            self.remark(Alert(f"{url}: reachable again after {outage.seconds:,.0f} s"))
            return
        since = time.strftime("%H:%M:%S", time.localtime(now - outage.seconds))
        if outage.given_up_in is None:
            end = "the other servers take its requests"
        else:
            at = time.strftime("%H:%M:%S", time.localtime(now + outage.given_up_in))
            end = f"the run stops at {at} unless it responds (--outage)"
        self.remark(Alert(f"{url}: unreachable since {since}, tried {outage.attempts} times; {end}"))


class _Mending:
    """The order of the requests, longest first by what is known of their prompts by now."""

    def __init__(
        self, requests: Sequence[ServerRequest], order: Sequence[int], planned: IntArray, share: float
    ) -> None:
        self._requests, self._share, group = requests, share, prompt_groups(requests)
        self._repair = LengthRepair(group, planned)
        self._rank = np.empty(len(order), dtype=np.int64)
        self._rank[np.asarray(order, dtype=np.int64)] = np.arange(len(order))
        first = np.unique(group[np.asarray(order, dtype=np.int64)], return_index=True)[1]
        # One request of each prompt goes first: its length predicts the others.
        self._scout = np.isin(self._rank, first) & (np.bincount(group)[group] > 1)
        self._since = 0

    @property
    def useful(self) -> bool:
        return self._repair.useful

    def saw(self, position: int, body: Mapping[str, Any] | None) -> None:
        """Note what a completion of a request shows."""
        _, tokens = usage_of(body)
        if tokens:
            self._repair.seen(position, tokens / self._requests[position].choices)
            self._since += 1

    def due(self, left: int) -> bool:
        """Return whether enough completions came since the last order of the ``left`` requests."""
        return self._since >= self._share * left

    def order(self) -> list[int]:
        """Return the order by what is known now."""
        self._since = 0
        expected = self._repair.expected()
        found: list[int] = np.lexsort((self._rank, -expected, ~self._scout)).tolist()
        return found


def prompt_groups(requests: Sequence[ServerRequest]) -> IntArray:
    """Return a number for the prompt of each request, equal where prompts are, shape (requests,)."""
    return numbered(json.dumps(request.says, sort_keys=True) for request in requests)


def output_line(request: ServerRequest, reply: Reply) -> dict[str, object]:
    """Return the line of the OpenAI batch output format for a request's outcome."""
    name = hashlib.sha256(request.custom_id.encode()).hexdigest()[:24]
    line: dict[str, object] = {"id": f"batch_req_{name}", "custom_id": request.custom_id}
    if reply.status is not None and reply.body is not None:
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": dict(reply.body)}
        return line | {"response": response, "error": None}
    error = {"code": reply.kind.value.replace(" ", "_"), "message": reply.message}
    return line | {"response": None, "error": error}


def completed(line: Mapping[str, Any]) -> bool:
    """Return whether a line of an output file holds a completion."""
    response = line.get("response")
    return isinstance(response, Mapping) and response.get("status_code") == 200


def usage_of(body: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the tokens of a prompt and of its completions as the server counted them, 0 where it did not."""
    usage = (body or {}).get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count if type(count) is int and 0 <= count <= LONGEST else 0 for count in counts)
    return prompt, completion


def _count(
    fact: ServerFacts,
    watch: Watch,
    first: ServerMetrics | None,
    last: ServerMetrics | None,
    *,
    interrupted: bool,
) -> ServerCount:
    known = ServerCount(fact.url, fact.engine, fact.version)
    if first is None or last is None:
        return known

    # A restarted server counts from zero.
    anew = interrupted if last.started is None else first.started != last.started

    def during(name: str) -> int | None:
        start, end = getattr(first, name), getattr(last, name)
        return None if anew or start is None or end is None or end < start else int(end - start)

    several = (last.engines or 1) > 1
    return replace(
        known,
        # Engines behind one address add their iterations up: of them no bound speaks.
        iterations=None if several else during("iterations"),
        preemptions=during("preemptions"),
        cached_tokens=during("cached_tokens"),
        most_running=watch.most_running,
        plateau=watch.plateau or None,
        kv_tokens=last.kv_tokens,
        block_tokens=last.block_tokens,
        prefix_caching=last.prefix_caching,
        speculates=last.speculates if first.speculates is None else first.speculates,
        drafts=last.drafts,
        engines=last.engines,
        cached_before=first.cached_tokens,
    )
