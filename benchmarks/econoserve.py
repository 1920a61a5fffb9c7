"""
EconoServe's study in simulation, each figure beside the published one.

Requests of its Table 2 (Alpaca, ShareGPT, BookCorpus) on OPT-13B on one A100 with 12 GB for keys and values,
on Llama-33B on two with 19.2 GB and on OPT-175B on eight with 264 GB (or OPT-66B on four, with 185 GB),
iterations at the costs DistServe fitted to OPT-13B and OPT-66B on these devices, or scaled from them. Needs
the public files (see --data).

Run: ``python benchmarks/econoserve.py systems`` (or ``rates``, ``sweet``, ``scales``, ``shortages``,
``decisions``, ``hours``, ``offline``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchbound.data.cost import CostModel, IntArray
from batchbound.data.generators import generate
from batchbound.data.iteration_cost import MixedCost, read_distserve_cost
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.disaggregated import simulate_disaggregated
from batchbound.executor.serving_metrics import ServingMetrics, serving_metrics
from batchbound.executor.serving_schedule import serving_schedule
from batchbound.executor.serving_simulation import EXECUTING, PAUSED, WAITING, ServingRun, simulate_serving
from batchbound.heuristics.econoserve_settings import EconoServeSettings
from batchbound.heuristics.serving_registry import SERVING_POLICIES, ServingOptions, serving_policy
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve

FORWARD = 1024
"""Target forward size: 85 % of the greatest rate at DistServe's prefill costs, 0.12 s an iteration."""
Shortage = Literal["reserve", "pause", "offload"]
PCIE, ETHERNET = 25e9, 12.5e9
"""Bytes per second, to the host and between machines (100 Gb/s)."""


@dataclass(frozen=True, slots=True)
class Served:
    """
    A model on the paper's machine: its name and devices in DistServe's file, its shape and KV memory.

    ``weights`` are those of the linear layers. A model that the file lacks names no fit of its own.
    """

    name: str | None
    devices: int
    layers: int
    width: int
    weights: float
    kv_memory: float

    @property
    def kv_bytes(self) -> int:
        """Of one token: keys and values, two bytes each."""
        return 2 * self.layers * self.width * 2

    @property
    def capacity(self) -> int:
        """Tokens of keys and values."""
        return int(self.kv_memory / self.kv_bytes)

    def cost(self, data: Path) -> MixedCost:
        """Return the cost of its iterations."""
        moves = {
            "swap_per_token": self.kv_bytes / (PCIE * self.devices),
            "transfer_per_token": self.kv_bytes / ETHERNET,
        }
        file = data / "distserve" / "profiler-a100-80g.distserve.json"
        if self.name is not None:
            return read_distserve_cost(file, self.name, self.devices, **moves)
        return replace(self._scaled(file), **moves)

    def _scaled(self, file: Path) -> MixedCost:
        """
        Return OPT-66B's cost on as many devices, scaled.

        What reads keys and values or pairs tokens goes by layers times width. All else goes by a power of the
        weights: that between OPT-13B and OPT-66B, coefficient by coefficient, at the greatest number of
        devices, of no more than ours, that the file has for both.
        """
        common = min(self.devices, 4)
        small, large = MODELS["opt-13b"], MODELS["opt-66b"]
        assert small.name is not None
        assert large.name is not None
        from_ = asdict(read_distserve_cost(file, small.name, common))
        to = asdict(read_distserve_cost(file, large.name, common))
        base = asdict(read_distserve_cost(file, large.name, self.devices))
        scaled = {}
        for name, value in base.items():
            if name.endswith(("kv_token", "pair")):
                scaled[name] = value * (self.layers * self.width) / (large.layers * large.width)
            elif value:
                power = math.log(to[name] / from_[name]) / math.log(large.weights / small.weights)
                scaled[name] = value * (self.weights / large.weights) ** power
            else:
                scaled[name] = value
        return MixedCost(**scaled)


def _opt(layers: int, width: int) -> float:
    return 12.0 * layers * width**2


