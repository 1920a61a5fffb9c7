"""Costs kept from run to run, in a folder of the test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import PAPER, UNIT

from batchbound.cost_cache import CostCache
from batchbound.data.costs.cost import CalibratedCost, CostModel, FitError


def measured(cost: CostModel = UNIT, steps: int = 100, **engine: object) -> CalibratedCost:
    error = FitError(0.01, 0.01, 0.0, 10, steps)
    return CalibratedCost(cost, error, {"device": "cpu", "dtype": "float32", **engine})


def test_what_a_run_measured_is_found_by_the_next(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs")
    assert cache.find("M", 8) is None
    assert cache.keep("M", 8, measured())
    assert cache.find("M", 8) == measured()
    assert cache.find("another", 8) is None


def test_the_nearest_number_of_slots_counts(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    cache.keep("M", 8, measured(UNIT))
    cache.keep("M", 64, measured(PAPER))
    assert cache.find("M", 50) == measured(PAPER)
    assert cache.find("M", 16) == measured(UNIT)


def test_a_longer_run_of_the_same_conditions_replaces_what_was_kept(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    cache.keep("M", 8, measured(UNIT))
    cache.keep("M", 8, measured(PAPER))
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert cache.find("M", 8) == measured(PAPER)
    cache.keep("M", 8, measured(UNIT, dtype="bfloat16"))
    assert len(list(tmp_path.rglob("*.json"))) == 2


@pytest.mark.parametrize("found", [measured(steps=49), replace(measured(), error=None)])
def test_a_run_too_short_to_measure_is_not_kept(tmp_path: Path, found: CalibratedCost) -> None:
    assert not CostCache(tmp_path).keep("M", 8, found)
    assert CostCache(tmp_path).find("M", 8) is None


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    cache.keep("M", 8, measured())
    next(tmp_path.rglob("*.json")).write_text("{}")
    assert cache.find("M", 8) is None


def test_a_home_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not CostCache(tmp_path / "file").keep("M", 8, measured())


def test_costs_of_as_many_threads_count_before_the_nearest_slots(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    one, two = (measured(cost, device=f"cpu (x86_64, {n} threads)") for n, cost in ((1, UNIT), (2, PAPER)))
    cache.keep("M", 8, one)
    cache.keep("M", 64, two)
    assert [cache.find("M", 8, threads) for threads in (1, 2, 3, None)] == [one, two, one, one]
