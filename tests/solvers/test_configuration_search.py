"""ExeGPT's branch and bound against exhaustive search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.data.costs.model_shape import ModelShape
from batchbound.data.lengths.pair import LengthPair
from batchbound.data.readers.generators import GENERATORS
from batchbound.data.readers.profile_readers import read_layer_profiles
from batchbound.models.exegpt.configuration import Cluster, Performance, Strategy, Targets
from batchbound.models.exegpt.roofline import ROOFLINE_DEVICES, Roofline
from batchbound.models.exegpt.row import Probe
from batchbound.models.exegpt.timeline import Timeline
from batchbound.models.iterations.layer_cost import LayerCost
from batchbound.solvers.exegpt.configuration_search import (
    Evaluate,
    Point,
    Variable,
    branch_and_bound,
)
from batchbound.solvers.exegpt.execution_search import (
    GAP,
    search,
    search_all,
    spaces,
    whole_frontier,
    whole_grid,
)
from batchbound.solvers.exegpt.row_search import RowRange, best_of_rows

LLAMA = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)


def _product(point: Point) -> tuple[float, float]:
    """Return a latency and a throughput that rise in every variable."""
    return float(math.prod(value + 1 for value in point)), float(sum(point))


def _random_monotone(seed: int, sides: tuple[int, ...]) -> Evaluate:
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(2):
        table = rng.exponential(size=sides)
        for axis in range(len(sides)):
            table = np.maximum.accumulate(table, axis=axis)
        tables.append(table)
    return lambda point: (float(tables[0][point]), float(tables[1][point]))


def _exhaustive(evaluate: Evaluate, variables: Sequence[Variable], bound: float) -> tuple[float, int]:
    """Return the most throughput of all configurations within a latency bound, and how many there are."""
    every = itertools.product(*(range(each.low, each.high + 1) for each in variables))
    reached = [evaluate(point) for point in every]
    return max((rate for seconds, rate in reached if seconds <= bound), default=-math.inf), len(reached)


def test_the_best_corner_is_taken_at_once_when_it_meets_the_bound() -> None:
    result = branch_and_bound(_product, [Variable("a", 0, 9), Variable("b", 0, 9)], math.inf)
    assert result.best == (9, 9)
    assert result.evaluated <= 4


def test_a_variable_that_falls_is_searched_from_its_other_end() -> None:
    def falling(point: Point) -> tuple[float, float]:
        return _product((point[0], 9 - point[1]))

    result = branch_and_bound(falling, [Variable("a", 0, 9), Variable("b", 0, 9, rises=False)], 20.0)
    assert result.best is not None
    assert result.throughput == _exhaustive(falling, [Variable("a", 0, 9), Variable("b", 0, 9)], 20.0)[0]


def test_nothing_is_found_where_nothing_meets_the_bound() -> None:
    result = branch_and_bound(_product, [Variable("a", 1, 9)], 1.0)
    assert result.best is None
    assert result.evaluated == 1


def test_an_infinite_latency_meets_no_bound() -> None:
    result = branch_and_bound(lambda point: (math.inf, 1.0), [Variable("a", 1, 9)], math.inf)
    assert result.best is None


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.floats(0.05, 3.0),
)
def test_branch_and_bound_is_exact_on_monotone_functions(seed: int, sides: list[int], bound: float) -> None:
    evaluate = _random_monotone(seed, tuple(sides))
    variables = [Variable(str(side), 0, side - 1) for side in sides]
    result = branch_and_bound(evaluate, variables, bound)
    best, configurations = _exhaustive(evaluate, variables, bound)
    assert result.throughput == best
    assert result.evaluated <= configurations
    assert (result.violations.latency, result.violations.throughput) == (0, 0)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.2, 3.0))
def test_within_the_tolerance_noise_does_no_harm(seed: int, bound: float) -> None:
    smooth = _random_monotone(seed, (12, 12))
    rng = np.random.default_rng(seed)
    noise = 1 + 0.02 * rng.random((2, 12, 12))

    def noisy(point: Point) -> tuple[float, float]:
        latency, throughput = smooth(point)
        return latency * noise[0][point], throughput * noise[1][point]

    variables = [Variable("a", 0, 11), Variable("b", 0, 11)]
    result = branch_and_bound(noisy, variables, bound, throughput_tolerance=0.02, latency_tolerance=0.02)
    assert result.throughput == _exhaustive(noisy, variables, bound)[0]


def test_a_fall_is_reported() -> None:
    result = branch_and_bound(lambda point: (1.0, float(-point[0])), [Variable("a", 0, 1)], 2.0)
    assert (result.violations.pairs, result.violations.throughput) == (1, 1)
    result = branch_and_bound(lambda point: (1.0, float(4 - point[0])), [Variable("a", 0, 1)], 2.0)
    assert (result.violations.throughput, result.violations.worst_throughput) == (1, 0.25)


def _timeline(devices: int, task: str = "S") -> Timeline:
    generator = GENERATORS[f"exegpt-{task}"]
    device = ROOFLINE_DEVICES["a100-80gb"]
    costs = {degree: LayerCost(Roofline(LLAMA, device, degree).profile()) for degree in (1, 2)}
    pair = LengthPair(generator.input_tokens(), generator.output_tokens())
    return Timeline(costs, Cluster(devices, device.memory), pair)


@pytest.mark.parametrize("strategy", mostly_slow(Strategy, fast=(Strategy.WAA_M,)))
def test_the_search_finds_the_exhaustive_best_of_every_strategy(strategy: Strategy) -> None:
    timeline = _timeline(4)
    for degree in (1, 2):
        latency, throughput = whole_grid(timeline, strategy, degree, encode_batches=(16, 55))
        for share in (0.1, 0.5, 0.9, 1.0):
            bound = float(np.quantile(latency[np.isfinite(latency)], share))
            result = search(timeline, strategy, degree, bound, encode_batches=(16, 55))
            assert result.performance is not None
            assert result.grid == len(latency)
            assert result.performance.latency <= bound
            best = float(throughput[latency <= bound].max())
            assert best / (1 + GAP) <= result.performance.throughput <= best * (1 + 1e-9)
            # Half of it to the first token, and from there so much a token.
            targets = Targets(bound, bound / 2, bound / 2 / timeline.longest)
            split = search(timeline, strategy, degree, targets, encode_batches=(16, 55)).performance
            assert split is None or targets.within(
                np.array(split.latency), np.array(split.ttft), timeline.longest
            ) == pytest.approx(split.latency)
            assert split is None or split.throughput <= best * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.02, 2.0), st.integers(1, 60), st.sampled_from([0.0, 0.05]))
def test_rows_are_searched_exactly_however_uneven(seed: int, bound: float, guess: int, gap: float) -> None:
    rng = np.random.default_rng(seed)
    rows = [_Uneven(rng) for _ in range(8)]
    ranges = [RowRange(row, 3, 50) for row in rows]
    found = best_of_rows(ranges, bound, first=int(rng.integers(8)), guess=guess, gap=gap)
    met = [
        float(rate)
        for row in rows
        for late, rate in zip(*row.reach(np.arange(3, 51)), strict=True)
        if late <= bound
    ]
    assert (found.row is None) == (not met)
    if found.row is not None:
        latency, throughput = rows[found.row].reach(np.array([found.batch]))
        assert latency[0] <= bound
        assert throughput[0] == found.throughput >= max(met) / (1 + gap)


def test_a_bound_that_rounding_passes_is_met() -> None:
    row = _Uneven(np.random.default_rng(0))
    # All batches are as fast, and the bound below them, added up in another order, lies above them.
    row.latency, row.throughput, row.rounding = np.full(51, 0.3), np.linspace(1.0, 2.0, 51), 1 + 1e-15
    for guess in range(3, 51):
        assert best_of_rows([RowRange(row, 3, 50)], 0.3, guess=guess).batch == 50


class _Uneven:
    """A row without any order, whose bounds hold."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.latency = rng.exponential(size=51) * np.linspace(0.1, 1, 51)
        self.throughput = rng.exponential(size=51) * np.linspace(0.1, 1, 51)
        self.rounding = 1.0

    def reach(self, batches: IntArray) -> tuple[FloatArray, FloatArray]:
        return self.latency[batches], self.throughput[batches]

    def ttft(self, batches: IntArray) -> FloatArray:
        return self.latency[batches] / 2

    def probe(self, low: int, at: int) -> Probe:
        least = float(self.latency[at:].min()) * self.rounding
        most = float(self.throughput[low : at + 1].max())
        return Probe(float(self.latency[at]), float(self.throughput[at]), least, most)

    def performance(self, batch: int) -> Performance:
        return Performance(float(self.throughput[batch]), float(self.latency[batch]), 0, (1, 1), 0, 0)


