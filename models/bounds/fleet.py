"""Lower bound on the makespan of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from ...data.arrays import FloatArray
from ...data.bound import Bound
from ...data.fleet import Fleet, Replica
from ..programme import Programme
from .fleet_steps import FleetCosts, steps_bound
from .makespan import best_bound
from .prove import evicting_bound, proven_bound

StageBy = Literal["slots", "tokens", "floor"]
"""Limit by which requests share prefill stages: slots, token cap, or the floor of a stage."""

StepBy = Literal["slots", "keys and values"]
"""Limit by which requests share decode steps: slots, or the KV capacity."""

MOST_KINDS = 16
"""Kinds of replicas that are tried as the one of most decode steps."""

BUSY = "what the replicas are busy with"
"""Name of the seconds of earlier work."""

CLASSES = 300
"""Classes of requests in the linear programme for the replicas' weights."""


def request_costs(fleet: Fleet, replica: Replica, stage_by: StageBy, step_by: StepBy) -> FloatArray:
    r"""Return each request's least share of a replica's time, shape (requests,).

    A replica with J slots that serves the requests A takes at least

    .. math:: \sum_{i \in A} \left( \frac{b_p}{J} + a_p p_i + \frac{b_d}{J} n_i + a_d n_i + a_k h_i \right)

    since it has at least :math:`|A| / J` prefill stages and :math:`\sum n_i / J` decode steps. Under a cap
    of C prompt tokens there are at least :math:`\sum p_i / C` stages, too. A stage takes at least its floor,
    a constant for each token of the cap. Under a KV capacity K no decode step reads more than K of the
    :math:`\sum h_i` tokens. If a prompt exceeds the bend, its stage exceeds it by at least as much.
    :math:`p_i` excludes tokens that prompts share, as another request may have computed them, and the
    :math:`h_i` in memory do so, as another may hold them.
    """
    cost, decode_steps, prompts = replica.cost, fleet.decode_steps, fleet.workload.own_tokens
    if stage_by == "floor":
        prefill = np.full(len(fleet), max(cost.prefill_floor, cost.prefill_base) / replica.slots)
    elif stage_by == "tokens" and replica.prefill_token_cap is not None:
        prefill = _seconds_a_token(replica, stage_by) * prompts
    else:
        prefill = cost.prefill_base / replica.slots + cost.prefill_per_token * prompts
    if not _takes_floor(replica, stage_by):
        prefill += cost.prefill_per_token_beyond * np.maximum(0.0, prompts - cost.prefill_bend)
    decode = step_shares(fleet, replica, step_by)
    read = cost.decode_per_kv_token * fleet.kv_token_steps
    seconds: FloatArray = prefill + decode + cost.decode_per_slot * decode_steps + read
    return seconds


def step_shares(fleet: Fleet, replica: Replica, step_by: StepBy) -> FloatArray:
    """Return the decode-step part of :func:`request_costs`, shape (requests,)."""
    cost, shares = replica.cost, fleet.decode_steps / replica.slots
    if step_by == "keys and values" and replica.kv_capacity is not None:
        shares = fleet.own_token_steps / replica.kv_capacity
    seconds: FloatArray = cost.decode_base * shares
    return seconds


def fleet_bound(fleet: Fleet, seconds: float = 0.0) -> Bound:
    r"""Return the best proven bound on a fleet's makespan without preemption.

    Take weights :math:`w_k \ge 0` that add up to one. The makespan is at least the weighted mean of the
    replicas' times. Each request costs at least its cheapest weighted share:

    .. math:: T \ge \sum_k w_k T_k \ge \sum_k w_k\,\mathrm{busy}_k + \sum_i \min_k w_k c_{ik}

    (:func:`request_costs`). Any weights are valid; the duals of a linear programme over kinds of requests
    give good ones, and equal replicas have equal weights. A request on its own is a bound too, and so are
    both together (:func:`~batchbound.models.bounds.fleet_steps.steps_bound`). Schedules of K replicas that
    differ by earlier work alone, one after another, are a schedule of one such replica. So a K-th of its
    bound (:func:`~batchbound.models.bounds.prove.proven_bound`) and the mean earlier work are a bound, too.

    seconds: Time limit of proofs that need a search.
    """
    if is_one_engine(fleet):
        return best_bound(fleet.problem())
    bounds = [work_bound(fleet), *one_after_another(fleet, seconds)]
    best = max(bounds, key=lambda bound: bound.seconds)
    for stage_by in _stage_arguments(fleet):
        for step_by in _step_arguments(fleet):
            proven = _steps_and_shares(fleet, stage_by, step_by, best.seconds)
            if proven is not None and proven.seconds > best.seconds:
                best = proven
    return best


