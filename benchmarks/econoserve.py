"""
EconoServe's study in simulation, each figure beside the published one.

Requests of its Table 2 (Alpaca, ShareGPT, BookCorpus) on OPT-13B on one A100 with 12 GB for keys and values
(or OPT-66B on four, with 185 GB), iterations at the costs DistServe fitted to that model and device. Needs
the public files (see --data).

Run: ``python benchmarks/econoserve.py systems --minutes 10`` (or ``rates``, ``sweet``, ``decisions``,
``hours``, ``offline``).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchbound.data.cost import CostModel, IntArray
from batchbound.data.generators import generate
from batchbound.data.iteration_cost import MixedCost, read_distserve_cost
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.disaggregated import simulate_disaggregated
from batchbound.executor.serving_metrics import ServingMetrics, serving_metrics
from batchbound.executor.serving_schedule import serving_schedule
from batchbound.executor.serving_simulation import ServingRun, simulate_serving
from batchbound.heuristics.econoserve import EconoServeSettings
from batchbound.heuristics.serving_registry import SERVING_POLICIES, ServingOptions, serving_policy
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve

FORWARD = 1024
"""Target forward size: 85 % of the greatest rate at DistServe's prefill costs, 0.12 s an iteration."""
PCIE, ETHERNET = 25e9, 12.5e9
"""Bytes per second, to the host and between machines (100 Gb/s)."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model on the paper's machine: its name and devices in DistServe's file, its shape and KV memory."""

    name: str
    devices: int
    layers: int
    width: int
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
        return read_distserve_cost(
            data / "distserve" / "profiler-a100-80g.distserve.json",
            self.name,
            self.devices,
            swap_per_token=self.kv_bytes / (PCIE * self.devices),
            transfer_per_token=self.kv_bytes / ETHERNET,
        )


MODELS = {
    "opt-13b": Served("facebook/opt-13b", 1, 40, 5120, 12e9),
    "opt-66b": Served("facebook/opt-66b", 4, 64, 9216, 185e9),
}
"""The paper's other two, Llama-33B and OPT-175B, have no coefficients in the file; OPT-66B on four devices
has, with the memory DistServe found for it (78,496 tokens)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """
    A trace's settings in the paper, and the error of predicted lengths that gives its accuracy.

    ``error`` is the log-deviation at which a prediction raised by the padding suffices as often as section
    2.3 says (77.5, 73.2, 69.8 %); ``longest`` is what max-allocation promises.
    """

    rate: float
    longest: int
    padding: float
    reserved: float
    buffer: float
    error: float


TRACES = {
    "alpaca": Trace(36.0, 2048, 0.10, 0.02, 0.15, 0.126),
    "sharegpt": Trace(28.0, 2048, 0.15, 0.03, 0.15, 0.226),
    "bookcorpus": Trace(1.2, 3089, 0.20, 0.04, 0.10, 0.351),
}

PUBLISHED = [
    # Over, under, figure, known lengths, ratio over / under as printed (averages of the three traces).
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
    ("econoserve-d", "econoserve", "completion", False, 1.19),
    ("econoserve-sd", "econoserve", "completion", False, 1.07),
    ("econoserve-sdo", "econoserve", "completion", False, 1.29),
    ("econoserve-d", "econoserve", "tokens_per_s", False, 0.64),
    ("econoserve-sd", "econoserve", "tokens_per_s", False, 0.83),
    ("econoserve-sdo", "econoserve", "tokens_per_s", False, 0.38),
    ("econoserve", "orca", "slo_satisfaction", False, 1.93),
    ("econoserve", "vllm", "slo_satisfaction", False, 1.83),
    ("econoserve", "sarathi", "slo_satisfaction", False, 1.42),
    ("econoserve", "distserve", "slo_satisfaction", False, 1.05),
    ("econoserve", "oracle", "slo_satisfaction", False, 0.98),
]


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

    def predicted(self, workload: Workload) -> IntArray:
        """Return lengths as a predictor of the paper's accuracy sees them."""
        noise = np.random.default_rng((self.seed, 7)).standard_normal(len(workload))
        guess = workload.output_tokens * np.exp(self.trace.error * noise)
        return np.maximum(1, np.rint(guess)).astype(np.int64)

    def run(
        self, system: str, workload: Workload, *, known: bool, sizes: EconoServeSettings | None = None
    ) -> ServingRun:
        """Return what a system does with a workload."""
        if system == "distserve":
            return simulate_disaggregated(workload, self.cost, self.capacity, batched_tokens=FORWARD).run
        sizes = self.sizes if sizes is None else sizes
        if system == "oracle":
            system, known, sizes = "econoserve", True, replace(sizes, padding=0.0)
        if known:
            sizes = replace(sizes, padding=0.0)
        policy = serving_policy(system, ServingOptions(self.trace.longest, FORWARD, sizes))
        predicted = None if known else self.predicted(workload)
        return simulate_serving(workload, policy, self.cost, self.capacity, predicted=predicted)


