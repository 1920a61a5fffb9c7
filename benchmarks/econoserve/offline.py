"""The policies beside the planner, where all requests are there and their lengths are known."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from planner_schedule import serving_schedule
from setting import FORWARD
from study import Study

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.heuristics.serving.metrics import serving_metrics
from batchbound.heuristics.serving.registry import SERVING_POLICIES, ServingOptions, serving_policy
from batchbound.heuristics.serving.simulation import simulate_serving
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve


def offline(make: Callable[[str], Study], options: argparse.Namespace) -> dict[str, object]:
    """Compare the policies with the planner: 1,000 requests, all there, known lengths, planner's costs."""
    study = make("sharegpt")
    drawn = generate("sharegpt", study.seed, 1000)
    workload = Workload(drawn.ids, drawn.input_tokens, drawn.output_tokens)
    fit = study.cost
    cost = CostModel(
        fit.prefill_base, fit.prefill_per_token, fit.few_base, fit.few_per_request, 0.0, fit.few_per_kv_token
    )
    problem = Problem(workload, cost, 256, kv_capacity=study.capacity, prefill_emits_first_token=True)
    policies: dict[str, float] = {}
    start = None
    for system in SERVING_POLICIES:
        policy = serving_policy(system, ServingOptions(2048, FORWARD, replace(study.sizes, padding=0.0)))
        run = simulate_serving(workload, policy, fit, study.capacity, block_tokens=1)
        prompts = run.prompt_tokens[run.prompt_tokens > 0]
        decode_steps = int((run.decodes > 0).sum())
        # What the same iterations take when a prompt and a token are a stage and a step, swaps not counted.
        stages = len(prompts) * cost.prefill_base + cost.prefill_per_token * int(prompts.sum())
        read = cost.decode_per_kv_token * problem.kv_token_steps
        seconds = (
            stages + decode_steps * cost.decode_base + cost.decode_per_slot * int(run.decodes.sum()) + read
        )
        schedule = serving_schedule(run, problem)
        also = None if schedule is None else schedule.makespan(problem)
        metrics = serving_metrics(run)
        print(
            f"{system:16}{seconds:9.2f} s, as a schedule {'-' if also is None else f'{also:.2f} s':>9},"
            f" KV held {metrics.kv_held:.3f}, given {metrics.kv_promised:.3f}, refused {run.failures},"
            f" lent {run.lent_tokens}"
        )
        policies[system] = min(seconds, also or seconds)
        if schedule is not None and (start is None or schedule.makespan(problem) < start.makespan(problem)):
            start = schedule
    result = solve(problem, limits=Limits(seconds=options.seconds), initial=start)
    if result.makespan is None or result.bound is None:
        raise RuntimeError("the planner found nothing")
    gap = result.bound.gap(result.makespan)
    print(
        f"planner         {result.makespan:9.2f} s, bound {result.bound.seconds:.2f} s, proven gap {gap:.2%}"
    )
    print(f"best policy     {min(policies.values()):9.2f} s ({min(policies, key=policies.__getitem__)})")
    return {"policies": policies, "planner": result.makespan, "bound": result.bound.seconds, "gap": gap}
