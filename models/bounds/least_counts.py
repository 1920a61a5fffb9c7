"""Fewest prefill stages and decode steps of every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.iterations import EngineLimits
from ...data.prefix_tree import PrefixTree
from ...data.problem import Problem
from .packing.lower_bounds import lifted_bound, mean_or_longest, packing_bound
from .params import BoundParams
from .tree_area import tree_area

ALL_ON = BoundParams()

BY_MEMORY = "KV tokens over capacity"
TREE_AREA = "tree area"
"""Kinds of claims of decode steps by memory, of whole prompts and of a tree."""

COUNTS = "trivial"
"""Kind of a certificate of counts alone."""

COUNTS_SOURCE = "fewest stages and decode steps"


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
    min(J, k). Where requests hold shared beginnings once, a prompt counts with the tokens after them.
    """
    slots = problem.slots
    if problem.kv_capacity is not None:
        prompt_tokens = np.cumsum(np.sort(problem.held_alone))
        slots = min(slots, int(np.searchsorted(prompt_tokens, problem.kv_capacity, side="right")))
    stages, stage_claim = fewest_stages(problem, slots, priced=STAGE_PACKING not in params.off)
    steps, step_claim = max(_fewest_steps(problem, slots, params), key=lambda found: found[0])
    claims = {
        "stages": {"at_least": stages, **stage_claim},
        "decode_steps": {"at_least": steps, **step_claim},
    }
    return Counts(slots, stages, steps, claims)


StepCount = tuple[int, Mapping[str, object]]
"""Least decode steps with the claim."""


def _fewest_steps(problem: Problem, slots: int, params: BoundParams) -> Iterator[StepCount]:
    """Yield each argument's least decode steps with the claim."""
    for count in COUNTED:
        if count.name not in params.off and (problem.holds_whole_prompts or not count.counts_whole_prompts):
            yield from count.steps(problem, slots)
    bounded = mean_or_longest(problem.decode_steps, slots)
    yield bounded.value, bounded.witness


def _lifted(problem: Problem, slots: int) -> Iterator[StepCount]:
    """Yield the largest share of requests that some slots hold.

    A slot works on one request at a time, so the steps are at least the makespan of packing the requests over
    the slots (the hybrid paper's (26)-(30)). Any bound on that makespan holds.
    """
    bounded = lifted_bound(problem.decode_steps, slots)
    yield bounded.value, bounded.witness


