"""How much a system takes: the rates it sustains (Figure 9), its decisions, hours of requests."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from published import RATES
from study import Study

from batchbound.data.arrays import FloatArray
from batchbound.data.workload import Workload
from batchbound.heuristics.serving.metrics import serving_metrics
from batchbound.heuristics.serving.simulation import ServingRun


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
            "econoserve",
            "pipelined",
            "oracle",
        ):
            known = not system.startswith(("econoserve", "pipelined"))
            low, high, why = study.trace.rate / 256, 4 * study.trace.rate, "not sustained"
            for _ in range(options.steps):
                middle = (low * high) ** 0.5
                minutes = options.minutes or 10.0
                outcome = study.outcome(system, study.workload(middle, minutes), known=known)
                if outcome.metrics.normalized_latency <= limit:
                    low, why = middle, outcome.why()
                else:
                    high = middle
            reached[system] = low
            print(f"  {system:16}{low:8.2f} requests/s; {why}", flush=True)
        print("  econoserve over, and pipelined over:")
        for system, rate in reached.items():
            least, most = RATES.get(options.model, {}).get(system, (math.nan, math.nan))
            said = "" if math.isnan(least) else f" (published for EconoServe {least:g} to {most:g})"
            both = "".join(f"{reached[ours] / rate:8.2f}" for ours in ("econoserve", "pipelined"))
            print(f"    {system:16}{both}{said}")
        found[name] = reached
    return found


def decisions(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Time decisions while thousands are queued, beside MultiRes': as they are, and free of interruptions."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        for count in options.queued:
            drawn = study.workload(study.trace.rate, count / study.trace.rate / 60)
            workload = replace(drawn, arrival=np.zeros(len(drawn)))

            def decide(system: str, study: Study = study, workload: Workload = workload) -> ServingRun:
                return study.run(system, workload, known=False, until=150.0)

            # The first decision takes the whole queue in; the next ones see nearly all of it.
            early = slice(1, max(2, count // 5))
            for system in ("econoserve", "pipelined", "multires", "vllm"):
                run = decide(system)
                took = run.prompt_tokens[early] > 0
                kinds = {system: run.decided[early]}
                if system in ("econoserve", "pipelined"):
                    # The same decisions in the same order: what differs is what came in between.
                    gc.collect()
                    gc.disable()
                    kinds[f"{system}, least of 5 without gc"] = np.min(
                        [decide(system).decided[early] for _ in range(5)], axis=0
                    )
                    gc.enable()
                for label, decided in kinds.items():
                    figures = _spread(1e6 * decided, took)
                    print(
                        f"{name:11}{count:6} queued  {label:34} mean {figures[0]:7.1f} us,"
                        f" when prompts are taken {figures[1]:7.1f},"
                        f" 99th percentile {figures[2]:7.1f}, longest {figures[3]:8.1f}",
                        flush=True,
                    )
                    found[f"{name} {count} {label}"] = figures
    return found


def _spread(times: FloatArray, took: NDArray[np.bool_]) -> list[float]:
    busy = float(times[took].mean()) if took.any() else math.nan
    return [float(times.mean()), busy, float(np.quantile(times, 0.99)), float(times.max())]


def hours(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Simulate three hours at the paper's rates (``--drain``: and all that is left then)."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        workload = study.workload(study.trace.rate, 180)
        until = math.inf if options.drain else float(workload.arrival.max())
        begun = time.process_time()
        run = study.run("pipelined", workload, known=False, until=until)
        seconds = time.process_time() - begun
        print(
            f"{name}, pipelined: {len(workload)} requests, {len(run.start)} iterations, {seconds:.1f} CPU s",
            flush=True,
        )
        found[name] = seconds
    return found
