r"""Scheduling problem without slots: requests are intervals.

With affine costs the makespan of any schedule is :math:`a S + c R` and a constant (S prefill stages, R decode
steps). Slots are interchangeable: at most J intervals may overlap, and colouring them gives the slots. The
models are smaller than the paper's (1)-(25) by the factor J, and equivalent.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ..bounds.difference_set import RoundUp, useful_differences
from .full_model import (
    UnsupportedProblemError,
    alike,
    bins_needed,
    refuse_large,
    refuse_shared,
    refuse_unsupported,
    without_empty_bins,
)
from .full_rows import least_steps
from .linear_model import LinearModel, ModelBuilder


@dataclass(frozen=True, slots=True, eq=False)
class SlotFreeModel:
    """Slot-free model as a linear one, and its columns.

    model: Linear model in seconds. All its columns are whole, unless short prefill stages cost a floor.
    p, d, v: A request is prefilled in the bin; holds a slot there; its decode steps there. Shape (requests,
    bins).
    z, decode_steps: The bin prefills a request; its decode steps. Shape (bins,).
    floor: Seconds of the bins' prefill stages, shape (bins,), or None where they are affine.
    """

    problem: Problem
    model: LinearModel
    p: IntArray
    d: IntArray
    v: IntArray
    z: IntArray
    decode_steps: IntArray
    floor: IntArray | None


def slot_free_model(problem: Problem) -> SlotFreeModel:
    """Return the slot-free model as a mixed-integer linear one.

    Raises UnsupportedProblemError for arrivals, a KV capacity, or a model too large to build.
    """
    refuse_slot_free(problem)
    count = bins_needed(problem)
    cost, lengths = problem.cost, problem.decode_steps[:, None]
    shape = (len(problem), count)
    affine = stages_are_affine(problem)
    add = ModelBuilder()
    p = add.columns("p", shape, upper=1, integer=True)
    d = add.columns("d", shape, upper=1, integer=True)
    v = add.columns("v", shape, upper=lengths, integer=True)
    z = add.columns("z", (count,), upper=1, integer=True, cost=cost.prefill_base if affine else 0.0)
    horizon = int(problem.decode_steps.sum())
    decode_steps = add.columns("r", (count,), upper=horizon, integer=True, cost=cost.decode_base)
    over_bins = np.broadcast_to(z, shape).ravel(), np.broadcast_to(decode_steps, shape).ravel()
    add.rows("prefilled_once", [(1, p)], lower=1, upper=1)
    add.rows("opened", [(1, p.ravel()), (-1, over_bins[0])], upper=0)
    add.rows("held_at_prefill", [(1, d.ravel()), (-1, p.ravel())], lower=0)
    add.rows("held_first", [(1, d[:, 0]), (-1, p[:, 0])], upper=0)
    onward = [(1, d[:, 1:].ravel()), (-1, d[:, :-1].ravel()), (-1, p[:, 1:].ravel())]
    add.rows("held_onward", onward, upper=0)
    add.rows("slots", [(1, d.T)], upper=problem.slots)
    served = -np.broadcast_to(lengths, shape).ravel()
    add.rows("served_while_held", [(1, v.ravel()), (served, d.ravel())], upper=0)
    add.rows("served_in_steps", [(1, v.ravel()), (-1, over_bins[1])], upper=0)
    add.rows("served_whole", [(1, v)], lower=problem.decode_steps, upper=problem.decode_steps)
    add.rows("open_first", [(1, z[:-1]), (-1, z[1:])], lower=0)
    add.rows("open_steps", [(1, decode_steps), (-horizon, z)], upper=0)
    if problem.prefill_token_cap is not None:
        add.rows("token_cap", [(problem.prompt_tokens, p.T)], upper=problem.prefill_token_cap)
    for group in interchangeable(problem):
        at = np.arange(count)
        add.rows(f"equal[{group[0]}]", [(at, p[group[1:]]), (-at, p[group[:-1]])], lower=0)
    add.rows("least_steps", [(1, decode_steps[None, :])], lower=least_steps(problem))
    add.rows("least_stages", [(1, z[None, :])], lower=-(-len(problem) // problem.slots))
    stage_seconds = None if affine else _prefill_seconds(problem, add, p, z)
    model = add.build(offset=constant_seconds(problem, tokens=affine))
    return SlotFreeModel(problem, model, p, d, v, z, decode_steps, stage_seconds)


def refuse_slot_free(problem: Problem) -> None:
    """Raise UnsupportedProblemError if :func:`slot_free_model` cannot express it."""
    refuse_unsupported(problem)
    refuse_large(3 * len(problem) * bins_needed(problem))


def _prefill_seconds(problem: Problem, add: ModelBuilder, p: IntArray, z: IntArray) -> IntArray:
    cost = problem.cost
    seconds = add.columns("np", z.shape, cost=1.0)
    tokens = (-cost.prefill_per_token * problem.prompt_tokens, p.T)
    add.rows("prefill_time", [(1, seconds), (-cost.prefill_base, z), tokens], lower=0)
    add.rows("prefill_floor", [(1, seconds), (-cost.prefill_floor, z)], lower=0)
    if problem.reaches_bend:
        # The cost is convex, so the part beyond the bend is one more line below it.
        opened = cost.prefill_base - cost.prefill_per_token_beyond * cost.prefill_bend
        slope = cost.prefill_per_token + cost.prefill_per_token_beyond
        steep = (-slope * problem.prompt_tokens, p.T)
        add.rows("prefill_bend", [(1, seconds), (-opened, z), steep], lower=0)
    return seconds


def stages_are_affine(problem: Problem) -> bool:
    """Return True if stages are affine, without floor and bend."""
    return not (floor_binds(problem) or problem.reaches_bend)


def floor_binds(problem: Problem) -> bool:
    """Return True if the shortest prompt alone costs less than the floor."""
    shortest = int(problem.prompt_tokens.min())
    return problem.cost.prefill_floor > problem.cost.prefill_base + problem.cost.prefill_per_token * shortest


def steps_by_stages(problem: Problem, stages: int) -> IntArray:
    """Return the least decode steps for each number of stages.

    They come from the difference-set argument.
    """
    lengths, numbers = np.unique(problem.decode_steps[problem.decode_steps > 0], return_counts=True)
    fewest = least_steps(problem)
    fewest_steps = np.full(stages + 1, fewest)
    if len(lengths) == 0:
        return fewest_steps
    round_up, work = RoundUp(lengths, numbers), int(problem.decode_steps.sum())
    for count in range(1, stages + 1):
        values = useful_differences(count, int(lengths[-1]), fewest)
        fewest_steps[count] = max(fewest, -(-(work + round_up.least_waste(values)) // problem.slots))
    fewest_steps[0] = fewest_steps[min(1, stages)]
    return np.minimum.accumulate(fewest_steps)


def constant_seconds(problem: Problem, *, tokens: bool = True) -> float:
    """Return the seconds that every schedule takes.

    tokens: True to include prompt tokens; with a floor or a bend their seconds depend on the schedule.
    """
    cost = problem.cost
    seconds = cost.decode_per_slot * int(problem.decode_steps.sum())
    seconds += cost.decode_per_kv_token * problem.kv_token_steps
    return seconds + (cost.prefill_per_token * int(problem.prompt_tokens.sum()) if tokens else 0.0)


def interchangeable(problem: Problem) -> list[IntArray]:
    """Return the groups of two or more interchangeable requests."""
    limited = problem.prefill_token_cap is not None or problem.kv_capacity is not None
    if limited or not stages_are_affine(problem):
        return alike(problem.decode_steps, problem.prompt_tokens)
    return alike(problem.decode_steps)


def read_slot_free(model: SlotFreeModel, values: FloatArray) -> Schedule:
    """Return a solution's schedule, with slots by interval colouring."""
    bin_of = values[model.p].argmax(axis=1)
    return Schedule.from_bins(model.problem, bin_of, np.round(values[model.decode_steps]).astype(np.int64))


