"""Simulating two devices, one for prompts and one for completions (DistServe)."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.costs.iteration_cost import MixedCost
from ...data.workload import Workload
from ...heuristics.serving.baselines import Vllm
from ...heuristics.serving.kv_ledger import KvLedger
from .simulation import EXECUTING, QUEUED, WAITING, ServingRun, simulate_serving


@dataclass(frozen=True, slots=True, eq=False)
class DisaggregatedRun:
    """
    What two devices did.

    run: Of all requests; its iterations and memory are the completions' device's.
    prompt_seconds: The prompts' device was busy.
    transfer_seconds: Of each request between the end of its prompt and its arrival at the other device, shape
        (requests,); 0 if nothing was sent.
    """

    run: ServingRun
    prompt_seconds: float
    transfer_seconds: FloatArray


def simulate_disaggregated(
    workload: Workload,
    cost: MixedCost,
    kv_capacity: int,
    *,
    block_tokens: int = 32,
    batched_tokens: int = 2048,
    until: float = math.inf,
) -> DisaggregatedRun:
    """
    Return what DistServe's two devices do, first come, first served.

    One computes prompts in batches and keeps their keys and values until one link has sent them, one request
    after the other; where the other device has no room, they wait in its host's memory. There the rule is
    vLLM's (block-allocation, the youngest swapped out).

    workload: The requests, with their true lengths.
    cost: Of an iteration on either device, and of the link (``transfer_per_token``).
    kv_capacity: Tokens of keys and values each of the two holds.
    block_tokens: Tokens of a block.
    batched_tokens: Most prompt tokens of an iteration (one prompt is always taken).
    until: Seconds after which nothing more is begun.
    Raises ValueError if no completion has a second token: nothing is left for the second device.
    Raises ServingError if a request does not fit the second device.
    """
    stage = _Prompts(workload, cost, KvLedger(kv_capacity, len(workload), block_tokens), batched_tokens)
    stage.run(until)
    # One token of completion is drawn where the prompt is: nothing is sent then.
    going = np.flatnonzero((workload.output_tokens > 1) & np.isfinite(stage.sent))
    if not going.size:
        raise ValueError(
            "no request with an answer of two tokens or more reaches the second device: nothing to do for it"
        )
    arrival = np.minimum(workload.arrival, until)
    start, end, sent = (np.minimum(times, until) for times in (stage.start, stage.end, stage.sent))
    spent = np.zeros((len(workload), 4))
    spent[:, WAITING] = start - arrival
    spent[:, EXECUTING] = end - start
    spent[going, QUEUED] = (sent - end)[going]
    rest = replace(workload.select(going), arrival=stage.sent[going])
    policy = Vllm(received=True)
    run = simulate_serving(
        rest, policy, cost, kv_capacity, block_tokens=block_tokens, prefilled=True, until=until
    )
    finished = np.where(stage.end <= until, stage.end, np.nan)
    preempted = np.zeros(len(workload), dtype=np.int64)
    tokens = (stage.end <= until).astype(np.int64)
    tokens[going] *= run.tokens
    finished[going], preempted[going] = run.finished, run.preempted
    # Waiting for room on the second device is queueing between prompt and completion.
    spent[going] += run.spent[:, (QUEUED, EXECUTING, WAITING, 3)]
    whole = replace(
        run,
        workload=workload,
        first_token=np.where(stage.end <= until, stage.end, np.nan),
        finished=finished,
        spent=spent,
        tokens=tokens,
        preempted=preempted,
    )
    transfers = np.zeros(len(workload))
    transfers[going] = stage.sent[going] - stage.end[going]
    return DisaggregatedRun(whole, stage.busy, transfers)


class _Prompts:
    """The device that computes prompts, and the link behind it."""

    def __init__(self, workload: Workload, cost: MixedCost, ledger: KvLedger, batched_tokens: int) -> None:
        count = len(workload)
        self.workload, self.cost, self.ledger, self.most = workload, cost, ledger, batched_tokens
        self.start, self.end, self.sent = (np.full(count, np.inf) for _ in range(3))
        self.busy = self.link = 0.0
        self.leaving: list[tuple[float, int]] = []

    def run(self, until: float) -> None:
        """Compute prompts until then; those not begun have infinite times."""
        order: IntArray = np.argsort(self.workload.arrival, kind="stable")
        at, clock = 0, 0.0
        while at < len(order):
            clock = max(clock, float(self.workload.arrival[order[at]]))
            if clock >= until:
                break
            batch = self._batch(order[at:], clock)
            if not batch:
                # Memory is full of what the link has not sent: the next transfer frees some.
                clock = max(clock, self.leaving[0][0])
                continue
            at += len(batch)
            clock = self._compute(batch, clock)

    def _batch(self, order: IntArray, now: float) -> list[int]:
        ledger, batch, tokens = self.ledger, list[int](), 0
        while self.leaving and self.leaving[0][0] <= now:
            ledger.release(heapq.heappop(self.leaving)[1])
        for request in order.tolist():
            prompt = int(self.workload.input_tokens[request])
            if self.workload.arrival[request] > now or (batch and tokens + prompt > self.most):
                break
            if not ledger.grow(request, prompt):
                if not self.leaving and not batch:
                    raise ValueError(
                        f"prompt of {prompt} tokens on a device that holds {ledger.blocks} blocks"
                    )
                break
            batch.append(request)
            tokens += prompt
        return batch

    def _compute(self, batch: list[int], now: float) -> float:
        prompts = self.workload.input_tokens[batch]
        seconds = self.cost.seconds(0, 0, int(prompts.sum()), int((prompts**2).sum()))
        self.busy += seconds
        end = now + seconds
        self.start[batch], self.end[batch] = now, end
        for request in batch:
            tokens = int(self.workload.input_tokens[request])
            send = tokens * self.cost.transfer_per_token if self.workload.output_tokens[request] > 1 else 0.0
            self.link = max(self.link, end) + send if send else self.link
            self.sent[request] = self.link if send else end
            heapq.heappush(self.leaving, (float(self.sent[request]), request))
        return end
