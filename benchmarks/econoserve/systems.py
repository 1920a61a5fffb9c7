"""Every system at the paper's rates, each ratio beside the published one (Figures 1, 9, 10, 13)."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict

from outcome import Outcome, table
from published import LESS, MORE, ratios
from study import ORACLES, Study

from batchbound.heuristics.serving.registry import SERVING_POLICIES

PARTS = ("econoserve-d", "econoserve-sd", "econoserve-sdo")
MARKS = {" ": "as published", "~": "by more than a quarter another", "=": "a tie", "x": "the other order"}


def systems(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Run every system at the paper's rates, and print each ratio beside the published one, and why not."""
    found: dict[str, dict[str, Outcome]] = {}
    for name in options.traces:
        study = make(name)
        rate = study.rate(options)
        workload = study.workload(rate, options.minutes or study.trace.minutes)
        memory, computing = study.memory(workload, rate), study.computing(workload, rate)
        print(
            f"\n{name}: {len(workload)} requests at {rate:g}/s (* lengths known). To keep up, any system"
            f" would need {memory:.2f} of the memory and {computing:.2f} of the computing there is"
        )
        # A trace is judged while it lasts, as the paper's of hours: a queue that grows ten times as fast as
        # it is served would take days to drain, and the figures would be those of draining it.
        until = math.inf if options.drain else float(workload.arrival.max())
        rows: dict[str, Outcome] = {}
        for system in [*SERVING_POLICIES, "distserve"]:
            rows[f"{system}*"] = study.outcome(system, workload, known=True, until=until)
        for system in (*PARTS, "econoserve", "pipelined", *ORACLES):
            rows[system] = study.outcome(system, workload, known=False, until=until)
        table(rows)
        found[name] = rows
    for system in ("econoserve", "pipelined"):
        compare(found, options.model, system)
    return {
        name: {
            k: one.metrics.to_json() | asdict(one.binding) | {"served_tokens": one.served_tokens}
            for k, one in rows.items()
        }
        for name, rows in found.items()
    }


def compare(found: dict[str, dict[str, Outcome]], model: str, system: str) -> None:
    """Print ratios beside the published ones, one system as the paper's; for others, what bound the two."""
    print(f"\n{'ratio':46}{'published':>10}" + "".join(f"{name:>13}" for name in found))
    counts = {name: dict.fromkeys(MARKS, 0) for name in found}
    others: dict[str, dict[tuple[str, str], list[str]]] = {name: {} for name in found}
    for over, under, figure, ratio in ratios(model, system):
        said = {MORE: "> 1", LESS: "< 1"}.get(ratio, f"{ratio:.2f}")
        line = f"{over + ' / ' + under + ', ' + figure:46}{said:>10}"
        for name, rows in found.items():
            high, low = (getattr(rows[system].metrics, figure) for system in (over, under))
            here = high / low if low else math.inf
            mark = _mark(here, ratio)
            counts[name][mark] += 1
            line += f"{here:11.2f} {mark}"
            if mark != " ":
                others[name].setdefault((over, under), []).append(f"{figure} {here:.2f} {mark} {said}")
        print(line)
    marks = "".join("{:>13}".format(", ".join(map(str, count.values()))) for count in counts.values())
    print(f"{'as published, ' + ', '.join(f'{mark} {MARKS[mark]}' for mark in '~=x'):56}{marks}")
    for name, pairs in others.items():
        print(f"\n{name}, ratios that are not the published ones:")
        for (over, under), figures in pairs.items():
            print(f"    {over} / {under}: {'; '.join(figures)}")
        print("  where the seconds of these systems go, and what binds them:")
        for system in dict.fromkeys(itertools.chain.from_iterable(pairs)):
            print(f"    {system:16}{found[name][system].why()}")


def _mark(here: float, published: float) -> str:
    """Return a key of MARKS."""
    if abs(here - 1) < 0.005:
        return "="
    if (here > 1) != (published > 1):
        return "x"
    ordered = published in (MORE, LESS)
    return " " if ordered or abs(math.log(here / published)) <= math.log(1.25) else "~"
