"""Fit of a server's seconds per iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.iterations import EngineLimits, Sequences
from ...data.prefix_tree import PrefixTree
from ...data.readers.iteration_log import IterationLog
from ...data.workload import Workload
from ...models.iterations.iteration_minorant import Minorant, Work
from ..prefixes.engine import TreeEngine
from ..prefixes.vllm_cache import BlockTree
from ..serving.device import DeviceBatch
from ..serving.release import engine_of, fits, simulable
from ..serving.simulation import ServingRun, serve_on_device

_FITTED = ("iterations", "decodes", "prompt_tokens", "kv_tokens")
"""Kinds of work in the fit; others cannot be separated."""

_COLUMNS = [[field.name for field in fields(Work)].index(name) for name in _FITTED]

_DRAWN = [field.name for field in fields(Work)].index("drawn")

_PASSES = 5
"""Passes of simulation and fit, which depend on each other."""

_MOST_MARKS = 1500
_PARTS = 6

LEAST_MARKS = 24
"""First and last tokens below which one rate is fitted."""

LARGEST_ERROR = 0.2
"""Relative error beyond which costs are not linear."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedJob:
    """Work of a server, with the times of its requests.

    sequences: A row per completion, in the order they were sent.
    request: Position of each row's request, ascending, shape (rows,).
    start, last: Seconds of each request's send and last token, shape (requests,).
    first: Seconds of its first token, shape (requests,); None if not recorded.
    """

    sequences: Sequences
    request: IntArray
    start: FloatArray
    last: FloatArray
    first: FloatArray | None = None

    @property
    def makespan(self) -> float:
        """Seconds from the first request to the last token."""
        return float(self.last.max() - self.start.min())


@dataclass(frozen=True, slots=True)
class IterationFit:
    """Seconds of a server's iterations.

    rates: Seconds per iteration, and per unit of its work; none is negative.
    error: Mean relative error on held-out sixths of the job. None for a job too short to hold any out (its
        one rate is per iteration), and for one that took no time.
    marks: Moments at which the server's clock was compared.
    """

    rates: Minorant
    error: float | None
    marks: int

    @property
    def is_linear(self) -> bool:
        """True if the iterations fit a linear cost."""
        return self.error is None or self.error <= LARGEST_ERROR


