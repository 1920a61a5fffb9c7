"""One trace on one model: its requests, their predicted lengths, and what a system does with them."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
from setting import FORWARD, TRACES

from batchbound.data.cost import IntArray
from batchbound.data.generators import generate
from batchbound.data.iteration_cost import MixedCost
from batchbound.data.workload import Workload
from batchbound.executor.disaggregated import simulate_disaggregated
from batchbound.executor.serving_simulation import ServingRun, simulate_serving
from batchbound.heuristics.econoserve_settings import EconoServeSettings
from batchbound.heuristics.serving_registry import ServingOptions, serving_policy


class Study:
    """Runs systems on a trace, at a rate."""

    def __init__(self, cost: MixedCost, capacity: int, name: str, seed: int, slo_scale: float = 2.0) -> None:
        self.cost, self.capacity, self.name, self.trace = cost, capacity, name, TRACES[name]
        self.seed, self.slo = seed, slo_scale
        self.sizes = EconoServeSettings(
            padding=self.trace.padding, reserved=self.trace.reserved, buffer=self.trace.buffer
        )

    def workload(self, rate: float, minutes: float) -> Workload:
        """Return the trace at a rate, each request with the deadline of the paper's SLO."""
        count = max(2, round(rate * minutes * 60))
        drawn = generate(self.name, self.seed, count)
        # No sequence is longer than the model's positions: the few that would be lose some of their prompt.
        fitting = np.minimum(drawn.input_tokens, self.trace.longest - drawn.output_tokens)
        drawn = replace(drawn, input_tokens=fitting)
        arrival = drawn.arrival * (self.trace.rate / rate)
        prompt = int(drawn.input_tokens.mean())
        prompt_seconds = self.cost.seconds(0, 0, prompt, prompt**2)
        # A token's average latency: that of a device whose memory is full of such requests.
        held = drawn.input_tokens.mean() + drawn.output_tokens.mean() / 2
        token_seconds = self.cost.seconds(int(self.capacity / held), self.capacity)
        allowed = self.slo * (prompt_seconds + token_seconds * drawn.output_tokens)
        return replace(drawn, arrival=arrival, deadline=arrival + allowed)

    def rate(self, options: argparse.Namespace) -> float:
        """Return the requests a second that the options ask for."""
        rate = self.trace.rate * float(options.scale)
        if options.demand is None:
            return rate
        memory, _ = self.demand(self.workload(rate, self.trace.minutes), rate)
        return rate * float(options.demand) / memory

    def demand(self, workload: Workload, rate: float) -> tuple[float, float]:
        """Return the shares of the memory and of the computing that keeping up with a rate takes."""
        prompt, answer = workload.input_tokens, workload.output_tokens
        held = prompt.mean() + answer.mean() / 2
        token_seconds = self.cost.seconds(int(self.capacity / held), self.capacity)
        memory = rate * float(((prompt + answer / 2) * answer).mean()) * token_seconds / self.capacity
        full = self.cost.seconds(0, 0, FORWARD) / FORWARD
        return memory, rate * float((prompt + answer).mean()) * full

    def predicted(self, workload: Workload) -> IntArray:
        """Return lengths as a predictor of the paper's accuracy sees them."""
        noise = np.random.default_rng((self.seed, 7)).standard_normal(len(workload))
        guess = workload.output_tokens * np.exp(self.trace.error * noise)
        return np.maximum(1, np.rint(guess)).astype(np.int64)

    def run(
        self,
        system: str,
        workload: Workload,
        *,
        known: bool,
        sizes: EconoServeSettings | None = None,
        until: float = math.inf,
    ) -> ServingRun:
        """Return what a system does with a workload."""
        if system == "distserve":
            return simulate_disaggregated(
                workload, self.cost, self.capacity, batched_tokens=FORWARD, until=until
            ).run
        sizes = self.sizes if sizes is None else sizes
        if system == "oracle":
            system, known, sizes = "econoserve", True, replace(sizes, padding=0.0)
        if known:
            sizes = replace(sizes, padding=0.0)
        policy = serving_policy(system, ServingOptions(self.trace.longest, FORWARD, sizes))
        predicted = None if known else self.predicted(workload)
        return simulate_serving(workload, policy, self.cost, self.capacity, predicted=predicted, until=until)
