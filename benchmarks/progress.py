"""
How well ``run`` foretells its end: at 25, 50 and 75 % of each run, beside what then remained.

Runs on the simulator, on machines of a random speed that wavers, of plans whose lengths are right, capped,
guessed, or constant and far too short. Writes JSON with ``--json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.trace import Stage
from batchbound.data.workload import Workload
from batchbound.executor.jobs.plan_clock import PlanClock, Standing
from batchbound.heuristics.loop import execute
from batchbound.heuristics.policy import State, Step
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.heuristics.simulator import Simulator
from batchbound.solvers.result import Limits
from batchbound.solvers.solve import solve

COST = CostModel(0.02, 1e-4, 0.01, 5e-4, decode_per_kv_token=1e-6, decode_per_change=0.002)

Lengths = Callable[[IntArray, np.random.Generator], IntArray | FloatArray]

PLANNED: dict[str, Lengths] = {
    "as they are": lambda real, _: real,
    "guessed, 30 % off": lambda real, rng: real * np.exp(rng.normal(0, 0.3, len(real))),
    "caps that few reach": lambda real, rng: np.full(len(real), real.max()),
    "half of what they are": lambda real, _: real / 2,
    "constant:40": lambda real, _: np.full(len(real), 40.0),
}


def standings(problem: Problem, real: IntArray, rng: np.random.Generator) -> Iterator[tuple[float, Standing]]:
    """Yield when each stage ended and what the clock then said."""
    schedule = solve(problem, limits=Limits(work=3)).schedule
    assert schedule is not None
    new: list[tuple[int, int]] = []

    def ended() -> list[tuple[int, int]]:
        taken, new[:] = list(new), []
        return taken

    clock = PlanClock(problem, schedule, range(len(problem)), None, ended)
    said: list[tuple[float, Standing]] = []
    pace, time = float(np.exp(rng.normal(0, 1))), 0.0

    def on_stage(stage: Stage, done: int) -> None:
        nonlocal time
        begin, time = time, time + pace * rng.uniform(0.8, 1.2) * stage.model_seconds(COST)
        said.append((time, clock.after(replace(stage, start=begin, end=time), done)))

    def on_finish(request: int) -> None:
        new.append((request, int(real[request])))

    replay = Replay(schedule, problem)

    def policy(state: State) -> Step:
        step = replay(state)
        if len(step.prefill):
            clock.begun(step.prefill)
        return step

    execute(problem, policy, Simulator(problem, real), on_stage=on_stage, on_finish=on_finish)
    yield from said


def errors(lengths: Lengths, seed: int, count: int, slots: int) -> list[float]:
    """Return the error at each quarter of a run, relative to what remained."""
    rng = np.random.default_rng(seed)
    real = np.clip(np.exp(rng.normal(5.4, 0.6, count)), 2, 1500).astype(np.int64)
    planned = np.clip(lengths(real, rng), 1, None).astype(np.int64)
    prompts = rng.integers(5, 80, count)
    problem = Problem(Workload.from_lengths(prompts, planned), COST, slots, prefill_emits_first_token=True)
    said = list(standings(problem, real, rng))
    end, found = said[-1][0], []
    for share in (0.25, 0.5, 0.75):
        time, standing = next(each for each in said if each[0] >= share * end)
        found.append((standing.left - (end - time)) / max(end - time, 1e-9))
    return found


def main() -> None:
    """Print and write the errors of each kind of planned length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'planned lengths':24} {'25 %':>8} {'50 %':>8} {'75 %':>8}   median error; (median of its size)")
    for name, lengths in PLANNED.items():
        found = np.array([errors(lengths, seed, args.requests, args.slots) for seed in range(args.runs)])
        signed, size = np.median(found, axis=0), np.median(np.abs(found), axis=0)
        rows.append({"planned": name, "median_error": signed.tolist(), "median_size": size.tolist()})
        print(
            f"{name:24}",
            *(f"{one:>+7.1%} ({two:.1%})" for one, two in zip(signed, size, strict=True)),
            flush=True,
        )
    if args.json:
        setting = {"runs": args.runs, "requests": args.requests, "slots": args.slots}
        args.json.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
