"""Batch job on running servers."""

from __future__ import annotations

import array
import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np

from ...data.arrays import IntArray
from ...data.prompts.names import Names
from ...data.readers.completions import EXPIRED, EXPIRED_MESSAGE, batch_completions, failed_line
from ...data.readers.server_batch import ServerBatch, ServerRequest
from ...data.readers.server_metrics import ServerMetrics
from ...data.readers.server_run import ServerCount, ServerRun
from ...data.workload import LONGEST
from ...heuristics.serving.in_flight import in_flight_of, running_of
from ..jobs.journal import Journal
from ..jobs.params import RunParams
from ..models.faults import Alert
from .client import ServerClient
from .dispatch import Dispatch, Served
from .kept_rows import KeptRows, kept_rows
from .probe import ServerFacts, Watch, probe
from .reordering import ByKinds, ByPrompts, Reordering
from .reply import Kind, Reply
from .sending import Outage, Sender, run_until_stopped
from .tokenizing import PromptTokens, prompt_tokens


@dataclass(frozen=True, slots=True, eq=False)
class ServerOutcome:
    """Outcome of a run on servers.

    run: Record of the requests that this run served.
    failed: Requests without a completion, of this run and of its interrupted part.
    stopped: Reason for an early end, or None.
    """

    run: ServerRun
    failed: int
    stopped: str | None


