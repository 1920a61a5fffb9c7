"""How a fleet serves requests of predicted length: what does best over the lengths that may come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..data.cost import IntArray
from ..data.fleet import Fleet
from ..data.prediction_error import PredictionError
from ..data.problem import Problem
from ..heuristics.admission import Admission
from ..heuristics.dispatch import Dispatch
from ..heuristics.dispatch_rules import dispatch
from ..heuristics.ordered import Ordered, arrival_order, longest_first
from ..heuristics.policy import Policy
from ..heuristics.prefill_rules import SkiRental
from .fleet_simulation import FleetRun, simulate_fleet

ORDERS = ("longest-first", "as-given", "shortest-first")
"""The orders that are compared. Where short predictions may turn out long, they had better not come last."""

PATIENCE = (1.0, 0.5, 0.0)
"""Settings of the ski-rental rule that are compared; with none, a free slot never waits."""


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """
    The order in which each replica serves its queue, and when it starts a prefill stage.

    Parameters
    ----------
    order
        One of :data:`ORDERS`, by predicted length.
    patience
        Of the ski-rental rule, and of backoff.
    compared
        Mean seconds of everything that was compared, by name.
    """

    order: str = "longest-first"
    patience: float = 0.5
    compared: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __call__(self, problem: Problem) -> Policy:
        """Return a fresh policy for one replica."""
        if self.order == "as-given":
            order = arrival_order(problem)
        else:
            longest = longest_first(problem)
            order = longest if self.order == "longest-first" else longest[::-1]
        return Dispatch(Ordered(order), SkiRental(self.patience), Admission(problem))


def choose_fleet_policy(
    fleet: Fleet,
    error: PredictionError,
    *,
    samples: int = 5,
    seed: int = 0,
) -> tuple[FleetPolicy, IntArray]:
    """
    Return the policy of least mean makespan over sampled lengths, and the dispatch it goes with.

    Parameters
    ----------
    fleet
        The job, with the lengths as predicted, and its replicas.
    error
        What is known about the predictions' error.
    samples
        Sets of lengths that may come out, to simulate each candidate on.
    seed
        Draws them.

    Returns
    -------
    policy
        What each replica follows, with backoff.
    replica_of
        The replica of each request, by expected length, shape (requests,).
    """
    predicted = fleet.workload.output_tokens
    planned = fleet.with_output_tokens(error.expected(predicted))
    truths = error.sample(predicted, np.random.default_rng(seed), samples)
    replica_of = dispatch(planned)
    compared: dict[FleetPolicy, float] = {}

    def compare(candidate: FleetPolicy) -> None:
        if candidate not in compared:
            runs = [serve_with_backoff(planned, replica_of, candidate, truth) for truth in truths]
            compared[candidate] = float(np.mean([run.makespan for run in runs]))

    for order in ORDERS:
        compare(FleetPolicy(order, PATIENCE[0]))
    best = min(compared, key=compared.__getitem__)
    for patience in PATIENCE[1:]:
        compare(FleetPolicy(best.order, patience))
    best = min(compared, key=compared.__getitem__)
    seconds = {f"{policy.order}, patience {policy.patience:g}": mean for policy, mean in compared.items()}
    return FleetPolicy(best.order, best.patience, seconds), replica_of


def serve_with_backoff(
    fleet: Fleet, replica_of: IntArray, policy: FleetPolicy, output_tokens: IntArray | None = None
) -> FleetRun:
    """
    Return what a fleet does that follows a policy, with backoff, in simulated time.

    Parameters
    ----------
    fleet, replica_of, output_tokens
        As of :func:`~batchbound.executor.fleet_simulation.simulate_fleet`.
    policy
        What each replica follows.
    """
    return simulate_fleet(fleet, replica_of, output_tokens, policy=policy, patience=policy.patience)
