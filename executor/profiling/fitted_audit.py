"""Seconds that a job lost, at the seconds of an iteration that its own times show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...data.costs.cost import IntArray
from ...data.iterations import EngineLimits, IterationBound, Sequences
from ...models.bounds.iterations import iteration_bound
from ...models.exegpt.iteration_minorant import Minorant, Work
from ..serving.release import fits, simulable
from .iteration_fit import IterationFit, PricedRun, TimedJob, fit_iterations, replay_at
from .seconds_audit import AGAIN, ITERATIONS, WAITED, needed_work, waited

BEYOND = "measured beyond the fit"


@dataclass(frozen=True, slots=True, eq=False)
class FittedAudit:
    """
    A job's seconds against those that no order could have gone below, at fitted rates.

    Parameters
    ----------
    fit
        Seconds of an iteration.
    proven
        Those of which the bound consists.
    measured, simulated
        Makespan of the job, and of its simulation at the fitted rates.
    bound
        Seconds that every order takes at least at those rates, all requests there at the start.
    iterations
        The bound on iterations in it.
    losses
        Seconds by cause; they add up to ``measured - bound``.
    orders
        Simulated runs by the order of the requests, all there at the start.
    """

    fit: IterationFit
    proven: Minorant
    measured: float
    simulated: float
    bound: float
    iterations: IterationBound
    losses: Mapping[str, float]
    orders: Mapping[str, PricedRun]


def fitted_audit(
    job: TimedJob, limits: EngineLimits, proven: EngineLimits, orders: Mapping[str, IntArray]
) -> FittedAudit | None:
    """
    Return what a job lost, or None where its seconds cannot be fitted.

    An iteration is taken to cost an affine function of its work, so that whatever the order, a job costs as
    much as the sum of its work: each rate, none of them negative, times the least that is needed of its kind.
    """
    fit = fit_iterations(job, limits)
    if fit is None:
        return None
    rates, work = fit.rates, needed_work(job.sequences, proven)
    least = proven_rates(rates, put_back=any(map(job.sequences.may_run_short, (limits, proven))))
    replay = replay_at(job, limits, rates)
    done = Work(*replay.work.sum(0).tolist())
    simulated, bound = float(replay.run.finished.max()), least.seconds(work)
    # Rounded: an engine that never stood still waited for nothing.
    idle = waited(simulated, float(replay.run.seconds.sum()))
    more = rates.iterations * (done.iterations - work.iterations)
    again = rates.seconds(replace(done, iterations=0)) - least.seconds(replace(work, iterations=0))
    return FittedAudit(
        fit=fit,
        proven=least,
        measured=job.makespan,
        simulated=simulated,
        bound=bound,
        iterations=iteration_bound(job.sequences, proven),
        losses={
            # With what was rounded, so that all of them add up.
            BEYOND: job.makespan - bound - idle - more - again,
            WAITED: idle,
            ITERATIONS: more,
            AGAIN: again,
        },
        orders={name: replay_at(job, limits, rates, np.asarray(order)) for name, order in orders.items()},
    )


def proven_rates(rates: Minorant, *, put_back: bool) -> Minorant:
    """
    Return rates at which no order takes less than the sum of its least work.

    A request that was restored computes its newest token within a chunk of all it holds, ``m`` tokens, in the
    place of a decode that reads ``m``. So that what every order needs is not counted at more than that costs,
    a decode and what it reads may count no more than a chunk of as many tokens.
    """
    if not put_back:
        return rates
    kv = min(rates.kv_tokens, rates.prompt_tokens)
    return replace(rates, kv_tokens=kv, decodes=min(rates.decodes, rates.prompt_tokens - kv))


def simulated_orders(
    sequences: Sequences, limits: EngineLimits, orders: Mapping[str, IntArray]
) -> dict[str, PricedRun]:
    """Return the iterations of orders; empty for a job too large to simulate."""
    if not simulable(sequences, limits) or not fits(sequences, limits):
        return {}
    zeros, rates = np.zeros(len(sequences)), Minorant(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    job = TimedJob(sequences, np.arange(len(sequences)), zeros, zeros)
    return {name: replay_at(job, limits, rates, order) for name, order in orders.items()}
