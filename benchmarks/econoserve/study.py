"""One trace on one model: its requests, their predicted lengths, and what a system does with them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from outcome import Binding, Outcome
from setting import FORWARD, TRACES, Served

from batchbound.data.arrays import IntArray
from batchbound.data.costs.iteration_cost import MixedCost
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.heuristics.serving.disaggregated import DisaggregatedRun, simulate_disaggregated
from batchbound.heuristics.serving.econoserve.sizes import EconoServeSizes
from batchbound.heuristics.serving.metrics import serving_metrics
from batchbound.heuristics.serving.registry import ServingOptions, serving_policy
from batchbound.heuristics.serving.simulation import ServingRun, simulate_serving

SLOTS: Mapping[str, float] = {"fastserve": 8, "vllm": 256, "sarathi": 128, "distserve": 256}
"""Most requests under way: the policies' own."""


ORACLES: Mapping[str, str] = {"oracle": "econoserve", "pipelined-oracle": "pipelined"}
"""Policies that are told the true lengths."""


class Study:
    """Runs systems on a trace, at a rate."""

    def __init__(self, served: Served, cost: MixedCost, name: str, seed: int, errors: str) -> None:
        self.served, self.cost, self.name, self.trace = served, cost, name, TRACES[name]
        self.capacity = served.capacity
        self.seed, self.errors, self.slo = seed, errors, 2.0
        self.sizes = EconoServeSizes(
            padding=self.trace.errors.padding, reserved=self.trace.reserved, buffer=self.trace.buffer
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
        return rate if options.demand is None else self.rate_of(float(options.demand))

    def rate_of(self, demand: float) -> float:
        """Return the requests a second whose keys and values would fill a share of the memory."""
        workload = self.workload(self.trace.rate, self.trace.minutes)
        return demand * self.trace.rate / self.memory(workload, self.trace.rate, min(demand, 1.0))

    def memory(self, workload: Workload, rate: float, filled: float = 1.0) -> float:
        """Return the share of the memory that keeping up with a rate takes, so much of it being filled."""
        prompt, answer = workload.input_tokens, workload.output_tokens
        held = filled * self.capacity
        token_seconds = self.cost.seconds(int(held / (prompt.mean() + answer.mean() / 2)), int(held))
        return rate * float(((prompt + answer / 2) * answer).mean()) * token_seconds / self.capacity

    def computing(self, workload: Workload, rate: float) -> float:
        """Return the share of the computing that keeping up with a rate takes."""
        full = self.cost.seconds(0, 0, FORWARD) / FORWARD
        return rate * float((workload.input_tokens + workload.output_tokens).mean()) * full

    def predicted(self, workload: Workload) -> IntArray:
        """Return lengths as a predictor sees them that errs as the paper's."""
        rng, errors = np.random.default_rng((self.seed, 7)), self.trace.errors
        draw = errors.ratios if self.errors == "reported" else errors.log_normal
        return np.maximum(1, np.rint(workload.output_tokens / draw(rng, len(workload)))).astype(np.int64)

    def run(
        self,
        system: str,
        workload: Workload,
        *,
        known: bool,
        sizes: EconoServeSizes | None = None,
        until: float = math.inf,
    ) -> ServingRun:
        """Return what a system does with a workload."""
        if system == "distserve":
            return self.split(workload, until).run
        sizes = self.sizes if sizes is None else sizes
        if system in ORACLES:
            system, known, sizes = ORACLES[system], True, replace(sizes, padding=0.0)
        if known:
            sizes = replace(sizes, padding=0.0)
        options = ServingOptions(self.trace.longest, FORWARD, sizes, self.served.orca_batch)
        policy = serving_policy(system, options)
        predicted = None if known else self.predicted(workload)
        return simulate_serving(workload, policy, self.cost, self.capacity, predicted=predicted, until=until)

    def split(self, workload: Workload, until: float) -> DisaggregatedRun:
        """Return what DistServe's two devices do with a workload."""
        return simulate_disaggregated(workload, self.cost, self.capacity, batched_tokens=FORWARD, until=until)

    def outcome(
        self,
        system: str,
        workload: Workload,
        *,
        known: bool,
        sizes: EconoServeSizes | None = None,
        until: float = math.inf,
    ) -> Outcome:
        """Return a system's figures on a workload, and what bound it."""
        slots = {**SLOTS, "orca": self.served.orca_batch}
        if system == "distserve":
            split = self.split(workload, until)
            run = split.run
        else:
            split, run = None, self.run(system, workload, known=known, sizes=sizes, until=until)
        served = run.tokens[np.isfinite(run.finished)]
        length = float(served.mean()) if len(served) else math.nan
        return Outcome(serving_metrics(run), Binding.of(run, slots.get(system, math.inf), split), length)
