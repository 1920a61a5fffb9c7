"""What the replica that serves the longest request takes, beside what is left for the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import FloatArray
from ...data.fleet import Fleet, Replica

EVALUATIONS = 40
"""Weights of the replica tried."""

GOLDEN = (5.0**0.5 - 1.0) / 2.0
"""By how much the interval of the best weight shrinks with each."""


@dataclass(frozen=True, slots=True, eq=False)
class LongestCase:
    """
    What is proven if one replica serves the longest request.

    Parameters
    ----------
    replica
        Where that replica is in the fleet.
    weights
        Of every replica, not negative, adding up to one, shape (replicas,).
    terms
        Seconds that add up to what is proven.
    """

    replica: int
    weights: tuple[float, ...]
    terms: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds that the fleet takes at least."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True, eq=False)
class LongestCosts:
    """
    What requests add to each kind of replica, in seconds.

    Parameters
    ----------
    shares
        As of :func:`~batchbound.models.bounds.fleet.request_costs`, for each replica alike.
    beside
        The same without the share of decode steps: what is added to a replica whose longest request is
        another.
    a_token
        What a token of a shared prompt adds at least, for each replica alike.
    """

    shares: dict[Replica, FloatArray]
    beside: dict[Replica, FloatArray]
    a_token: dict[Replica, float]


def longest_cases(
    fleet: Fleet, costs: LongestCosts, weights: FloatArray, enough: float
) -> list[LongestCase] | None:
    r"""
    Return what is proven of each replica that may serve the longest request; the least of them is a bound.

    Let replica j serve it, of n rounds, and the requests A. It takes n decode steps at least, so

    .. math:: T_j \ge \mathrm{busy}_j + b_d n + \sum_{i \in A} \left( c_{ij} - \tfrac{b_d}{J} n_i \right)

    where :math:`c_{ij}` is a request's share of slots: beside a long request others cost little. With weights
    that add up to one, each request costs at least the least of :math:`w_j` times the bracket and
    :math:`w_k c_{ik}` of all other replicas k. The weight of j is found by golden section: what is proven is
    concave in it.

    Parameters
    ----------
    fleet
        The job and its replicas.
    costs
        What its requests add.
    weights
        Of the replicas without a longest request, from which those of the others are made.
    enough
        Seconds that are proven already. None is returned as soon as a replica, serving all requests, might
        take no more.
    """
    cases: list[LongestCase] = []
    rounds = int(fleet.rounds.max(initial=0))
    for at, replica in _first_of_each(fleet):
        alone = replica.busy + replica.cost.decode_base * rounds
        if alone + float(costs.beside[replica].sum()) <= enough:
            return None
        cases.append(_Case(fleet, costs, weights, at).best())
        if cases[-1].seconds <= enough:
            return None
    return cases


def _first_of_each(fleet: Fleet) -> Iterator[tuple[int, Replica]]:
    """Yield one replica of all that are alike, and where it is."""
    met = set[Replica]()
    for at, replica in enumerate(fleet.replicas):
        if replica not in met:
            met.add(replica)
            yield at, replica


class _Case:
    """One replica serves the longest request; the others have fixed weights among themselves."""

    def __init__(self, fleet: Fleet, costs: LongestCosts, weights: FloatArray, at: int) -> None:
        others = np.array(weights, dtype=np.float64)
        others[at] = 0.0
        rest = float(others.sum())
        self._at, self._others = at, others / rest if rest > 0 else others
        holder, lightest = fleet.replicas[at], dict[Replica, float]()
        for k, (replica, weight) in enumerate(zip(fleet.replicas, self._others.tolist(), strict=True)):
            if k != at:
                lightest[replica] = min(weight, lightest.get(replica, np.inf))
        self._elsewhere = np.full(len(fleet), np.inf)
        for replica, weight in lightest.items():
            np.minimum(self._elsewhere, weight * costs.shares[replica], out=self._elsewhere)
        self._beside = costs.beside[holder]
        self._busy = np.array([replica.busy for replica in fleet.replicas])
        self._steps = holder.cost.decode_base * int(fleet.rounds.max(initial=0))
        self._tokens = int(fleet.problem().prefix_tokens.sum()) if fleet.workload.shared_tokens.any() else 0
        self._token = costs.a_token[holder]
        self._token_elsewhere = min((w * costs.a_token[r] for r, w in lightest.items()), default=np.inf)

    def at(self, weight: float) -> LongestCase:
        """Return what a weight of the replica proves, the others sharing what is left of one."""
        left = 1.0 - weight
        weights = left * self._others
        weights[self._at] = weight
        terms = {
            "what the replicas are busy with": float(weights @ self._busy),
            "decode steps of the longest request": weight * self._steps,
            "requests": float(np.minimum(weight * self._beside, left * self._elsewhere).sum()),
        }
        if self._tokens:
            token = min(weight * self._token, left * self._token_elsewhere)
            terms["shared prompts"] = self._tokens * token
        return LongestCase(self._at, tuple(weights.tolist()), terms)

    def best(self) -> LongestCase:
        """Return the most that some weight proves, about."""
        low, high = 0.0, 1.0
        inner = [high - GOLDEN, low + GOLDEN]
        cases = [self.at(weight) for weight in inner]
        for _ in range(EVALUATIONS - 2):
            if cases[0].seconds >= cases[1].seconds:
                high, inner[1], cases[1] = inner[1], inner[0], cases[0]
                inner[0] = high - GOLDEN * (high - low)
                cases[0] = self.at(inner[0])
            else:
                low, inner[0], cases[0] = inner[0], inner[1], cases[1]
                inner[1] = low + GOLDEN * (high - low)
                cases[1] = self.at(inner[1])
        return max(cases, key=lambda case: case.seconds)
