"""Stage times annealed many at once by a bound on their slots are a better start than stages drawn."""

from __future__ import annotations

import numpy as np
import pytest
from builders import UNIT, problem_of

from batchbound.data.costs.cost import CostModel, IntArray
from batchbound.solvers.search.stages.rough_times import rough_times
from batchbound.solvers.search.stages.slot_flow import LengthProfile
from batchbound.solvers.search.stages.slot_price import slot_price
from batchbound.solvers.search.stages.spread import spread_times
from batchbound.solvers.search.stages.times import StageCosts

DEAR = CostModel(9.0, 0.0, 1.0, 0.0)


def profile_and_costs(outputs: list[int], slots: int, cost: CostModel) -> tuple[LengthProfile, StageCosts]:
    problem = problem_of([1] * len(outputs), outputs, slots, cost)
    return LengthProfile.of(problem.rounds), StageCosts.of(problem)


def outputs_of(seed: int, count: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(4.5, 0.45, count)
    return np.clip(drawn, 20, 300).astype(np.int64).tolist()  # type: ignore[no-any-return]


def worth(times: IntArray, profile: LengthProfile, costs: StageCosts) -> float:
    price = slot_price(times, profile)
    return np.inf if price is None else float(costs.guide(times, price.slots, 0.9))


@pytest.mark.parametrize("seed", range(3))
def test_they_are_better_than_stages_spread_unevenly(seed: int) -> None:
    profile, costs = profile_and_costs(outputs_of(seed, 64), 16, DEAR)
    found = rough_times(profile, costs, np.random.default_rng(seed), lambda: False)
    drawn = list(spread_times(profile, costs, np.random.default_rng(seed), 400))
    assert found
    for times in found:
        assert times[0] == 0
        assert (np.diff(times) >= 0).all()
    best = min(worth(times, profile, costs) for times in found)
    assert best < min(worth(times, profile, costs) for times in drawn)
    assert best <= worth(found[-1], profile, costs), "the best come first"


def test_the_same_draws_give_the_same_times() -> None:
    profile, costs = profile_and_costs(outputs_of(0, 40), 8, DEAR)
    one, other = (rough_times(profile, costs, np.random.default_rng(5), lambda: False) for _ in range(2))
    assert [times.tolist() for times in one] == [times.tolist() for times in other]


def test_four_requests_on_two_slots_share_two_stages_by_length() -> None:
    # The shorter two for 2 rounds, the longer two for 4, in either order: no third stage is worth 9 rounds.
    profile, costs = profile_and_costs([1, 2, 3, 4], 2, DEAR)
    found = rough_times(profile, costs, np.random.default_rng(0), lambda: False)
    assert found[0].tolist() in ([0, 2, 6], [0, 4, 6])


def test_where_many_stages_are_better_there_are_none() -> None:
    profile, costs = profile_and_costs(outputs_of(1, 300), 4, UNIT)
    assert rough_times(profile, costs, np.random.default_rng(0), lambda: False) == []


def test_without_time_they_end_with_what_there_is() -> None:
    profile, costs = profile_and_costs(outputs_of(2, 64), 16, DEAR)
    assert rough_times(profile, costs, np.random.default_rng(0), lambda: True) == []
