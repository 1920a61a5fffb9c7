"""Argument of the replica with most decode steps, and the others' work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray
from ...data.fleet import Fleet, Replica
from .packing.lower_bounds import lifted_bound

EVALUATIONS = 40
"""Number of weights to try."""

WORTH = 1.0 + 1e-6
"""Least relative gain to look for."""

GOLDEN = (5.0**0.5 - 1.0) / 2.0


@dataclass(frozen=True, slots=True, eq=False)
class StepsCase:
    """Proof for the case that one replica takes most decode steps.

    weights: Weight of every replica, not negative, with a sum of one, shape (replicas,).
    terms: Seconds that add up to the proven time.
    """

    replica: int
    weights: tuple[float, ...]
    terms: dict[str, float]

    @property
    def seconds(self) -> float:
        """Least seconds of the fleet."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True, eq=False)
class StepsBound:
    """A case for each kind of replica; the least is a bound.

    decode_steps: Number of decode steps that some slot holds at least.
    """

    cases: tuple[StepsCase, ...]
    decode_steps: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class FleetCosts:
    """Seconds that each request adds to each kind of replica.

    shares: See :func:`~batchbound.models.bounds.fleet.request_costs`.
    added: The same without the share of decode steps, for a replica with its steps counted apart.
    a_token: Least seconds of a token of a shared prompt, on every replica.
    """

    shares: dict[Replica, FloatArray]
    added: dict[Replica, FloatArray]
    a_token: dict[Replica, float]


def steps_bound(fleet: Fleet, costs: FleetCosts, weights: FloatArray, enough: float) -> StepsBound | None:
    r"""Return a case for each replica that may take most steps.

    For any placement of requests, some slot holds at least n decode steps, for example those of the longest
    request (:func:`~batchbound.models.bounds.packing.lower_bounds.lifted_bound`). Let it be a slot of replica
    j, with J slots, which serves the requests A. Then

    .. math:: T_j \ge \mathrm{busy}_j + b_d n + \sum_{i \in A} \left( c_{ij} - \tfrac{b_d}{J} n_i \right)

    where :math:`c_{ij}` is a request's share. With weights that add up to one, each request costs at least
    the minimum of :math:`w_j` times the bracket and :math:`w_k c_{ik}` of all other replicas k. The proven
    time is concave in the weight of j, so golden section finds it.
    """
    slots = sum(replica.slots for replica in fleet.replicas)
    enough *= WORTH
    # No slot needs to hold more than this.
    at_most = float(fleet.decode_steps.max(initial=0)) + float(fleet.decode_steps.sum()) / slots
    cases = [_Case(fleet, costs, weights, at) for at in _one_of_each(fleet)]
    if any(case.at_most(at_most, enough) <= enough for case in cases):
        return None
    packing = lifted_bound(fleet.decode_steps[fleet.decode_steps > 0], slots)
    if any(case.at_most(packing.value, enough) <= enough for case in cases):
        return None
    best = tuple(case.best(packing.value) for case in cases)
    return StepsBound(best, {"at_least": packing.value, **packing.witness})


def _one_of_each(fleet: Fleet) -> Iterator[int]:
    met = set[Replica]()
    for at, replica in enumerate(fleet.replicas):
        if replica not in met:
            met.add(replica)
            yield at


class _Case:
    """One replica has most decode steps; the others keep their weights' ratios."""

    def __init__(self, fleet: Fleet, costs: FleetCosts, weights: FloatArray, at: int) -> None:
        weights_of_others = np.array(weights, dtype=np.float64)
        weights_of_others[at] = 0.0
        rest = float(weights_of_others.sum())
        self._at, self._others = at, weights_of_others / rest if rest > 0 else weights_of_others
        self._replica = holder = fleet.replicas[at]
        lightest: dict[Replica, float] = {}
        for k, (replica, weight) in enumerate(zip(fleet.replicas, self._others.tolist(), strict=True)):
            if k != at:
                lightest[replica] = min(weight, lightest.get(replica, np.inf))
        self._elsewhere = np.full(len(fleet), np.inf)
        for replica, weight in lightest.items():
            np.minimum(self._elsewhere, weight * costs.shares[replica], out=self._elsewhere)
        self._added = costs.added[holder]
        self._busy = np.array([replica.busy for replica in fleet.replicas])
        self._tokens = fleet.workload.shared_once
        self._token = costs.a_token[holder]
        self._token_elsewhere = min((w * costs.a_token[r] for r, w in lightest.items()), default=np.inf)

    def at_most(self, steps: float, enough: float) -> float:
        """Return an upper limit on the proof of any weight."""
        there = self._replica.busy + self._replica.cost.decode_base * steps
        elsewhere = float(self._others @ self._busy)
        added = float(self._added.sum()) + self._tokens * self._token
        work = float(self._elsewhere.sum()) + self._tokens * self._token_elsewhere
        share = 1.0
        if np.isfinite(work) and work > 0:
            share = min(max(1.0 - (enough - elsewhere) / work, 0.0), 1.0)
            elsewhere += (1.0 - share) * work
        return max(there + share * added, elsewhere)

    def at(self, weight: float, steps: int) -> StepsCase:
        """Return the proof of one weight."""
        other_weights = 1.0 - weight
        weights = other_weights * self._others
        weights[self._at] = weight
        terms = {
            "what the replicas are busy with": float(weights @ self._busy),
            "decode steps of one replica": weight * self._replica.cost.decode_base * steps,
            "requests": float(np.minimum(weight * self._added, other_weights * self._elsewhere).sum()),
        }
        if self._tokens:
            token = min(weight * self._token, other_weights * self._token_elsewhere)
            terms["shared prompts"] = self._tokens * token
        return StepsCase(self._at, tuple(weights.tolist()), terms)

    def best(self, steps: int) -> StepsCase:
        """Return about the best proof over all weights."""
        # scipy's search would take a quarter of a second to import, more than short limits allow.
        low, high = 0.0, 1.0
        inner = [high - GOLDEN, low + GOLDEN]
        cases = [self.at(weight, steps) for weight in inner]
        for _ in range(EVALUATIONS - 2):
            if cases[0].seconds >= cases[1].seconds:
                high, inner[1], cases[1] = inner[1], inner[0], cases[0]
                inner[0] = high - GOLDEN * (high - low)
                cases[0] = self.at(inner[0], steps)
            else:
                low, inner[0], cases[0] = inner[0], inner[1], cases[1]
                inner[1] = low + GOLDEN * (high - low)
                cases[1] = self.at(inner[1], steps)
        return max(cases, key=lambda case: case.seconds)
