"""
A job whose keys and values do not fit: the plan beside first come, first served with vLLM's admission.

The first requests of the Azure conversation trace, all there at the start, at the hybrid paper's costs. The
baseline admits whatever fits now, keeps one per cent free and evicts the newest when memory runs out; the
plan knows the lengths and never exceeds the capacity, as the referee checks at every decode step.

Run: ``python benchmarks/kv_capacity.py`` (``BATCHBOUND_DATA`` names the folder of public data).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.tables import read_lengths
from batchbound.data.workload import Workload
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.models.certificates.checker import verify_bound
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits

DATA = Path(os.environ.get("BATCHBOUND_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TRACE = DATA / "azure2023" / "AzureLLMInferenceTrace_conv.csv"


def azure(count: int) -> Workload:
    """Return the trace's first requests, all there at the start."""
    trace = read_lengths(TRACE).select(np.arange(count))
    return Workload(trace.ids, trace.input_tokens, trace.output_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--capacity", type=int, default=200_000, help="tokens")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of the plan")
    args = parser.parse_args()
    problem = Problem(
        azure(args.requests),
        CostModel.paper(),
        args.slots,
        kv_capacity=args.capacity,
        prefill_emits_first_token=True,
    )
    plan = make_plan(problem, limits=Limits(seconds=args.time_limit))
    assert plan.bound is not None
    assert plan.schedule.check(problem) is None
    assert verify_bound(problem, plan.bound) is None
    held = int(plan.schedule.kv_tokens(problem).max())
    print("| schedule | seconds | most tokens held | evictions | above the bound |")
    print("|---|---:|---:|---:|---:|")
    print(f"| proven bound ({plan.bound.source}) | {plan.bound.seconds:.1f} | | | |")
    gap = plan.bound.gap(plan.makespan)
    print(f"| plan, {args.time_limit:g} s | {plan.makespan:.1f} | {held:,} | 0 | {gap:.1%} |")
    factors = []
    for name in ("fcfs", "lpt", "lpt-ski"):
        trace = simulate(problem, policy_named(name, problem))
        most = max(
            stage.kv_tokens // max(1, stage.decode_steps) for stage in trace.stages if stage.kind == "decode"
        )
        above = plan.bound.gap(trace.makespan)
        print(f"| {name} | {trace.makespan:.1f} | {most:,} | {trace.evictions} | {above:.1%} |")
        factors.append(f"{trace.makespan / plan.makespan:.3f} ({name})")
    print(f"\nThe plan is faster by a factor of {', '.join(factors)}.")


if __name__ == "__main__":
    main()
