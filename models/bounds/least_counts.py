"""Fewest prefill stages and decode steps of every schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from .packing.lower_bounds import dual_feasible_bound, lifted_bound, mean_or_longest
from .params import BoundParams
from .stage_packing import PRICED_WORK, fewest_stages
from .two_requests import two_requests

ALL_ON = BoundParams()


@dataclass(frozen=True, slots=True)
class Counts:
    """Fewest stages and steps of every schedule of a problem.

    slots: Most requests that ever run together: the problem's slots, or fewer if the KV capacity holds fewer
        prompts.
    stages: Least number of prefill stages (the paper's non-empty bins).
    claims: Proofs for a certificate, one for ``stages`` and one for ``decode_steps``.
    """

    slots: int
    stages: int
    decode_steps: int
    claims: Mapping[str, Mapping[str, object]]


def least_counts(problem: Problem, params: BoundParams = ALL_ON) -> Counts:
    """Return the fewest prefill stages and decode steps of a problem.

    The KV capacity holds at most the k smallest prompts that fit it together, so J slots may be replaced by
    min(J, k).
    """
    slots = problem.slots
    if problem.kv_capacity is not None:
        held = np.cumsum(np.sort(problem.prompt_tokens))
        slots = min(slots, int(np.searchsorted(held, problem.kv_capacity, side="right")))
    stages, stage_claim = fewest_stages(problem, slots, priced=params.stage_packing)
    steps, step_claim = max(_fewest_steps(problem, slots, params), key=lambda found: found[0])
    claims = {
        "stages": {"at_least": stages, **stage_claim},
        "decode_steps": {"at_least": steps, **step_claim},
    }
    return Counts(slots, stages, steps, claims)


def _fewest_steps(
    problem: Problem, slots: int, params: BoundParams
) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield each argument's least decode steps with the claim.

    A slot works on one request at a time, so the steps are at least the makespan of packing the requests over
    the slots (the hybrid paper's (26)-(30)). Any bound on that makespan holds.
    """
    bounded = (lifted_bound if params.lifting else mean_or_longest)(problem.decode_steps, slots)
    yield bounded.value, bounded.witness
    if params.dual_feasible_functions and bounded.value * len(np.unique(problem.decode_steps)) <= PRICED_WORK:
        refuted = dual_feasible_bound(
            problem.decode_steps, slots, bounded.value, int(problem.decode_steps.sum())
        )
        if refuted is not None:
            yield refuted.value, refuted.witness
    if problem.kv_capacity is None:
        return
    if params.kv_tokens:
        yield -(-problem.kv_token_steps // problem.kv_capacity), {"kind": "KV tokens over capacity"}
    if params.two_requests:
        steps, pair = two_requests(problem, problem.kv_capacity)
        yield steps, {"kind": "two requests", "requests": pair}


def cost_terms(problem: Problem, stages: int, decode_steps: int) -> dict[str, float]:
    r"""Return the least seconds of some stages and steps, by cause.

    A stage of p tokens takes max(floor, base + per_token p + beyond max(0, p - bend)), and S of them take at
    least S times the floor, and at least the inner sum. A step takes base + per_slot active + per_kv_token
    held, and the sums of active slots and of held tokens over all steps are those of the requests whatever
    the schedule.

    The excess of a stage of prompts :math:`p_i` over the bend b is a sum of two: the excesses of single
    prompts, and that of the prompts cut at b:

    .. math:: (\sum_i p_i - b)^+ = \sum_i (p_i - b)^+ + (\sum_i \min(p_i, b) - b)^+ .

    If no prompt exceeds b, the first sum is 0 and every :math:`\min(p_i, b)` is :math:`p_i`. If some prompt
    does, then :math:`\sum_i \min(p_i, b) \ge b`, so both positive parts equal their arguments, and
    :math:`(p_i - b)^+ + \min(p_i, b) = p_i`. Over S stages the first sum is the same for every schedule.
    The positive parts of the second are no less than that of their sum, :math:`\sum_i \min(p_i, b) - S b`.
    """
    cost = problem.cost
    prefill = {name: float(each[0]) for name, each in _prefill_terms(problem, np.array([stages])).items()}
    return {
        **prefill,
        "decode steps": cost.decode_base * decode_steps,
        "slot-steps": cost.decode_per_slot * int(problem.decode_steps.sum()),
        "KV reads": cost.decode_per_kv_token * problem.kv_token_steps,
    }


def cheapest_stages(problem: Problem, at_least: int) -> int:
    """Return the number of prefill stages, ``at_least`` or more, that costs least.

    More than ``at_least`` cost less only if stages reach beyond the bend of their cost.
    """
    if not problem.reaches_bend or at_least >= len(problem):
        return at_least
    return at_least + int(prefill_seconds(problem, at_least).argmin())


def prefill_seconds(problem: Problem, at_least: int) -> FloatArray:
    """Return the least prefill seconds for each number of stages."""
    terms = _prefill_terms(problem, np.arange(at_least, len(problem) + 1))
    seconds: FloatArray = np.sum([*terms.values()], axis=0)
    return seconds


def _prefill_terms(problem: Problem, stages: IntArray) -> dict[str, FloatArray]:
    """Return the least prefill seconds by cause."""
    cost, prompts = problem.cost, problem.prompt_pieces
    terms = {
        "prefill stages": cost.prefill_base * stages,
        "prompt tokens": np.full(len(stages), cost.prefill_per_token * int(prompts.sum())),
    }
    if problem.reaches_bend:
        within = np.minimum(prompts, cost.prefill_bend).sum()
        alone, together = prompts.sum() - within, np.maximum(0.0, within - stages * cost.prefill_bend)
        terms["prompts beyond the bend"] = np.full(len(stages), cost.prefill_per_token_beyond * alone)
        terms["stages beyond the bend"] = cost.prefill_per_token_beyond * together
    floor = np.maximum(0.0, cost.prefill_floor * stages - np.sum([*terms.values()], axis=0))
    return {**terms, "prefill floor": floor}
