"""The best execution configuration under a latency bound: Algorithm 1 for every strategy and degree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..models.exec_config import ExecConfig, Performance, Strategy
from ..models.timeline import Timeline
from .configuration_search import Evaluate, Point, SearchResult, Variable, branch_and_bound

GAP = 0.005
"""Of throughput: no better configuration is looked for that is better by less."""
WAA_TOLERANCE = 0.05
"""Of throughput and latency: where the slower side of WAA changes, they step back by so much."""
LEAST_MICRO_BATCH = 4
"""Prompts that an RRA micro-batch encodes at least: smaller ones vary too much to plan with."""
_GAINING_RATIO = 2
_PROBE_RATIO = 1.1
"""Of batches at which the allocation of devices is looked up; bisection finds where it changes."""


@dataclass(frozen=True, slots=True)
class Space:
    """
    A grid on which latency and throughput can be expected to be monotone.

    The paper takes the number of tensor-parallel devices as a monotone variable, at a fixed degree. On
    measured profiles it is not (a pipeline of unlike stages gains less than it loses); nor is the batch where
    the workload-aware allocation moves a device; nor are the rounds of a pipeline, where encoding so often
    costs more in bubbles than the larger decode batch gains. So there is one space for each number of groups,
    each range of batches with the same allocation, and each range that loses by more rounds from the same on.

    Parameters
    ----------
    strategy
        The strategy.
    tensor_degree, tensor_groups
        Of the configurations.
    variables
        ``encode_batch``, and ``decode_rounds`` (RRA) or ``micro_batches`` (WAA).
    probed
        Configurations simulated to find this space and those after it.
    skipped
        Configurations left out of it: fewer rounds than pay, worse in latency and in throughput.
    """

    strategy: Strategy
    tensor_degree: int
    tensor_groups: int
    variables: tuple[Variable, ...]
    probed: int = 0
    skipped: int = 0

    @property
    def grid(self) -> int:
        """Configurations in all."""
        return self.skipped + math.prod(each.high - each.low + 1 for each in self.variables)

    def config(self, point: Point) -> ExecConfig:
        """Return the configuration at values of the variables."""
        chosen = {each.name: value for each, value in zip(self.variables, point, strict=True)}
        return ExecConfig(
            self.strategy, tensor_degree=self.tensor_degree, tensor_groups=self.tensor_groups, **chosen
        )

    def evaluate(self, timeline: Timeline) -> Evaluate:
        """Return what simulates a configuration at values of the variables."""

        def reached(point: Point) -> tuple[float, float]:
            performance = timeline(self.config(point))
            return performance.latency, performance.throughput

        return reached


@dataclass(frozen=True, slots=True)
class Found:
    """
    The best configuration of a strategy at one tensor-parallel degree.

    Parameters
    ----------
    strategy, tensor_degree
        Where it was searched.
    config, performance
        The best; None if no configuration meets the bound.
    evaluated, grid
        Configurations looked at, and in all.
    results
        Of the spaces searched.
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
    decode_rounds: tuple[int, int] | None = None,
) -> Iterator[Space]:
    """
    Yield the spaces of a strategy at a tensor-parallel degree; none where the devices are too few.

    Parameters
    ----------
    timeline
        The model, cluster and lengths.
    strategy, tensor_degree
        Of the configurations.
    encode_batches
        Range of :math:`B_E`.
    decode_rounds
        Range of :math:`N_D`; by default from 1 to the longest answer, beyond which it changes nothing.
    """
    devices, shared = timeline.cluster.devices, tensor_degree > 1
    rounds = decode_rounds or (1, timeline.lengths.outputs.high)
    if strategy is Strategy.RRA:
        least = max(encode_batches[0], LEAST_MICRO_BATCH * devices if devices > 1 else 1)
        if least > encode_batches[1]:
            return
        for groups in range(1, devices // tensor_degree + 1) if shared else (0,):
            whole = Space(
                strategy, tensor_degree, groups, (Variable("encode_batch", least, encode_batches[1]),)
            )
            yield from _gaining(timeline, whole, rounds)
        return
    if devices < 2:
        return
    for low, high in _same_allocation(timeline, strategy, encode_batches):
        decoders = devices - timeline.encoders(strategy, low)
        batch = Variable("encode_batch", low, high)
        most = decoders // tensor_degree + (devices - decoders) // tensor_degree
        for groups in range(1, most + 1) if shared else (0,):
            stages = decoders - min(groups, decoders // tensor_degree) * (tensor_degree - 1)
            micro = (Variable("micro_batches", 1, stages, False),) if stages > 1 else ()
            yield Space(strategy, tensor_degree, groups, (batch, *micro))


def search(
    timeline: Timeline,
    strategy: Strategy,
    tensor_degree: int,
    latency_bound: float,
    *,
    encode_batches: tuple[int, int] = (1, 256),
    decode_rounds: tuple[int, int] | None = None,
    gap: float = GAP,
) -> Found:
    """
    Return the best configuration of a strategy at a tensor-parallel degree (see :func:`.branch_and_bound`).

    Parameters
    ----------
    timeline
        Simulates a configuration.
    strategy, tensor_degree
        Of the configurations.
    latency_bound
        Seconds for an answer of the 99th-percentile length.
    encode_batches, decode_rounds
        As in :func:`spaces`.
    gap
        Of throughput, as a fraction (see :func:`.branch_and_bound`).
    """
    tolerance = 0.0 if strategy is Strategy.RRA else WAA_TOLERANCE
    best: ExecConfig | None = None
    throughput, grid, evaluated = -math.inf, 0, 0
    results = []
    for space in spaces(
        timeline, strategy, tensor_degree, encode_batches=encode_batches, decode_rounds=decode_rounds
    ):
        result = branch_and_bound(
            space.evaluate(timeline),
            space.variables,
            latency_bound,
            gap=gap,
            throughput_tolerance=tolerance,
            latency_tolerance=tolerance,
            at_least=throughput,
        )
        grid += space.grid
        evaluated += space.probed + result.evaluated
        results.append(result)
        if result.best is not None:
            best, throughput = space.config(result.best), result.throughput
    performance = None if best is None else timeline(best)
    return Found(strategy, tensor_degree, best, performance, evaluated, grid, tuple(results))


def search_all(
    timeline: Timeline,
    latency_bound: float,
    *,
    strategies: Sequence[Strategy] = tuple(Strategy),
    encode_batches: tuple[int, int] = (1, 256),
    decode_rounds: tuple[int, int] | None = None,
    gap: float = GAP,
) -> list[Found]:
    """
    Return the best configuration of each strategy and degree, the best of all first.

    Parameters
    ----------
    timeline, latency_bound, encode_batches, decode_rounds, gap
        As in :func:`search`.
    strategies
        Those to search.
    """
    found = [
        search(
            timeline,
            strategy,
            degree,
            latency_bound,
            encode_batches=encode_batches,
            decode_rounds=decode_rounds,
            gap=gap,
        )
        for strategy in strategies
        for degree in sorted(timeline.costs)
        if degree <= timeline.cluster.devices
    ]
    found = [each for each in found if each.grid]
    return sorted(found, key=lambda each: -each.performance.throughput if each.performance else math.inf)


def _gaining(timeline: Timeline, whole: Space, rounds: tuple[int, int]) -> Iterator[Space]:
    """Yield the parts of a batch range (large batches first), each with its rounds."""
    low, high = whole.variables[0].low, whole.variables[0].high
    probes = [low]
    while probes[-1] < high:
        probes.append(min(high, max(probes[-1] + 1, _GAINING_RATIO * probes[-1])))
    pays, probed = [], 0
    for batch in probes:
        best, most = rounds[0], -math.inf
        for count in range(rounds[0], rounds[1] + 1):
            probed += 1
            config = ExecConfig(whole.strategy, batch, count, 1, whole.tensor_degree, whole.tensor_groups)
            rate = timeline(config).throughput
            if rate <= most:
                break
            best, most = count, rate
        pays.append(best)
    parts: list[tuple[int, int, int]] = []
    for (start, end), (first, last) in zip(pairwise(probes), pairwise(pays), strict=True):
        least = min(first, last)
        if parts and parts[-1][2] == least:
            parts[-1] = (parts[-1][0], end, least)
        else:
            parts.append((start if not parts else start + 1, end, least))
    for start, end, least in reversed(parts or [(low, high, pays[0])]):
        variables = (Variable("encode_batch", start, end), Variable("decode_rounds", least, rounds[1], False))
        skipped = (end - start + 1) * (least - rounds[0])
        yield replace(whole, variables=variables, probed=probed, skipped=skipped)
        probed = 0


def _same_allocation(
    timeline: Timeline, strategy: Strategy, batches: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return the ranges of encoding batches for which as many devices encode."""
    low, high = batches
    probes = [low]
    while probes[-1] < high:
        probes.append(min(high, max(probes[-1] + 1, int(probes[-1] * _PROBE_RATIO))))
    starts = [low]
    for left, right in pairwise(probes):
        first, last = left, right
        before = timeline.encoders(strategy, first)
        if timeline.encoders(strategy, last) == before:
            continue
        while last - first > 1:
            middle = (first + last) // 2
            if timeline.encoders(strategy, middle) == before:
                first = middle
            else:
                last = middle
        starts.append(last)
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], high + 1], strict=True)]