def work_bound(fleet: Fleet) -> Bound:
    """Bound a fleet's makespan even if requests are evicted and moved.

    Each request takes part in one prefill stage at least, and in as many decode steps as without.
    """
    if is_one_engine(fleet) and fleet.workload.tree is not None:
        return evicting_bound(fleet.problem())
    bounds = [_alone(fleet)]
    for stage_by in _stage_arguments(fleet):
        bounds += [_shared(fleet, stage_by, step_by) for step_by in _step_arguments(fleet)]
    return max(bounds, key=lambda bound: bound.seconds)


def is_one_engine(fleet: Fleet) -> bool:
    """Return whether a fleet is one idle replica, bounded by its problem."""
    return len(fleet.replicas) == 1 and fleet.replicas[0].busy == 0


def one_after_another(fleet: Fleet, seconds: float) -> list[Bound]:
    """Bound replicas that differ by earlier work alone by one that does all."""
    alike = len({replace(replica, busy=0.0) for replica in fleet.replicas}) == 1
    if not alike or fleet.workload.tree is not None:
        # Replicas compute apart what one would compute once.
        return []
    alone = proven_bound(fleet.problem(), seconds) if seconds > 0 else best_bound(fleet.problem())
    number = len(fleet.replicas)
    terms = {BUSY: sum(replica.busy for replica in fleet.replicas) / number}
    terms |= {name: value / number for name, value in alone.terms.items()}
    certificate = {"kind": "one after another", "alone": alone.certificate}
    return [Bound(sum(terms.values()), "replicas one after another", terms, certificate)]


def share_weights(fleet: Fleet, stage_by: StageBy = "slots", step_by: StepBy = "slots") -> FloatArray:
    """Return weights for :func:`fleet_bound`, of sum one, shape (replicas,)."""
    kinds = list(dict.fromkeys(fleet.replicas))
    which = np.array([kinds.index(replica) for replica in fleet.replicas])
    if len(kinds) == 1:
        return np.full(len(which), 1 / len(which))
    costs = np.array([request_costs(fleet, kind, stage_by, step_by) for kind in kinds])
    weights = _duals(costs, np.bincount(which).astype(np.float64), np.array([kind.busy for kind in kinds]))
    spread: FloatArray = (weights / np.bincount(which))[which]
    return spread


def _duals(costs: FloatArray, number: FloatArray, busy: FloatArray) -> FloatArray:
    """Return each kind's weight from the linear programme."""
    # Requests of like costs are taken together, which only makes the weights a little worse.
    order = np.lexsort(costs[::-1])
    groups = np.array_split(order, min(CLASSES, len(order)))
    demand = np.array([costs[:, group].sum(axis=1) for group in groups])
    kinds, classes = len(costs), len(groups)
    # Variables: the share of each class on each kind, then the makespan.
    objective = np.zeros(kinds * classes + 1)
    objective[-1] = 1.0
    capacity = np.zeros((kinds, kinds * classes + 1))
    for k in range(kinds):
        capacity[k, k * classes : (k + 1) * classes] = demand[:, k] / number[k]
        capacity[k, -1] = -1.0
    served = np.hstack([np.eye(classes)] * kinds + [np.zeros((classes, 1))])
    all_served = np.ones(classes)
    high = np.concatenate((-busy, all_served))
    programme = Programme.within(objective, np.concatenate((capacity, served)), high)
    optimum = replace(programme, low=np.concatenate((np.full(kinds, -np.inf), all_served))).solved()
    weights = np.zeros(kinds) if optimum is None else np.maximum(0.0, -optimum.prices[:kinds])
    # Without any cost, no replica is scarce.
    total: FloatArray = weights / weights.sum() if weights.sum() > 0 else np.full(kinds, 1 / kinds)
    return total