MODELS = {
    "opt-13b": Served("facebook/opt-13b", 1, 40, 5120, _opt(40, 5120), 12e9),
    "llama-33b": Served(None, 2, 60, 6656, 60 * (4.0 * 6656**2 + 3 * 6656 * 17920), 19.2e9),
    "opt-175b": Served(None, 8, 96, 12288, _opt(96, 12288), 264e9),
    "opt-66b": Served("facebook/opt-66b", 4, 64, 9216, _opt(64, 9216), 185e9),
}
"""The paper's three, with its memory for keys and values, and OPT-66B with the memory DistServe found for it
(78,496 tokens)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """
    A trace's settings in the paper, and the error of predicted lengths that gives its accuracy.

    ``error`` is the log-deviation at which a prediction raised by the padding suffices as often as section
    2.3 says (77.5, 73.2, 69.8 %); ``longest`` is what max-allocation promises,
    ``minutes`` what is simulated unless said otherwise.
    """

    rate: float
    longest: int
    padding: float
    reserved: float
    buffer: float
    error: float
    minutes: float


TRACES = {
    "alpaca": Trace(36.0, 2048, 0.10, 0.02, 0.15, 0.126, 3.0),
    "sharegpt": Trace(28.0, 2048, 0.15, 0.03, 0.15, 0.226, 5.0),
    "bookcorpus": Trace(1.2, 3089, 0.20, 0.04, 0.10, 0.351, 30.0),
}

MORE, LESS = math.inf, 0.0
"""Where the paper orders two systems without a number."""

PUBLISHED = [
    # Over, under, figure, known lengths, ratio over / under as printed (averages of the three traces).
    ("orca", "vllm", "completion", True, MORE),
    ("srtf", "vllm", "completion", True, MORE),
    ("fastserve", "vllm", "completion", True, MORE),
    ("orca", "vllm", "tokens_per_s", True, LESS),
    ("srtf", "vllm", "tokens_per_s", True, LESS),
    ("fastserve", "vllm", "tokens_per_s", True, LESS),
    ("vllm", "sarathi", "completion", True, 1.29),
    ("vllm", "sarathi", "tokens_per_s", True, 0.59),
    ("vllm", "sarathi", "kv_held", True, 1.20),
    ("vllm", "sarathi", "forward_size", True, 0.73),
    ("multires", "vllm", "completion", True, 0.5737),
    ("multires", "sarathi", "completion", True, 0.65),
    ("multires", "sarathi", "tokens_per_s", True, 1.10),
    ("econoserve-sd", "sync-coupled", "completion", True, 0.647),
    ("econoserve-sd", "sync-coupled", "tokens_per_s", True, 1.31),
    ("econoserve-sd", "distserve", "completion", True, 0.91),
    ("econoserve-sd", "distserve", "tokens_per_s", True, 1.07),
    ("econoserve", "orca*", "completion", False, LESS),
    ("econoserve", "vllm*", "completion", False, LESS),
    ("econoserve", "sarathi*", "completion", False, LESS),
    ("econoserve", "distserve*", "completion", False, LESS),
    ("econoserve", "orca*", "tokens_per_s", False, MORE),
    ("econoserve", "vllm*", "tokens_per_s", False, MORE),
    ("econoserve", "sarathi*", "tokens_per_s", False, MORE),
    ("econoserve", "distserve*", "tokens_per_s", False, MORE),
    ("econoserve", "orca*", "requests_per_s", False, MORE),
    ("econoserve", "vllm*", "requests_per_s", False, MORE),
    ("econoserve", "sarathi*", "requests_per_s", False, MORE),
    ("econoserve", "distserve*", "requests_per_s", False, MORE),
    ("econoserve-d", "econoserve", "completion", False, 1.19),
    ("econoserve-sd", "econoserve", "completion", False, 1.07),
    ("econoserve-sdo", "econoserve", "completion", False, 1.29),
    ("econoserve-d", "econoserve", "tokens_per_s", False, 0.64),
    ("econoserve-sd", "econoserve", "tokens_per_s", False, 0.83),
    ("econoserve-sdo", "econoserve", "tokens_per_s", False, 0.38),
    ("econoserve-d", "econoserve", "slo_satisfaction", False, 0.84),
    ("econoserve-sd", "econoserve", "slo_satisfaction", False, 0.79),
    ("econoserve-sdo", "econoserve", "slo_satisfaction", False, 0.83),
]

SATISFACTION = {
    # EconoServe's SLO satisfaction over each system's, by model (averages of the three traces).
    "opt-13b": {"orca*": 1.93, "vllm*": 1.83, "sarathi*": 1.42, "distserve*": 1.05, "oracle": 0.98},
    "llama-33b": {"orca*": 1.91, "vllm*": 1.80, "sarathi*": 1.41, "distserve*": 1.07, "oracle": 0.96},
    "opt-175b": {"orca*": 2.06, "vllm*": 1.77, "sarathi*": 1.47, "distserve*": 1.09, "oracle": 0.972},
}


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


COLUMNS: tuple[tuple[str, str], ...] = (
    ("completion", "JCT"), ("waiting", "wait"), ("execution", "exec"), ("queueing", "queue"),
    ("preemption", "preempt"), ("between_tokens", "TBT"), ("slo_satisfaction", "SSR"),
    ("requests_per_s", "req/s"), ("tokens_per_s", "tok/s"), ("kv_held", "KV"), ("kv_promised", "given"),
    ("kv_full", "full"), ("forward_size", "fwd"), ("completed_per_iteration", "done/it"),
    ("failed", "failed"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Binding:
    """
    What a run was bound by, as shares of its busy time.

    ``forward``: at least 95 % of the target forward size is used; ``memory``: at least 95 % of it is
    promised, or prompts wait though the forward size would take some; ``idle``: no prompt waits.
    """

    memory: float
    forward: float
    idle: float

    @classmethod
    def of(cls, run: ServingRun) -> Binding:
        """Return the shares of a run."""
        busy = run.seconds.sum()
        arrival = run.workload.arrival
        waited = run.spent[:, WAITING]
        never = np.isnan(run.first_token) & (waited == 0)
        begun = np.sort(np.where(never, np.inf, arrival + waited))
        came = np.searchsorted(np.sort(arrival), run.start, side="right")
        waiting = came - np.searchsorted(begun, run.start, side="right")

        def share(when: NDArray[np.bool_]) -> float:
            return float(run.seconds[when].sum() / busy)

        forward = run.decodes + run.prompt_tokens >= 0.95 * FORWARD
        memory = (run.promised >= 0.95 * run.capacity) | ((waiting > 0) & ~forward)
        return cls(share(memory), share(forward), share(waiting <= 0))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A system's figures on a trace, and what bound it."""

    metrics: ServingMetrics
    binding: Binding

    @classmethod
    def of(cls, run: ServingRun) -> Outcome:
        """Return the outcome of a run."""
        return cls(serving_metrics(run), Binding.of(run))

    def why(self) -> str:
        """Return in words what bound it."""
        bound, metrics = self.binding, self.metrics
        return (
            f"memory {bound.memory:.0%}, forward {bound.forward:.0%}, idle {bound.idle:.0%} of the time;"
            f" held {metrics.kv_held:.2f} of {metrics.kv_promised:.2f} promised;"
            f" {metrics.failed:.0%} stopped"
        )


