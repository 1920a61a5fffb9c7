"""How much the sizes matter: padding, reserve, buffer, SLO scale, answers too long (Figures 4, 5, 15)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from published import SWEET_SPOTS
from study import Study

from batchbound.executor.serving_metrics import ServingMetrics, serving_metrics
from batchbound.executor.serving_simulation import EXECUTING, PAUSED
from batchbound.heuristics.econoserve_settings import EconoServeSettings

Shortage = Literal["reserve", "pause", "offload"]


def _with(sizes: EconoServeSettings, field: str, value: float) -> EconoServeSettings:
    changed: dict[str, Any] = {field: value}
    return replace(sizes, **changed)


GRIDS: dict[str, tuple[float, ...]] = {
    "padding": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    "reserved": (0.0, 0.01, 0.02, 0.04, 0.08, 0.15),
    "buffer": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
}


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
                    sizes = _with(study.sizes, field, value)
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
        f"{name:11}{field:9}best {values[best]:g} ({inside}), published {SWEET_SPOTS[field][name]:g};"
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