def fit_rates(work: FloatArray, seconds: FloatArray, after: IntArray | None = None) -> tuple[Minorant, float]:
    """Fit non-negative rates by least absolute error.

    The error is absolute and not squared: on a shared machine some iterations take ten times as long.

    Shapes: work (observations, 6), seconds (observations,).
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    count, features = len(seconds), work[:, _COLUMNS]
    unit, size = np.maximum(features.max(0), 1e-300), max(float(np.abs(seconds).max()), 1e-300)
    shift = np.zeros((count, 1))
    shift[[] if after is None else after] = 1.0
    rows = np.hstack([features / unit, shift])
    known, row = len(unit), np.arange(count)
    both = np.vstack([rows, -rows])
    at, column = np.nonzero(both)
    # After the rates and the shift come the observations' errors, bounded by the residuals on both sides.
    coefficients: Any = csr_array(
        (
            np.concatenate((both[at, column], np.full(2 * count, -1.0))),
            (
                np.concatenate((at, np.arange(2 * count))),
                np.concatenate((column, known + 1 + row, known + 1 + row)),
            ),
        )
    )
    solution = linprog(
        np.concatenate((np.zeros(known + 1), np.ones(count))),
        A_ub=coefficients,
        b_ub=np.concatenate((seconds, -seconds)) / size,
        bounds=[(0, None)] * known + [(None, None)] + [(0, None)] * count,
        method="highs",
    )
    if solution.x is None:
        raise ValueError(f"the seconds of the iterations could not be fitted ({solution.message})")
    row, decode, prompt, kv = (np.maximum(0.0, solution.x[:known]) * size / unit).tolist()
    rates = Minorant(row, decode, prompt, drawn=0.0, kv_tokens=kv, pairs=0.0)
    return rates, float(solution.x[known]) * size


def fit_iterations(job: TimedJob, limits: EngineLimits) -> IterationFit | None:
    """Fit an iteration's seconds to the times of requests.

    The batches of iterations are simulated as vLLM schedules them, at the rates found so far. Each first and
    last token is a mark on two clocks: the measured seconds, and the simulated work done by then. The rates
    convert one into the other. Returns None if a job is too large to simulate.
    """
    sequences = job.sequences
    if not simulable(sequences, limits) or not fits(sequences, limits):
        return None
    rates = Minorant(job.makespan / int(sequences.rows(limits).max()), 0.0, 0.0, 0.0, 0.0, 0.0)
    for _ in range(_PASSES):
        work, seconds = _marks(job, replay_at(job, limits, rates))
        if len(seconds) < LEAST_MARKS:
            work[:, 1:] = 0.0  # too few to fit more than one rate
        fitted, _ = fit_rates(work, seconds)
        near = np.allclose(astuple(fitted), astuple(rates), rtol=1e-3)
        rates = fitted
        if near:
            break
    return IterationFit(rates, _error(work, seconds), len(seconds))


def fit_cached(
    job: TimedJob, tree: PrefixTree, limits: EngineLimits, after: IntArray | None = None
) -> IterationFit:
    """Fit an iteration's seconds to the ends of requests on an engine with a prefix cache.

    Raises ValueError if a request alone exceeds the KV cache.

    tree: Tree of the job's prompts, in the order they were sent.
    after: Ends of requests before each sending, shape (requests,); None if all wait at the start.
    """
    blocks = BlockTree.of(tree, limits.block_tokens)
    times = None if after is None else after.tolist()
    engine = TreeEngine(blocks, job.sequences.output, limits, range(len(tree)), times)
    engine.run()
    ends = np.array(engine.ends, dtype=np.int64)
    at = np.unique(np.linspace(0, len(ends) - 1, min(len(ends), _MOST_MARKS)).astype(np.int64))
    work = np.zeros((len(at), len(fields(Work))))
    work[:, _COLUMNS] = ends[at, 1:]
    # Ends are told apart by their times: the k-th end by the server is the k-th simulated one.
    seconds = np.sort(job.last - job.start.min())[at]
    if len(seconds) < LEAST_MARKS:
        work[:, 1:] = 0.0  # too few to fit more than one rate
    rates, _ = fit_rates(work, seconds)
    return IterationFit(rates, _error(work, seconds), len(seconds))


def fit_log(log: IterationLog) -> IterationFit:
    """Fit an iteration's seconds to a server's own log."""
    work = np.zeros((len(log), len(fields(Work))))
    work[:, :3] = np.stack((np.ones(len(log)), log.decodes, log.chunk_tokens), axis=1)
    at = np.unique(np.linspace(0, len(log) - 1, min(len(log), _MOST_MARKS)).astype(np.int64))
    rates, _ = fit_rates(work[at], log.seconds[at])
    return IterationFit(rates, _error(np.cumsum(work, axis=0)[at], np.cumsum(log.seconds)[at]), len(at))


def _error(work: FloatArray, seconds: FloatArray) -> float | None:
    if len(seconds) < LEAST_MARKS:
        return None
    missed = []
    for part in np.array_split(np.arange(len(seconds)), _PARTS):
        elapsed = seconds[part[-1]] - (seconds[part[0] - 1] if part[0] else 0.0)
        rest = np.setdiff1d(np.arange(len(seconds)), part)
        after = np.flatnonzero(rest > part[-1])
        if elapsed <= 0:
            continue
        if after.size:
            _, miss = fit_rates(work[rest], seconds[rest], after)
        else:
            rates, _ = fit_rates(work[rest], seconds[rest])
            between = work[part[-1]] - work[part[0] - 1]
            miss = elapsed - float(between @ np.array([*rates.rates.values()]))
        missed.append(abs(miss) / elapsed)
    return float(np.mean(missed)) if missed else None


@dataclass(frozen=True, slots=True, eq=False)
class PricedRun:
    """Simulated job.

    work: Work of each iteration, by the columns of :class:`.Work`, shape (iterations, 6).
    """

    run: ServingRun
    work: FloatArray

    @property
    def under_way(self) -> FloatArray:
        """Requests that sampled a token in each iteration, shape (iterations,)."""
        drawn: FloatArray = self.work[:, _DRAWN]
        return drawn


def replay_at(
    job: TimedJob, limits: EngineLimits, rates: Minorant, order: Sequence[int] | IntArray | None = None
) -> PricedRun:
    """Simulate a job at some rates."""
    sequences = job.sequences
    if order is None:
        sent = np.maximum.accumulate((job.start - job.start.min())[job.request])
        work = replace(Workload.from_lengths(sequences.prompt, sequences.output), arrival=sent)
    else:
        at = np.asarray(order, dtype=np.int64)
        work = Workload.from_lengths(sequences.prompt[at], sequences.output[at])
    policy, ledger = engine_of(work, limits)
    device = _Recorded(rates)
    run = serve_on_device(work, policy, device, ledger)
    return PricedRun(run, np.array(device.rows, dtype=np.float64))


class PricedDevice:
    """Device that prices an iteration's work."""

    def __init__(self, rates: Minorant) -> None:
        self._rates = rates

    def run(self, work: DeviceBatch) -> float:
        """Return the seconds of an iteration."""
        return self._rates.seconds(_done(work))

    def decode_seconds(self, decodes: IntArray, held: IntArray) -> FloatArray:
        """Return the seconds of iterations without prompts."""
        rates = self._rates
        seconds: FloatArray = (
            rates.iterations + (rates.decodes + rates.drawn) * decodes + rates.kv_tokens * held
        )
        return seconds

    def mixed_seconds(self, decodes: int, held: int, chunks: Sequence[tuple[int, int]], drawn: int) -> float:
        """Return the seconds of an iteration with prompts."""
        tokens = sum(new for new, _ in chunks)
        pairs = sum(new * (before + new / 2) for new, before in chunks)
        return self._rates.seconds(Work(1, decodes, tokens, drawn, held, pairs))


