"""Independent check of a fleet's bound, request by request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...data.bound import Bound
from ...data.fleet import Fleet, Replica
from ...data.schedule import Violation
from .checker import ROUNDING, judged, proven_seconds, verify_bound
from .claims import RefutedError, Work, entries, fullest_slot, unreadable, whole
from .reads import tokens_read


def verify_fleet_bound(fleet: Fleet, bound: Bound) -> Violation | None:
    """Return an error in a fleet's bound, or None if proven.

    No code is shared with the bounds.
    """
    certificate = bound.certificate
    kind = certificate.get("kind")
    derived = _DERIVED.get(kind) if isinstance(kind, str) else None
    several = len(fleet.replicas) > 1 or fleet.replicas[0].busy > 0
    if not several and fleet.workload.tree is not None:
        derived = None
    if derived is None:
        if several:
            return Violation("a certificate is of a known kind", f"{kind!r} is not one of a fleet")
        return verify_bound(fleet.problem(), bound)
    return judged(bound, lambda: derived(fleet, bound))


def _weighted(fleet: Fleet, certificate: Mapping[str, object]) -> list[tuple[Replica, float]]:
    weights = [_weight(value) for value in entries(certificate, "weights")]
    if len(weights) != len(fleet.replicas):
        raise RefutedError("weights", f"{len(weights)} weights for {len(fleet.replicas)} replicas")
    if math.fsum(weights) > 1 + ROUNDING:
        raise RefutedError("weights", f"they add up to {math.fsum(weights)!r}, more than one")
    return list(zip(fleet.replicas, weights, strict=True))


def _arguments(certificate: Mapping[str, object]) -> tuple[str, str]:
    """Return the bases of the shares in stages and decode steps."""
    stage_by, step_by = certificate["stage_by"], certificate["step_by"]
    if stage_by not in ("slots", "tokens", "floor") or step_by not in ("slots", "keys and values"):
        raise RefutedError("shares", f"no argument is called {stage_by!r} or {step_by!r}")
    return str(stage_by), str(step_by)


def _beside_steps(fleet: Fleet, bound: Bound) -> float:
    """Return the least case over the replica of most decode steps."""
    stage_by, step_by = _arguments(bound.certificate)
    first = int(fleet.prefill_emits_first_token)
    decode_steps = [request.output_tokens - first for request in fleet.workload]
    slots, claim = sum(replica.slots for replica in fleet.replicas), bound.certificate.get("decode_steps")
    if not isinstance(claim, Mapping) or claim.get("kind") != "lifted":
        raise unreadable("decode_steps", claim, "a claim about slots")
    claimed, proven = whole(claim, "at_least", "decode_steps"), fullest_slot(decode_steps, slots, claim)
    if claimed > proven:
        raise RefutedError("decode_steps", f"{claimed} claimed, {proven} proven")
    cases, busiest = entries(bound.certificate, "cases"), dict[Replica, float]()
    Work().spend(len(cases) * len(set(fleet.replicas)) * len(fleet))
    for case in cases:
        if not isinstance(case, Mapping):
            raise unreadable("cases", case, "a case")
        at, weighted = whole(case, "replica", "cases"), _weighted(fleet, case)
        if at >= len(weighted):
            raise RefutedError("cases", f"there is no replica {at} of {len(weighted)}")
        holder, weight = weighted.pop(at)
        steps = weight * holder.cost.decode_base * claimed
        busy = math.fsum([weight * holder.busy, *(factor * replica.busy for replica, factor in weighted)])
        free = replace(holder, cost=replace(holder.cost, decode_base=0.0))
        # It pays for its decode steps in place of shares of them.
        requests = _requests(fleet, [(free, weight), *weighted], stage_by, step_by)
        busiest[holder] = max(busiest.get(holder, 0.0), busy + steps + requests)
    missing = set(fleet.replicas) - set(busiest)
    if missing:
        raise RefutedError("cases", f"none of {len(missing)} kinds of replicas")
    return min(busiest.values())


def _shares(fleet: Fleet, bound: Bound) -> float:
    weighted = _weighted(fleet, bound.certificate)
    busy = math.fsum(weight * replica.busy for replica, weight in weighted)
    return busy + _requests(fleet, weighted, *_arguments(bound.certificate))


def _requests(fleet: Fleet, weighted: list[tuple[Replica, float]], stage_by: str, step_by: str) -> float:
    """Return the least sum that all requests add to the weighted mean."""
    # The cheaper of two equal replicas is the one of less weight.
    lightest: dict[Replica, float] = {}
    for replica, weight in weighted:
        lightest[replica] = min(weight, lightest.get(replica, math.inf))
    Work().spend(len(lightest) * len(fleet))
    parts: list[float] = []
    first = int(fleet.prefill_emits_first_token)
    for request, own_tokens in zip(fleet.workload, _own_tokens(fleet), strict=True):
        steps = request.output_tokens - first
        read, alone = (tokens_read(steps, held + first) for held in (request.input_tokens, own_tokens))
        parts.append(
            min(
                weight * _share(replica, own_tokens, steps, (read, alone), stage_by, step_by)
                for replica, weight in lightest.items()
            )
        )
    # Some replica computes what prompts share, though not all that it computes is a part of the floor.
    if fleet.workload.tree is not None and stage_by != "floor":
        token = (weight * _a_token(replica, stage_by) for replica, weight in lightest.items())
        parts.append(sum(fleet.workload.tree.tokens.tolist()) * min(token))
    return math.fsum(parts)


def _own_tokens(fleet: Fleet) -> list[int]:
    """Return the tokens of each prompt that no other request computes or holds."""
    tree = fleet.workload.tree
    own_tokens: list[int] = (fleet.workload.input_tokens if tree is None else tree.own).tolist()
    return own_tokens


def _a_token(replica: Replica, stage_by: str) -> float:
    """Return the least seconds of a shared beginning's token."""
    cost, cap = replica.cost, replica.prefill_token_cap
    if stage_by != "tokens" or cap is None:
        return cost.prefill_per_token
    # A full stage takes least a token: its cost, or the floor, spread over the cap.
    return max(cost.prefill_base + cap * cost.prefill_per_token, cost.prefill_floor) / cap


