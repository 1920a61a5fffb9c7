"""That no schedule of a small problem is cheaper is judged by following all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builders import limited_problem, steps_of

from batchbound.data.problem import Problem
from batchbound.models.certificates.claims import RefutedError, Work
from batchbound.models.certificates.states import check_no_cheaper

LESS = r"'states', 'a schedule takes less'"


@pytest.mark.parametrize("batch", range(6))
def test_the_optimum_holds_and_a_little_more_does_not(
    batch: int, optimal_makespan: Callable[[Problem], float]
) -> None:
    for seed in range(1000 + 20 * batch, 1020 + 20 * batch):
        problem = limited_problem(seed, most=4)
        optimum = optimal_makespan(problem)
        check_no_cheaper(problem, optimum * (1 - 1e-9), Work())
        if optimum > 0:
            with pytest.raises(RefutedError, match=LESS):
                check_no_cheaper(problem, optimum * (1 + 1e-6), Work())


@pytest.mark.parametrize(
    ("seed", "steps"), [(2004, 4410), (2011, 17280), (2037, 15810), (2042, 3090), (2054, 4980), (2089, 8010)]
)
def test_the_check_takes_no_more_steps_than_it_needs_and_is_refused_with_one_less(
    seed: int, steps: int, optimal_makespan: Callable[[Problem], float]
) -> None:
    problem = limited_problem(seed)
    optimum = optimal_makespan(problem)
    assert steps_of(lambda work: check_no_cheaper(problem, optimum * (1 - 1e-9), work)) == steps