def table(rows: dict[str, Outcome]) -> None:
    print(
        f"{'':16}"
        + "".join(f"{head:>9}" for _, head in COLUMNS)
        + f"{'sched us':>10}{'memory':>8}{'forward':>8}{'idle':>6}"
    )
    for name, one in rows.items():
        values = "".join(f"{getattr(one.metrics, field):9.3g}" for field, _ in COLUMNS)
        bound = one.binding
        print(
            f"{name:16}{values}{1e6 * one.metrics.decision:10.1f}"
            f"{bound.memory:8.2f}{bound.forward:8.2f}{bound.idle:6.2f}",
            flush=True,
        )


def systems(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Run every system at the paper's rates, and print each ratio beside the published one, and why not."""
    found: dict[str, dict[str, Outcome]] = {}
    for name in options.traces:
        study = make(name)
        rate = study.rate(options)
        workload = study.workload(rate, options.minutes or study.trace.minutes)
        memory, computing = study.demand(workload, rate)
        print(
            f"\n{name}: {len(workload)} requests at {rate:g}/s (* lengths known). To keep up, any system"
            f" would need {memory:.2f} of the memory and {computing:.2f} of the computing there is"
        )
        # A trace is judged while it lasts, as the paper's of hours: a queue that grows ten times as fast as
        # it is served would take days to drain, and the figures would be those of draining it.
        until = math.inf if options.drain else float(workload.arrival.max())
        rows: dict[str, Outcome] = {}
        for system in [*SERVING_POLICIES, "distserve"]:
            rows[f"{system}*"] = Outcome.of(study.run(system, workload, known=True, until=until))
        for system in ("econoserve-d", "econoserve-sd", "econoserve-sdo", "econoserve", "oracle"):
            rows[system] = Outcome.of(study.run(system, workload, known=False, until=until))
        section = replace(study.sizes, hosted="answers")
        rows["econoserve 3.2"] = Outcome.of(
            study.run("econoserve", workload, known=False, sizes=section, until=until)
        )
        table(rows)
        found[name] = rows
    compare(found, options.model)
    return {
        name: {k: one.metrics.to_json() | asdict(one.binding) for k, one in rows.items()}
        for name, rows in found.items()
    }


def compare(found: dict[str, dict[str, Outcome]], model: str) -> None:
    """Print ratios beside the published ones; for each order that is another, what bound the two systems."""
    published = [
        (f"{over}{'*' * known}", under if not known else f"{under}*", figure, ratio)
        for over, under, figure, known, ratio in PUBLISHED
    ]
    published += [
        ("econoserve", under, "slo_satisfaction", ratio)
        for under, ratio in SATISFACTION.get(model, SATISFACTION["opt-13b"]).items()
    ]
    print(f"\n{'ratio':46}{'published':>10}" + "".join(f"{name:>13}" for name in found))
    counts, others = {name: [0, 0, 0] for name in found}, list[str]()
    for over, under, figure, ratio in published:
        said = {MORE: "> 1", LESS: "< 1"}.get(ratio, f"{ratio:.2f}")
        line = f"{over + ' / ' + under + ', ' + figure:46}{said:>10}"
        for name, rows in found.items():
            high, low = (getattr(rows[system].metrics, figure) for system in (over, under))
            here = high / low if low else math.inf
            verdict = 1 if abs(here - 1) < 0.005 else 0 if (here > 1) == (ratio > 1) else 2
            counts[name][verdict] += 1
            line += f"{here:11.2f} {' =x'[verdict]}"
            if verdict == 2:
                others.append(f"{name}: {over} / {under}, {figure} {here:.2f}, published {said}")
                others += [f"    {system:16}{rows[system].why()}" for system in (over, under)]
        print(line)
    marks = "".join(f"{f'{a}, {b} =, {c} x':>13}" for a, b, c in counts.values())
    print(f"{'in the published order':56}{marks}")
    print("\nOrders that are not the published ones:", *others, sep="\n")


def rates(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Find the greatest rate each system sustains at a normalized latency (Figure 9)."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        unloaded = serving_metrics(study.run("sarathi", study.workload(0.05, 20), known=True))
        limit = options.latency * unloaded.normalized_latency
        print(
            f"\n{name}: greatest rate at a normalized latency of {limit:.3f} s,"
            f" {options.latency:g} x unloaded"
        )
        reached: dict[str, float] = {}
        for system in (
            "orca",
            "vllm",
            "sarathi",
            "multires",
            "distserve",
            "econoserve-sdo",
            "econoserve",
            "oracle",
        ):
            known = not system.startswith("econoserve")
            low, high = study.trace.rate / 256, 4 * study.trace.rate
            for _ in range(options.steps):
                middle = (low * high) ** 0.5
                minutes = options.minutes or 10.0
                run = study.run(system, study.workload(middle, minutes), known=known)
                latency = serving_metrics(run).normalized_latency
                low, high = (middle, high) if latency <= limit else (low, middle)
            reached[system] = low
            print(f"  {system:16}{low:8.2f} requests/s", flush=True)
        best = reached["econoserve"]
        ratios = {system: best / rate if rate else float("inf") for system, rate in reached.items()}
        print("  econoserve over: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
        found[name] = reached
    print("\npublished, OPT-13B: over orca 3.5-25, vllm 1.28-2.33, sarathi 1.20-2.33, distserve 1.01-1.33")
    return found


def _with(sizes: EconoServeSettings, field: str, value: float) -> EconoServeSettings:
    changed: dict[str, Any] = {field: value}
    return replace(sizes, **changed)


GRIDS: dict[str, tuple[float, ...]] = {
    "padding": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    "reserved": (0.0, 0.01, 0.02, 0.04, 0.08, 0.15),
    "buffer": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
}
BEST = {
    "padding": {"alpaca": 0.10, "sharegpt": 0.15, "bookcorpus": 0.20},
    "reserved": {"alpaca": 0.02, "sharegpt": 0.03, "bookcorpus": 0.04},
    "buffer": {"alpaca": 0.15, "sharegpt": 0.15, "bookcorpus": 0.10},
}
"""The paper's sweet spots (Figure 15)."""


def sweet(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Vary padding, reserve and buffer (Figures 4 and 15); say how sure each minimum is, and what trades."""
    found: dict[str, object] = {}
    for name in options.traces:
        for field in options.fields:
            rows: dict[float, list[ServingMetrics]] = {}
            for value in GRIDS[field]:
                rows[value] = []
                for seed in range(options.seeds):
                    study = make(name)
                    study.seed = seed
                    workload = study.workload(study.rate(options), options.minutes or study.trace.minutes)
                    sizes = replace(
                        _with(study.sizes, field, value),
                        shortage=options.shortage,
                        beyond_reserve=not options.strict,
                    )
                    run = study.run(options.system, workload, known=False, sizes=sizes)
                    rows[value].append(serving_metrics(run))
            found[f"{name} {field}"] = _minimum(name, field, rows)
    return found


def _minimum(name: str, field: str, rows: dict[float, list[ServingMetrics]]) -> dict[str, object]:
    """Print a parameter's minimum of the mean completion time, and what falls and rises about it."""
    values = list(rows)
    times = np.array([[one.completion for one in rows[value]] for value in values])
    mean = times.mean(1)
    best = int(mean.argmin())

    def over(at: int) -> str:
        # The same seeds at both values: paired differences.
        gained = (times[at] - times[best]) / times[best]
        error = gained.std(ddof=1) / len(gained) ** 0.5 if len(gained) > 1 else math.nan
        return f"{values[at]:g} costs {gained.mean():+.1%} +- {error:.1%}"

    inside = "inside" if 0 < best < len(values) - 1 else "at the edge"
    print(
        f"{name:11}{field:9}best {values[best]:g} ({inside}), published {BEST[field][name]:g};"
        f" {over(0)}, {over(len(values) - 1)}"
    )
    parts = {
        "completion": mean,
        "waiting": np.array([np.mean([one.waiting + one.queueing for one in rows[v]]) for v in values]),
        "preempted": np.array([np.mean([one.preemption for one in rows[v]]) for v in values]),
        "stopped": np.array([np.mean([one.failed for one in rows[v]]) for v in values]),
        "held": np.array([np.mean([one.kv_held for one in rows[v]]) for v in values]),
    }
    for part, column in parts.items():
        print(f"    {part:11}" + "".join(f"{value:9.4g}" for value in column), flush=True)
    return {"best": values[best], "values": values} | {key: column.tolist() for key, column in parts.items()}


def scales(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Vary the SLO scale (Figure 15a)."""
    found: dict[str, object] = {}
    for name in options.traces:
        rows = {}
        for scale in (0.5, 1.0, 1.5, 2.0, 2.5):
            study = make(name)
            study.slo = scale
            workload = study.workload(study.rate(options), options.minutes or study.trace.minutes)
            metrics = serving_metrics(study.run(options.system, workload, known=False))
            rows[scale] = (metrics.slo_satisfaction, metrics.completion)
        line = ", ".join(f"{k}: {a:.3f} {b:.4g}" for k, (a, b) in rows.items())
        print(f"{name:11}SLO scale (SSR, JCT): {line}")
        found[name] = {str(key): list(value) for key, value in rows.items()}
    return found


def shortages(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Compare what an answer longer than predicted does (Figure 5b): its pause over its completion time."""
    published: dict[Shortage, float] = {"offload": 0.12, "pause": 0.04, "reserve": 0.005}
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        workload = study.workload(study.rate(options), options.minutes or study.trace.minutes)
        predicted = study.predicted(workload) * (1 + study.trace.padding)
        short = float((predicted < workload.output_tokens).mean())
        print(f"{name}: {short:.1%} of the answers are longer than predicted with the padding")
        for shortage, share in published.items():
            sizes = replace(study.sizes, shortage=shortage)
            run = study.run("econoserve-sd", workload, known=False, sizes=sizes)
            stopped = run.preempted > 0
            paused = run.spent[stopped, PAUSED] / (run.finished - workload.arrival)[stopped]
            served = run.spent[stopped, PAUSED] / run.spent[stopped][:, [EXECUTING, PAUSED]].sum(1)
            figures = [float(x.mean()) if x.size else 0.0 for x in (stopped, paused, served)]
            print(
                f"    {shortage:8} {figures[0]:6.1%} stopped; paused {figures[1]:.2%} of their completion"
                f" time (published {share:.1%}), {figures[2]:.2%} of the time from first to last iteration"
            )
            found[f"{name} {shortage}"] = figures
    return found


def decisions(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Time decisions while thousands are queued: EconoServe beside MultiRes."""
    found: dict[str, object] = {}
    study = make("sharegpt")
    for count in (2_500, 5_000, 10_000):
        drawn = study.workload(study.trace.rate, count / study.trace.rate / 60)
        workload = replace(drawn, arrival=np.zeros(len(drawn)))
        for system in ("econoserve", "multires", "vllm"):
            run = study.run(system, workload, known=False)
            # The first decision takes the whole queue in; the next ones see nearly all of it.
            early = run.decided[1 : max(2, count // 5)] * 1e6
            took = run.prompt_tokens[1 : max(2, count // 5)] > 0
            busy = early[took].mean() if took.any() else float("nan")
            figures = [float(early.mean()), float(busy), float(np.quantile(early, 0.99)), float(early.max())]
            print(
                f"{count:6} queued  {system:11} mean {figures[0]:7.1f} us,"
                f" when prompts are taken {figures[1]:7.1f},"
                f" 99th percentile {figures[2]:7.1f}, longest {figures[3]:8.1f}"
            )
            found[f"{system} {count}"] = figures
    return found


def hours(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Simulate three hours at the paper's rates (``--drain``: and all that is left then)."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        workload = study.workload(study.trace.rate, 180)
        until = math.inf if options.drain else float(workload.arrival.max())
        begun = time.process_time()
        run = study.run("econoserve", workload, known=False, until=until)
        seconds = time.process_time() - begun
        print(
            f"{name}: {len(workload)} requests, {len(run.start)} iterations, {seconds:.1f} CPU s", flush=True
        )
        found[name] = seconds
    return found


def offline(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Compare the policies with the planner: 1,000 requests, all there, known lengths, planner's costs."""
    study = make("sharegpt")
    drawn = generate("sharegpt", study.seed, 1000)
    workload = Workload(drawn.ids, drawn.input_tokens, drawn.output_tokens)
    fit = study.cost
    cost = CostModel(
        fit.prefill_base, fit.prefill_per_token, fit.few_base, fit.few_per_request, 0.0, fit.few_per_kv_token
    )
    problem = Problem(workload, cost, 256, kv_capacity=study.capacity, prefill_emits_first_token=True)
    policies: dict[str, float] = {}
    start = None
    for system in SERVING_POLICIES:
        policy = serving_policy(system, ServingOptions(2048, FORWARD, replace(study.sizes, padding=0.0)))
        run = simulate_serving(workload, policy, fit, study.capacity, block_tokens=1)
        prompts = run.prompt_tokens[run.prompt_tokens > 0]
        rounds = int((run.decodes > 0).sum())
        # What the same iterations take when a prompt and a token are a stage and a round, swaps not counted.
        stages = len(prompts) * cost.prefill_base + cost.prefill_per_token * int(prompts.sum())
        read = cost.decode_per_kv_token * problem.kv_token_rounds
        seconds = stages + rounds * cost.decode_base + cost.decode_per_slot * int(run.decodes.sum()) + read
        schedule = serving_schedule(run, problem)
        also = None if schedule is None else schedule.makespan(problem)
        metrics = serving_metrics(run)
        print(
            f"{system:16}{seconds:9.2f} s, as a schedule {'-' if also is None else f'{also:.2f} s':>9},"
            f" KV held {metrics.kv_held:.3f}, given {metrics.kv_promised:.3f}, refused {run.failures},"
            f" lent {run.lent_tokens}"
        )
        policies[system] = min(seconds, also or seconds)
        if schedule is not None and (start is None or schedule.makespan(problem) < start.makespan(problem)):
            start = schedule
    result = solve(problem, limits=Limits(seconds=options.seconds), start=start)
    if result.makespan is None or result.bound is None:
        raise RuntimeError("the planner found nothing")
    gap = result.bound.gap(result.makespan)
    print(
        f"planner         {result.makespan:9.2f} s, bound {result.bound.seconds:.2f} s, proven gap {gap:.2%}"
    )
    print(f"best policy     {min(policies.values()):9.2f} s ({min(policies, key=policies.__getitem__)})")
    return {"policies": policies, "planner": result.makespan, "bound": result.bound.seconds, "gap": gap}


COMMANDS = {
    "systems": systems,
    "rates": rates,
    "sweet": sweet,
    "scales": scales,
    "shortages": shortages,
    "decisions": decisions,
    "hours": hours,
    "offline": offline,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("BATCHBOUND_DATA", "../shared/data"))
    )
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--model", choices=MODELS, default="opt-13b")
    parser.add_argument("--minutes", type=float, help="default: by trace")
    parser.add_argument(
        "--demand", type=float, help="instead of a rate: share of the memory that keeping up would take"
    )
    parser.add_argument("--drain", action="store_true", help="serve everyone after the last arrival, too")
    parser.add_argument("--scale", type=float, default=1.0, help="of the paper's rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="averaged over, in sweet")
    parser.add_argument("--steps", type=int, default=8, help="of the search for a rate")
    parser.add_argument(
        "--latency", type=float, default=3.0, help="normalized, over the unloaded one, in rates"
    )
    parser.add_argument(
        "--shortage", choices=("reserve", "pause", "offload"), default="reserve", help="in sweet"
    )
    parser.add_argument("--strict", action="store_true", help="prompts begin in the reserve alone, in sweet")
    parser.add_argument("--fields", nargs="+", choices=GRIDS, default=list(GRIDS), help="in sweet")
    parser.add_argument("--system", default="econoserve", help="in sweet")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the planner")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    served = MODELS[options.model]
    cost = served.cost(options.data)
    found = COMMANDS[options.what](lambda name: Study(cost, served.capacity, name, options.seed), options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
