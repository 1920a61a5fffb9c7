"""
Draw an evaluation set first come, first served, and planned, on one clock: the gallery's picture.

    BATCHBOUND_DATA=../shared/data python benchmarks/answers_picture.py docs/answers.png

The completions of one model to the GSM8K test prompts (ZeroEval, Apache-2.0), at the hybrid paper's costs.
Prints both times and the bound.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rollouts_plan import rollouts

from batchbound import CostModel, Limits, Problem, plan, report, simulate
from batchbound.executor.reports.gantt import Panel, save_gantt
from batchbound.executor.reports.report import simulated

MODEL = "gsm8k_models:Qwen2-7B-Instruct"


def main() -> None:
    """Plan the set, simulate both ways, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("picture", nargs="?", default="docs/answers.png")
    parser.add_argument("--job", default=MODEL, help="FILE:MODEL (default %(default)s)")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    jobs = {
        name: workload for name, workload, _ in rollouts(Path(os.environ["BATCHBOUND_DATA"]) / "rollouts")
    }
    if options.job not in jobs:
        parser.error(f"--job {options.job}: there are {', '.join(jobs)}")
    problem = Problem(jobs[options.job], CostModel.paper(), options.slots, prefill_emits_first_token=True)
    made = plan(problem, limits=Limits(seconds=options.seconds))
    first_come, planned = simulate(problem, "fcfs"), simulated(made)[0]
    panels = [
        Panel(title, trace, report(made, [trace]))
        for title, trace in (("First come, first served", first_come), ("Planned", planned))
    ]
    save_gantt(options.picture, *panels)
    saved = 1 - planned.makespan / first_come.makespan
    print(
        f"{options.job}, {len(problem)} requests on {options.slots} slots: first come, first served"
        f" {first_come.makespan:.1f} s, planned {planned.makespan:.1f} s ({saved:.1%} less), no order takes"
        f" less than {panels[1].report.run_bound:.1f} s"
    )


if __name__ == "__main__":
    main()
