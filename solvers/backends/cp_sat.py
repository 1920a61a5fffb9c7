"""CP-SAT on the slot-free problem, imported in workers only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from ...data.arrays import IntArray
from ...models.formulations.slot_free import IntervalModel
from ..result import Limits
from .worker import Desk


@dataclass(slots=True)
class _Columns:
    times: list[cp_model.IntVar]
    opened: list[cp_model.IntVar]
    starts: list[cp_model.IntVar]
    in_stage: list[list[cp_model.IntVar]]
    end: cp_model.IntVar


class _Incumbents(cp_model.CpSolverSolutionCallback):
    """Callback that reports each better solution and bound."""

    def __init__(self, columns: _Columns, desk: Desk) -> None:
        super().__init__()
        self._columns = columns
        self._desk = desk

    def on_solution_callback(self) -> None:
        self._desk.report("incumbent", _places(self._columns, self.value))
        self._desk.report("bound", self.best_objective_bound)


def solve_intervals(
    model: IntervalModel, limits: Limits, start: IntArray | None, desk: Desk
) -> dict[str, object]:
    """Solve the slot-free problem with CP-SAT, unchecked.

    limits: Work is in milliseconds of deterministic time.
    start: Each request's first decode step and prefill stage, shape (2, requests), or None.
    desk: Receives better solutions and bounds.

    The result has ``starts`` (as ``start``), ``bound`` (a lower bound in the model's units) and ``limit``
    (the limit that stopped it without a proof).
    """
    desk.ready()
    cp = cp_model.CpModel()
    columns = _stages(cp, model)
    _slots(cp, model, columns)
    _order(cp, model, columns)
    _token_cap(cp, model, columns)
    _kv_capacity(cp, model, columns)
    cp.minimize(_objective(cp, model, columns))
    if start is not None:
        _hint(cp, model, columns, start)
    desk.report("built", True)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.threads
    solver.parameters.random_seed = limits.seed
    solver.parameters.catch_sigint_signal = False
    if limits.work is not None:
        solver.parameters.max_deterministic_time = limits.work / 1000.0
        solver.parameters.interleave_search = limits.threads > 1
    if (seconds := desk.remaining()) is not None:
        solver.parameters.max_time_in_seconds = seconds
    desk.on_stop(solver.stop_search)
    status = solver.solve(cp, _Incumbents(columns, desk))
    answer: dict[str, object] = {}
    if status != cp_model.INFEASIBLE:
        answer["bound"] = solver.best_objective_bound
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        answer["starts"] = _places(columns, solver.value)
    if status in (cp_model.UNKNOWN, cp_model.FEASIBLE):
        answer["limit"] = desk.what_stopped(limits.work)
    return answer


def _places(columns: _Columns, value: Callable[[cp_model.IntVar], int]) -> IntArray:
    """Return each request's first decode step and stage, shape (2, requests)."""
    stages = [next(k for k, column in enumerate(row) if value(column)) for row in columns.in_stage]
    return np.array([[value(start) for start in columns.starts], stages])


def _stages(cp: cp_model.CpModel, model: IntervalModel) -> _Columns:
    """Add the stages' times, and each request's place among them."""
    count, requests, longest = model.stages, range(len(model.lengths)), int(model.lengths.max())
    times = [cp.new_int_var(0, model.horizon if k else 0, f"t{k}") for k in range(count)]
    opened = [cp.new_bool_var(f"z{k}") for k in range(count)]
    starts = [cp.new_int_var(0, model.horizon - int(model.lengths[i]), f"s{i}") for i in requests]
    in_stage = [[cp.new_bool_var(f"p{i},{k}") for k in range(count)] for i in requests]
    end = cp.new_int_var(int(model.least_steps[-1]), model.horizon, "end")
    for k in range(1, count):
        cp.add(end >= int(model.least_steps[k])).only_enforce_if(opened[k].negated())
    for k in range(count - 1):
        cp.add_implication(opened[k + 1], opened[k])
        # Under a token cap or with a bend, two stages in a row can be useful.
        apart = int(model.affine and model.token_cap is None)
        cp.add(times[k + 1] >= times[k] + apart).only_enforce_if(opened[k + 1])
        # After as many decode steps as the longest request has, all have ended: a longer wait is useless.
        cp.add(times[k + 1] <= times[k] + longest)
        cp.add(times[k + 1] == times[k]).only_enforce_if(opened[k + 1].negated())
    for i in requests:
        cp.add_exactly_one(in_stage[i])
        cp.add(end >= starts[i] + int(model.lengths[i]))
        for k in range(count):
            cp.add(starts[i] == times[k]).only_enforce_if(in_stage[i][k])
    for k in range(count):
        cp.add_max_equality(opened[k], [in_stage[i][k] for i in requests])
    return _Columns(times, opened, starts, in_stage, end)


def _slots(cp: cp_model.CpModel, model: IntervalModel, columns: _Columns) -> None:
    intervals = [
        cp.new_fixed_size_interval_var(start, int(length), "")
        for start, length in zip(columns.starts, model.lengths, strict=True)
    ]
    cp.add_cumulative(intervals, [1] * len(intervals), model.slots)
    for k in range(model.stages):
        cp.add(sum(row[k] for row in columns.in_stage) <= model.slots)
    steps = -(-len(model.lengths) // model.slots)
    cp.add(sum(columns.opened) >= steps)


def _order(cp: cp_model.CpModel, model: IntervalModel, columns: _Columns) -> None:
    for group in model.groups:
        for first, second in zip(group[:-1].tolist(), group[1:].tolist(), strict=True):
            cp.add(columns.starts[first] <= columns.starts[second])


def _token_cap(cp: cp_model.CpModel, model: IntervalModel, columns: _Columns) -> None:
    if model.token_cap is not None:
        for k in range(model.stages):
            prompts = zip(columns.in_stage, model.prompts.tolist(), strict=True)
            cp.add(sum(tokens * row[k] for row, tokens in prompts) <= model.token_cap)


def _kv_capacity(cp: cp_model.CpModel, model: IntervalModel, columns: _Columns) -> None:
    """Keep the KV tokens under the capacity.

    Held tokens grow until a request ends, so their peak is in the last decode step of some request.
    """
    capacity = model.kv_capacity
    peaks = model.kv_at_start + model.lengths - 1
    if capacity is None or int(np.sort(peaks)[-model.slots :].sum()) <= capacity:
        return
    lengths, first = model.lengths.tolist(), model.kv_at_start.tolist()
    for j, last in enumerate(columns.starts):
        kv_tokens: list[cp_model.LinearExprT] = [int(peaks[j])]
        for i, start in enumerate(columns.starts):
            if i == j:
                continue
            age = last + lengths[j] - 1 - start
            begun, running = cp.new_bool_var(""), cp.new_bool_var("")
            cp.add(age >= 0).only_enforce_if(begun)
            cp.add(age <= -1).only_enforce_if(begun.negated())
            cp.add(age <= lengths[i] - 1).only_enforce_if(running)
            cp.add(age >= lengths[i]).only_enforce_if(running.negated())
            tokens = cp.new_int_var(0, int(peaks[i]), "")
            cp.add(tokens >= first[i] + age).only_enforce_if(begun, running)
            kv_tokens.append(tokens)
        cp.add(sum(kv_tokens) <= capacity)


def _objective(cp: cp_model.CpModel, model: IntervalModel, columns: _Columns) -> cp_model.LinearExprT:
    decode_steps = model.step_cost * columns.end
    if model.affine:
        return decode_steps + model.stage_cost * sum(columns.opened)
    dearest = model.token_cost + model.beyond_cost
    largest = model.stage_floor + model.stage_cost + dearest * int(model.prompts.sum())
    seconds = [cp.new_int_var(0, largest, f"np{k}") for k in range(model.stages)]
    for k, stage in enumerate(seconds):
        tokens = sum(n * row[k] for n, row in zip(model.prompts.tolist(), columns.in_stage, strict=True))
        cp.add(stage >= model.stage_floor * columns.opened[k])
        affine = model.stage_cost * columns.opened[k] + model.token_cost * tokens
        cp.add(stage >= affine)
        if model.beyond_cost:
            cp.add(stage >= affine + model.beyond_cost * (tokens - model.bend))
    return decode_steps + sum(seconds)


def _hint(cp: cp_model.CpModel, model: IntervalModel, columns: _Columns, start: IntArray) -> None:
    (times, _), place = np.unique(start, axis=1, return_inverse=True)
    place = place.ravel()
    for group in model.groups:
        place[group] = np.sort(place[group])
    ordered = times[place]
    for i, (at, stage) in enumerate(zip(ordered.tolist(), place.tolist(), strict=True)):
        cp.add_hint(columns.starts[i], at)
        for k, column in enumerate(columns.in_stage[i]):
            cp.add_hint(column, k == stage)
    for k in range(model.stages):
        cp.add_hint(columns.opened[k], k < len(times))
        cp.add_hint(columns.times[k], int(times[min(k, len(times) - 1)]))
    cp.add_hint(columns.end, int((ordered + model.lengths).max()))
