"""Lost seconds of a measured run, by cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...data.arrays import FloatArray
from ...data.iterations import EngineLimits, IterationBound, Sequences
from ...data.readers.measured_run import MeasuredRun
from ...models.bounds.iterations import KINDS, iteration_bound
from ...models.iterations.iteration_minorant import Minorant, Work, best_minorant
from ...models.iterations.layer_cost import LayerCost
from ..serving.device import DeviceBatch
from .replay import ComposedDevice, replay_on

MODEL = "measured beyond the cost model"
WAITED = "nothing had arrived"
ITERATIONS = "iterations beyond the least"
AGAIN = "tokens computed again"
PADDING = "padding to captured graphs"
TAIL = "above the least cost: after the last prompt"
MIXED = "above the least cost: with prompts"
DECODE = "above the least cost: decodes alone"


@dataclass(frozen=True, slots=True)
class SecondsAudit:
    """Measured makespan against a bound at a cost model's prices.

    measured, simulated: Makespan of the run and of its replay at the model's prices.
    bound: Least seconds of every order at those prices, all requests there at the start.
    minorant: Lower bound on the seconds of each iteration, which the bound sums up.
    iterations: The bound on iterations in it.
    losses: Seconds by cause; they add up to ``measured - bound``.
    """

    measured: float
    simulated: float
    bound: float
    minorant: Minorant
    iterations: IterationBound
    losses: Mapping[str, float]


def audit_seconds(run: MeasuredRun, cost: LayerCost, kinds: Collection[str] = KINDS) -> SecondsAudit:
    """Split a measured run's loss by cause.

    Prompts are taken to share no prefix. The bound on iterations uses certificates of some kinds.
    """
    workload = run.workload
    limits = EngineLimits(run.sequences, run.batched_tokens, run.kv_capacity, run.block_tokens)
    sequences = Sequences(workload.input_tokens, workload.output_tokens)
    iterations = iteration_bound(sequences, limits, kinds=kinds)
    work = replace(needed_work(sequences, limits), iterations=iterations.iterations)
    longest = int((workload.input_tokens + workload.output_tokens).max())
    minorant = best_minorant(
        cost,
        limits,
        longest,
        work,
        graph_tokens=run.graph_tokens,
        put_back=sequences.may_run_short(limits),
    )
    record = _Record(cost, run.graph_tokens)
    replayed = replay_on(run, record)
    simulated = float(replayed.finished.max())
    bound = minorant.seconds(work)
    parts = _losses(record, minorant, work)
    idle = waited(simulated, float(record.rows[:, 6].sum()))
    # The model's error takes the rounding, so that all losses add up.
    error = run.makespan - bound - idle - sum(parts.values())
    losses = {MODEL: error, WAITED: idle, **parts}
    return SecondsAudit(run.makespan, simulated, bound, minorant, iterations, losses)


def waited(seconds: float, worked: float) -> float:
    """Return the seconds without work, rounded; zero has no sign."""
    return round(seconds - worked, 9) + 0.0


def needed_work(sequences: Sequences, limits: EngineLimits) -> Work:
    """Return the least work of every order."""
    prompt, output, cached = (
        column.astype(float) for column in (sequences.prompt, sequences.output, sequences.cached)
    )
    decodes = output - 1
    return Work(
        iterations=iteration_bound(sequences, limits).iterations,
        decodes=float(decodes.sum()),
        prompt_tokens=float((prompt - cached).sum()),
        drawn=float(output.sum()),
        kv_tokens=float((decodes * prompt + decodes * output / 2).sum()),
        pairs=float((prompt**2 - cached**2).sum() / 2),
    )


class _Record:
    """Device that records the work of each iteration."""

    def __init__(self, cost: LayerCost, graph_tokens: tuple[int, ...]) -> None:
        self._padded, self._exact = ComposedDevice(cost, graph_tokens), ComposedDevice(cost)
        self._rows: list[tuple[float, ...]] = []

    def run(self, work: DeviceBatch) -> float:
        new = [(tokens, int(work.held[request]) - tokens) for request, tokens in work.prefill]
        seconds = self._padded.run(work)
        self._rows.append(
            (
                1,
                len(work.decodes),
                sum(tokens for tokens, _ in new),
                work.drawn,
                int(work.held[work.decodes].sum()),
                sum(tokens * (past + tokens / 2) for tokens, past in new),
                seconds,
                seconds - self._exact.run(work),
            )
        )
        return seconds

    @property
    def rows(self) -> FloatArray:
        """Work, seconds and padding of each iteration, shape (iterations, 8)."""
        return np.array(self._rows, dtype=np.float64)


def _losses(record: _Record, minorant: Minorant, work: Work) -> dict[str, float]:
    rows = record.rows
    done = Work(*rows[:, :6].sum(0).tolist())
    least_seconds = np.array([minorant.seconds(Work(*row)) for row in rows[:, :6].tolist()])
    above, padding = rows[:, 6] - rows[:, 7] - least_seconds, rows[:, 7]
    prompts = np.flatnonzero(rows[:, 2])
    after = np.arange(len(rows)) > (prompts[-1] if prompts.size else -1)
    mixed = ~after & (rows[:, 2] > 0)
    again = replace(done, iterations=0), replace(work, iterations=0)
    return {
        ITERATIONS: minorant.iterations * (done.iterations - work.iterations),
        AGAIN: minorant.seconds(again[0]) - minorant.seconds(again[1]),
        TAIL: float(above[after].sum()),
        MIXED: float(above[mixed].sum()),
        DECODE: float(above[~after & ~mixed].sum()),
        PADDING: float(padding.sum()),
    }
