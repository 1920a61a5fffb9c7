"""How a fleet serves requests of predicted length: what does best over the lengths that may come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ...data.costs.cost import IntArray
from ...data.fleet import Fleet
from ...data.lengths.prediction_error import PredictionError
from ...data.lengths.remaining import RemainingLengths
from ...data.problem import Problem
from ..dispatch import dispatch
from ..policy import Policy
from ..queues.admission import Admission
from ..queues.ordered import Ordered, arrival_order, longest_first
from ..queues.prefill_rules import SkiRental
from ..queues.queue_policy import QueuePolicy
from ..queues.tail_preemption import TailPreemption
from .simulation import FleetRun, simulate_fleet

ORDERS = ("longest-first", "as-given", "shortest-first")
"""The orders that are compared. Where short predictions may turn out long, they had better not come last."""

PATIENCE = (1.0, 0.5, 0.0)
"""Settings of the ski-rental rule that are compared; with none, a free slot never waits."""

ENDS = ((3.0, 80), (10.0, 40), (40.0, 20))
"""Settings of parking that are compared: its share of the slots, and its margin in rounds."""


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """
    The order in which each replica serves its queue, when it starts a prefill stage, and how it ends.

    Parameters
    ----------
    order
        One of :data:`ORDERS`, by predicted length.
    patience
        Of the ski-rental rule, and of backoff.
    end
        Share and margin of :class:`~batchbound.heuristics.queues.tail_preemption.TailPreemption`; None to
        park nothing.
    remaining
        What is left of each request by what it has decoded; needed to park any.
    compared
        Mean seconds of everything that was compared, by name.

    Raises
    ------
    ValueError
        If requests are to be parked by what is left of them, and nothing says what is.
    """

    order: str = "longest-first"
    patience: float = 0.5
    end: tuple[float, int] | None = None
    remaining: RemainingLengths | None = field(default=None, compare=False, repr=False)
    compared: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.end is not None and self.remaining is None:
            raise ValueError("parking needs to know what remains of the requests")

    @property
    def name(self) -> str:
        """What it is called among others."""
        parked = "" if self.end is None else f", last {self.end[0]:g} a slot by what is left"
        return f"{self.order}, patience {self.patience:g}{parked}"

    def __call__(self, problem: Problem) -> Policy:
        """Return a fresh policy for one replica."""
        if self.order == "as-given":
            order = arrival_order(problem)
        else:
            longest = longest_first(problem)
            order = longest if self.order == "longest-first" else longest[::-1]
        policy = QueuePolicy(Ordered(order), SkiRental(self.patience), Admission(problem))
        if self.end is None or self.remaining is None:
            return policy
        share, margin = self.end
        return TailPreemption(
            policy, problem, self.remaining, share=share, margin=margin, patience=self.patience
        )


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
    remaining = RemainingLengths.of(error, predicted, seed=seed)
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
    for end in ENDS:
        # The longest wait for the end, where there is most to learn about them.
        compare(FleetPolicy("shortest-first", best.patience, end, remaining))
    best = min(compared, key=compared.__getitem__)
    return replace(best, compared={policy.name: mean for policy, mean in compared.items()}), replica_of


def serve_with_backoff(
    fleet: Fleet, replica_of: IntArray, policy: FleetPolicy, output_tokens: IntArray | None = None
) -> FleetRun:
    """
    Return what a fleet does that follows a policy, with backoff, in simulated time.

    Parameters
    ----------
    fleet, replica_of, output_tokens
        As of :func:`~batchbound.heuristics.fleet.simulation.simulate_fleet`.
    policy
        What each replica follows.
    """
    return simulate_fleet(
        fleet,
        replica_of,
        output_tokens,
        policy=policy,
        patience=policy.patience,
        remaining=policy.remaining,
    )
