"""Simulation of a measured run by a layer profile."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.costs.communication import exchange_seconds, experts_apart, with_all_reduce
from ...data.costs.layer_profile import LayerProfile
from ...data.costs.link import Link
from ...data.files.disk import InputError
from ...data.readers.measured_run import MeasuredRun
from ...data.workload import Workload
from ...models.iterations.layer_cost import LayerCost
from ..serving.chunked_prefill import ChunkedPrefill
from ..serving.device import DeviceBatch, ServingDevice
from ..serving.kv_ledger import KvLedger
from ..serving.simulation import ServingError, ServingJob, ServingRun, serve_on_device


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Token times of a simulated run.

    first_token, finished: Seconds after the first arrival, shape (requests,).
    """

    first_token: FloatArray
    finished: FloatArray


class ComposedDevice:
    """Device with seconds from a layer profile."""

    def __init__(self, cost: LayerCost, graph_tokens: Sequence[int] = ()) -> None:
        self._cost, self._graphs = cost, list(graph_tokens)

    def run(self, work: DeviceBatch, tokens: int | None = None) -> float:
        """Return an iteration's seconds.

        tokens: Number of tokens to price, if another replica of a group has more.
        """
        contexts, chunks = work.held[work.decodes], _chunks(work)
        context = float(contexts.mean()) if len(contexts) else 0.0
        padded = tokens or self.padded(work)
        return self._cost.iteration(len(contexts), context, chunks, sampled=work.drawn, padded_tokens=padded)

    def decode_seconds(self, decodes: IntArray, held: IntArray) -> FloatArray:
        """Return the seconds of iterations without prompts."""
        if self._graphs:
            raise ValueError("what is rounded up to captured graphs is priced iteration by iteration")
        many = decodes.astype(np.float64)
        per_layer, once = self._cost.decode_many(many, held / many)
        seconds: FloatArray = self._cost.profile.shape.layers * per_layer + once
        return seconds

    def mixed_seconds(self, decodes: int, held: int, chunks: Sequence[tuple[int, int]], drawn: int) -> float:
        """Return the seconds of an iteration with prompts."""
        tokens = decodes + sum(new for new, _ in chunks)
        context = held / decodes if decodes else 0.0
        return self._cost.iteration(decodes, context, chunks, sampled=drawn, padded_tokens=tokens)

    def padded(self, work: DeviceBatch) -> int:
        """Return the tokens, rounded up to a captured graph."""
        tokens = len(work.decodes) + sum(new for new, _ in _chunks(work))
        at = bisect_left(self._graphs, tokens)
        return self._graphs[at] if at < len(self._graphs) else tokens