def write_slot_free(model: SlotFreeModel, schedule: Schedule) -> FloatArray:
    """Return a schedule as a solution, for a warm start.

    Raises ValueError if the schedule prefills in more bins than the model has.
    """
    problem = model.problem
    bin_of, decode_steps = without_empty_bins(schedule, len(model.z))
    used = len(decode_steps)
    for group in interchangeable(problem):
        bin_of[group] = np.sort(bin_of[group])
    values = np.zeros(model.model.columns)
    for i, k in enumerate(bin_of.tolist()):
        values[model.p[i, k]] = values[model.d[i, k]] = 1.0
        steps_left = int(problem.decode_steps[i])
        while steps_left > 0:
            values[model.d[i, k]] = 1.0
            values[model.v[i, k]] = served = min(steps_left, int(decode_steps[k]))
            steps_left, k = steps_left - served, k + 1
    values[model.z[:used]] = 1.0
    values[model.decode_steps[:used]] = decode_steps
    if model.floor is not None:
        tokens = np.bincount(bin_of, weights=problem.prompt_tokens, minlength=used).astype(np.int64)
        values[model.floor[:used]] = problem.cost.prefill_seconds(tokens)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class IntervalModel:
    """Slot-free problem in whole numbers, for solvers with intervals.

    Minimise ``stage_cost`` x stages + ``step_cost`` x decode steps (with a floor or a bend: the stages' own
    costs), in units of ``unit`` seconds. Costs that are not whole are rounded down, so a bound remains valid.

    lengths: Decode steps of each request, at least 1, shape (requests,).
    prompts: Prompt tokens, shape (requests,).
    kv_at_start: KV tokens in a request's first decode step; each decode step adds one. Shape (requests,).
    slots, token_cap, kv_capacity: Limits; the last two may be None.
    affine: True if stages are affine; then the constant has their tokens' seconds.
    stage_cost, token_cost, beyond_cost, stage_floor, step_cost: In units. ``token_cost``, ``beyond_cost`` and
    ``stage_floor`` are 0 where stages are affine.
    bend: Tokens of a stage beyond which each costs ``beyond_cost`` more.
    unit: Seconds.
    constant: Seconds that every schedule takes on top.
    stages, horizon: Most stages and decode steps.
    least_steps: Least decode steps by number of stages, shape (stages + 1,).
    groups: Interchangeable requests.
    """

    lengths: IntArray
    prompts: IntArray
    kv_at_start: IntArray
    slots: int
    token_cap: int | None
    kv_capacity: int | None
    affine: bool
    stage_cost: int
    token_cost: int
    beyond_cost: int
    bend: int
    stage_floor: int
    step_cost: int
    unit: float
    constant: float
    stages: int
    horizon: int
    least_steps: IntArray
    groups: tuple[IntArray, ...]