def _kv_tokens(problem: Problem, slots: int) -> Iterator[StepCount]:
    """Yield the steps in which the KV capacity lets all tokens be read."""
    if problem.kv_capacity is not None:
        yield -(-problem.kv_token_steps // problem.kv_capacity), {"kind": BY_MEMORY}


def _tree_area(problem: Problem, slots: int) -> Iterator[StepCount]:
    """Yield the steps in which the KV capacity lets requests hold shared beginnings once."""
    if problem.tree is not None and problem.kv_capacity is not None:
        limits = EngineLimits(slots, kv_tokens=problem.kv_capacity, block_tokens=1)
        first = int(problem.prefill_emits_first_token)
        yield tree_area(problem.tree, problem.decode_steps, limits, drawn_before=first), {"kind": TREE_AREA}


def _two_requests(problem: Problem, slots: int) -> Iterator[StepCount]:
    """Yield the steps of two requests that the KV capacity keeps apart."""
    if problem.kv_capacity is not None:
        steps, pair = two_requests(problem, problem.kv_capacity)
        yield steps, {"kind": "two requests", "requests": pair}


def _no_steps(problem: Problem, slots: int) -> Iterator[StepCount]:
    """Yield nothing: the argument counts stages."""
    yield from ()


class Counted(NamedTuple):
    """Argument by counts alone."""

    name: str
    """Name by which :class:`~.params.BoundParams` leaves it out."""
    steps: Callable[[Problem, int], Iterator[StepCount]]
    """Decode steps of a problem with some slots."""
    holds_under_evictions: bool
    """Whether it also holds for schedules that evict requests; no curve over numbers of stages does."""
    counts_whole_prompts: bool = False
    """Whether it is false where requests hold shared beginnings once."""


STAGE_PACKING = "stage_packing"

COUNTED = (
    Counted("lifting", _lifted, holds_under_evictions=False),
    Counted("kv_tokens", _kv_tokens, holds_under_evictions=True, counts_whole_prompts=True),
    Counted("tree_area", _tree_area, holds_under_evictions=True),
    Counted("two_requests", _two_requests, holds_under_evictions=False),
    Counted(STAGE_PACKING, _no_steps, holds_under_evictions=True),
)
"""Arguments by counts alone; ``checker.STEP_CHECKS`` has a row for the kind of each claim."""


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
    prefill = {
        name: float(seconds[0]) for name, seconds in _prefill_terms(problem, np.array([stages])).items()
    }
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


LONGEST = 200
"""Longest requests to compare in pairs."""


def two_requests(problem: Problem, capacity: int) -> tuple[int, list[int]]:
    r"""Return the pair of requests that need most decode steps together.

    Let request i end first. In its last step it holds :math:`a_i + n_i - 1` tokens, where :math:`a_i` are the
    tokens that it reads in its first of :math:`n_i` steps. At most :math:`C - (a_i + n_i - 1)` are left for
    j, which began with :math:`a_j` and grows by one a step. So the two share at most
    :math:`C - a_j - (a_i + n_i - 1) + 1` steps, whichever of them ends first. Tokens of a beginning that both
    hold once add to C.
    """
    longest = np.argsort(-problem.decode_steps, kind="stable")[:LONGEST]
    longest = longest[problem.decode_steps[longest] > 0]
    if len(longest) < 2:
        return 0, []
    decode_steps, first = problem.decode_steps[longest], problem.kv_at_start[longest]
    # Steps that each pair shares if the first request ends first.
    room = capacity + (0 if problem.tree is None else _common_tokens(problem.tree, longest))
    shared = np.maximum(0, room - (first + decode_steps - 1)[:, None] - first + 1)
    needed = decode_steps[:, None] + decode_steps - np.maximum(shared, shared.T)
    np.fill_diagonal(needed, 0)
    request, second = (int(place) for place in np.unravel_index(needed.argmax(), needed.shape))
    return int(needed[request, second]), [int(longest[request]), int(longest[second])]


def _common_tokens(tree: PrefixTree, requests: IntArray) -> IntArray:
    """Return the tokens of the nodes that each two requests have in common, shape (requests, requests)."""
    nodes, parent = tree.leaf[requests], np.append(tree.parent, -1)
    # The higher-numbered node of a pair goes up until both are the same: parents come first.
    one, other = np.broadcast_arrays(nodes[:, None], nodes)
    while (apart := one != other).any():
        one, other = (
            np.where(apart & (one > other), parent[one], one),
            np.where(apart & (other > one), parent[other], other),
        )
    common: IntArray = np.append(tree.through, 0)[one]
    return common


PRICED_WORK = 20_000_000
"""Most capacity times lengths, as the checker repeats the knapsack."""

BY_SLOTS: Mapping[str, object] = {"kind": "requests over slots"}
BY_CAP: Mapping[str, object] = {"kind": "tokens over cap"}


def fewest_stages(problem: Problem, slots: int, *, priced: bool) -> tuple[int, Mapping[str, object]]:
    """Return the fewest prefill stages with their proof.

    A stage prefills at most one request a slot. Under a token cap it also computes at most that many prompt
    tokens; those that requests share are computed at least once. All prompts of a stage are held at once (or
    their own tokens, where beginnings are held once), so the KV capacity caps them too. Stages are thus the
    bins of a packing, which dual feasible functions bound (``priced``).
    """
    stages, claim = -(-len(problem) // slots), BY_SLOTS
    for pieces, cap, fields in _packed(problem):
        needed, witness = -(-int(pieces.sum()) // cap), BY_CAP
        if priced and cap * len(np.unique(pieces)) <= PRICED_WORK:
            bins, prices = packing_bound(pieces, cap)
            if bins > needed:
                needed, witness = bins, {**prices, **fields}
        if needed > stages:
            stages, claim = needed, witness
    return stages, claim


def _packed(problem: Problem) -> list[tuple[IntArray, int, Mapping[str, object]]]:
    """Return the pieces to pack, a stage's tokens and the claim's field."""
    computed, held = problem.prefill_token_cap, problem.kv_capacity
    if not problem.shares_prompts:
        caps = [cap for cap in (computed, held) if cap is not None]
        return [(problem.prompt_tokens, min(caps), {})] if caps else []
    packed: list[tuple[IntArray, int, Mapping[str, object]]] = []
    if computed is not None:
        packed.append((problem.prompt_pieces, computed, {}))
    if held is not None:
        packed.append((problem.held_alone, held, {"held": True}))
    return packed
