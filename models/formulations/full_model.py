r"""Hybrid paper's full model (1)-(25), as printed and repaired.

Letters as there: request :math:`i`, client (slot) :math:`j`, bin :math:`k`, level :math:`l`; :math:`x_{ij}`
request on client, :math:`p_{ijk}` prefilled in bin, :math:`d_{ijk}` held in the bin's decode stage,
:math:`w_{ijk}` share of its decoding done there, :math:`y_{kl}` level of a prefill stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from .full_rows import FullColumns, FullRows, PrefillLevel
from .linear_model import LinearModel

MOST_COLUMNS = 10_000_000
"""Most columns of a model; each takes kilobytes."""

MOST_COEFFICIENTS = 50_000_000
"""Most coefficients of a model; each takes 100 bytes."""


class UnsupportedProblemError(ValueError):
    """Error of a problem that a formulation cannot express."""


@dataclass(frozen=True, slots=True, eq=False)
class FullModel:
    """Full model, in seconds, and its columns."""

    problem: Problem
    model: LinearModel
    columns: FullColumns


def default_levels(problem: Problem) -> tuple[PrefillLevel, ...]:
    """Return at most eight levels with doubling caps.

    The largest holds all prompts, or the problem's cap.
    """
    largest = int(problem.prompt_tokens.sum())
    if problem.prefill_token_cap is not None:
        largest = min(largest, problem.prefill_token_cap)
    caps = sorted({max(1, -(-largest // 2**step)) for step in range(8)})
    return tuple(PrefillLevel(cap, problem.cost.prefill_seconds(cap)) for cap in caps)


def bins_needed(problem: Problem) -> int:
    """Return how many bins an optimal schedule can need.

    Every slot can start at once. So the first bin of an optimal schedule prefills one request per slot, and
    every other bin at least one. A token cap, the memory or a bend of the cost may need more bins.
    """
    count = len(problem)
    if problem.prefill_token_cap is not None or problem.kv_capacity is not None or problem.reaches_bend:
        return count
    return max(1, count - min(count, problem.slots) + 1)


def literal_model(
    problem: Problem, *, bins: int | None = None, levels: Sequence[PrefillLevel] | None = None
) -> FullModel:
    r"""Return the model (1)-(25) as printed, with its mistakes.

    Its optimum need not be executable. No row ties :math:`w` to :math:`d`, so a request may decode before its
    prefill, and two may share a client's decode stage. Empty bins cost seconds, and decode steps may be
    fractional. :math:`T^d` in (8) is seconds per decode step (29 ms + 0.21 ms for each of J slots).

    problem: Problem without KV capacity, arrivals and costs per KV token, which have no equation.
    bins: :math:`K`; by default as many as a schedule can need.
    levels: Prefill levels :math:`\mathcal{L}`; by default :func:`default_levels`.

    Raises UnsupportedProblemError if the model cannot express the problem, or would be too large.
    """
    bins = bins or bins_needed(problem)
    refuse_literal(problem, bins)
    rows = FullRows(problem, bins)
    levels = default_levels(problem) if levels is None else levels
    y = rows.builder.columns("y", (rows.bins, len(levels)), upper=1, integer=True)
    rows.makespan()
    rows.bins_in_order()
    rows.decode_after_prefill()
    rows.prefill_time_of_level(y, levels)
    rows.level_holds_tokens(y, levels)
    rows.one_level(y)
    rows.decode_time()
    rows.held_when_prefilled()
    rows.held_without_gap()
    rows.not_held_before_prefill()
    rows.one_request_per_client()
    rows.held_in_bins()
    rows.decoded_where_assigned()
    rows.decoded_whole()
    rows.one_prefill_per_client()
    rows.prefilled_where_assigned()
    rows.assigned()
    return FullModel(problem, rows.builder.build(), rows.columns)


def repaired_model(problem: Problem) -> FullModel:
    r"""Return the model with exactly the optimal schedules as optima.

    Beyond (1)-(25): :math:`w \le d`; an empty bin is free; steps are whole; stages have the affine cost
    model's costs, without levels; (10)-(11) need no big-M. Interchangeable requests, slots and bins are
    ordered. The numbers of stages and decode steps are bounded by the capacity of the slots.

    problem: Problem without arrivals and KV capacity, which have no equation.

    Raises UnsupportedProblemError if the model cannot express the problem, or would be too large.
    """
    refuse_repaired(problem)
    rows = FullRows(problem, bins_needed(problem))
    z = rows.builder.columns("z", (rows.bins,), upper=1, integer=True)
    horizon = float(problem.decode_steps.sum())
    decode_steps = rows.builder.columns("r", (rows.bins,), upper=horizon, integer=True)
    rows.makespan()
    rows.bins_in_order()
    rows.decode_after_prefill()
    rows.affine_prefill_time(z)
    rows.affine_decode_time(decode_steps)
    rows.steps_serve_every_client(decode_steps)
    rows.tokens_fit()
    rows.prefill_opens_bin(z)
    rows.decoded_while_held()
    rows.held_when_prefilled()
    rows.held_from_prefill_on()
    rows.one_request_per_client()
    rows.decoded_where_assigned()
    rows.prefilled_where_assigned()
    rows.assigned()
    rows.open_bins_first(z, decode_steps)
    rows.clients_in_order()
    rows.equal_requests_in_order(equal_requests(problem))
    rows.work_fits(z, decode_steps)
    constant = problem.cost.decode_per_kv_token * problem.kv_token_steps
    return FullModel(
        problem, rows.builder.build(offset=constant), replace(rows.columns, z=z, decode_steps=decode_steps)
    )


def read_schedule(full: FullModel, values: FloatArray) -> Schedule:
    """Return a solution's schedule, which may break rules if literal.

    A bin gets the whole decode steps that its busiest client needs.
    """
    columns = full.columns
    bin_of = values[columns.p].sum(axis=1).argmax(axis=1)
    slot_of = values[columns.x].argmax(axis=1)
    if columns.decode_steps is not None:
        return Schedule(bin_of, slot_of, np.round(values[columns.decode_steps]).astype(np.int64))
    served = (full.problem.decode_steps[:, None, None] * values[columns.w]).sum(axis=0).max(axis=0)
    return Schedule(bin_of, slot_of, np.ceil(served - 1e-6).astype(np.int64))


def write_schedule(full: FullModel, schedule: Schedule) -> FloatArray:
    """Return a schedule as a solution of the repaired model.

    Interchangeable requests take the model's order, so the schedule may be read back differently, with the
    same makespan. Raises ValueError if the schedule prefills in more bins than the model has.
    """
    columns, problem = full.columns, full.problem
    assert columns.z is not None
    assert columns.decode_steps is not None
    bins = len(columns.z)
    bin_of, decode_steps = without_empty_bins(schedule, bins)
    bin_of = in_equal_order(problem, bin_of)
    slot_of = _slots_by_first_request(Schedule.from_bins(problem, bin_of, decode_steps).slot_of)
    used = len(decode_steps)
    values = np.zeros(full.model.columns)
    for i, (j, k) in enumerate(zip(slot_of.tolist(), bin_of.tolist(), strict=True)):
        values[columns.x[i, j]] = values[columns.p[i, j, k]] = values[columns.d[i, j, k]] = 1.0
        need = steps_left = int(problem.decode_steps[i])
        values[columns.w[i, j, k]] = float(need == 0)
        while steps_left > 0:
            served = min(steps_left, int(decode_steps[k]))
            values[columns.d[i, j, k]] = 1.0
            values[columns.w[i, j, k]] = served / need
            steps_left, k = steps_left - served, k + 1
    values[columns.decode_steps[:used]] = decode_steps
    values[columns.z[:used]] = 1.0
    prefill, decode = np.zeros(bins), np.zeros(bins)
    tokens = np.bincount(bin_of, weights=problem.prompt_tokens, minlength=bins)[:used]
    prefill[:used] = problem.cost.prefill_seconds(tokens.astype(np.int64))
    shares = values[columns.w].sum(axis=1)
    decode[:used] = problem.cost.decode_base * decode_steps
    decode += problem.cost.decode_per_slot * (problem.decode_steps @ shares)
    ends = np.cumsum(prefill + decode)
    values[columns.prefill_time], values[columns.decode_time] = prefill, decode
    values[columns.prefill_start], values[columns.decode_start] = ends - decode - prefill, ends - decode
    values[columns.end] = ends[-1]
    return values


def _slots_by_first_request(slot_of: IntArray) -> IntArray:
    used, first, which = np.unique(slot_of, return_index=True, return_inverse=True)
    names = np.empty(len(used), dtype=np.int64)
    names[np.argsort(first)] = np.arange(len(used))
    renamed: IntArray = names[which]
    return renamed


def without_empty_bins(schedule: Schedule, most: int) -> tuple[IntArray, IntArray]:
    """Join bins without a prefill to the one before.

    Raises ValueError if more than ``most`` bins are left.
    """
    used, bin_of = np.unique(schedule.bin_of, return_inverse=True)
    if len(used) > most:
        raise ValueError(f"the schedule prefills in {len(used)} bins, the model has {most}")
    edges = np.append(schedule.starts[used], schedule.starts[-1])
    return bin_of.astype(np.int64), np.diff(edges)


def in_equal_order(problem: Problem, bin_of: IntArray) -> IntArray:
    """Swap equal requests so that the first starts first."""
    ordered = bin_of.copy()
    for group in equal_requests(problem):
        ordered[group] = np.sort(bin_of[group])
    return ordered


def equal_requests(problem: Problem) -> list[IntArray]:
    """Return groups of requests with equal lengths."""
    return alike(problem.prompt_tokens, problem.decode_steps)


def alike(*numbers: IntArray) -> list[IntArray]:
    """Return groups of requests with equal numbers."""
    _, group, sizes = np.unique(np.stack(numbers), axis=1, return_inverse=True, return_counts=True)
    return [np.flatnonzero(group.ravel() == g) for g in np.flatnonzero(sizes > 1)]


def refuse_literal(problem: Problem, bins: int | None = None) -> None:
    """Raise UnsupportedProblemError if :func:`literal_model` cannot express it."""
    refuse_unsupported(problem)
    # A line that is steep from the first token on has no bend.
    if problem.reaches_bend and problem.cost.prefill_bend > 0:
        raise UnsupportedProblemError(
            "the model as printed has no equation for a prefill stage whose cost bends at"
            f" {problem.cost.prefill_bend:g} tokens; use the repaired one, or a token cap up to the bend"
        )
    bins, pairs = bins or bins_needed(problem), len(problem) * problem.slots
    # (10) has a row for every two bins, with all bins between them.
    refuse_large(3 * pairs * bins, pairs * bins**3 // 6)


def refuse_repaired(problem: Problem) -> None:
    """Raise UnsupportedProblemError if :func:`repaired_model` cannot express it."""
    refuse_unsupported(problem)
    refuse_large(3 * len(problem) * problem.slots * bins_needed(problem))


def refuse_shared(problem: Problem) -> None:
    """Raise UnsupportedProblemError if requests share prompts."""
    if problem.shares_prompts:
        raise UnsupportedProblemError("this formulation has no equation for prompts that requests share")


def refuse_unsupported(problem: Problem) -> None:
    """Raise UnsupportedProblemError for arrivals, a KV capacity or shared prompts."""
    if problem.workload.arrival.any():
        raise UnsupportedProblemError("this formulation has no equation for arrival times")
    refuse_shared(problem)
    # An upper bound on the tokens ever held: the largest requests, one per slot.
    most_held = int(np.sort(problem.kv_peak)[-problem.slots :].sum())
    if problem.kv_capacity is not None and most_held > problem.kv_capacity:
        raise UnsupportedProblemError(
            "this formulation has no equation for the KV capacity, and some requests do not fit together"
        )


def refuse_large(columns: int, coefficients: int = 0) -> None:
    """Raise UnsupportedProblemError if a model is too large."""
    for what, size, limit in (
        ("columns", columns, MOST_COLUMNS),
        ("coefficients", coefficients, MOST_COEFFICIENTS),
    ):
        if size > limit:
            raise UnsupportedProblemError(
                f"this formulation of so large a job has {size:,} {what}, more than {limit:,}"
            )
