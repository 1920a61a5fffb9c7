"""What every schedule needs at least: prefill stages, decode steps, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import FloatArray, IntArray
from ...data.problem import Problem
from .partition import dual_feasible_bound, lifted_bound, packing_bound

PRICED_WORK = 20_000_000
"""Most capacity times distinct lengths for an argument by prices: a checker repeats the knapsack."""


LONGEST = 200
"""Requests of which each two are looked at."""

BY_SLOTS: Mapping[str, object] = {"kind": "requests over slots"}
BY_CAP: Mapping[str, object] = {"kind": "tokens over cap"}


@dataclass(frozen=True, slots=True)
class Counts:
    """
    What every schedule of a problem needs at least, apart from how starts and ends fit together.

    Parameters
    ----------
    slots
        No more requests than this are ever in progress together: the problem's slots, or fewer where the KV
        capacity holds no more prompts.
    stages
        Least number of prefill stages (the paper's non-empty bins).
    rounds
        Least number of decode steps.
    claims
        Why, as a certificate states it: one claim for ``stages`` and one for ``rounds``.
    """

    slots: int
    stages: int
    rounds: int
    claims: Mapping[str, Mapping[str, object]]


def least_counts(problem: Problem) -> Counts:
    r"""
    Return the fewest prefill stages and decode steps any schedule of the problem has.

    With J slots, the requests' rounds n_i and prompts p_i:

    - the KV capacity C holds at most the k smallest prompts that fit it together, so J may be replaced by
      min(J, k);
    - a stage prefills at most J requests and, under a token cap, at most that many prompt tokens, of which
      those that requests share are computed once at least; all prompts of a stage are held at once, each
      as a whole, so the KV capacity caps a stage's tokens too. Stages are bins of a packing, so dual
      feasible functions of the prompts count as well;
    - a slot works on one request at a time, so the rounds are at least any bound on the makespan of packing
      the n_i over J slots (the hybrid paper's (26)-(30)), and no round reads more than C tokens of keys and
      values;
    - of two requests, the one that ends last holds no more than C leaves in the last round of the other, so
      that they share no more than :math:`C - a_j - (a_i + n_i - 1) + 1` rounds if j ends last.

    Parameters
    ----------
    problem
        The problem bounded.

    Returns
    -------
    Counts
        The two counts, the slots they hold for, and why.
    """
    slots, capacity = problem.slots, problem.kv_capacity
    if capacity is not None:
        fitting = int(np.searchsorted(np.cumsum(np.sort(problem.prompt_tokens)), capacity, side="right"))
        slots = min(slots, fitting)
    stages, stage_claim = -(-len(problem) // slots), BY_SLOTS
    caps = [cap for cap in (problem.prefill_token_cap, capacity) if cap is not None]
    for pieces, cap, said in _in_stages(problem, caps):
        needed, witness = -(-int(pieces.sum()) // cap), BY_CAP
        if cap * len(np.unique(pieces)) <= PRICED_WORK:
            priced, prices = packing_bound(pieces, cap)
            if priced > needed:
                needed, witness = priced, {**prices, **said}
        if needed > stages:
            stages, stage_claim = needed, witness
    lifted = lifted_bound(problem.rounds, slots)
    rounds, round_claim = lifted.value, lifted.witness
    if rounds * len(np.unique(problem.rounds)) <= PRICED_WORK:
        refuted = dual_feasible_bound(problem.rounds, slots, rounds, int(problem.rounds.sum()))
        if refuted is not None:
            rounds, round_claim = refuted.value, refuted.witness
    if capacity is not None and -(-problem.kv_token_rounds // capacity) > rounds:
        rounds, round_claim = -(-problem.kv_token_rounds // capacity), {"kind": "KV tokens over capacity"}
    if capacity is not None:
        apart, pair = _two_requests(problem, capacity)
        if apart > rounds:
            rounds, round_claim = apart, {"kind": "two requests", "requests": pair}
    claims = {
        "stages": {"at_least": stages, **stage_claim},
        "rounds": {"at_least": rounds, **round_claim},
    }
    return Counts(slots, stages, rounds, claims)


def _two_requests(problem: Problem, capacity: int) -> tuple[int, list[int]]:
    """Return the most rounds that two requests need which cannot run side by side for long, and the two."""
    longest = np.argsort(-problem.rounds, kind="stable")[:LONGEST]
    longest = longest[problem.rounds[longest] > 0]
    if len(longest) < 2:
        return 0, []
    rounds, first = problem.rounds[longest], problem.kv_at_start[longest]
    # Of each two, rounds side by side if the first ends first.
    beside = np.maximum(0, capacity - (first + rounds - 1)[:, None] - first + 1)
    needed = rounds[:, None] + rounds - np.maximum(beside, beside.T)
    np.fill_diagonal(needed, 0)
    one, other = (int(place) for place in np.unravel_index(needed.argmax(), needed.shape))
    return int(needed[one, other]), [int(longest[one]), int(longest[other])]


def _in_stages(problem: Problem, caps: list[int]) -> list[tuple[IntArray, int, Mapping[str, object]]]:
    """Return what is packed into stages, the tokens of it a stage takes, and how a claim tells it apart."""
    if not caps:
        return []
    if not len(problem.prefix_tokens):
        return [(problem.prompt_tokens, min(caps), {})]
    packed: list[tuple[IntArray, int, Mapping[str, object]]] = []
    if problem.prefill_token_cap is not None:
        packed.append((problem.prompt_pieces, problem.prefill_token_cap, {}))
    if problem.kv_capacity is not None:
        packed.append((problem.prompt_tokens, problem.kv_capacity, {"held": True}))
    return packed


def cost_terms(problem: Problem, stages: int, rounds: int) -> dict[str, float]:
    r"""
    Return the least seconds of that many prefill stages and decode steps, by what they pay for.

    A stage of p tokens takes max(floor, base + per_token p + beyond max(0, p - bend)), and S of them take at
    least S times the floor, and at least what is inside. A round takes base + per_slot active + per_kv_token
    held, and the sums of active slots and of held tokens over all rounds are those of the requests whatever
    the schedule.

    What a stage of prompts :math:`p_i` exceeds the bend b by splits into what each prompt exceeds it by and
    what is left of them together:

    .. math:: (\sum_i p_i - b)^+ = \sum_i (p_i - b)^+ + (\sum_i \min(p_i, b) - b)^+ .

    If no prompt exceeds b, the first sum is 0 and every :math:`\min(p_i, b)` is :math:`p_i`. If some prompt
    does, then :math:`\sum_i \min(p_i, b) \ge b`, so both positive parts are what is in them, and
    :math:`(p_i - b)^+ + \min(p_i, b) = p_i`. Over S stages the first sum is the same for every schedule, and
    the positive parts of the second are no less than that of their sum, :math:`\sum_i \min(p_i, b) - S b`.

    Parameters
    ----------
    problem
        The problem.
    stages
        Prefill stages. More of them may take less, where stages reach beyond the bend: a bound for at least
        so many takes :func:`cheapest_stages`.
    rounds
        Decode steps.

    Returns
    -------
    dict
        Seconds by name, all not negative.
    """
    cost = problem.cost
    prefill = {name: float(each[0]) for name, each in _prefill_terms(problem, np.array([stages])).items()}
    return {
        **prefill,
        "decode rounds": cost.decode_base * rounds,
        "slot-rounds": cost.decode_per_slot * int(problem.rounds.sum()),
        "KV reads": cost.decode_per_kv_token * problem.kv_token_rounds,
    }


def cheapest_stages(problem: Problem, at_least: int) -> int:
    """
    Return how many prefill stages, of at least some number, take the least seconds.

    These are as few as possible, but for stages that reach beyond the bend of their cost.

    Parameters
    ----------
    problem
        The problem.
    at_least
        Stages at least; more than one a request never take less.
    """
    if not problem.reaches_bend or at_least >= len(problem):
        return at_least
    return at_least + int(prefill_seconds(problem, at_least).argmin())


def prefill_seconds(problem: Problem, at_least: int) -> FloatArray:
    """
    Return the least seconds of prefill with each number of stages from some number to one a request.

    Parameters
    ----------
    problem
        The problem.
    at_least
        Stages at least, no more than requests.

    Returns
    -------
    FloatArray
        As :func:`cost_terms` counts them, shape (requests - at_least + 1,).
    """
    terms = _prefill_terms(problem, np.arange(at_least, len(problem) + 1))
    seconds: FloatArray = np.sum([*terms.values()], axis=0)
    return seconds


def _prefill_terms(problem: Problem, stages: IntArray) -> dict[str, FloatArray]:
    """Return the least seconds of prefill with these numbers of stages by what they pay for."""
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