@dataclass(frozen=True, slots=True, eq=False)
class ServerJob:
    """
    Batch of requests, its sending order, and the servers.

    requests: Requests in the order of their file.
    order: Positions of all requests in sending order, shape (requests,).
    urls: Addresses of the servers, which are replicas.
    slots: Requests that each server runs at a time.
    in_flight: Completions to keep in flight on each server; by default ``in_flight_of``, raised up to
        fourfold when a server's queue runs empty.
    model: Replaces the ``model`` of every body; None leaves them.
    params: Time limits and retries.
    seed: Seed of the random waits between attempts.
    planned: Planned tokens of each completion, shape (requests,). Unsent requests are reordered, longest
        first, as completions of the same prompts arrive. None keeps the order.
    kind: Kind of each request, shape (requests,). Longer kinds go first as soon as completions show that it
        saves iterations. None keeps the order.
    deadline: Seconds after which requests without an outcome become ``batch_expired``; None for no limit.
    retry: Endings of rows of an earlier part to send again, such as ``failed``.
    cap: Cap of each completion that is sent, if its own is lower; None keeps the rows' own.
    earlier: Lines of cut completions that are sent again, by row; they stay if that fails.
    headers: Headers of each request beside our own.
    ca: File of certificates to trust; None for those of the system.
    waiting: Least completions beyond the slots that wait at each server, so that it admits in this order.
    home: Server of each request, shape (requests,), as long as it keeps up; None for any.
    after: Completions after which each request of the order is sent, shape (requests,); None for no wait.
    """

    requests: Sequence[ServerRequest]
    order: Sequence[int] | IntArray
    urls: Sequence[str]
    slots: int
    in_flight: int | None = None
    order_name: str = "plan"
    model: str | None = None
    params: RunParams = field(default_factory=RunParams)
    seed: int = 0
    planned: IntArray | None = None
    kind: IntArray | None = None
    deadline: float | None = None
    retry: Sequence[str] = ()
    cap: int | None = None
    earlier: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca: str | None = None
    waiting: int = 0
    home: IntArray | None = None
    after: IntArray | None = None

    @property
    def flying(self) -> int:
        """Completions kept in flight on each server."""
        if self.in_flight is not None:
            return self.in_flight
        largest = int(ServerBatch.of(self.requests).choices.max(initial=1))
        usual = in_flight_of(self.slots, running_of(largest, self.params.running_share))
        return max(usual, self.slots + self.waiting)

    def probe(self) -> tuple[ServerFacts, ...]:
        """Return the facts about each server."""

        async def ask() -> tuple[ServerFacts, ...]:
            async with contextlib.AsyncExitStack() as stack:
                clients = [self._client(url) for url in self.urls]
                for client in clients:
                    stack.push_async_callback(client.close)
                return tuple(await asyncio.gather(*map(probe, clients)))

        return run_until_stopped(ask())

    def prompt_tokens(self, fact: ServerFacts) -> PromptTokens | None:
        """Return the token ids of all prompts by a server; None if it does not tell them."""

        async def ask() -> PromptTokens | None:
            client = self._client(fact.url)
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(client.close)
                named = self.model or (fact.models[0] if fact.models else None)
                return await prompt_tokens(client, ServerBatch.of(self.requests), named)

        return run_until_stopped(ask())

    def kept(self, journal: Journal, facts: Sequence[ServerFacts]) -> KeptRows:
        """Return the rows that the journal finishes."""
        lines = journal.finished.lines(journal.finished)
        # Completions cut at their cap were sent again before they came into this journal.
        retry = [ending for ending in self.retry if ending != "cut"]
        context = min((fact.context for fact in facts if fact.context is not None), default=None)
        batch = ServerBatch.of(self.requests)
        return kept_rows(lines, batch, retry, journal.path, context=context)

    def run(
        self,
        journal: Journal,
        facts: Sequence[ServerFacts],
        kept: KeptRows | None = None,
        *,
        on_served: Callable[[int], None] | None = None,
        remark: Callable[[str], None] = lambda _: None,
    ) -> ServerOutcome:
        """Send every request that the journal does not finish."""
        kept = self.kept(journal, facts) if kept is None else kept
        return run_until_stopped(self._run(journal, facts, kept, on_served, _Remarks(facts, remark)))

    def _client(self, url: str, default: str | None = None, model: str | None = None) -> ServerClient:
        return ServerClient(
            url,
            timeout=self.params.request_seconds,
            model=model,
            default_model=default,
            largest=self.params.largest_replies,
            headers=self.headers,
            ca=self.ca,
        )

    async def _run(
        self,
        journal: Journal,
        facts: Sequence[ServerFacts],
        kept: KeptRows,
        on_served: Callable[[int], None] | None,
        remarks: _Remarks,
    ) -> ServerOutcome:
        batch = ServerBatch.of(self.requests)
        reordering = self._reordering(batch, journal)
        order = np.asarray(self.order if reordering is None else reordering.given, dtype=np.int64)
        left = order[~kept.done[order]]
        caps = batch.caps if self.cap is None else np.maximum(batch.caps, self.cap)
        served = _Log(batch, caps)
        failed = set(kept.failed)

        def keep(found: Sequence[Served]) -> None:
            lines = [self._line_of(batch, one) for one in found]
            journal.append_all(lines)
            for one, (name, line) in zip(found, lines, strict=True):
                answered = one.reply.kind is Kind.ANSWERED
                # A cut completion that stays, as its retry failed, was cut at an earlier cap.
                cap = int(caps[one.request]) or None if answered else None
                kept.endings.add(batch_completions([line]), cap, facts[one.server].context)
                done = one.reply.kind is Kind.ANSWERED or remarks.stays(self.earlier, one)
                (failed.discard if done else failed.add)(name)
                usage = usage_of(one.reply.body if one.reply.kind is Kind.ANSWERED else None)
                served.add(one, usage)
                if reordering is not None:
                    reordering.note(one.request, usage[1], one.finished - one.sent)
            if reordering is not None:
                _reorder(dispatch, reordering, len(left) - len(served))
            if on_served is not None:
                on_served(len(served))

        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for url, fact in zip(self.urls, facts, strict=True):
                default = fact.models[0] if fact.models else None
                client = self._client(url, default, self.model)
                stack.push_async_callback(client.close)
                clients.append(client)
            rng, patience = random.Random(self.seed), self.params.patience
            dispatch = Dispatch(
                batch,
                len(clients),
                self.flying,
                self.params,
                rng,
                proven=len(journal.finished) > len(kept.failed),
                slots=self.slots if self.in_flight is None else None,
                on_wait=remarks.waits,
            )
            dispatch.keep_homes(self.home)
            dispatch.send_after(order, self.after)
            if reordering is None:
                dispatch.send_ahead()
            sender = Sender(
                dispatch,
                partial(batch.sent, cap=self.cap),
                clients,
                patience,
                lambda failures: patience.wait(failures, rng),
                remarks.outage,
                slots=self.slots,
            )
            watches = [
                Watch(client, self.params.metrics_seconds, partial(_watched, sender, k))
                for k, client in enumerate(clients)
            ]
            before = await asyncio.gather(*(watch.read() for watch in watches))
            readers = [asyncio.create_task(watch.run()) for watch in watches]
            try:
                stopped = await sender.run(left, keep, self.deadline)
            finally:
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)
            after = await asyncio.gather(*(watch.read() for watch in watches))
        counts = [
            replace(
                _count(fact, watch, first, last, self.slots, interrupted=interrupted), unreachable=seconds
            )
            for fact, watch, first, last, interrupted, seconds in zip(
                facts, watches, before, after, dispatch.interrupted, sender.unreachable, strict=True
            )
        ]
        if sender.expired:
            failed |= self._expire(journal, batch, left.tolist())
        ran = served.record(self, counts, dispatch)
        ran = replace(
            ran,
            endings=kept.endings.facts(),
            abandoned=sender.abandoned,
            earlier=kept.completed,
        )
        return ServerOutcome(ran, len(failed), stopped)

    def _line_of(self, batch: ServerBatch, served: Served) -> tuple[str, Mapping[str, Any]]:
        """Return a row's name and its line: the earlier one of a cut completion if a retry failed."""
        name, earlier = batch.names[served.request], self.earlier.get(served.request)
        stays = earlier is not None and served.reply.kind is not Kind.ANSWERED
        return name, earlier if earlier is not None and stays else _line_of(batch, served)

    def _expire(self, journal: Journal, batch: ServerBatch, rows: Sequence[int]) -> set[str]:
        """End rows without an outcome; return the names of those that have no earlier completion."""
        failed = set[str]()
        for row in rows:
            if (name := batch.names[row]) not in journal.finished:
                expired = failed_line(name, batch.line_id(row), EXPIRED, EXPIRED_MESSAGE)
                journal.append(name, self.earlier.get(row, expired))
                failed |= set() if row in self.earlier else {name}
        return failed

    def _reordering(self, batch: ServerBatch, journal: Journal) -> Reordering | None:
        if self.planned is not None:
            found: Reordering = ByPrompts(batch, self.order, self.planned, self.params.reorder_share)
        elif self.kind is not None:
            slots = self.slots if self.in_flight is None else self.in_flight
            found = ByKinds(batch, self.order, self.kind, slots * len(self.urls), self.seed)
        else:
            return None
        for position, name in enumerate(batch.names):
            line = journal.finished.get(name)
            if line is not None:
                body = (
                    cast("Mapping[str, Mapping[str, Any]]", line["response"])["body"]
                    if completed(line)
                    else None
                )
                found.note(position, usage_of(body)[1], 0.0)
        return found


