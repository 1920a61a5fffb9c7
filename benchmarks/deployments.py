"""
Check what ``batchbound size`` estimates and ranks, on measured points and on two measured runs of vLLM.

A point has C requests in flight. By Little's law its engine finishes ``C * output / latency`` tokens a
second, with all waiting in the latency, and ``min(C, KV capacity / tokens held)`` requests run at a time.
Efficiencies are fitted to the points of all other models on all other devices; a pair of model and device
weighs as its root.

Run: ``python benchmarks/deployments.py FOLDER``, FOLDER with aiconfigurator, and vllm_runs if there are any
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measured_points import MeasuredPoint, read_aiconfigurator
from roofline_error import Terms, fit, left_out_errors, terms

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.iterations import Sequences
from batchbound.data.readers.measured_run import read_vllm_run
from batchbound.models.exegpt.roofline import ROOFLINE_DEVICES, Efficiency, Roofline
from batchbound.models.sizing.demand import least_seconds, least_work, machine_of
from batchbound.models.sizing.load import OFF, REACHED, Load, kv_tokens

NEAR = 0.9
"""Share of the best measured tokens/s per device that the first in the ranking should have."""
RUNS = {"RTX4090-Llama-3.1-8B": "rtx4090", "RTXPRO6000-Llama-3.1-8B": "rtxpro6000"}
LLAMA = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)


def running(point: MeasuredPoint) -> MeasuredPoint:
    """Return a point with the requests that run, and the seconds of a token of each."""
    room = kv_tokens(point.shape, ROOFLINE_DEVICES[point.device], point.degree)
    held = point.input_tokens + point.output_tokens / 2
    at_once = max(1.0, min(point.sequences, room / held))
    latency = point.ttft + point.tpot * (point.output_tokens - 1)
    rate = point.sequences * point.output_tokens / latency
    return replace(point, sequences=at_once, tpot=at_once / rate)


def quantiles(known: Terms, errors: FloatArray, rows: IntArray) -> list[float]:
    """Return the quantiles of some errors; a pair of model and device weighs as its root."""
    pairs, order = Counter(known.pair[rows].tolist()), rows[np.argsort(errors[rows])]
    weights = np.cumsum([pairs[pair] ** -0.5 for pair in known.pair[order].tolist()])
    return [float(errors[order[np.searchsorted(weights, at * weights[-1])]]) for at in OFF]


def coverage(known: Terms, errors: FloatArray) -> list[dict[str, Any]]:
    """Return, for each pair, how many of its points the interval of the other pairs holds."""
    rows = []
    for pair in sorted(set(known.pair[~np.isnan(errors)].tolist())):
        mine = np.flatnonzero(known.pair == pair)
        apart = (known.model != known.model[mine[0]]) & (known.device != known.device[mine[0]])
        low, sure, _, high = quantiles(known, errors, np.flatnonzero(apart & ~np.isnan(errors)))
        inside = (errors[mine] >= low) & (errors[mine] <= high)
        shares = {"held": float(inside.mean()), "sure": float((errors[mine] >= sure).mean())}
        rows.append(
            {"pair": pair, "points": len(mine), "median": float(np.exp(np.median(errors[mine])))} | shares
        )
    return rows


def ranking(
    measured: Sequence[MeasuredPoint], points: Sequence[MeasuredPoint], errors: FloatArray
) -> list[dict[str, Any]]:
    """Return, for each model and workload, the measured rate of the first in the ranking over the best one.

    A deployment is a device, its parallelism, the precision and the requests in flight; its rate is the
    median of the engines that were measured. Of equal estimates, as where the KV cache limits both, more
    requests in flight come first.
    """
    cases: dict[Any, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, (asked, point) in enumerate(zip(measured, points, strict=True)):
        if not np.isnan(errors[at]):
            deployed = point.device, point.degree, point.expert_degree, point.shape, asked.sequences
            cases[point.model, point.input_tokens, point.output_tokens][deployed].append(at)
    rows = []
    for (model, prompt, output), members in cases.items():
        rates, keys = list[float](), list[tuple[float, float]]()
        for (*_, in_flight), engines in members.items():
            rate = [points[at].sequences / points[at].tpot / points[at].degree for at in engines]
            rates.append(float(np.median(rate)))
            keys.append((round(rate[0] / float(np.exp(errors[engines[0]])), 6), in_flight))
        if len(rates) == 1:
            continue
        first = rates[max(range(len(keys)), key=keys.__getitem__)] / max(rates)
        case = {"model": model, "input": prompt, "output": output, "deployments": len(rates)}
        rows.append(case | {"first": first})
    return rows


def measured_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the makespan of each measured run, its estimate and its proven minimum."""
    rows = []
    for name, device in RUNS.items():
        if not (folder / "vllm_runs" / name).exists():
            continue
        run, rates = read_vllm_run(folder / "vllm_runs" / name), ROOFLINE_DEVICES[device]
        sequences = Sequences(run.workload.input_tokens, run.workload.output_tokens)
        load, room = Load.of(sequences), kv_tokens(LLAMA, rates, 1)
        at_once = load.running(run.sequences, room, len(sequences))
        seconds = load.seconds(Roofline(LLAMA, rates, 1, REACHED), at_once, run.batched_tokens)
        least, _ = least_seconds(least_work(sequences), machine_of(LLAMA, rates, 1))
        times = {"expected": seconds / OFF[0.5], "low": seconds / OFF[0.95], "high": seconds / OFF[0.05]}
        rows.append({"run": name, "measured": run.makespan, **times, "least": least})
    return rows


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the docs."""
    held, sure = (f"{100 * result[name]:.1f} %" for name in ("held", "sure"))
    cases = result["cases"]
    near = sum(case["first"] >= NEAR for case in cases)
    worst = min(result["models"].values())
    rows = [
        ["90 % interval holds, tokens/s", f"{held} of {result['points']:,} points"],
        ["within the seconds called 90 % sure", sure],
        ["first in the ranking within 10 % of the best", f"{near} of {len(cases)} models with lengths"],
        ["the same, median of a model", f"at least {worst:.2f} in {len(result['models'])} models"],
    ]
    for run in result["runs"]:
        name, *seconds = (run["run"].partition("-")[0], *(run[key] for key in ("expected", "low", "high")))
        estimate = "{:.0f} s, {:.0f} to {:.0f}".format(*seconds)
        figures = f"measured {run['measured']:.0f} s, proven {run['least']:.0f} s"
        rows.append([f"vLLM on {name}", f"{estimate}; {figures}"])
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="rows for docs/write_results.py, as JSON")
    args = parser.parse_args(argv)
    measured, left_out = read_aiconfigurator(args.folder / "aiconfigurator" / "measured_points.csv")
    points = [running(point) for point in measured]
    known = terms(points)
    errors = left_out_errors(known)
    judged = np.flatnonzero(~np.isnan(errors))
    pairs, cases = coverage(known, errors), ranking(measured, points, errors)
    weights = [row["points"] for row in pairs]
    by_model = defaultdict(list)
    for case in cases:
        by_model[case["model"]].append(case["first"])
    whole = np.exp(fit(known, np.arange(len(points)))).tolist()
    result: dict[str, Any] = {
        "points": len(judged),
        "left_out": dict(left_out),
        "efficiency": dict(zip(Efficiency.__dataclass_fields__, whole, strict=True)),
        "off": dict(zip(map(str, OFF), np.exp(quantiles(known, errors, judged)).tolist(), strict=True)),
        "held": float(np.average([row["held"] for row in pairs], weights=weights)),
        "sure": float(np.average([row["sure"] for row in pairs], weights=weights)),
        "near": float(np.mean([case["first"] >= NEAR for case in cases])),
        "models": {model: float(np.median(first)) for model, first in by_model.items()},
        "pairs": pairs,
        "cases": cases,
        "runs": measured_runs(args.folder),
    }
    for name in ("points", "efficiency", "off", "held", "sure", "near", "models", "runs"):
        print(name, json.dumps(result[name], indent=None))
    for row in (*pairs, *cases):
        print(" ", *row.values())
    if args.table:
        args.table.write_text(json.dumps(table(result)), encoding="utf-8")
    if args.output:
        args.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
