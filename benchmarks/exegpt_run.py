"""
ExeGPT end to end on this machine: profile, search under a bound that binds, run, compare.

For RRA and for WAA (two processes) one line a repeat: throughput in the steady state and 99th-percentile
latency, predicted and measured. Profiles and runs take turns; the configuration is chosen on the first
profile, and each run compared with what the profile right before it predicts. Answers are compared with
per-request `generate`, token by token.

    python benchmarks/exegpt_run.py                 # on a quiet machine
    python benchmarks/exegpt_run.py --clock cpu     # in CPU seconds of the process that decodes

In CPU seconds, WAA's throughput is that of a decoder that never waits, and its latency is not known.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchbound.cli.search import planned_configuration, timelines_of
from batchbound.data.configuration import PlannedConfiguration
from batchbound.data.cost import CostModel
from batchbound.data.generators import GENERATORS
from batchbound.data.layer_profile import LayerProfile
from batchbound.data.length_pair import LengthPair
from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload
from batchbound.executor.configuration_run import steady_state
from batchbound.executor.encode_worker import EncodeWorker
from batchbound.executor.engine_spec import EngineSpec
from batchbound.executor.huggingface import HuggingFaceEngine, vocabulary_of
from batchbound.executor.journal import Journal
from batchbound.executor.layer_profiling import profile_layers
from batchbound.executor.loop import execute
from batchbound.executor.model_source import load_model
from batchbound.executor.profile_grid import Grid
from batchbound.executor.profiling import grid
from batchbound.executor.prompts import Prompts
from batchbound.executor.tiers import Tier, choose_tier
from batchbound.executor.workload_aware import DecodeEngine
from batchbound.heuristics.configured import dynamic_batch, rra_policy
from batchbound.heuristics.workload_aware_allocation import WorkloadAwareAllocation
from batchbound.models.exec_config import ExecConfig, Strategy
from batchbound.models.timeline import Timeline
from batchbound.solvers.execution_search import search

MOST_ENCODE_BATCH = 16
CHECKED = 24
"""Answers compared with `generate`."""


def main() -> None:
    """Print one line for each repeat and strategy."""
    parser = argparse.ArgumentParser(description="ExeGPT end to end on this machine")
    parser.add_argument("--model", default="tiny:llama")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--task", default="T", help="of ExeGPT's Table 3 (default %(default)s)")
    parser.add_argument("--scale", type=float, default=0.25, help="of its lengths (default %(default)s)")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--margin", type=float, default=0.1, help="of the bound, not planned with")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    model = load_model(args.model, dtype=args.dtype, device="cpu")
    tier = choose_tier(model)
    problem = _problem(args)
    prompts = Prompts.random(problem.workload, vocabulary_of(model), seed=0)
    spec = EngineSpec(args.model, dtype=args.dtype, device="cpu", tier=tier.name)
    strategies = [Strategy.RRA, Strategy.WAA_C]
    chosen: dict[Strategy, tuple[ExecConfig, float]] = {}
    for repeat in range(args.repeats):
        profile = _profile(model, tier, spec, clock, problem)
        for strategy in strategies:
            timeline = _timeline(profile, problem, strategy)
            if strategy not in chosen:
                chosen[strategy] = _choose(timeline, strategy, args.margin)
            config, bound = chosen[strategy]
            planned = planned_configuration(timeline, config, bound)
            answers, trace = _run(planned, problem, model, tier, spec, prompts, args, clock)
            _print(repeat, planned, trace)
            if repeat == 0:
                print(
                    f"    {_mismatches(model, prompts, answers)} of {CHECKED} answers differ from `generate`"
                )


def _problem(args: argparse.Namespace) -> Problem:
    """Return requests of a task with its lengths scaled down."""
    generator = GENERATORS[f"exegpt-{args.task}"]
    rng = np.random.default_rng(0)
    inputs = np.maximum(1, args.scale * generator.input_tokens().sample(rng, args.requests))
    outputs = np.maximum(2, args.scale * generator.output_tokens().sample(rng, args.requests))
    workload = Workload.from_lengths(inputs.astype(np.int64), outputs.astype(np.int64))
    return Problem(workload, CostModel.paper(), args.requests, prefill_emits_first_token=True)


def _profile(
    model: Any, tier: Tier, spec: EngineSpec, clock: Callable[[], float], problem: Problem
) -> LayerProfile:
    longest = int((problem.prompt_tokens + problem.rounds).max())
    measured = Grid(tuple(grid(128, points=6)), tuple(grid(longest, least=8, points=4)))
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "points", {"clock": str(clock)}) as journal,
    ):
        return profile_layers(model, tier, measured, journal, pinned=True, worker=spec, clock=clock)


def _timeline(profile: LayerProfile, problem: Problem, strategy: Strategy) -> Timeline:
    lengths = LengthPair.observed(problem.workload.with_output_tokens(problem.rounds))
    devices = 1 if strategy is Strategy.RRA else 2
    return timelines_of([profile], lengths, devices)[strategy is not Strategy.RRA]


def _choose(timeline: Timeline, strategy: Strategy, margin: float) -> tuple[ExecConfig, float]:
    """Return the best under a bound half way (by ratio) from the least latency to that without a bound."""
    batches = (1, MOST_ENCODE_BATCH)
    free = search(timeline, strategy, 1, math.inf, encode_batches=batches)
    rounds = timeline.lengths.outputs.high if strategy is Strategy.RRA else 1
    least = timeline(ExecConfig(strategy, 1, rounds)).latency
    assert free.performance is not None
    bound = math.sqrt(least * free.performance.latency)
    found = search(timeline, strategy, 1, bound * (1 - margin), encode_batches=batches)
    if found.config is None:
        raise SystemExit(f"{strategy.value}: no configuration under {bound:.3f} s")
    print(f"{strategy.value}: least latency {least:.3f} s, without a bound {free.performance.latency:.3f} s")
    return found.config, bound


def _run(
    planned: PlannedConfiguration,
    problem: Problem,
    model: Any,
    tier: Tier,
    spec: EngineSpec,
    prompts: Prompts,
    args: argparse.Namespace,
    clock: Callable[[], float],
) -> tuple[list[list[int]], Trace]:
    problem = replace(problem, slots=min(len(problem), planned.slots))
    most = problem.workload.output_tokens
    if not planned.handed_over:
        single = HuggingFaceEngine(problem, model, prompts.tokens, most, tier=tier, clock=clock)
        return single.answers, execute(problem, rra_policy(planned), single)
    batch = dynamic_batch(planned)
    with closing(EncodeWorker(spec, batch.most, int(problem.prompt_tokens.max()))) as worker:
        engine = DecodeEngine(
            worker, problem, model, prompts.tokens, most_tokens=most, tier=tier, clock=clock
        )
        trace = execute(problem, WorkloadAwareAllocation(engine, batch, planned.lead), engine)
    began = engine.encode_began if args.clock == "wall" else np.full(len(problem), np.nan)
    return engine.answers, replace(trace, prefilled=began)


def _print(repeat: int, planned: PlannedConfiguration, trace: Trace) -> None:
    reached = steady_state(trace)
    if reached is None:
        raise SystemExit("the run is too short for a steady state: give more --requests")
    assert planned.latency_bound is not None
    # NaN where encoding began on another clock.
    latency, bound = reached.latency, planned.latency_bound
    met = "met" if latency <= bound else "missed" if latency > bound else "not known"
    print(
        f"{repeat} {planned.strategy:5s} B_E {planned.encode_batch:3d} N_D {planned.decode_rounds:3d}"
        f" B_D {planned.decode_batch:5.1f}: throughput {planned.throughput:7.2f}/s predicted,"
        f" {reached.throughput:7.2f}/s measured ({planned.throughput / reached.throughput - 1:+.1%});"
        f" 99 % latency {planned.latency:.3f} s predicted, {latency:.3f} s measured,"
        f" bound {bound:.3f} s {met}; {reached.requests} requests",
        flush=True,
    )


def _mismatches(model: Any, prompts: Prompts, answers: list[list[int]]) -> int:
    import torch

    wrong = 0
    for row in np.linspace(0, len(answers) - 1, CHECKED).astype(int).tolist():
        ids = torch.tensor([prompts.tokens[row]])
        count = len(answers[row])
        alone = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        wrong += alone[0, ids.shape[1] :].tolist() != answers[row]
    return wrong


if __name__ == "__main__":
    main()
