"""How much the sizes matter: padding, reserve, buffer and SLO scale (Figure 15)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from outcome import Binding
from published import SWEET_SPOTS
from study import Study

from batchbound.heuristics.serving.metrics import serving_metrics

SCHEMES = {"pipelined": 0.9, "econoserve": 0.6}
"""Policies, and the demand (share of the memory) at which their requests queue: exact allocation cannot fill
what lending by time does."""

GRIDS: dict[str, tuple[float, ...]] = {
    "padding": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    "reserved": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12),
    "buffer": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
}


def sweet(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Vary padding, reserve and buffer (Figure 15); say how sure each minimum is, and what trades."""
    found: dict[str, object] = {}
    for name in options.traces:
        for label in options.schemes:
            demand = SCHEMES[label] if options.demand is None else options.demand
            for field in options.fields:
                rows: dict[float, list[dict[str, float | None]]] = {value: [] for value in GRIDS[field]}
                for seed in range(options.seeds):
                    study = make(name)
                    study.seed = seed
                    rate = study.trace.rate if options.paper_rates else study.rate_of(demand)
                    workload = study.workload(rate, options.minutes or study.trace.minutes)
                    # As in systems: a queue that ever grows is judged while it does.
                    until = float(workload.arrival.max()) if options.paper_rates else math.inf
                    for value, row in rows.items():
                        sizes = replace(study.sizes, **{field: value})  # type: ignore[arg-type]
                        run = study.run(label, workload, known=False, sizes=sizes, until=until)
                        bound = Binding.of(run, math.inf, None)
                        more = {"lent": run.lent_tokens / len(workload), "memory": bound.memory}
                        row.append(serving_metrics(run).to_json() | more | {"idle": bound.idle})
                load = f"{study.trace.rate:g}/s" if options.paper_rates else f"demand {demand:g}"
                found[f"{name} {label} {field}"] = _minimum(name, f"{label} {field}", load, rows)
    return found


def _minimum(
    name: str, label: str, load: str, rows: dict[float, list[dict[str, float | None]]]
) -> dict[str, object]:
    """Print a parameter's minimum of the mean completion time, and what falls and rises about it."""
    values = list(rows)
    columns = {
        "completion": ("completion",),
        "waiting": ("waiting", "queueing"),
        "stopped": ("preemption",),
        "running": ("execution",),
        "share": ("failed",),
        "held": ("kv_held",),
        "given": ("kv_promised",),
        "lent": ("lent",),
        "memory": ("memory",),
        "idle": ("idle",),
    }
    # By parameter and seed.
    parts = {
        part: np.array([[sum(one[key] or 0 for key in keys) for one in rows[value]] for value in values])
        for part, keys in columns.items()
    }
    times = parts["completion"]
    best = int(times.mean(1).argmin())
    # The same seeds at all values: paired differences.
    gained = (times - times[best]) / times[best]
    over = gained.mean(1)
    seeds = times.shape[1]
    error = gained.std(1, ddof=1) / seeds**0.5 if seeds > 1 else np.full(len(values), math.nan)
    edges = (0, len(values) - 1)
    sure = all(over[at] > 2 * error[at] for at in edges)
    inside = "at the edge" if best in edges else "inside, beyond two errors" if sure else "inside, not surely"
    published = SWEET_SPOTS[label.split()[1]][name]
    print(
        f"{name:11}{label:17} {load}: best {values[best]:g} ({inside}), published {published:g}; "
        + ", ".join(f"{values[at]:g} costs {over[at]:+.1%} +- {error[at]:.1%}" for at in edges)
    )
    for part, column in parts.items():
        print(f"    {part:11}" + "".join(f"{value:9.4g}" for value in column.mean(1)), flush=True)
    first, second = (0, values.index(published)) if best == 0 else (values.index(published), len(values) - 1)
    change = {part: parts[part][second].mean() - parts[part][first].mean() for part in parts}
    print(
        f"    from {values[first]:g} to {values[second]:g}: waiting {change['waiting']:+.3g} s, stopped"
        f" {change['stopped']:+.3g} s, running {change['running']:+.3g} s;"
        f" {change['share']:+.1%} of the requests are stopped"
    )
    means = {part: column.mean(1).tolist() for part, column in parts.items()}
    return {"best": values[best], "values": values, "load": load, "seeds": times.tolist()} | means


def scales(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Vary the SLO scale (Figure 15a)."""
    found: dict[str, object] = {}
    for name in options.traces:
        for system in SCHEMES:
            rows = {}
            for scale in (0.5, 1.0, 1.5, 2.0, 2.5):
                study = make(name)
                study.slo = scale
                workload = study.workload(study.rate(options), options.minutes or study.trace.minutes)
                until = math.inf if options.drain else float(workload.arrival.max())
                metrics = serving_metrics(study.run(system, workload, known=False, until=until))
                rows[scale] = (metrics.slo_satisfaction, metrics.completion, metrics.tokens_per_s)
            line = ", ".join(f"{k}: {a or 0:.3f} {b:.4g} {c:.4g}" for k, (a, b, c) in rows.items())
            print(f"{name:11}{system:11}SLO scale (SSR, JCT, tokens/s): {line}")
            found[f"{name} {system}"] = {str(key): list(value) for key, value in rows.items()}
    return found
