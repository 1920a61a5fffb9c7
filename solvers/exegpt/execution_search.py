"""Best configuration of each strategy and tensor-parallel degree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray
from ...models.exegpt.configuration import ExecConfig, Performance, Strategy, Targets
from ...models.exegpt.timeline import Timeline
from .configuration_search import Evaluate, Point, SearchResult, Variable, branch_and_bound
from .row_search import RowRange, best_of_rows

ANY = Targets()
GAP = 0.005
"""Least relative gain in throughput to search for; larger is faster."""
LEAST_MICRO_BATCH = 4
"""Least prompts of an RRA micro-batch; smaller ones vary too much."""
_START_GAP = 0.2
"""Gap of the first search, which assumes a monotone grid."""


@dataclass(frozen=True, slots=True)
class Space:
    """Grid on which latency and throughput should be monotone.

    The paper takes the number of tensor-parallel devices as a monotone variable, at a fixed degree. On
    measured profiles it is not: a pipeline of unequal stages loses more than it gains. Nor is the batch at
    which the workload-aware allocation moves a device. So there is one space for each number of groups and
    each range of batches with the same allocation.

    tensor_degree, tensor_groups: Fixed values of the configurations.
    variables: ``encode_batch``, and ``decode_steps`` (RRA) or ``micro_batches`` (WAA).
    """

    strategy: Strategy
    tensor_degree: int
    tensor_groups: int
    variables: tuple[Variable, ...]

    @property
    def grid(self) -> int:
        """Number of configurations."""
        return math.prod(variable.high - variable.low + 1 for variable in self.variables)

    def config(self, point: Point) -> ExecConfig:
        """Return the configuration at some values of the variables."""
        chosen = {variable.name: value for variable, value in zip(self.variables, point, strict=True)}
        return ExecConfig(
            self.strategy, tensor_degree=self.tensor_degree, tensor_groups=self.tensor_groups, **chosen
        )

    def evaluate(self, rows: Sequence[RowRange]) -> Evaluate:
        """Return a function that simulates the configuration at a point."""

        def reached(point: Point) -> tuple[float, float]:
            probe = rows[self.number(point)].row.probe(point[0], point[0])
            return probe.latency, probe.throughput

        return reached

    def number(self, point: Point) -> int:
        """Return the index of a point's row."""
        return sum(
            value - variable.low for value, variable in zip(point[1:], self.variables[1:], strict=True)
        )

    def rows(self, timeline: Timeline) -> list[RowRange]:
        """Return rows of configurations along the encoding batch."""
        batch = self.variables[0]
        rest = self.variables[1:]
        values = itertools.product(*(range(variable.low, variable.high + 1) for variable in rest))
        rows = []
        for value in values:
            row = timeline.row(self.config((batch.low, *value)), batch.high)
            if row is not None:
                rows.append(RowRange(row, batch.low, batch.high))
        return rows


@dataclass(frozen=True, slots=True)
class Found:
    """Best configuration of a strategy at one tensor-parallel degree.

    config, performance: The best; None if no configuration meets the bound.
    evaluated, grid: Number of configurations simulated, and of all.
    """

    strategy: Strategy
    tensor_degree: int
    config: ExecConfig | None
    performance: Performance | None
    evaluated: int
    grid: int
    results: tuple[SearchResult, ...]