def interval_model(problem: Problem, start: Schedule | None = None) -> IntervalModel:
    """Return the problem as intervals.

    problem: Problem without arrivals; each request has at least one decode step.
    start: Schedule that bounds the length of better ones, or None.

    Raises UnsupportedProblemError if the model would be too large.
    """
    if problem.workload.arrival.any():
        raise UnsupportedProblemError("the interval model has no arrival times")
    refuse_shared(problem)
    if (problem.decode_steps < 1).any():
        raise UnsupportedProblemError("the interval model has no requests without a decode step")
    cost, affine = problem.cost, stages_are_affine(problem)
    unit, scale = _unit(problem)
    stages = bins_needed(problem)
    refuse_large(len(problem) * stages)
    horizon = int(problem.decode_steps.sum())
    if start is not None:
        spent = start.makespan(problem) - constant_seconds(problem, tokens=affine)
        fewest = -(-len(problem) // problem.slots)
        if cost.decode_base > 0:
            largest = (spent - cost.prefill_base * fewest) / cost.decode_base
            horizon = min(horizon, int(largest * (1 + 1e-9) + 1e-6))
    return IntervalModel(
        lengths=problem.decode_steps,
        prompts=problem.prompt_tokens,
        kv_at_start=problem.kv_at_start,
        slots=problem.slots,
        token_cap=problem.prefill_token_cap,
        kv_capacity=problem.kv_capacity,
        stage_cost=int(cost.prefill_base * scale + 1e-6),
        affine=affine,
        token_cost=0 if affine else int(cost.prefill_per_token * scale + 1e-6),
        beyond_cost=0 if affine else int(cost.prefill_per_token_beyond * scale + 1e-6),
        bend=math.ceil(cost.prefill_bend),
        stage_floor=0 if affine else int(cost.prefill_floor * scale + 1e-6),
        step_cost=int(cost.decode_base * scale + 1e-6),
        unit=unit,
        constant=constant_seconds(problem, tokens=affine),
        stages=stages,
        horizon=horizon,
        least_steps=steps_by_stages(problem, stages),
        groups=tuple(interchangeable(problem)),
    )


def _unit(problem: Problem) -> tuple[float, float]:
    """Return the coarsest unit that makes the costs whole, or ns."""
    cost = problem.cost
    values = [cost.prefill_base, cost.decode_base]
    if not stages_are_affine(problem):
        values += [cost.prefill_per_token, cost.prefill_per_token_beyond, cost.prefill_floor]
    for scale in (1.0, 1e3, 1e6):
        if all(abs(value * scale - round(value * scale)) < 1e-7 for value in values):
            return 1 / scale, scale
    return 1e-9, 1e9


def schedule_of_starts(problem: Problem, starts: IntArray, stages: IntArray | None = None) -> Schedule:
    """Return the schedule with given start steps.

    starts: First decode step of each request, shape (requests,).
    stages: Requests of a step with the same number are prefilled together; all of them by default.
    """
    keys = np.stack((starts, np.zeros_like(starts) if stages is None else stages))
    (times, _), bin_of = np.unique(keys, axis=1, return_inverse=True)
    end = int((starts + problem.decode_steps).max())
    return Schedule.from_bins(problem, bin_of.ravel(), np.diff(np.append(times, end)))


def list_schedule(problem: Problem) -> Schedule | None:
    """Return the longest-first schedule, or None under a cap.

    It is only a warm start for exact methods; the heuristics are better.
    """
    free = [(0, slot) for slot in range(problem.slots)]
    starts = np.zeros(len(problem), dtype=np.int64)
    for i in np.argsort(-problem.decode_steps, kind="stable").tolist():
        at, slot = heapq.heappop(free)
        starts[i] = at
        heapq.heappush(free, (at + int(problem.decode_steps[i]), slot))
    if (problem.decode_steps < 1).any():
        return None
    schedule = schedule_of_starts(problem, starts)
    return schedule if schedule.check(problem) is None else None