def _shared(fleet: Fleet, stage_by: StageBy, step_by: StepBy) -> Bound:
    weights = share_weights(fleet, stage_by, step_by)
    kinds = dict(zip(fleet.replicas, weights.tolist(), strict=True))
    lowest = np.min(
        [weight * request_costs(fleet, replica, stage_by, step_by) for replica, weight in kinds.items()],
        axis=0,
    )
    shared = min(weight * _seconds_a_token(replica, stage_by) for replica, weight in kinds.items())
    busy = sum(
        weight * replica.busy for weight, replica in zip(weights.tolist(), fleet.replicas, strict=True)
    )
    terms = {BUSY: busy, "requests": float(lowest.sum())}
    if fleet.workload.tree is not None:
        terms["shared prompts"] = shared * fleet.workload.shared_once
    certificate: Mapping[str, object] = {
        "kind": "fleet shares",
        "weights": weights.tolist(),
        "stage_by": stage_by,
        "step_by": step_by,
    }
    return Bound(sum(terms.values()), "shares of the fleet", terms, certificate)


def _steps_and_shares(fleet: Fleet, stage_by: StageBy, step_by: StepBy, enough: float) -> Bound | None:
    """Bound by one replica's decode steps and the requests' shares."""
    kinds = list(dict.fromkeys(fleet.replicas))
    if len(kinds) > MOST_KINDS:
        return None
    shares = {kind: request_costs(fleet, kind, stage_by, step_by) for kind in kinds}
    costs = FleetCosts(
        shares,
        {kind: shares[kind] - step_shares(fleet, kind, step_by) for kind in kinds},
        {kind: _seconds_a_token(kind, stage_by) for kind in kinds},
    )
    steps_proof = steps_bound(fleet, costs, share_weights(fleet, stage_by, step_by), enough)
    if steps_proof is None:
        return None
    cheapest = min(steps_proof.cases, key=lambda case: case.seconds)
    certificate: Mapping[str, object] = {
        "kind": "decode steps and shares",
        "decode_steps": steps_proof.decode_steps,
        "cases": [{"replica": case.replica, "weights": list(case.weights)} for case in steps_proof.cases],
        "stage_by": stage_by,
        "step_by": step_by,
    }
    source = "decode steps of one replica and shares of the fleet"
    return Bound(cheapest.seconds, source, cheapest.terms, certificate)


def _takes_floor(replica: Replica, stage_by: StageBy) -> bool:
    """Return whether requests pay for the floor of stages."""
    cost, cap = replica.cost, replica.prefill_token_cap
    if stage_by != "tokens" or cap is None:
        return stage_by == "floor"
    return cost.prefill_floor > cost.prefill_base + cost.prefill_per_token * cap


def _seconds_a_token(replica: Replica, stage_by: StageBy) -> float:
    """Return the least seconds that a shared prompt's token adds."""
    cost, cap = replica.cost, replica.prefill_token_cap
    if stage_by == "floor":
        return 0.0
    if stage_by != "tokens" or cap is None:
        return cost.prefill_per_token
    if _takes_floor(replica, stage_by):
        # A stage of fewer tokens than the cap takes no less a token.
        return cost.prefill_floor / cap
    return cost.prefill_per_token + cost.prefill_base / cap


def _alone(fleet: Fleet) -> Bound:
    """Return the time of the longest request on its best replica."""
    # Another request's stage may have computed the shared tokens.
    prompts, decode_steps = fleet.workload.own_tokens, fleet.decode_steps
    best = np.full(len(fleet), np.inf)
    for replica in dict.fromkeys(fleet.replicas):
        cost = replica.cost
        seconds = cost.prefill_seconds(prompts) + decode_steps * (cost.decode_base + cost.decode_per_slot)
        best = np.minimum(best, replica.busy + seconds + cost.decode_per_kv_token * fleet.kv_token_steps)
    request = int(best.argmax())
    terms = {"one request": float(best[request])}
    certificate = {"kind": "one request", "request": request}
    return Bound(float(best[request]), "the longest request", terms, certificate)


def _stage_arguments(fleet: Fleet) -> list[StageBy]:
    arguments: list[StageBy] = ["slots"]
    if any(replica.prefill_token_cap is not None for replica in fleet.replicas):
        arguments.append("tokens")
    if any(replica.cost.prefill_floor > 0 for replica in fleet.replicas):
        arguments.append("floor")
    return arguments


def _step_arguments(fleet: Fleet) -> list[StepBy]:
    if any(replica.kv_capacity is not None for replica in fleet.replicas):
        return ["slots", "keys and values"]
    return ["slots"]