def spaces(
    timeline: Timeline,
    strategy: Strategy,
    tensor_degree: int,
    *,
    encode_batches: tuple[int, int] = (1, 256),
    decode_steps: tuple[int, int] | None = None,
) -> Iterator[Space]:
    """Yield the spaces of a strategy at a tensor-parallel degree.

    There are none with too few devices.

    encode_batches: Range of :math:`B_E`.
    decode_steps: Range of :math:`N_D`; by default up to the longest completion.
    """
    devices, shared = timeline.cluster.devices, tensor_degree > 1
    decode_steps = decode_steps or (1, timeline.lengths.outputs.high)
    if strategy is Strategy.RRA:
        smallest = max(encode_batches[0], LEAST_MICRO_BATCH * devices if devices > 1 else 1)
        if smallest > encode_batches[1]:
            return
        variables = (
            Variable("encode_batch", smallest, encode_batches[1]),
            Variable("decode_steps", *decode_steps, rises=False),
        )
        for groups in range(1, devices // tensor_degree + 1) if shared else (0,):
            yield Space(strategy, tensor_degree, groups, variables)
        return
    if devices < 2:
        return
    for low, high in _same_allocation(timeline, strategy, encode_batches):
        decoders = devices - int(timeline.encoders(strategy, np.array([low]))[0])
        batch = Variable("encode_batch", low, high)
        largest = decoders // tensor_degree + (devices - decoders) // tensor_degree
        for groups in range(1, largest + 1) if shared else (0,):
            stages = decoders - min(groups, decoders // tensor_degree) * (tensor_degree - 1)
            micro = (Variable("micro_batches", 1, stages, False),) if stages > 1 else ()
            yield Space(strategy, tensor_degree, groups, (batch, *micro))


def whole_grid(
    timeline: Timeline,
    strategy: Strategy,
    tensor_degree: int,
    *,
    encode_batches: tuple[int, int] = (1, 256),
    decode_steps: tuple[int, int] | None = None,
    targets: Targets = ANY,
) -> tuple[FloatArray, FloatArray]:
    """Return every configuration's latency and throughput, as a reference.

    Latency (s) is infinite if a configuration does not fit or misses one of ``targets``. Throughput is in
    requests a second. Both have shape (configurations,).
    """
    parts = [(np.zeros(0), np.zeros(0))]
    for space in spaces(
        timeline, strategy, tensor_degree, encode_batches=encode_batches, decode_steps=decode_steps
    ):
        for row in space.rows(timeline):
            parts.append(_reached(timeline, row, targets))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def whole_frontier(
    timeline: Timeline,
    *,
    strategies: Sequence[Strategy] = tuple(Strategy),
    encode_batches: tuple[int, int] = (1, 256),
    decode_steps: tuple[int, int] | None = None,
    targets: Targets = ANY,
) -> list[tuple[float, float]]:
    """Return the Pareto frontier over all configurations, by rising latency.

    Configurations that miss one of ``targets`` are left out.
    """
    degrees = [degree for degree in sorted(timeline.costs) if degree <= timeline.cluster.devices]
    grids = [
        whole_grid(
            timeline,
            strategy,
            degree,
            encode_batches=encode_batches,
            decode_steps=decode_steps,
            targets=targets,
        )
        for strategy in strategies
        for degree in degrees
    ]
    latency, throughput = (np.concatenate(column) for column in zip(*grids, strict=True))
    order = np.lexsort((-throughput, latency))
    order = order[np.isfinite(latency[order])]
    before = np.maximum.accumulate(np.concatenate(([-math.inf], throughput[order])))[:-1]
    best = order[throughput[order] > before]
    return list(zip(latency[best].tolist(), throughput[best].tolist(), strict=True))


def _reached(timeline: Timeline, rows: RowRange, targets: Targets) -> tuple[FloatArray, FloatArray]:
    batches = np.arange(rows.low, rows.high + 1)
    latency, throughput = rows.row.reach(batches)
    return targets.within(latency, rows.row.ttft(batches), timeline.longest), throughput


def search(
    timeline: Timeline,
    strategy: Strategy,
    tensor_degree: int,
    latency_bound: float | Targets,
    *,
    encode_batches: tuple[int, int] = (1, 256),
    decode_steps: tuple[int, int] | None = None,
) -> Found:
    """Find the best configuration of a strategy at a degree.

    A first search assumes a monotone grid (:func:`.branch_and_bound`, the paper's Algorithm 1) and reports
    violations. The second (:func:`.best_of_rows`) assumes nothing: it finds what the first missed, and proves
    the gap. With targets for the first token or those after it, all configurations are simulated.

    timeline: Simulates a configuration.
    latency_bound: Seconds for a completion of the 99th-percentile length, or all targets for it.
    encode_batches, decode_steps: As in :func:`spaces`.
    """
    targets = Targets.of(latency_bound)
    if not targets.of_latency_alone:
        every = spaces(
            timeline, strategy, tensor_degree, encode_batches=encode_batches, decode_steps=decode_steps
        )
        best, grid = _best_of_grid(timeline, every, targets)
        performance = None if best is None else timeline(best)
        return Found(strategy, tensor_degree, best, performance, grid, grid, ())
    bound = targets.latency
    best = None
    throughput, grid, evaluated = -math.inf, 0, 0
    results = []
    for space in spaces(
        timeline, strategy, tensor_degree, encode_batches=encode_batches, decode_steps=decode_steps
    ):
        rows, first, guess = space.rows(timeline), 0, 1
        start = branch_and_bound(
            space.evaluate(rows), space.variables, bound, gap=_START_GAP, at_least=throughput
        )
        if start.best is not None:
            best, throughput = space.config(start.best), start.throughput
            first, guess = space.number(start.best), start.best[0]
        proven = best_of_rows(rows, bound, first=first, guess=guess, at_least=throughput, gap=GAP)
        if proven.row is not None:
            values = (variable.low + proven.row for variable in space.variables[1:])
            best, throughput = space.config((proven.batch, *values)), proven.throughput
        grid += space.grid
        evaluated += start.evaluated + proven.evaluated
        results.append(start)
    performance = None if best is None else timeline(best)
    return Found(strategy, tensor_degree, best, performance, evaluated, grid, tuple(results))


def _best_of_grid(
    timeline: Timeline, every: Iterable[Space], targets: Targets
) -> tuple[ExecConfig | None, int]:
    """Return the best configuration of some spaces, and their number."""
    best: ExecConfig | None = None
    throughput, grid = -math.inf, 0
    for space in every:
        for number, row in enumerate(space.rows(timeline)):
            latency, rates = _reached(timeline, row, targets)
            rates = np.where(np.isfinite(latency), rates, -math.inf)
            at = int(np.argmax(rates))
            if rates[at] > throughput:
                values = (value.low + number for value in space.variables[1:])
                best, throughput = space.config((row.low + at, *values)), float(rates[at])
        grid += space.grid
    return best, grid


def search_all(
    timeline: Timeline,
    latency_bound: float | Targets,
    *,
    strategies: Sequence[Strategy] = tuple(Strategy),
    encode_batches: tuple[int, int] = (1, 256),
    decode_steps: tuple[int, int] | None = None,
) -> list[Found]:
    """Search every strategy and degree; put the best first."""
    results = [
        search(
            timeline,
            strategy,
            degree,
            latency_bound,
            encode_batches=encode_batches,
            decode_steps=decode_steps,
        )
        for strategy in strategies
        for degree in sorted(timeline.costs)
        if degree <= timeline.cluster.devices
    ]
    results = [each for each in results if each.grid]
    return sorted(results, key=lambda each: -each.performance.throughput if each.performance else math.inf)


def _same_allocation(
    timeline: Timeline, strategy: Strategy, batches: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return ranges of encoding batches with equal numbers of encoding devices."""
    low, high = batches
    counts = timeline.encoders(strategy, np.arange(low, high + 1))
    starts = [low, *(low + 1 + np.flatnonzero(np.diff(counts))).tolist()]
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], high + 1], strict=True)]