class _ExpertGroup:
    """Replicas that share experts, and so wait for each other."""

    def __init__(self, run: MeasuredRun, profile: LayerProfile, link: Link) -> None:
        rest, experts = experts_apart(with_all_reduce(profile, link, gathered=True))
        self._own = ComposedDevice(LayerCost(rest), run.graph_tokens)
        self._experts, self._replicas, self._link = LayerCost(experts), run.data_parallel, link
        self._largest = max(run.graph_tokens, default=0)

    def run(self, work: Sequence[DeviceBatch]) -> float:
        """Return the seconds of the slowest replica."""
        tokens = [self._own.padded(batch) for batch in work] + [0] * (self._replicas - len(work))
        if max(tokens) <= self._largest:
            # All replay graphs of one size; idle replicas compute it, too.
            tokens = [max(tokens)] * self._replicas
        profile = self._experts.profile
        devices = [
            -(-some // profile.tensor_parallel) for some in tokens for _ in range(profile.tensor_parallel)
        ]
        slowest = max(self._own.run(batch, some) for batch, some in zip(work, tokens, strict=False))
        prompts = any(batch.prefill for batch in work)
        seconds = slowest + self._experts.dense(sum(tokens), 0, prompts=prompts)
        return seconds + exchange_seconds(profile.shape, self._link, devices)


def _chunks(work: DeviceBatch) -> list[tuple[int, int]]:
    return [(new, int(work.held[request]) - new) for request, new in work.prefill]


def mismatches(run: MeasuredRun, profile: LayerProfile) -> list[str]:
    """Return the differences of a profile from a run.

    They are in model, device and degree, a sentence each.
    """
    messages = []
    served, measured = run.model.rpartition("/")[2], profile.shape.name.rpartition("/")[2]
    if _plain(served) != _plain(measured):
        messages.append(f"the run is of the model {served}, the profile of {measured}")
    if _plain(profile.device) not in _plain(run.device) and _plain(run.device) not in _plain(profile.device):
        messages.append(f"the run is on {run.device}, the profile of {profile.device}")
    if profile.tensor_parallel != run.tensor_parallel:
        messages.append(
            f"the run shares a layer among {run.tensor_parallel} devices, the profile among"
            f" {profile.tensor_parallel}"
        )
    return messages


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def replay_run(run: MeasuredRun, profile: LayerProfile, link: Link | None = None) -> Replay:
    """Simulate a measured run.

    Arrivals, lengths and limits are the run's. Requests go to replicas in turn, as they arrive.
    """
    experts = profile.shape.experts > 0
    if link is None and (profile.tensor_parallel > 1 or (experts and run.data_parallel > 1)):
        hint = "Name the link between the devices (--link), or its --link-bandwidth and --link-latency."
        what = f"what the devices tell each other cannot be costed: the link of {profile.device} is not known"
        raise InputError(what, where="link", hint=hint)
    whole = profile if link is None else with_all_reduce(profile, link)
    if run.data_parallel == 1:
        served = replay_on(run, ComposedDevice(LayerCost(whole), run.graph_tokens))
        return Replay(served.first_token, served.finished)
    if experts and not run.expert_parallel:
        hint = "Give a run with expert parallelism (enable_expert_parallel)."
        what = f"{run.data_parallel} replicas that cut every expert in parts cannot be costed"
        raise InputError(what, where="field 'engine_kwargs.enable_expert_parallel'", hint=hint)
    turns = [np.arange(at, len(run.workload), run.data_parallel) for at in range(run.data_parallel)]
    order = np.argsort(run.workload.arrival, kind="stable")
    parts = [np.sort(order[turn]) for turn in turns if len(turn)]
    if experts:
        settings = [_setting(run, part) for part in parts]
        jobs = [ServingJob(work, rule, kv, ahead=run.ahead) for work, rule, kv in settings]
        assert link is not None
        served_by = serve_in_step(jobs, _ExpertGroup(run, profile, link))
    else:
        device = ComposedDevice(LayerCost(whole), run.graph_tokens)
        served_by = [replay_on(run, device, part) for part in parts]
    first, last = np.empty(len(run.workload)), np.empty(len(run.workload))
    for part, replica in zip(parts, served_by, strict=True):
        first[part], last[part] = replica.first_token, replica.finished
    return Replay(first, last)


def replay_on(run: MeasuredRun, device: ServingDevice, requests: IntArray | None = None) -> ServingRun:
    """Simulate a device on a measured run's requests."""
    workload, policy, ledger = _setting(run, requests)
    return serve_on_device(workload, policy, device, ledger, ahead=run.ahead)


def _setting(run: MeasuredRun, requests: IntArray | None = None) -> tuple[Workload, ChunkedPrefill, KvLedger]:
    workload = run.workload if requests is None else run.workload.select(requests)
    reserved = workload.input_tokens + workload.output_tokens + run.block_tokens
    capacity = int(reserved.sum()) if run.kv_capacity is None else run.kv_capacity
    policy = ChunkedPrefill(run.batched_tokens, run.sequences)
    return workload, policy, KvLedger(capacity, len(workload), run.block_tokens, reuse=run.reuse)


class GroupDevice(Protocol):
    """Device that runs one iteration of several replicas at once."""

    def run(self, work: Sequence[DeviceBatch]) -> float:
        """Return an iteration's seconds; idle replicas have no batch."""
        ...


def serve_in_step(jobs: Sequence[ServingJob], device: GroupDevice) -> list[ServingRun]:
    """Serve replicas in lockstep at the pace of the slowest.

    A replica without requests waits for its next arrival and joins the first iteration that begins after it.
    Raises ServingError as :func:`.serve_on_device` does.

    jobs: One per replica, each with its own requests, policy and ledger, not yet begun.
    """
    steps = [job.iterations() for job in jobs]
    waiting = {at: next(step, None) for at, step in enumerate(steps)}
    begun = 0.0
    while ready := {at: ask for at, ask in waiting.items() if ask is not None}:
        begun = max(begun, min(start for start, _ in ready.values()))
        joined = {at: ask for at, ask in ready.items() if ask[0] <= begun}
        seconds = device.run([work for _, work in joined.values()])
        if not seconds >= 0:
            raise ServingError(f"an iteration of {len(joined)} replicas took {seconds} s")
        for at, (start, _) in joined.items():
            try:
                waiting[at] = steps[at].send(begun - start + seconds)
            except StopIteration:
                waiting[at] = None
        begun += seconds
    return [job.result() for job in jobs]
