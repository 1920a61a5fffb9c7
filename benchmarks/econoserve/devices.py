"""Devices that a system needs for the goodput of DistServe's sixteen (Figure 12)."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from study import Study

PAIRS = 8
"""The paper's two machines of eight devices, in pairs of one that computes prompts and one that generates."""
DEMANDS = (0.3, 0.6, 0.9, 1.2)
SYSTEMS = ("econoserve", "pipelined", "vllm", "sarathi")


def devices(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Print how many devices a system needs so that as many requests a second meet their deadline."""
    found: dict[str, object] = {}
    for name in options.traces:
        study = make(name)
        minutes = options.minutes or study.trace.minutes
        rows = []
        for demand in DEMANDS:
            rate = study.rate_of(demand)
            target = PAIRS * goodput(study, "distserve", rate, minutes)
            needed: dict[str, int | None] = {}
            for system in SYSTEMS:
                # The same requests a second in all, shared out evenly.
                counts = range(1, 2 * PAIRS + 1)
                enough = (
                    n for n in counts if n * goodput(study, system, PAIRS * rate / n, minutes) >= target
                )
                needed[system] = next(enough, None)
            rows.append({"requests_per_s": PAIRS * rate, "goodput": target, "devices": needed})
            said = ", ".join(f"{system} {count or 'more than 16'}" for system, count in needed.items())
            print(
                f"{name}, {PAIRS * rate:.3g} requests/s: DistServe 16 devices, {target:.3g} in time; {said}"
            )
        found[name] = rows
    return found


def goodput(study: Study, system: str, rate: float, minutes: float) -> float:
    """Return the requests a second that meet their deadline on one device (DistServe: on a pair)."""
    workload = study.workload(rate, minutes)
    until = float(workload.arrival.max())
    outcome = study.outcome(system, workload, known=system in ("distserve", "vllm", "sarathi"), until=until)
    in_time = outcome.metrics.slo_satisfaction or 0.0
    return in_time * len(workload) / (minutes * 60)