def _reorder(dispatch: Dispatch, reordering: Reordering, left: int) -> None:
    if reordering.due(left):
        order = reordering.order(dispatch.running(asyncio.get_running_loop().time()))
        if order is not None:
            dispatch.reorder(order)


class _Log:
    """Compact record of the served requests."""

    def __init__(self, batch: ServerBatch, caps: IntArray) -> None:
        self._batch, self._caps = batch, caps
        self._numbers = array.array("q")
        self._times = array.array("d")
        self._lengths: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._times) // 2

    def add(self, one: Served, usage: tuple[int, int]) -> None:
        """Note an outcome, with its tokens of prompt and completion."""
        answered = one.reply.kind is Kind.ANSWERED
        if answered and self._batch.choices[one.request] > 1:
            cap = int(self._caps[one.request])
            self._lengths[one.request] = lengths_of(one.reply.body, usage[1], cap)
        self._numbers.extend((one.request, one.server, not answered, *usage))
        self._times.extend((one.sent, one.finished))

    def record(self, job: ServerJob, counts: list[ServerCount], dispatch: Dispatch) -> ServerRun:
        times = np.asarray(self._times).reshape(-1, 2)
        order = np.argsort(times[:, 0], kind="stable")
        sent, finished = times[order].T
        numbers = np.asarray(self._numbers).view(np.int64).reshape(-1, 5)
        position, server, failed, prompt, completion = (column[order] for column in numbers.T)
        # The server counts all prompts of a request together; count the least, one token, for each.
        several = self._batch.several[position]
        return ServerRun(
            ids=Names(self._batch.names[i] for i in position),
            choices=self._batch.choices[position],
            prompt_tokens=np.where(several, np.minimum(prompt, 1), prompt),
            completion_tokens=completion,
            position=position,
            sent=sent,
            finished=finished,
            server_of=server,
            failed=failed,
            slots=job.slots,
            in_flight=dispatch.in_flight,
            order=job.order_name,
            retries=dispatch.retries,
            servers=tuple(counts),
            lengths={k: self._lengths[i] for k, i in enumerate(position.tolist()) if i in self._lengths},
        )


def _watched(sender: Sender, k: int, metrics: ServerMetrics) -> None:
    sender.counters_read(k, metrics.running, metrics.waiting)