def _share(
    replica: Replica,
    prompt: int,
    decode_steps: int,
    kv_tokens: tuple[int, int],
    stage_by: str,
    step_by: str,
) -> float:
    """Return a request's least share of a replica's time.

    kv_tokens: KV tokens that it reads in all its steps, and those of them that no other request holds.
    """
    cost, cap, capacity = replica.cost, replica.prefill_token_cap, replica.kv_capacity
    read, alone = kv_tokens
    # A stage is beyond the bend by all that its prompts are, one by one.
    beyond = cost.prefill_per_token_beyond * max(0.0, prompt - cost.prefill_bend)
    if stage_by == "floor":
        prefill = max(cost.prefill_base, cost.prefill_floor) / replica.slots
    elif stage_by == "tokens" and cap is not None:
        # The floor is there whatever a stage computes, and no more than the floor need be.
        floor = cost.prefill_floor > cost.prefill_base + cap * cost.prefill_per_token
        prefill = prompt * _a_token(replica, stage_by) + (0.0 if floor else beyond)
    else:
        prefill = cost.prefill_base / replica.slots + prompt * cost.prefill_per_token + beyond
    least_steps = decode_steps / replica.slots
    if step_by == "keys and values" and capacity is not None:
        least_steps = alone / capacity
    decode = (
        cost.decode_base * least_steps + cost.decode_per_slot * decode_steps + cost.decode_per_kv_token * read
    )
    return prefill + decode


def _one_request(fleet: Fleet, bound: Bound) -> float:
    chosen = whole(bound.certificate, "request", "one request")
    if chosen >= len(fleet):
        raise RefutedError("one request", f"there is no request {chosen} of {len(fleet)}")
    request, first = fleet.workload[chosen], int(fleet.prefill_emits_first_token)
    decode_steps, kv_tokens = request.output_tokens - first, request.input_tokens + first
    read = tokens_read(decode_steps, kv_tokens)
    return min(
        replica.busy
        + replica.cost.prefill_seconds(_own_tokens(fleet)[chosen])
        + decode_steps * replica.cost.decode_seconds(1)
        + replica.cost.decode_per_kv_token * read
        for replica in fleet.replicas
    )


def _one_after_another(fleet: Fleet, bound: Bound) -> float:
    """Return the mean seconds of replicas, as those of one in their place."""
    if len({replace(replica, busy=0.0) for replica in fleet.replicas}) > 1:
        raise RefutedError("one after another", "the replicas differ by more than what they are busy with")
    if fleet.workload.tree is not None:
        raise RefutedError("one after another", "requests share prompts, which replicas compute apart")
    number, alone = len(fleet.replicas), bound.certificate["alone"]
    if not isinstance(alone, Mapping):
        raise unreadable("alone", alone, "a certificate")
    terms = {name: number * seconds for name, seconds in bound.terms.items()}
    terms.pop("what the replicas are busy with", None)
    of_one = Bound(math.fsum(terms.values()), bound.source, terms, alone)
    busy = math.fsum(replica.busy for replica in fleet.replicas)
    return (busy + proven_seconds(fleet.problem(), of_one)) / number


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise unreadable("weights", value, "a number")
    if not 0 <= value < math.inf:
        raise RefutedError("weights", f"{value} is negative or not finite")
    return float(value)


_DERIVED = {
    "fleet shares": _shares,
    "decode steps and shares": _beside_steps,
    "one request": _one_request,
    "one after another": _one_after_another,
}
"""Derivation of the seconds for each kind of certificate."""
