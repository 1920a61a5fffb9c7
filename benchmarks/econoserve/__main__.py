"""
EconoServe's study in simulation, each figure beside the published one.

Requests of its Table 2 (Alpaca, ShareGPT, BookCorpus) on OPT-13B on one A100 with 12 GB for keys and values,
on Llama-33B on two with 19.2 GB and on OPT-175B on eight with 264 GB (or OPT-66B on four, with 185 GB),
iterations at the costs DistServe fitted to OPT-13B and OPT-66B on these devices, or scaled from them. Needs
the public files (see --data).

Run: ``python benchmarks/econoserve systems`` (or ``rates``, ``sweet``, ``scales``,
``decisions``, ``hours``, ``offline``, ``devices``, ``waiting``).
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from devices import devices
from load import decisions, hours, rates
from offline import offline
from sensitivity import GRIDS, SCHEMES, scales, sweet
from setting import MODELS, TRACES
from study import Study
from systems import systems
from waiting import waiting

COMMANDS = {
    "systems": systems,
    "rates": rates,
    "sweet": sweet,
    "scales": scales,
    "decisions": decisions,
    "hours": hours,
    "offline": offline,
    "devices": devices,
    "waiting": waiting,
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
    parser.add_argument("--memory", type=float, default=1.0, help="times the memory for keys and values")
    parser.add_argument("--preemption", type=float, default=1.0, help="times the cost of moving to the host")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5, help="averaged over, in sweet")
    parser.add_argument(
        "--paper-rates", action="store_true", help="in sweet, instead of a demand, till the last arrival"
    )
    parser.add_argument(
        "--errors", choices=("reported", "log-normal"), default="reported", help="of predicted lengths"
    )
    parser.add_argument("--steps", type=int, default=8, help="of the search for a rate")
    parser.add_argument(
        "--latency", type=float, default=3.0, help="normalized, over the unloaded one, in rates"
    )
    parser.add_argument("--fields", nargs="+", choices=GRIDS, default=list(GRIDS), help="in sweet")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="in sweet")
    parser.add_argument("--queued", type=int, nargs="+", default=(2_500, 5_000, 10_000), help="in decisions")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the planner")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    served = MODELS[options.model]
    served = replace(served, kv_memory=served.kv_memory * options.memory)
    cost = served.cost(options.data)
    cost = replace(cost, swap_per_token=cost.swap_per_token * options.preemption)
    found = COMMANDS[options.what](
        lambda name: Study(served, cost, name, options.seed, options.errors), options
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
