"""How much a system takes: the rates it sustains (Figure 9), its decisions, hours of requests."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from study import Study

from batchbound.executor.serving_metrics import serving_metrics


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


def decisions(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Time decisions while thousands are queued, with and without garbage collection, beside MultiRes'."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        for count in (2_500, 5_000, 10_000):
            drawn = study.workload(study.trace.rate, count / study.trace.rate / 60)
            workload = replace(drawn, arrival=np.zeros(len(drawn)))
            for system in ("econoserve", "multires", "vllm"):
                for collected in (True, False) if system == "econoserve" else (True,):
                    _collect(collected)
                    run = study.run(system, workload, known=False, until=150.0)
                    _collect(True)
                    # The first decision takes the whole queue in; the next ones see nearly all of it.
                    early = run.decided[1 : max(2, count // 5)] * 1e6
                    took = run.prompt_tokens[1 : max(2, count // 5)] > 0
                    busy = early[took].mean() if took.any() else math.nan
                    tail = [float(np.quantile(early, 0.99)), float(early.max())]
                    figures = [float(early.mean()), float(busy), *tail]
                    label = system if collected else f"{system}, no garbage collected"
                    print(
                        f"{name:11}{count:6} queued  {label:33} mean {figures[0]:7.1f} us,"
                        f" when prompts are taken {figures[1]:7.1f},"
                        f" 99th percentile {figures[2]:7.1f}, longest {figures[3]:8.1f}",
                        flush=True,
                    )
                    found[f"{name} {count} {label}"] = figures
    return found


def _collect(on: bool) -> None:
    gc.collect()
    (gc.enable if on else gc.disable)()


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
