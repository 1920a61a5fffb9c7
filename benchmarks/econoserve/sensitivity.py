"""How much the sizes matter: padding, reserve, buffer, SLO scale, answers too long (Figures 4, 5, 15)."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from outcome import Binding
from published import SWEET_SPOTS
from study import Study

from batchbound.executor.serving.metrics import serving_metrics
from batchbound.executor.serving.simulation import EXECUTING, PAUSED
from batchbound.heuristics.serving.econoserve.settings import EconoServeSettings, Shortage


@dataclass(frozen=True, slots=True)
class Scheme:
    """
    A system with settings of its own, and the demand (share of the memory) at which its requests queue.

    ``reserved`` is what it reserves by trace, if other than Figure 15's best.
    """

    system: str
    demand: float
    settings: dict[str, Any]
    reserved: dict[str, float] = dataclasses.field(default_factory=dict)

    def sizes(self, trace: str, sizes: EconoServeSettings, field: str, value: float) -> EconoServeSettings:
        """Return the settings with one size set."""
        reserved = self.reserved.get(trace, sizes.reserved)
        return replace(sizes, **self.settings | {"reserved": reserved} | {field: value})


SCHEMES = {
    "default": Scheme("econoserve", 0.9, {}),
    "printed": Scheme("econoserve", 0.6, {"hosted": "answers", "literal": True}),
    "offload": Scheme(
        "econoserve-sd",
        0.6,
        {"shortage": "offload"},
        {"alpaca": 0.012, "sharegpt": 0.03, "bookcorpus": 0.05},
    ),
    "reserve-offload": Scheme("econoserve", 0.6, {"hosted": "answers", "shortage": "reserve, then offload"}),
    "recalled": Scheme("econoserve", 0.9, {"shortage": "reserve, then offload"}),
}
"""EconoServe as it is here, and as sections 3.2 and 3.3 print it; SyncDecoupled, of which Figure 4 is, with
its reserve (section 2.2) and vLLM's strategy for answers longer than predicted; and EconoServe whose answers
longer than predicted take the reserve (section 2.3's third solution) and, where it is used up, follow vLLM's
strategy (its first), lending as printed, and (``recalled``) to whole requests, of which guests that overstay
give their place back. Exact allocation cannot fill what lending by time does."""

GRIDS: dict[str, tuple[float, ...]] = {
    "padding": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    "reserved": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12),
    "buffer": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
}


def sweet(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Vary padding, reserve and buffer (Figures 4 and 15); say how sure each minimum is, and what trades."""
    found: dict[str, object] = {}
    for name in options.traces:
        for label in options.schemes:
            scheme = SCHEMES[label]
            demand = scheme.demand if options.demand is None else options.demand
            # SyncDecoupled lends nothing: no buffer.
            fields = [field for field in options.fields if (label, field) != ("offload", "buffer")]
            for field in fields:
                rows: dict[float, list[dict[str, float]]] = {value: [] for value in GRIDS[field]}
                for seed in range(options.seeds):
                    study = make(name)
                    study.seed = seed
                    rate = study.trace.rate if options.paper_rates else study.rate_of(demand)
                    workload = study.workload(rate, options.minutes or study.trace.minutes)
                    # As in systems: a queue that ever grows is judged while it does.
                    until = float(workload.arrival.max()) if options.paper_rates else math.inf
                    for value, row in rows.items():
                        sizes = scheme.sizes(name, study.sizes, field, value)
                        run = study.run(scheme.system, workload, known=False, sizes=sizes, until=until)
                        bound = Binding.of(run, math.inf, None)
                        more = {"lent": run.lent_tokens / len(workload), "memory": bound.memory}
                        row.append(serving_metrics(run).to_json() | more | {"idle": bound.idle})
                load = f"{study.trace.rate:g}/s" if options.paper_rates else f"demand {demand:g}"
                found[f"{name} {label} {field}"] = _minimum(name, f"{label} {field}", load, rows)
    return found


def _minimum(
    name: str, label: str, load: str, rows: dict[float, list[dict[str, float]]]
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
        part: np.array([[sum(one[key] for key in keys) for one in rows[value]] for value in values])
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
        rows = {}
        for scale in (0.5, 1.0, 1.5, 2.0, 2.5):
            study = make(name)
            study.slo = scale
            workload = study.workload(study.rate(options), options.minutes or study.trace.minutes)
            until = math.inf if options.drain else float(workload.arrival.max())
            metrics = serving_metrics(study.run("econoserve", workload, known=False, until=until))
            rows[scale] = (metrics.slo_satisfaction, metrics.completion, metrics.tokens_per_s)
        line = ", ".join(f"{k}: {a:.3f} {b:.4g} {c:.4g}" for k, (a, b, c) in rows.items())
        print(f"{name:11}SLO scale (SSR, JCT, tokens/s): {line}")
        found[name] = {str(key): list(value) for key, value in rows.items()}
    return found


def shortages(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Compare what an answer longer than predicted does (Figure 5b): its pause over its completion time."""
    published: dict[Shortage, float] = {"offload": 0.12, "pause": 0.04, "reserve": 0.005}
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        workload = study.workload(study.rate(options), options.minutes or study.trace.minutes)
        predicted = study.predicted(workload) * (1 + study.sizes.padding)
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