COLUMNS: tuple[tuple[str, str], ...] = (
    ("completion", "JCT"), ("waiting", "wait"), ("execution", "exec"), ("queueing", "queue"),
    ("preemption", "preempt"), ("between_tokens", "TBT"), ("slo_satisfaction", "SSR"),
    ("requests_per_s", "req/s"), ("tokens_per_s", "tok/s"), ("kv_held", "KV"), ("kv_promised", "given"),
    ("kv_full", "full"), ("forward_size", "fwd"), ("completed_per_iteration", "done/it"),
    ("failed", "failed"),
)  # fmt: skip


def table(rows: dict[str, ServingMetrics]) -> None:
    print(f"{'':16}" + "".join(f"{head:>9}" for _, head in COLUMNS) + f"{'sched us':>10}")
    for name, metrics in rows.items():
        values = "".join(f"{getattr(metrics, field):9.3g}" for field, _ in COLUMNS)
        print(f"{name:16}{values}{1e6 * metrics.decision:10.1f}", flush=True)


def systems(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Run every system at the paper's rates, and print each ratio beside the published one."""
    found: dict[str, dict[str, ServingMetrics]] = {}
    for name in options.traces:
        study = make(name)
        rate = study.trace.rate * options.scale
        workload = study.workload(rate, options.minutes)
        rows: dict[str, ServingMetrics] = {}
        for system in [*SERVING_POLICIES, "distserve"]:
            rows[f"{system}*"] = serving_metrics(study.run(system, workload, known=True))
        for system in ("econoserve-d", "econoserve-sd", "econoserve-sdo", "econoserve", "oracle"):
            rows[system] = serving_metrics(study.run(system, workload, known=False))
        print(f"\n{name}: {len(workload)} requests at {rate:g}/s (* lengths known)")
        table(rows)
        found[name] = rows
    print(f"\n{'ratio':46}{'published':>10}" + "".join(f"{name:>12}" for name in found))
    for over, under, figure, known, published in PUBLISHED:
        line = f"{over}{'*' if known else ''} / {under}, {figure}"
        line = f"{line:46}{published:10.2f}"
        for rows in found.values():
            high = rows[over + "*"] if known else rows[over]
            low = rows.get(under + "*", high) if known or under not in rows else rows[under]
            base = getattr(low, figure)
            line += f"{getattr(high, figure) / base:12.2f}" if base else f"{'inf':>12}"
        print(line)
    return {name: {k: v.to_json() for k, v in rows.items()} for name, rows in found.items()}


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
                run = study.run(system, study.workload(middle, options.minutes), known=known)
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


def sweet(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Vary padding, reserve, buffer and SLO scale of EconoServe (Figures 4 and 15)."""
    grids: dict[str, tuple[float, ...]] = {
        "padding": (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
        "reserved": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15, 0.2),
        "buffer": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    }
    found: dict[str, object] = {}
    for name in options.traces:
        for field, values in grids.items():
            rows = {}
            for value in values:
                taken = []
                for seed in range(options.seeds):
                    study = make(name)
                    study.seed = seed
                    workload = study.workload(study.trace.rate * options.scale, options.minutes)
                    sizes = replace(_with(study.sizes, field, value), shortage=options.shortage)
                    taken.append(
                        serving_metrics(study.run(options.system, workload, known=False, sizes=sizes))
                    )
                rows[value] = {
                    key: float(np.mean([getattr(one, key) for one in taken]))
                    for key in (
                        "completion",
                        "waiting",
                        "tokens_per_s",
                        "slo_satisfaction",
                        "kv_held",
                        "failed",
                    )
                }
            best = min(rows, key=lambda value: rows[value]["completion"])
            line = "  ".join(f"{value:g}: {row['completion']:.4g} s" for value, row in rows.items())
            print(f"{name:11}{field:9} best {best:g}   {line}", flush=True)
            found[f"{name} {field}"] = {"best": best, "rows": {str(k): v for k, v in rows.items()}}
        scales = {}
        for scale in (0.5, 1.0, 1.5, 2.0, 2.5):
            study = make(name)
            study.slo = scale
            workload = study.workload(study.trace.rate * options.scale, options.minutes)
            metrics = serving_metrics(study.run(options.system, workload, known=False))
            scales[scale] = (metrics.slo_satisfaction, metrics.completion)
        print(
            f"{name:11}SLO scale (SSR, JCT): "
            + ", ".join(f"{k}: {a:.3f} {b:.4g}" for k, (a, b) in scales.items())
        )
        found[f"{name} slo"] = {str(key): list(value) for key, value in scales.items()}
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
    """Simulate three hours at the paper's rates."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        workload = study.workload(study.trace.rate, 180)
        begun = time.process_time()
        run = study.run("econoserve", workload, known=False)
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
    parser.add_argument("--minutes", type=float, default=10.0)
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
