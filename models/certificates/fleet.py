"""An independent check of a fleet's bound: every request priced again, one by one."""

from __future__ import annotations

import math

from ...data.bound import Bound
from ...data.fleet import Fleet, Replica
from ...data.schedule import Violation
from .checker import ROUNDING, verify_bound


def verify_fleet_bound(fleet: Fleet, bound: Bound) -> Violation | None:
    """
    Return what is wrong with a fleet's bound, or None if its certificate proves it.

    Nothing is taken from the code that makes bounds.

    Parameters
    ----------
    fleet
        The job and its replicas.
    bound
        The bound, its terms and certificate.
    """
    certificate = bound.certificate
    kind = certificate.get("kind")
    if kind not in ("fleet shares", "one request"):
        if len(fleet.replicas) > 1 or fleet.replicas[0].busy:
            return Violation("a certificate is of a known kind", f"{kind!r} is not one of a fleet")
        return verify_bound(fleet.problem_of(0, range(len(fleet))), bound)
    if not bound.valid:
        return Violation("a bound is valid", f"{bound.source!r} bounds nothing in general")
    total = math.fsum(bound.terms.values())
    if not math.isclose(total, bound.seconds, rel_tol=ROUNDING, abs_tol=1e-12):
        return Violation(
            "terms add up", f"the terms add up to {total!r} s, the bound says {bound.seconds!r} s"
        )
    try:
        proven = _shares(fleet, bound) if kind == "fleet shares" else _one_request(fleet, bound)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return Violation("a certificate is readable", f"{type(error).__name__}: {error}")
    if bound.seconds > proven * (1 + ROUNDING) + 1e-12:
        return Violation(
            "the certificate proves the bound", f"it proves {proven!r} s, the bound says {bound.seconds!r} s"
        )
    return None


def _shares(fleet: Fleet, bound: Bound) -> float:
    given = bound.certificate["weights"]
    if not isinstance(given, list) or len(given) != len(fleet.replicas):
        raise ValueError("there is not one weight for each replica")
    weights = [float(weight) for weight in given]
    if min(weights) < 0 or math.fsum(weights) > 1 + ROUNDING:
        raise ValueError("the weights are negative, or add up to more than one")
    stage_by, round_by = bound.certificate["stage_by"], bound.certificate["round_by"]
    if stage_by not in ("slots", "tokens", "floor") or round_by not in ("slots", "keys and values"):
        raise ValueError(f"no argument is called {stage_by!r} or {round_by!r}")
    # Of two replicas alike, the one of less weight is the cheaper.
    lightest: dict[Replica, float] = {}
    for replica, weight in zip(fleet.replicas, weights, strict=True):
        lightest[replica] = min(weight, lightest.get(replica, math.inf))
    parts = [weight * replica.busy for replica, weight in zip(fleet.replicas, weights, strict=True)]
    first = int(fleet.prefill_emits_first_token)
    for prompt, answer in zip(
        fleet.workload.input_tokens.tolist(), fleet.workload.output_tokens.tolist(), strict=True
    ):
        rounds = answer - first
        parts.append(
            min(
                weight * _share(replica, prompt, prompt + first, rounds, str(stage_by), str(round_by))
                for replica, weight in lightest.items()
            )
        )
    return math.fsum(parts)


def _share(replica: Replica, prompt: int, held: int, rounds: int, stage_by: str, round_by: str) -> float:
    """Return what a request adds at least to the time of the replica that serves it."""
    cost, cap, capacity = replica.cost, replica.prefill_token_cap, replica.kv_capacity
    read = rounds * held + rounds * (rounds - 1) // 2
    if stage_by == "floor":
        prefill = max(cost.prefill_base, cost.prefill_floor) / replica.slots
    elif stage_by == "tokens" and cap is not None:
        prefill = prompt * (cost.prefill_base / cap + cost.prefill_per_token)
    else:
        prefill = cost.prefill_base / replica.slots + prompt * cost.prefill_per_token
    by_memory = round_by == "keys and values" and capacity is not None
    least_rounds = read / (capacity or 1) if by_memory else rounds / replica.slots
    decode = cost.decode_base * least_rounds + cost.decode_per_slot * rounds + cost.decode_per_kv_token * read
    return prefill + decode


def _one_request(fleet: Fleet, bound: Bound) -> float:
    chosen = bound.certificate["request"]
    if not isinstance(chosen, int) or not 0 <= chosen < len(fleet):
        raise ValueError(f"there is no request {chosen!r}")
    request, first = fleet.workload[chosen], int(fleet.prefill_emits_first_token)
    best = math.inf
    for replica in fleet.replicas:
        cost = replica.cost
        seconds = replica.busy + cost.prefill_seconds(request.input_tokens)
        for done in range(request.output_tokens - first):
            seconds += cost.decode_seconds(1, request.input_tokens + first + done)
        best = min(best, seconds)
    return best
