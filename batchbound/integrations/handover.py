"""What an engine can take of a plan: an order, priorities, a replica for each request, its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..data.costs.cost import IntArray
from ..data.iterations import EngineLimits, IterationBound
from ..data.plan import Plan
from ..executor.serving.release import Release
from ..models.bounds.iterations import iteration_bound
from ..planning.release import Releasable, best_release, plan_order
from .handover_file import ENGINES

_UNSTATED_BUDGET = 2048
"""Tokens of an iteration taken where the plan has no limit: vLLM's default on most devices."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """
    What one replica is to do.

    Parameters
    ----------
    requests
        Positions of its requests in the plan, first to begin first, shape (requests of the share,).
    release
        How the order came to be, and what it is predicted to take.
    bound
        Iterations that no order of these requests goes below.
    """

    requests: IntArray
    release: Release
    bound: IterationBound


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """
    A plan in the terms of an engine.

    Parameters
    ----------
    engine
        One of :data:`ENGINES`.
    shares
        One per replica that has requests.
    priority
        Of each request in the plan's order, shape (requests,); None for an engine that takes the order of
        its list. In vLLM and verl the lowest begins first (verl drops 0: they count from 1), in SGLang the
        highest.
    command
        Words of the server's command that the priorities and the plan's limits need.
    settings
        Configuration of a trainer, by its dotted names.
    remarks
        What to know before using it, in sentences.
    """

    engine: str
    shares: tuple[Share, ...]
    priority: IntArray | None
    command: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def replica_of(self) -> IntArray:
        """Position of each request's share, shape (requests,)."""
        column = np.zeros(sum(len(share.requests) for share in self.shares), dtype=np.int64)
        for k, share in enumerate(self.shares):
            column[share.requests] = k
        return column

    @property
    def order(self) -> IntArray:
        """Positions of all requests, the shares' taken in turn, first to begin first, shape (requests,)."""
        return np.argsort(_ranks_in(self.shares), kind="stable")


def hand_over(plan: Plan, engine: str, *, exact: bool = False, seed: int = 0) -> Handover:
    """
    Return a plan in the terms of an engine that mixes prompts with generated tokens.

    Within each replica's share the order is the one of fewest simulated iterations.

    Parameters
    ----------
    plan
        For one machine or a fleet.
    engine
        One of :data:`ENGINES`.
    exact
        Whether the plan's lengths are known, and not predictions.
    seed
        Of orders that are drawn.

    Raises
    ------
    ValueError
        If the engine is none of them.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    planned, fleet = plan_order(plan), plan.fleet
    shares = []
    for k, replica in enumerate(fleet.replicas):
        members = planned[plan.shares.replica_of[planned] == k]
        if not members.size:
            continue
        limits = EngineLimits(
            replica.slots, replica.prefill_token_cap or _UNSTATED_BUDGET, replica.kv_capacity
        )
        at = np.sort(members)
        work = Releasable(
            plan.workload.input_tokens[at], plan.workload.output_tokens[at], np.ones_like(at), exact
        )
        release = best_release(work, limits, np.searchsorted(at, members), seed)
        shares.append(Share(at[release.order], release, iteration_bound(work.sequences(), limits)))
    return _HANDOVERS[engine](plan, tuple(shares))


def _ranks_in(shares: tuple[Share, ...]) -> IntArray:
    """Return the place of each request in its share's order, counted from zero, shape (requests,)."""
    rank = np.zeros(sum(len(share.requests) for share in shares), dtype=np.int64)
    for share in shares:
        rank[share.requests] = np.arange(len(share.requests))
    return rank


def _vllm(plan: Plan, shares: tuple[Share, ...]) -> Handover:
    words = ["--max-num-seqs", str(_slots(plan)), "--scheduling-policy", "priority"]
    words += _limit(plan, "prefill_token_cap", "--max-num-batched-tokens")
    words += _limit(plan, "max_position", "--max-model-len")
    return Handover(
        "vllm",
        shares,
        _ranks_in(shares),
        ("vllm", "serve", "MODEL", *words),
        remarks=("A vLLM without --scheduling-policy priority takes the field and ignores it in silence.",),
    )


def _sglang(plan: Plan, shares: tuple[Share, ...]) -> Handover:
    words = ["--max-running-requests", str(_slots(plan)), "--schedule-policy", "fcfs"]
    # Ranks are an order, and no reason to throw out what runs.
    words += ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", str(2**31 - 1)]
    words += _limit(plan, "prefill_token_cap", "--chunked-prefill-size")
    words += _limit(plan, "max_position", "--context-length")
    rank = _ranks_in(shares)
    most = max(len(share.requests) for share in shares)
    return Handover(
        "sglang",
        shares,
        most - rank,
        ("python", "-m", "sglang.launch_server", "--model-path", "MODEL", *words),
        remarks=("Other policies than fcfs and lof take priorities and ignore them.",),
    )


def _verl(plan: Plan, shares: tuple[Share, ...]) -> Handover:
    rollout = "actor_rollout_ref.rollout"
    settings = {
        f"{rollout}.name": "vllm",
        f"{rollout}.max_num_seqs": str(_slots(plan)),
        f"+{rollout}.engine_kwargs.vllm.scheduling_policy": "priority",
    }
    cap = _limit(plan, "prefill_token_cap", f"{rollout}.max_num_batched_tokens")
    if cap:
        settings[cap[0]] = cap[1]
    return Handover(
        "verl",
        shares,
        _ranks_in(shares) + 1,
        settings=settings,
        remarks=(
            "batchbound.integrations.verl.set_priorities puts the column into a batch, before"
            " generate_sequences fills it with the batch's own order.",
            "batchbound.integrations.verl.planned_load_balancer sends each prompt to its replica.",
        ),
    )


def _openrlhf(plan: Plan, shares: tuple[Share, ...]) -> Handover:
    settings = {"vllm.num_engines": str(len(plan.fleet.replicas))}
    remark = (
        "It serves the prompts of a batch in the order of its list, each with all its samples on one engine."
    )
    return Handover("openrlhf", shares, None, settings=settings, remarks=(remark,))


def _trl(plan: Plan, shares: tuple[Share, ...]) -> Handover:
    remark = (
        "It generates the prompts of a batch in the order of its list: dataset.select(order), with"
        " shuffle_dataset=False; or hand batchbound.Rollout to rollout_func."
    )
    return Handover("trl", shares, None, settings={"shuffle_dataset": "False"}, remarks=(remark,))


_HANDOVERS = {"vllm": _vllm, "sglang": _sglang, "verl": _verl, "openrlhf": _openrlhf, "trl": _trl}


def _slots(plan: Plan) -> int:
    return max(replica.slots for replica in plan.fleet.replicas)


def _limit(plan: Plan, name: str, option: str) -> list[str]:
    """Return an option with the least of a limit that the plan's replicas state, or nothing."""
    stated = [getattr(replica, name) for replica in plan.fleet.replicas]
    known = [value for value in stated if value is not None]
    return [option, str(min(known))] if known else []