def test_a_probe_bounds_the_rest_of_its_row() -> None:
    timeline = _timeline(4)
    rng = np.random.default_rng(1)
    for strategy in Strategy:
        for space in spaces(timeline, strategy, 2, encode_batches=(16, 79), decode_steps=(1, 80)):
            rows = space.rows(timeline)
            for each in rows[:: max(1, len(rows) // 5)]:
                latency, throughput = each.row.reach(np.arange(each.low, each.high + 1))
                at = int(rng.integers(each.low, each.high + 1))
                low = int(rng.integers(each.low, at + 1))
                probe = each.row.probe(low, at)
                place = at - each.low
                # To the last bit: a bound may be the latency of this very configuration.
                assert (probe.latency, probe.throughput) == (latency[place], throughput[place])
                assert probe.least_latency <= latency[place:].min() * (1 + 1e-9)
                assert probe.most_throughput >= throughput[low - each.low : place + 1].max() * (1 - 1e-9)


def test_the_best_strategy_comes_first_and_a_looser_bound_is_no_worse() -> None:
    timeline = _timeline(2)
    best = []
    for bound in (1.0, 2.0, 8.0):
        found = search_all(timeline, bound, encode_batches=(1, 64), decode_steps=(1, 40))
        rates = [each.performance.throughput for each in found if each.performance is not None]
        assert rates == sorted(rates, reverse=True)
        best.append(rates[0])
    assert best == sorted(best)


def test_the_whole_frontier_holds_what_every_search_finds() -> None:
    timeline = _timeline(2)
    curve = whole_frontier(timeline, encode_batches=(1, 32), decode_steps=(1, 40))
    assert curve == sorted(curve)
    assert [rate for _, rate in curve] == sorted(rate for _, rate in curve)
    for latency, throughput in curve[:: len(curve) // 4]:
        best = search_all(timeline, latency, encode_batches=(1, 32), decode_steps=(1, 40))[0].performance
        assert best is not None
        assert throughput / (1 + GAP) <= best.throughput <= throughput * (1 + 1e-9)


@pytest.mark.parametrize("task", mostly_slow(["S", "C1"], fast=["S"]))
@pytest.mark.parametrize("strategy", mostly_slow(Strategy, fast=(Strategy.WAA_M,)))
def test_the_search_is_exact_on_measured_profiles(task: str, strategy: Strategy, public_data: Path) -> None:
    folders = [public_data / "layer_profiles" / f"RTXPRO6000-Llama-3.1-8B-tp{degree}" for degree in (1, 2)]
    generator = GENERATORS[f"exegpt-{task}"]
    pair = LengthPair(generator.input_tokens(), generator.output_tokens())
    costs = {degree: LayerCost(read_layer_profiles(folders[degree - 1])) for degree in (1, 2)}
    timeline = Timeline(costs, Cluster(4, 96 * 2**30), pair)
    for degree in (1, 2):
        latency, throughput = whole_grid(timeline, strategy, degree)
        for share in (0.1, 0.5, 1.0):
            bound = float(np.quantile(latency[np.isfinite(latency)], share))
            found = search(timeline, strategy, degree, bound)
            assert found.performance is not None
            assert found.performance.throughput >= throughput[latency <= bound].max() / (1 + GAP)
            assert found.evaluated <= 0.02 * found.grid or found.grid < 10_000
