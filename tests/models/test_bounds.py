"""No bound exceeds an optimum, and a certificate proves what it says and nothing more."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import mostly_slow
from hypothesis import given
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.files.record import plain, record
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.bounds.difference_set import useful_differences
from batchbound.models.bounds.least_counts import cheapest_stages, cost_terms, least_counts
from batchbound.models.bounds.makespan import best_bound, difference_set_bound, paper_bound, trivial_bound
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.certificates.checker import verify_bound

Optimum = Callable[[Problem], float]


def problem_of(
    prompts: list[int], outputs: list[int], slots: int, cost: CostModel | None = None, **limits: Any
) -> Problem:
    return Problem(Workload.from_lengths(prompts, outputs), cost or CostModel.paper(), slots, **limits)


def tiny_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 7))
    prompts = rng.integers(1, 7, requests)
    outputs = rng.integers(1, 7, requests)
    cost = CostModel(
        prefill_base=float(rng.choice([0.0, 0.5, 2.0, 5.0])),
        prefill_per_token=float(rng.choice([0.0, 0.1])),
        decode_base=float(rng.choice([0.0, 1.0])),
        decode_per_slot=float(rng.choice([0.0, 0.2])),
        prefill_floor=float(rng.choice([0.0, 1.0, 3.0])),
        decode_per_kv_token=float(rng.choice([0.0, 0.01])),
        prefill_bend=float(rng.choice([0.0, 4.0, 9.0])),
        prefill_per_token_beyond=float(rng.choice([0.0, 0.0, 0.3])),
    )
    largest = int((prompts + outputs).max())
    return Problem(
        Workload.from_lengths(prompts, outputs),
        cost,
        slots=int(rng.integers(1, 4)),
        kv_capacity=int(largest + rng.integers(0, 12)) if rng.random() < 0.5 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, 6)) if rng.random() < 0.5 else None,
        prefill_emits_first_token=bool(rng.random() < 0.5),
    )


@pytest.mark.parametrize("batch", mostly_slow(range(5), fast=range(1)))
def test_no_valid_bound_exceeds_the_optimum_of_a_tiny_problem(batch: int, optimal_makespan: Optimum) -> None:
    for seed in range(40 * batch, 40 * batch + 40):
        problem = tiny_problem(seed)
        optimum = optimal_makespan(problem)
        for bound in (trivial_bound(problem), difference_set_bound(problem), best_bound(problem)):
            assert bound.valid
            assert bound.seconds <= optimum + 1e-9, (seed, bound.source)
            assert sum(bound.terms.values()) == pytest.approx(bound.seconds)
            assert verify_bound(problem, bound) is None, (seed, bound.source)


@pytest.mark.parametrize("batch", mostly_slow(range(3), fast=range(1)))
def test_no_searched_bound_exceeds_the_optimum_of_a_tiny_problem(
    batch: int, optimal_makespan: Optimum
) -> None:
    for seed in range(20 * batch, 20 * batch + 20):
        problem = tiny_problem(seed)
        bound = proven_bound(problem, seconds=0.2)
        assert best_bound(problem).seconds <= bound.seconds <= optimal_makespan(problem) + 1e-9, seed
        assert verify_bound(problem, bound) is None, seed


def few_long_requests(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    outputs = rng.integers(2, 15, rng.integers(5, 7)).tolist()
    stage = float(rng.choice([0.25, 0.5, 1.0]))
    cost = CostModel(prefill_base=stage, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
    return problem_of([1] * len(outputs), outputs, int(rng.integers(2, 4)), cost)


@pytest.mark.slow
def test_bounds_are_often_tight_on_tiny_problems(optimal_makespan: Optimum) -> None:
    tight = 0
    for seed in range(40):
        problem = tiny_problem(seed)
        tight += best_bound(problem).seconds >= optimal_makespan(problem) - 1e-9
    assert tight >= 16


def test_one_stage_and_the_longest_request_are_the_whole_cost_of_a_batch_that_fits() -> None:
    problem = problem_of([10, 20], [5, 3], slots=2)
    bound = trivial_bound(problem)
    assert bound.terms["prefill stages"] == pytest.approx(0.025)
    assert bound.terms["prompt tokens"] == pytest.approx(30 * 0.00013)
    assert bound.terms["decode steps"] == pytest.approx(5 * 0.029)
    assert bound.terms["slot-steps"] == pytest.approx(8 * 0.00021)
    schedule = Schedule.from_bins(problem, [0, 0], [5])
    assert bound.seconds == pytest.approx(schedule.makespan(problem))


@given(
    prompts=st.lists(st.integers(1, 40), min_size=0, max_size=6),
    bend=st.one_of(st.integers(0, 30).map(float), st.floats(0.0, 30.0)),
)
def test_what_a_stage_exceeds_the_bend_by_splits_exactly(prompts: list[int], bend: float) -> None:
    alone = sum(max(0.0, p - bend) for p in prompts)
    together = max(0.0, sum(min(p, bend) for p in prompts) - bend)
    assert max(0.0, sum(prompts) - bend) == pytest.approx(alone + together)


def test_tokens_beyond_the_bend_are_paid_by_each_prompt_and_by_what_stages_leave() -> None:
    # Bend at 10: prompts of 14 pay 4 each; what is left, 10 + 10 + 6, exceeds two stages by 6.
    cost = CostModel(1.0, 0.0, 1.0, 0.0, prefill_bend=10.0, prefill_per_token_beyond=0.125)
    problem = problem_of([14, 14, 6], [2, 2, 2], slots=2, cost=cost)
    terms = cost_terms(problem, 2, 4)
    assert (terms["prompts beyond the bend"], terms["stages beyond the bend"]) == (1.0, 0.75)
    assert cost_terms(problem, 3, 4)["stages beyond the bend"] == 0
    assert cheapest_stages(problem, 2) == 2
    assert best_bound(problem).seconds == 1.0 + 0.75 + 2 + 4


def test_more_stages_than_needed_are_counted_where_they_take_less(optimal_makespan: Optimum) -> None:
    cost = CostModel(1.0, 0.0, 1.0, 0.0, prefill_bend=10.0, prefill_per_token_beyond=1.0)
    problem = problem_of([10, 10, 10], [2, 2, 2], slots=3, cost=cost)
    assert [cheapest_stages(problem, at_least) for at_least in (1, 3, 5)] == [3, 3, 5]
    for bound in (trivial_bound(problem), best_bound(problem)):
        assert bound.seconds == optimal_makespan(problem) == 5.0
        assert verify_bound(problem, bound) is None


def test_a_checker_refuses_tokens_beyond_a_bend_that_stages_need_not_exceed() -> None:
    cost = CostModel(1.0, 0.0, 1.0, 0.0, prefill_bend=10.0, prefill_per_token_beyond=1.0)
    problem = problem_of([10, 10, 10], [2, 2, 2], slots=3, cost=cost)
    one_stage = cost_terms(problem, 1, 2)
    assert one_stage["stages beyond the bend"] == 20
    claimed = replace(trivial_bound(problem), seconds=sum(one_stage.values()), terms=one_stage)
    violation = verify_bound(problem, claimed)
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"


def test_stages_are_counted_by_the_token_cap() -> None:
    problem = problem_of([6, 6, 6, 5], [1, 1, 1, 1], slots=4, prefill_token_cap=10)
    counts = least_counts(problem)
    assert counts.stages == 4, "no two of these prompts fit into one stage although 23 tokens fit into three"
    assert counts.claims["stages"]["kind"] == "prices"


def test_slots_that_the_kv_capacity_cannot_fill_do_not_count() -> None:
    problem = problem_of([10] * 6, [2] * 6, slots=6, kv_capacity=25)
    counts = least_counts(problem)
    assert counts.slots == 2
    assert counts.stages == 3
    assert counts.decode_steps == 6


def test_the_kv_read_over_the_job_needs_steps_of_the_capacity() -> None:
    problem = problem_of([1] * 8, [9] * 8, slots=8, kv_capacity=12)
    assert problem.kv_token_steps == 8 * sum(range(1, 10))
    assert least_counts(problem).decode_steps == 30
    assert least_counts(problem).claims["decode_steps"]["kind"] == "KV tokens over capacity"


def test_two_requests_that_memory_keeps_apart_need_nearly_the_steps_of_both() -> None:
    # At the end of one of ten tokens five are left: the other of ten has begun at most five steps before.
    problem = problem_of([1, 1, 1], [10, 10, 2], slots=3, kv_capacity=15)
    counts = least_counts(problem)
    assert (counts.decode_steps, problem.kv_token_steps // 15) == (15, 7)
    assert counts.claims["decode_steps"] == {"at_least": 15, "kind": "two requests", "requests": [0, 1]}


def test_the_shorter_of_two_may_end_last_where_that_takes_fewer_steps() -> None:
    # Ending first, the one of eight decode steps leaves room for 7 of the other; the other way round for 5.
    problem = problem_of([1, 5], [10, 8], slots=2, kv_capacity=19)
    assert least_counts(problem).decode_steps == 18 - 7


def test_few_stages_leave_few_differences() -> None:
    # The first point and the end are always as far apart as the longest request.
    assert useful_differences(1, longest=10, decode_steps=10) == 0
    assert useful_differences(4, longest=10, decode_steps=19) == 9
    # Three steps of less than 10 at least lead over 20 steps: three pairs of the chain's four points are two
    # steps apart, and the fifth point is too far from one of them.
    assert useful_differences(4, longest=10, decode_steps=20) == 6
    # Two steps of 10 and nothing between.
    assert useful_differences(2, longest=10, decode_steps=20) == 0


def test_lengths_that_few_points_cannot_measure_waste_slot_time(optimal_makespan: Optimum) -> None:
    cost = CostModel(prefill_base=100.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
    problem = problem_of([1] * 6, [1, 2, 3, 4, 5, 6], slots=3, cost=cost)
    assert trivial_bound(problem).seconds == pytest.approx(2 * 100 + 21 / 3)
    # Two stages: two differences below 6 for five lengths, so three of these wait a decode step each.
    assert difference_set_bound(problem).seconds == pytest.approx(2 * 100 + (21 + 3) / 3)
    assert optimal_makespan(problem) == pytest.approx(2 * 100 + 3 + 6)


def test_requests_of_no_steps_need_stages_only(optimal_makespan: Optimum) -> None:
    problem = problem_of([3, 3, 3], [1, 1, 1], slots=2, prefill_emits_first_token=True)
    assert best_bound(problem).seconds == pytest.approx(optimal_makespan(problem))
    assert best_bound(problem).seconds == pytest.approx(2 * 0.025 + 9 * 0.00013)


def table3_like(requests: int = 1319, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    outputs = np.where(rng.random(requests) < 0.5, 512, np.clip(rng.gamma(1.5, 136.0, requests), 1, 511))
    prompts = np.maximum(1, rng.lognormal(4.16, 0.36, requests)).astype(np.int64)
    return Problem(Workload.from_lengths(prompts, outputs.astype(np.int64)), CostModel.paper(), slots=200)


def test_the_difference_set_bound_is_stronger_at_the_papers_size_and_survives_json() -> None:
    problem = table3_like()
    trivial, difference = trivial_bound(problem), best_bound(problem)
    assert difference.seconds > trivial.seconds + 0.2
    again = record(Bound, json.loads(json.dumps(plain(difference))))
    assert verify_bound(problem, again) is None


def forged(bound: Bound, **changes: object) -> Bound:
    return replace(bound, certificate={**bound.certificate, **changes})


def raised(bound: Bound, seconds: float) -> Bound:
    terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + seconds}
    return replace(bound, seconds=bound.seconds + seconds, terms=terms)


def test_a_checker_refuses_what_the_certificate_does_not_prove() -> None:
    problem = table3_like(300)
    bound = difference_set_bound(problem)
    trivial = trivial_bound(problem)
    assert verify_bound(problem, bound) is None
    claim: Mapping[str, object] = trivial.certificate["decode_steps"]  # type: ignore[assignment]
    forgeries = {
        "the certificate proves the bound": raised(bound, 0.01),
        "terms add up": replace(bound, seconds=bound.seconds + 0.01),
        "decode_steps": forged(raised(trivial, 1.0), decode_steps={**claim, "at_least": 10_000}),
        "stages": forged(bound, stages={"at_least": 50, "kind": "requests over slots"}),
        "slots": forged(bound, slots=100),
        "charges": forged(bound, charges=[-5]),
        "a certificate is of a known kind": forged(bound, kind="trust me"),
        "a certificate is readable": forged(bound, stages=None),
        "a bound is valid": replace(bound, valid=False),
    }
    for rule, forgery in forgeries.items():
        violation = verify_bound(problem, forgery)
        assert violation is not None, rule
        assert violation.rule == rule


def test_prices_that_a_full_slot_exceeds_prove_nothing() -> None:
    problem = problem_of([1, 1, 1], [3, 3, 4], slots=2)
    prices = {"kind": "prices", "capacity": 6, "lengths": [3, 4], "prices": [3, 4], "limit": 3, "at_least": 7}
    violation = verify_bound(problem, forged(raised(trivial_bound(problem), 0.029), decode_steps=prices))
    assert violation is not None
    assert violation.rule == "prices"


def test_the_papers_prefill_formula_exceeds_an_optimum() -> None:
    problem = problem_of([10, 10], [1, 1], slots=2)
    bound = paper_bound(problem, levels=[(10, 1.0), (20, 3.0)], decode_steps=1)
    assert bound.terms["prefill (31)"] == pytest.approx(3.0)
    assert not bound.valid
    two_small_stages = 2 * 1.0
    assert bound.terms["prefill (31)"] > two_small_stages


def test_the_papers_bound_exceeds_a_schedule_with_idle_slots() -> None:
    problem = problem_of([68] * 6, [512, 300, 200, 100, 50, 20], slots=200)
    printed = paper_bound(problem, levels=[(4096, 0.025 + 4096 * 0.00013)], decode_steps=512)
    assert printed.seconds == pytest.approx(512 * 0.071, abs=0.01)
    schedule = Schedule.from_bins(problem, [0] * 6, [512])
    assert schedule.check(problem) is None
    assert schedule.makespan(problem) == pytest.approx(15.17, abs=0.01)
    assert best_bound(problem).seconds <= schedule.makespan(problem) + 1e-9
    with pytest.raises(ValueError, match="not valid"):
        printed.gap(schedule.makespan(problem))


def test_the_bound_command_lists_what_a_checker_proves_the_strongest_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bound", "table3:1:60", "--slots", "20", "--json"]) == 0
    bounds = [record(Bound, value) for value in json.loads(capsys.readouterr().out)]
    problem = Problem(generate("table3", 1, 60), CostModel.paper(), 20)
    valid = [bound for bound in bounds if bound.valid]
    assert len({bound.source for bound in bounds}) == len(bounds) >= 3
    assert [bound.seconds for bound in valid] == sorted((bound.seconds for bound in valid), reverse=True)
    assert valid[0].seconds >= best_bound(problem).seconds
    assert all(verify_bound(problem, bound) is None for bound in valid)
    assert main(["bound", "table3:1:60", "--slots", "20"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(valid[0].source)
    assert "NOT a valid bound" in printed[-3]


def test_a_bound_without_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prefill level"):
        paper_bound(problem_of([1], [1], slots=1), levels=[], decode_steps=1)


def test_no_points_have_more_useful_differences_than_counted() -> None:
    rng = np.random.default_rng(0)
    most_met = 0
    for _ in range(3000):
        longest = int(rng.integers(2, 9))
        gaps = rng.integers(1, longest + 1, int(rng.integers(1, 9)))
        points = np.concatenate(([0], np.cumsum(gaps)))
        first, last = np.triu_indices(len(points), 1)
        useful = int((points[last] - points[first] < longest).sum())
        counted = useful_differences(len(gaps), longest, int(points[-1]))
        assert useful <= counted, (longest, points)
        most_met += useful == counted
    assert most_met > 300, "the count is often met, so it cannot be much too large"