@dataclass(frozen=True, slots=True)
class _Remarks:
    """Remarks about the servers of a run."""

    facts: Sequence[ServerFacts]
    remark: Callable[[str], None]

    def waits(self, k: int, reply: Reply, wait: float) -> None:
        asked = "" if reply.wait is None or reply.wait <= wait else f" of the {reply.wait:,.0f} s it asks for"
        does = f"the run waits {wait:,.0f} s{asked} (--outage)" if asked else ""
        does = does or f"it asks to wait {wait:,.0f} s, and the run does"
        self.remark(f"{self.facts[k].url}: {reply.message}; {does}")

    def stays(self, earlier: Mapping[int, object], served: Served) -> bool:
        """Tell a failed retry whose cut completion stays; return whether there is one."""
        if served.request in earlier:
            self.remark(f"a cut completion is kept, as its retry failed: {served.reply.message}")
        return served.request in earlier

    def outage(self, outage: Outage) -> None:
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


def _line_of(batch: ServerBatch, served: Served) -> dict[str, object]:
    """Return an outcome's line in OpenAI's batch output format."""
    name, line_id = batch.names[served.request], batch.line_id(served.request)
    reply = served.reply
    if reply.status is not None and reply.body is not None:
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": dict(reply.body)}
        return {"id": line_id, "custom_id": name, "response": response, "error": None}
    return failed_line(name, line_id, reply.kind.value.replace(" ", "_"), reply.message)


def completed(line: Mapping[str, Any]) -> bool:
    """Return whether a line of an output file holds a completion."""
    response = line.get("response")
    return isinstance(response, Mapping) and response.get("status_code") == 200


_CROWDED = 10
"""Readings with waiting requests after which fewer than the slots are believed to run at most."""

_COUNTED = (("prompt", "input"), ("completion", "output"))
"""Names of prompt and completion tokens, in two APIs."""


def usage_of(body: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the server's count of prompt and completion tokens, 0 if missing."""
    usage = None if body is None else body.get("usage")
    if not isinstance(usage, dict):
        return 0, 0
    counts = [usage.get(f"{old}_tokens", usage.get(f"{new}_tokens")) for old, new in _COUNTED]
    prompt, completion = (count if type(count) is int and 0 <= count <= LONGEST else 0 for count in counts)
    return prompt, completion


def lengths_of(body: Mapping[str, Any] | None, tokens: int, cap: int = 0) -> tuple[int, ...]:
    """Return the tokens of each completion, estimated by its share of the text.

    Those that were cut have ``cap`` tokens, the most of each; 0 if unknown.
    """
    choices = None if body is None else body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        return ()
    size = np.array([1 + _written(one.get("message") or {"text": one.get("text")}) for one in choices])
    cut = np.array([cap > 0 and one.get("finish_reason") == "length" for one in choices])
    left = tokens - cap * int(cut.sum())
    if left < int((~cut).sum()):
        cut[:], left = False, tokens  # the counts contradict each other
    lengths = np.where(cut, cap, 0)
    if not cut.all():
        # Rounded sums keep the total.
        ends = np.round(np.cumsum(size[~cut]) * (left / size[~cut].sum()))
        lengths[~cut] = np.diff(ends, prepend=0.0).astype(np.int64)
    return tuple(lengths.tolist())


def _written(message: Mapping[str, Any]) -> int:
    """Return the characters that a model wrote: content, reasoning and tool calls."""
    return sum(len(str(value)) for name, value in message.items() if value and name != "role")


def _count(
    fact: ServerFacts,
    watch: Watch,
    first: ServerMetrics | None,
    last: ServerMetrics | None,
    slots: int,
    *,
    interrupted: bool,
) -> ServerCount:
    known = ServerCount(fact.url, fact.engine, fact.version)
    if first is None or last is None:
        return known

    # The counters of a restarted server begin at zero.
    restarted = interrupted if last.started is None else first.started != last.started

    def during(name: str) -> int | None:
        start, end = getattr(first, name), getattr(last, name)
        return None if restarted or start is None or end is None or end < start else int(end - start)

    several = (last.engines or 1) > 1
    return replace(
        known,
        # Engines behind one address sum their iterations; no bound covers the sum.
        iterations=None if several else during("iterations"),
        preemptions=during("preemptions"),
        cached_tokens=during("cached_tokens"),
        generated=during("generated"),
        most_running=watch.most_running,
        plateau=watch.plateau if watch.plateau >= slots or watch.crowded >= _CROWDED else None,
        kv_tokens=last.kv_tokens,
        block_tokens=last.block_tokens,
        prefix_caching=last.prefix_caching,
        speculates=last.speculates if first.speculates is None else first.speculates,
        drafts=last.drafts,
        engines=last.engines,
        cached_before=first.cached_tokens,
        looked_up_before=first.looked_up,
    )
