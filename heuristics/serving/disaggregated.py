"""Simulation of DistServe's two devices."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.costs.iteration_cost import MixedCost
from ...data.workload import Workload
from .baselines import Vllm
from .kv_ledger import KvLedger
from .simulation import EXECUTING, QUEUED, WAITING, ServingRun, simulate_serving


@dataclass(frozen=True, slots=True, eq=False)
class DisaggregatedRun:
    """Run of two devices.

    run: All requests; iterations and memory are those of the completion device.
    prompt_seconds: Busy seconds of the prompt device.
    transfer_seconds: Seconds from each prompt's end to its arrival at the completion device, shape
        (requests,); 0 if not sent.
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
    """Simulate DistServe's two devices, first come, first served.

    The prompt device computes batches and keeps their KV cache until one link has sent it, request by
    request. KV cache for which the completion device has no room waits in host memory. The completion device
    follows vLLM's rule (block allocation, the youngest request swapped out).

    kv_capacity: Tokens that each device holds.
    batched_tokens: Most prompt tokens of an iteration; one prompt is always taken.
    until: Seconds after which nothing new begins.

    Raises ValueError if no completion has a second token, and ServingError for a request too large.
    """
    stage = _Prompts(workload, cost, KvLedger(kv_capacity, len(workload), block_tokens), batched_tokens)
    stage.run(until)
    # The prompt device draws the first token: a completion of one token is not sent.
    going = np.flatnonzero((workload.output_tokens > 1) & np.isfinite(stage.sent))
    if not going.size:
        raise ValueError("no completion has two tokens or more: the second device has nothing to do")
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
    # A wait for room on the completion device counts as queueing between prompt and completion.
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
    """Device that computes prompts, and its link."""

    def __init__(self, workload: Workload, cost: MixedCost, ledger: KvLedger, batched_tokens: int) -> None:
        count = len(workload)
        self.workload, self.cost, self.ledger, self.most = workload, cost, ledger, batched_tokens
        self.start, self.end, self.sent = (np.full(count, np.inf) for _ in range(3))
        self.busy = self.link = 0.0
        self.leaving: list[tuple[float, int]] = []

    def run(self, until: float) -> None:
        order: IntArray = np.argsort(self.workload.arrival, kind="stable")
        at, clock = 0, 0.0
        while at < len(order):
            clock = max(clock, float(self.workload.arrival[order[at]]))
            if clock >= until:
                break
            batch = self._batch(order[at:], clock)
            if not batch:
                # Unsent KV cache fills the memory: the next transfer frees some.
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
