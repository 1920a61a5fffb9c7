"""Seconds of an iteration, fitted to when requests came and went, and the bound at those seconds."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow

from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.readers.measured_run import read_vllm_run
from batchbound.executor.reports.iteration_audit import orders_of
from batchbound.heuristics.iterations.fitted_audit import estimate_seconds, proven_rates
from batchbound.heuristics.iterations.iteration_fit import IterationFit, TimedJob, fit_iterations, replay_at
from batchbound.heuristics.iterations.seconds_audit import needed_work, waited
from batchbound.models.bounds.iterations import iteration_bound
from batchbound.models.certificates.iterations import verify_iteration_seconds
from batchbound.models.iterations.iteration_minorant import Minorant

RATES = Minorant(0.01, 0.0004, 0.0001, 0.0, 2e-6, 0.0)
LIMITS = EngineLimits(8, 64, 4000, 16)


def ran(seed: int, count: int, *, spread: float, noise: float = 0.0) -> TimedJob:
    """Return when the requests of a server came and went whose iterations take the rates above."""
    rng = np.random.default_rng(seed)
    sequences = Sequences(rng.integers(1, 90, count), 1 + rng.geometric(1 / 40, count))
    start = np.sort(rng.uniform(0, spread, count))
    sent = TimedJob(sequences, np.arange(count), start, start)
    run = replay_at(sent, LIMITS, RATES).run
    # A machine that is now slower and now faster: each piece of the clock takes a little more or less.
    factor = np.cumsum(run.seconds * rng.uniform(1 - noise, 1 + noise, len(run.seconds))) / np.cumsum(
        run.seconds
    )
    ends = run.start + run.seconds

    def shown(
        times: np.ndarray[tuple[int], np.dtype[np.float64]],
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray(times * np.interp(times, ends, factor) + start[0], dtype=np.float64)

    return replace(sent, first=shown(run.first_token), last=shown(run.finished))


def fitted(job: TimedJob) -> IterationFit:
    fit = fit_iterations(job, LIMITS)
    assert fit is not None
    return fit


def test_the_rates_of_a_server_are_found_from_when_its_requests_came_and_went() -> None:
    fit = fitted(ran(0, 80, spread=0.0))
    assert fit.rates.iterations == pytest.approx(RATES.iterations, rel=0.02)
    assert fit.rates.decodes == pytest.approx(RATES.decodes, rel=0.1)
    assert fit.rates.prompt_tokens == pytest.approx(RATES.prompt_tokens, rel=0.1)
    assert fit.error is not None
    assert fit.error < 0.01


@pytest.mark.parametrize("seed", mostly_slow(range(3), fast=[0]))
def test_another_order_takes_what_the_fit_says_on_a_machine_that_is_not_even(seed: int) -> None:
    job = ran(seed, 60, spread=2.0, noise=0.3)
    fit = fitted(job)
    for order in orders_of(job.sequences).values():
        truth = replay_at(job, LIMITS, RATES, order).run.finished.max()
        assert replay_at(job, LIMITS, fit.rates, order).run.finished.max() == pytest.approx(truth, rel=0.03)


def test_where_only_the_end_of_requests_is_known_the_rates_are_found_as_well() -> None:
    fit = fitted(replace(ran(3, 80, spread=0.0), first=None))
    assert fit.rates.iterations == pytest.approx(RATES.iterations, rel=0.05)


def test_a_job_of_few_requests_shows_one_rate() -> None:
    fit = fitted(ran(1, 5, spread=0.0))
    assert fit.error is None
    assert (fit.rates.decodes, fit.rates.prompt_tokens, fit.rates.kv_tokens) == (0, 0, 0)


@pytest.mark.parametrize("seed", mostly_slow(range(4), fast=[0]))
def test_no_order_takes_less_than_the_least_at_true_rates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = Sequences(rng.integers(1, 20, 5), rng.integers(1, 9, 5))
    limits = EngineLimits(int(rng.integers(1, 4)), int(rng.integers(4, 12)))
    start = np.sort(rng.uniform(0, 0.05, 5))
    job = TimedJob(sequences, np.arange(5), start, start)
    run = replay_at(job, limits, RATES).run
    job = replace(job, first=run.first_token + start[0], last=run.finished + start[0])
    found = estimate_seconds(job, limits, limits, orders_of(sequences))
    assert found is not None
    least = RATES.seconds(needed_work(sequences, limits))
    shortest = min(
        replay_at(job, limits, RATES, np.array(order)).run.finished.max() for order in permutations(range(5))
    )
    assert 0.5 * shortest < least <= shortest * (1 + 1e-12)


@pytest.mark.parametrize("seed", mostly_slow(range(6), fast=[0, 1]))
def test_no_order_takes_less_than_the_bound_where_requests_are_put_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = Sequences(rng.integers(1, 12, 5), rng.integers(4, 12, 5))
    limits = EngineLimits(4, 16, int((sequences.prompt + sequences.output).max()) + 4, 1)
    assert sequences.may_run_short(limits)
    # A decode that costs more than the chunk that takes its place where a request is put back.
    dear = Minorant(0.001, 0.01, 0.002, 0.0, 0.0005, 0.0)
    job = TimedJob(sequences, np.arange(5), np.zeros(5), np.zeros(5))
    least = proven_rates(dear, put_back=True)
    bound, proven = iteration_bound(sequences, limits), least.seconds(needed_work(sequences, limits))
    shortest = min(
        replay_at(job, limits, dear, np.array(order)).run.finished.max() for order in permutations(range(5))
    )
    assert proven <= shortest
    rates = {name: value for name, value in asdict(least).items() if name != "points"}
    assert verify_iteration_seconds(sequences, limits, bound, rates, proven) is None
    found = {name: value for name, value in asdict(dear).items() if name != "points"}
    claimed = dear.seconds(needed_work(sequences, limits))
    assert "counts more than the chunk" in str(
        verify_iteration_seconds(sequences, limits, bound, found, claimed)
    )
    # Of rates that a table was seen to keep above, whatever resumes, the sum is checked all the same.
    for seconds, wrong in ((claimed, False), (1.001 * claimed, True)):
        said = verify_iteration_seconds(sequences, limits, bound, found, seconds, resumed_known=True)
        assert (said is not None) == wrong


def test_seconds_that_the_rates_do_not_prove_are_refused() -> None:
    sequences = Sequences(np.array([5, 3, 8]), np.array([7, 2, 4]), np.array([2, 0, 0]))
    limits = EngineLimits(2, 9)
    bound, seconds = iteration_bound(sequences, limits), RATES.seconds(needed_work(sequences, limits))
    rates = {name: value for name, value in asdict(RATES).items() if name != "points"}
    assert verify_iteration_seconds(sequences, limits, bound, rates, seconds) is None
    assert "the bound says" in str(verify_iteration_seconds(sequences, limits, bound, rates, seconds * 1.001))
    more = replace(bound, iterations=bound.iterations + 1)
    assert verify_iteration_seconds(sequences, limits, more, rates, seconds) is not None
    below = rates | {"kv_tokens": -1e-9}
    assert "below zero" in str(verify_iteration_seconds(sequences, limits, bound, below, 0.0))
    missing = {name: rates[name] for name in rates if name != "pairs"}
    assert "rates" in str(verify_iteration_seconds(sequences, limits, bound, missing, 0.0))
    each = [name for name in rates if rates[name]]
    for name in each:
        # Every rate counts: a bound with one a little higher is not proven by these.
        higher = Minorant(**(rates | {name: 1.01 * rates[name]})).seconds(needed_work(sequences, limits))
        assert verify_iteration_seconds(sequences, limits, bound, rates, higher) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("device", "near"), [("RTX4090", 0.01), ("RTXPRO6000", 0.03)])
def test_public_runs_are_reproduced_from_their_requests_alone(
    public_data: Path, device: str, near: float
) -> None:
    run = read_vllm_run(public_data / "vllm_runs" / f"{device}-Llama-3.1-8B")
    at = np.argsort(run.workload.arrival, kind="stable")
    sequences = Sequences(run.workload.input_tokens[at], run.workload.output_tokens[at])
    limits = EngineLimits(run.sequences, run.batched_tokens, run.kv_capacity, run.block_tokens)
    job = TimedJob(
        sequences, np.arange(len(at)), run.workload.arrival[at], run.finished[at], run.first_token[at]
    )
    found = estimate_seconds(job, limits, limits, orders_of(sequences))
    assert found is not None
    assert found.simulated == pytest.approx(found.measured, rel=near)
    assert found.least < found.measured


def test_an_engine_that_never_stood_still_waited_for_nothing_and_not_for_minus_nothing() -> None:
    assert str(waited(2.0, 2.0 + 1e-12)) == "0.0"
    assert waited(2.5, 2.0) == 0.5
