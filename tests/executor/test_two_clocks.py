"""A run meets a proven bound on the cost model's clock alone, whatever its machine's clock says."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from builders import mostly_slow
from matplotlib.collections import PolyCollection

from batchbound.data.arrays import FloatArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.trace import Stage, Trace
from batchbound.data.workload import Workload
from batchbound.executor.reports.gantt import Panel, gantt
from batchbound.executor.reports.report import in_model_seconds, model_seconds, pace_of, report
from batchbound.executor.reports.tables import report_rows
from batchbound.heuristics.loop import execute
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.heuristics.simulator import Simulator
from batchbound.models.bounds.makespan import best_bound
from batchbound.screen.run import run_line
from batchbound.solvers.search.constructive import ski_rental_schedule

ROUNDING = 1e-9


def random_run(rng: np.random.Generator) -> tuple[Problem, Trace]:
    count = int(rng.integers(2, 14))
    workload = Workload.from_lengths(
        rng.integers(1, 60, count).tolist(), (1 + rng.geometric(0.08, count)).tolist()
    )
    prefill_base, per_token, decode_base, per_slot = rng.uniform(0.001, 0.05, 4).tolist()
    read = float(rng.choice([0.0, 1e-4]))
    changing = float(rng.choice([0.0, 0.003]))
    cost = CostModel(
        prefill_base, per_token, decode_base, per_slot, decode_per_kv_token=read, decode_per_change=changing
    )
    problem = Problem(workload, cost, slots=int(rng.integers(1, 5)), prefill_emits_first_token=True)
    return problem, execute(problem, Replay(ski_rental_schedule(problem), problem), Simulator(problem))


def on_a_machine(trace: Trace, speed: float, rng: np.random.Generator) -> Trace:
    """Return a simulated run as a machine would have measured it: other seconds, padding, time in between."""
    old, new, stages, time = [0.0], [0.0], [], 0.0
    for stage in trace.stages:
        start = time + speed * float(rng.exponential(0.001))
        end = start + speed * stage.seconds * float(rng.lognormal(0, 0.2))
        padding = int(rng.integers(0, 30)) if stage.kind == "decode" else 0
        read = stage.kv_tokens + padding
        stages.append(replace(stage, start=start, end=end, padded_kv_tokens=read))
        old += [stage.start, stage.end]
        new += [start, end]
        time = end

    def moved(times: FloatArray) -> FloatArray:
        return np.interp(times, old, new)

    return replace(
        trace,
        stages=tuple(stages),
        prefilled=moved(trace.prefilled),
        first_token=moved(trace.first_token),
        finished=moved(trace.finished),
        engine={"name": "a machine"},
    )


def value_of(text: str) -> float:
    number, unit = re.match(r"([\d.,]+) (ms|s)\b", text).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * (1e-3 if unit == "ms" else 1.0)


@pytest.mark.parametrize("seed", mostly_slow(range(200), fast=range(0, 200, 5)))
def test_no_report_line_or_picture_shows_a_run_that_beats_its_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem, planned = random_run(rng)
    speed = float(rng.choice([0.1, 0.7, 1.0, 3.0, 50.0]))
    trace = on_a_machine(planned, speed, rng)
    found = report(problem, trace, best_bound(problem), planned.makespan)
    assert found.run_bound is not None
    assert found.schedule_makespan >= found.run_bound * (1 - ROUNDING)
    assert found.model_makespan >= found.schedule_makespan
    assert found.pace is not None
    assert speed / 2 < found.pace < 2 * speed

    values = {(row.group, row.name): row.value for row in report_rows(found)}
    shown = {name: value_of(values["At the plan's pace", name]) for name in ("planned", "run", "bound")}
    assert float(values["At the plan's pace", "gap of the run"].removesuffix(" %")) >= 0
    noted = next(row.note for row in report_rows(found) if row.name == "gap of the run")
    parts = [float(part) for part in re.findall(r"([\d.]+) % by", noted)]
    assert not parts or sum(parts) == pytest.approx(100 * (found.run_gap or 0), abs=0.02)
    # Figures are shown to half a unit in the third digit.
    assert min(shown["planned"], shown["run"]) >= 0.99 * shown["bound"]
    assert "bound" not in "".join(name for group, name in values if group != "At the plan's pace")
    line = run_line(found)
    model, gap, bound = re.search(r"; (.*) by the model, (\S+) % above .* of (.*)$", line).groups()  # type: ignore[union-attr]
    assert value_of(model) >= 0.99 * value_of(bound)
    assert float(gap) >= 0

    if seed % 20 == 0:
        as_planned = report(problem, planned, best_bound(problem), planned.makespan)
        panels = Panel("Plan", planned, as_planned), Panel.of("Run", problem.cost, trace, found)
        for axis in gantt(*panels).axes[:2]:
            bars = axis.collections[0]
            assert isinstance(bars, PolyCollection)
            end = max(float(np.asarray(path.vertices)[:, 0].max()) for path in bars.get_paths())
            assert end >= float(np.asarray(axis.lines[0].get_xdata())[0]) * (1 - ROUNDING)


def test_a_run_on_the_models_clock_takes_what_the_model_gives_its_stages() -> None:
    rng = np.random.default_rng(1)
    problem, planned = random_run(rng)
    cost = problem.cost
    again = in_model_seconds(cost, on_a_machine(planned, 7.0, rng))
    assert again.makespan == pytest.approx(model_seconds(cost, again))
    assert again.finished.max() == pytest.approx(again.makespan)
    assert all(a.end == b.start for a, b in zip(again.stages, again.stages[1:], strict=False))


def test_the_machines_pace_is_that_of_the_median_stage_and_the_rest_is_the_models() -> None:
    # The model gives a second a stage; two stages take 2 s, one 5 s: the pace is 2, and 3 of 6 s are missed.
    cost = CostModel(1.0, 0.0, 1.0, 0.0)
    stages = tuple(
        Stage("prefill", start, end, 0, 1, 1, 1, 1) for start, end in ((0.0, 2.0), (3.0, 5.0), (5.0, 10.0))
    )
    trace = replace(Trace.empty(1), stages=stages)
    pace, missed = pace_of([(cost, trace)])
    assert pace == 2.0
    assert missed == pytest.approx(9 / 6 - 1)
    assert pace_of([(cost, Trace.empty(1))]) == (None, None)