class _Recorded(PricedDevice):
    """The same device, with a record of each iteration."""

    def __init__(self, rates: Minorant) -> None:
        super().__init__(rates)
        self.rows: list[tuple[float, ...]] = []

    def run(self, work: DeviceBatch) -> float:
        self.rows.append(astuple(_done(work)))
        return super().run(work)


def _done(work: DeviceBatch) -> Work:
    new = [(tokens, int(work.held[request]) - tokens) for request, tokens in work.prefill]
    return Work(
        iterations=1,
        decodes=len(work.decodes),
        prompt_tokens=sum(tokens for tokens, _ in new),
        drawn=work.drawn,
        kv_tokens=int(work.held[work.decodes].sum()),
        pairs=sum(tokens * (past + tokens / 2) for tokens, past in new),
    )


def _marks(job: TimedJob, priced: PricedRun) -> tuple[FloatArray, FloatArray]:
    """Return the marks of a job's clock, shape (marks, 6)."""
    run, ends = priced.run, priced.run.start + priced.run.seconds
    begins = np.flatnonzero(np.append(True, np.diff(job.request) > 0))
    marks = [(np.maximum.reduceat(run.finished, begins), job.last)]
    if job.first is not None:
        marks.append((np.minimum.reduceat(run.first_token, begins), job.first))
    simulated = np.concatenate([simulated_part for simulated_part, _ in marks])
    measured = np.concatenate([simulated_part for _, simulated_part in marks]) - job.start.min()
    at = np.minimum(np.searchsorted(ends, simulated * (1 - 1e-12)), len(ends) - 1)
    by = np.argsort(at, kind="stable")
    by = by[np.unique(np.linspace(0, len(by) - 1, min(len(by), _MOST_MARKS)).astype(np.int64))]
    # The device was idle before the next arrival: seconds without work.
    stood = (ends - np.cumsum(run.seconds))[at[by]]
    return np.cumsum(priced.work, axis=0)[at[by]], measured[by] - stood
