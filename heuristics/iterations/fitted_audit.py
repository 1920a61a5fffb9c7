"""Estimated seconds of a job at fitted rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import IntArray
from ...data.iterations import EngineLimits, Sequences
from ...models.iterations.iteration_minorant import Minorant
from ..serving.release import fits, simulable
from .iteration_fit import IterationFit, PricedRun, TimedJob, fit_iterations, replay_at
from .seconds_audit import needed_work


@dataclass(frozen=True, slots=True, eq=False)
class SecondsEstimate:
    """Seconds of a job and of its simulations at fitted rates.

    fit: Seconds of an iteration.
    measured, simulated: Makespan of the job, and of its simulation at the fitted rates.
    least: Least seconds of every order if the rates are true, all requests there at the start.
    orders: Simulated runs by order, all requests there at the start.
    """

    fit: IterationFit
    measured: float
    simulated: float
    least: float
    orders: Mapping[str, PricedRun]


def estimate_seconds(
    job: TimedJob, limits: EngineLimits, proven: EngineLimits, orders: Mapping[str, IntArray]
) -> SecondsEstimate | None:
    """Estimate the seconds of a job's orders at fitted rates.

    An iteration costs an affine function of its work. So every order costs at least the sum over kinds of
    work of each non-negative rate times the least work of its kind. ``proven`` holds the limits known for
    sure, for that bound; ``orders`` are positions of the rows. The result is None for a job too large to
    simulate.
    """
    fit = fit_iterations(job, limits)
    if fit is None:
        return None
    put_back = any(map(job.sequences.may_run_short, (limits, proven)))
    least_seconds = proven_rates(fit.rates, put_back=put_back).seconds(needed_work(job.sequences, proven))
    simulated = float(replay_at(job, limits, fit.rates).run.finished.max())
    runs = {name: replay_at(job, limits, fit.rates, np.asarray(order)) for name, order in orders.items()}
    return SecondsEstimate(fit, job.makespan, simulated, least_seconds, runs)


def proven_rates(rates: Minorant, *, put_back: bool) -> Minorant:
    """Return rates that bound every order from below.

    An evicted request computes its newest token within a chunk of all its ``m`` tokens, instead of a decode
    that reads ``m``. So a decode and its read may cost no more than a chunk of ``m`` tokens. ``put_back`` is
    true if requests may be evicted.
    """
    if not put_back:
        return rates
    kv = min(rates.kv_tokens, rates.prompt_tokens)
    return replace(rates, kv_tokens=kv, decodes=min(rates.decodes, rates.prompt_tokens - kv))


def simulated_orders(
    sequences: Sequences, limits: EngineLimits, orders: Mapping[str, IntArray]
) -> dict[str, PricedRun]:
    """Simulate orders at one second an iteration.

    The result is empty for a job too large to simulate.
    """
    if not simulable(sequences, limits) or not fits(sequences, limits):
        return {}
    zeros, rates = np.zeros(len(sequences)), Minorant(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    job = TimedJob(sequences, np.arange(len(sequences)), zeros, zeros)
    return {name: replay_at(job, limits, rates, order) for name, order in orders.items()}
