"""
ExeGPT end to end on this machine: profile, search under a bound that binds, run, compare.

RRA and WAA (two processes) are searched for on the medians of some passes of the profile, each under a bound
half way (by ratio) from the least latency to that without a bound. A machine's speed may change from one
second to the next, so each run is compared with what as many passes of the profile predict that are made
beside it: they go on in turns, some measurements and a stretch of each run, whose clock stands still
meanwhile. Where a share of the measurements is made, the run has finished that share of its requests. One
line a run: throughput in the steady state and 99th-percentile latency, predicted and measured; in the end the
medians, with the prediction that the search made beforehand. Answers are compared with per-request
`generate`, token by token.

    python benchmarks/exegpt/exegpt_run.py                 # on a quiet machine
    python benchmarks/exegpt/exegpt_run.py --clock cpu     # in CPU seconds of the process that decodes

In CPU seconds, WAA's throughput is that of a decoder that never waits, and its latency is not known.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from paused_run import PausedClock, PausedRun

from batchbound.data.configuration import PlannedConfiguration
from batchbound.data.costs.cost import CostModel
from batchbound.data.costs.layer_profile import LayerProfile
from batchbound.data.lengths.pair import LengthPair
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import GENERATORS
from batchbound.data.workload import Workload
from batchbound.executor.engines.huggingface import HuggingFaceEngine, vocabulary_of
from batchbound.executor.engines.tiers import Tier, choose_tier
from batchbound.executor.jobs.journal import Journal
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.models.source import load_model
from batchbound.executor.processes.encode_worker import EncodeWorker
from batchbound.executor.processes.engine_spec import EngineSpec
from batchbound.executor.processes.workload_aware import DecodeEngine
from batchbound.executor.profiling.grid_run import grid
from batchbound.executor.profiling.layer_profiling import ProfiledModel, profile_layers
from batchbound.executor.profiling.profile_grid import Grid
from batchbound.executor.reports.steady_state import SteadyState, steady_state
from batchbound.heuristics.exegpt.dynamic_batch import DynamicBatch
from batchbound.heuristics.exegpt.round_robin import RoundRobinAllocation
from batchbound.heuristics.exegpt.workload_aware import WorkloadAwareAllocation
from batchbound.heuristics.loop import Execution
from batchbound.models.exegpt.configuration import ExecConfig, Performance, Strategy
from batchbound.models.exegpt.timeline import Timeline
from batchbound.searching import planned_configuration, timelines_of
from batchbound.solvers.exegpt.execution_search import search

MOST_ENCODE_BATCH = 16
MOST_DECODE_BATCH = 96
"""Of the profile."""
TOGETHER = 4
"""Measurements between two stretches of a run."""
CHECKED = 24
"""Answers compared with `generate`."""


def main() -> None:
    """Print one line for each repeat and strategy."""
    parser = argparse.ArgumentParser(description="ExeGPT end to end on this machine")
    parser.add_argument("--model", default="tiny:llama")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--task", default="T", help="of ExeGPT's Table 3 (default %(default)s)")
    parser.add_argument("--scale", type=float, default=0.25, help="of its lengths (default %(default)s)")
    parser.add_argument("--requests", type=int, default=9600)
    parser.add_argument(
        "--passes", type=int, default=3, help="of the profile, before the search and beside each run"
    )
    parser.add_argument(
        "--points",
        type=int,
        nargs=2,
        default=(6, 5),
        metavar=("BATCHES", "LENGTHS"),
        help="of the profile (default 6 5)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of both")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    model = load_model(args.model, dtype=args.dtype, device="cpu")
    tier = choose_tier(model)
    problem = _problem(args)
    prompts = Prompts.random(problem.workload, vocabulary_of(model), seed=0)
    spec = EngineSpec(args.model, dtype=args.dtype, device="cpu", tier=tier.name)
    longest = math.ceil(problem.prompt_tokens.mean() + problem.decode_steps.mean())
    # No batch holds more tokens a request on average, but a batch of few.
    batches, lengths = args.points
    sizes = Grid(
        tuple(grid(MOST_DECODE_BATCH, points=batches)),
        tuple(grid(longest, least=min(8, longest), points=lengths)),
        repeats=args.passes,
    )
    profiled = partial(_profile, model, tier, spec, clock, sizes)
    profile = profiled()
    chosen = {
        each: _choose(_timeline(profile, problem, each), each) for each in (Strategy.RRA, Strategy.WAA_C)
    }
    reached: dict[Strategy, list[tuple[Performance, SteadyState]]] = {each: [] for each in chosen}
    for repeat in range(args.repeats):
        with ExitStack() as workers:
            runs = {
                each: _Run(planned, problem, model, tier, spec, prompts, clock, workers)
                for each, planned in chosen.items()
            }

            def go_on(done: int, of: int, runs: Iterable[_Run] = tuple(runs.values())) -> None:
                if done % TOGETHER == 0 or done == of:
                    for run in runs:
                        run.paused.go_on(done / of)

            profile = profiled(on_point=go_on)
        for strategy, run in runs.items():
            planned, state = chosen[strategy], run.steady_state()
            config = ExecConfig(strategy, planned.encode_batch, planned.decode_steps)
            predicted = _timeline(profile, problem, strategy)(config)
            if state is None:
                print(f"{repeat} {planned.strategy:5s}: too short for a steady state: give more --requests")
            else:
                reached[strategy].append((predicted, state))
                print(
                    f"{repeat} {planned.strategy:5s}: {predicted.throughput:7.2f}/s predicted,"
                    f" {state.throughput:7.2f}/s measured"
                    f" ({predicted.throughput / state.throughput - 1:+.1%});"
                    f" 99 % latency {predicted.latency:.3f} s predicted, {state.latency:.3f} s measured;"
                    f" {state.requests} requests",
                    flush=True,
                )
            if repeat == 0:
                wrong = _mismatches(model, prompts, run.engine.answers)
                print(f"  {wrong} of {CHECKED} answers differ from `generate`", flush=True)
    for strategy, planned in chosen.items():
        if reached[strategy]:
            _print(planned, reached[strategy])


def _problem(args: argparse.Namespace) -> Problem:
    """Return requests of a task with its lengths scaled down."""
    generator = GENERATORS[f"exegpt-{args.task}"]
    rng = np.random.default_rng(0)
    inputs = np.maximum(1, args.scale * generator.input_tokens().sample(rng, args.requests))
    outputs = np.maximum(2, args.scale * generator.output_tokens().sample(rng, args.requests))
    workload = Workload.from_lengths(inputs.astype(np.int64), outputs.astype(np.int64))
    return Problem(workload, CostModel.paper(), args.requests, prefill_emits_first_token=True)


def _profile(
    model: Any,
    tier: Tier,
    spec: EngineSpec,
    clock: Callable[[], float],
    sizes: Grid,
    on_point: Callable[[int, int], None] | None = None,
) -> LayerProfile:
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "points", {}) as journal:
        profiled = ProfiledModel(model, tier, pinned=True, clock=clock)
        return profile_layers(profiled, sizes, journal, worker=spec, on_point=on_point)


def _timeline(profile: LayerProfile, problem: Problem, strategy: Strategy) -> Timeline:
    lengths = LengthPair.observed(problem.workload.with_output_tokens(problem.decode_steps))
    devices = 1 if strategy is Strategy.RRA else 2
    return timelines_of([profile], lengths, devices)[strategy is not Strategy.RRA]


def _choose(timeline: Timeline, strategy: Strategy) -> PlannedConfiguration:
    """Return the best under a bound half way (by ratio) from the least latency to that without a bound."""
    batches = (1, MOST_ENCODE_BATCH)
    free = search(timeline, strategy, 1, math.inf, encode_batches=batches)
    decode_steps = timeline.lengths.outputs.high if strategy is Strategy.RRA else 1
    least = timeline(ExecConfig(strategy, 1, decode_steps)).latency
    assert free.performance is not None
    bound = math.sqrt(least * free.performance.latency)
    found = search(timeline, strategy, 1, bound, encode_batches=batches)
    if found.config is None:
        raise SystemExit(f"{strategy.value}: no configuration under {bound:.3f} s")
    planned = planned_configuration(timeline, found.config, bound)
    print(
        f"{planned.strategy}: least latency {least:.3f} s, without a bound {free.performance.latency:.3f} s;"
        f" under {bound:.3f} s B_E {planned.encode_batch}, N_D {planned.decode_steps}, B_D"
        f" {planned.decode_batch:.1f}: {planned.throughput:.2f}/s, 99 % latency {planned.latency:.3f} s",
        flush=True,
    )
    return planned


class _Run:
    """A run of a configuration that waits to be told to go on; its worker ends with ``workers``."""

    def __init__(
        self,
        planned: PlannedConfiguration,
        problem: Problem,
        model: Any,
        tier: Tier,
        spec: EngineSpec,
        prompts: Prompts,
        clock: Callable[[], float],
        workers: ExitStack,
    ) -> None:
        problem = replace(problem, slots=min(len(problem), planned.slots))
        most = problem.workload.output_tokens
        self._clock = PausedClock(clock)
        self._wall = clock is time.perf_counter
        options: dict[str, Any] = {"most_tokens": most, "tier": tier, "clock": self._clock}
        self._origin = self._clock()
        self.engine: HuggingFaceEngine
        policy: RoundRobinAllocation | WorkloadAwareAllocation
        if planned.handed_over:
            batch = DynamicBatch.of(planned)
            worker = EncodeWorker(spec, batch.most, int(problem.prompt_tokens.max()))
            workers.enter_context(closing(worker))
            self.engine = DecodeEngine(worker, problem, model, prompts.tokens, **options)
            policy = WorkloadAwareAllocation(self.engine, batch, planned.lead)
        else:
            self.engine = HuggingFaceEngine(problem, model, prompts.tokens, **options)
            policy = RoundRobinAllocation.of(planned)
        self.paused = PausedRun(Execution(problem, policy, self.engine).run(), self._clock, len(problem))

    def steady_state(self) -> SteadyState | None:
        """Return what the run reached, ``None`` where it was too short."""
        trace = self.paused.trace
        assert trace is not None
        if isinstance(self.engine, DecodeEngine):
            # When encoding began is known on the clock that went on; in CPU seconds it is not known.
            began = self.engine.encode_began + self._origin
            began = self._clock.read_at(began) if self._wall else np.full_like(began, np.nan)
            trace = replace(trace, prefilled=began - self._origin)
        return steady_state(trace)


def _print(planned: PlannedConfiguration, reached: list[tuple[Performance, SteadyState]]) -> None:
    assert planned.latency_bound is not None
    measured = np.array([state.throughput for _, state in reached])
    off = np.array([predicted.throughput for predicted, _ in reached]) / measured - 1
    before = planned.throughput / measured - 1
    # NaN where encoding began on another clock.
    latencies = np.array([state.latency for _, state in reached])
    met = int((latencies <= planned.latency_bound).sum())
    print(
        f"{planned.strategy}: predicted over measured {np.median(off):+.1%} ({off.min():+.1%} to"
        f" {off.max():+.1%}), by the search {np.median(before):+.1%} ({before.min():+.1%} to"
        f" {before.max():+.1%}); bound {planned.latency_bound:.3f} s met by {met} of {len(reached)} runs"
        f" (99 % latency {latencies.min():.3f} to {latencies.max():.3f} s)",
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
