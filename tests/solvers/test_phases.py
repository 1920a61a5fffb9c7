"""The contract of every phase: valid schedules, never a worse one, limits kept, switched off by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow

from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.heuristics.registry import POLICIES
from batchbound.models.bounds.params import BoundParams
from batchbound.solvers import Limits, solve
from batchbound.solvers.result import StoppedBy
from batchbound.solvers.search.baselines import simulated_schedule
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.core.compiled import compiled_core
from batchbound.solvers.search.core.parameters import CoreParameters, ExactParameters, SpanParameters
from batchbound.solvers.search.incumbent import Budget, Incumbent, SearchRun, TracePoint
from batchbound.solvers.search.params import ParamsError, SearchParams
from batchbound.solvers.search.phases import PHASES, Phase
from batchbound.solvers.search.schedule_search import ScheduleSearch, search_schedule

PAPER = CostModel.paper()
_SCORED = Workload.from_lengths(np.random.default_rng(0).integers(50, 400, 60), [1] * 60)
PROBLEMS = {
    "slots": Problem(generate("table3", 0, 60), PAPER, 8),
    "cap": Problem(generate("table3", 1, 60), PAPER, 8, prefill_token_cap=400),
    "memory": Problem(generate("sharegpt", 2, 30), PAPER, 16, kv_capacity=5_000),
    "large memory": Problem(generate("sharegpt", 2, 240), PAPER, 8, kv_capacity=6_000),
    "memory and cap": Problem(
        generate("sharegpt", 3, 60), PAPER, 16, kv_capacity=5_000, prefill_token_cap=3_000
    ),
    "equal lengths": Problem(Workload.from_lengths([90] * 30, [60] * 30), PAPER, 16, kv_capacity=2_000),
    "four slots": Problem(generate("table3", 4, 44), PAPER, 4),
    "bend": Problem(generate("table3", 5, 50), CostModel(0.02, 1e-4, 0.03, 2e-4, 0, 0, 500, 1e-3), 10),
    "prefill only": Problem(
        _SCORED, CostModel.paper(), 8, prefill_token_cap=2_000, prefill_emits_first_token=True
    ),
}
CASES = [
    (phase, name)
    for phase in PHASES
    for name, problem in PROBLEMS.items()
    if phase.applies(problem, SearchParams())
]


def run_of(problem: Problem, steps: int) -> SearchRun:
    """Return a search of a number of steps whose incumbent is a quick schedule."""
    best = Incumbent(problem, None, steps)
    assert best.offer(ski_rental_schedule(problem))
    return SearchRun(problem, best, np.random.default_rng(0))


@pytest.mark.skipif(compiled_core() is None, reason="no C++ compiler at installation")
def test_every_phase_applies_to_some_problem() -> None:
    assert {phase.name for phase, _ in CASES} == {phase.name for phase in PHASES}
    assert len({phase.name for phase in PHASES}) == len(PHASES)


@pytest.mark.parametrize(("phase", "name"), CASES, ids=[f"{phase.name}-{name}" for phase, name in CASES])
def test_a_phase_keeps_the_rules_its_limits_and_the_best_schedule(phase: Phase, name: str) -> None:
    problem = PROBLEMS[name]
    run = run_of(problem, steps=16)
    start = run.best.makespan
    phase.improve(run, Budget(run.best, 0.5))
    assert run.best.schedule.check(problem) is None
    assert run.best.makespan == pytest.approx(run.best.schedule.makespan(problem))
    assert run.best.makespan <= start
    assert run.best.steps <= 9, "half of the steps, and the one under way"


@pytest.mark.parametrize("name", mostly_slow(PROBLEMS, fast=("memory", "slots")))
def test_a_search_with_every_phase_off_is_the_best_baseline(name: str) -> None:
    problem, params = PROBLEMS[name], SearchParams(off=tuple(phase.name for phase in PHASES))
    found = search_schedule(problem, iterations=5, params=params)
    rules = [simulated_schedule(problem, policy, np.inf) for policy in POLICIES]
    least = min(rule.makespan(problem) for rule in rules if rule is not None)
    assert found.iterations == 0
    assert found.makespan <= least * (1 + 1e-12)


def test_every_rule_is_tried_before_the_search_begins_whatever_the_limit() -> None:
    problem = PROBLEMS["large memory"]
    search = ScheduleSearch(problem, seconds=1e-6)
    search.begin()
    rules = [simulated_schedule(problem, policy, np.inf) for policy in POLICIES]
    least = min(rule.makespan(problem) for rule in rules if rule is not None)
    assert search.incumbent.makespan <= least * (1 + 1e-12)


def test_a_phase_that_does_not_exist_is_refused_by_name() -> None:
    for params in (SearchParams(off=("beams",)), SearchParams(shares={"beams": 0.5})):
        with pytest.raises(ParamsError, match="there is no phase 'beams'; choose from pack_stages"):
            search_schedule(PROBLEMS["slots"], iterations=1, params=params)


def test_parameters_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "params.toml"
    file.write_text(
        '[search]\noff = ["orders"]\nshare = 0.4\nshares = {spans = 0.7}\nexact_requests = 0\n'
        "[search.core]\nevents_requests = 30\n[search.core.spans]\nstage_bias = 2\n"
        "[search.core.ruin]\nhot = 0.7\n[search.core.exact]\nbytes = 1\n[bounds]\noff = ['lifting']\n"
    )
    params = SearchParams.from_file(file)
    assert (params.off, params.share, dict(params.shares)) == (("orders",), 0.4, {"spans": 0.7})
    assert (params.exact_requests, params.baseline_requests) == (0, 2_000)
    assert (params.core.spans.stage_bias, params.core.spans.coldest) == (2.0, 0.03)
    assert (params.core.events_requests, params.core.ruin.hot, params.core.ruin_improves.hot) == (
        30,
        0.7,
        0.3,
    )
    assert params.bounds.off == ("lifting",)
    found = solve(PROBLEMS["slots"], limits=Limits(work=1), params=params)
    assert found.schedule is not None


@pytest.mark.skipif(compiled_core() is None, reason="no C++ compiler at installation")
def test_an_exact_search_gives_up_at_the_memory_of_its_parameters() -> None:
    problem = Problem(generate("table3", 0, 12), PAPER, 2)
    little = SearchParams(core=CoreParameters(exact=ExactParameters(bytes=1.0)))
    found = solve(problem, "exact", limits=Limits(work=100_000), params=little)
    assert found.stopped_by is StoppedBy.FINISHED


def test_values_of_the_compiled_search_have_an_effect() -> None:
    def made(params: SearchParams) -> list[int]:
        stages: list[int] = search_schedule(
            PROBLEMS["slots"], iterations=5, params=params
        ).schedule.bin_of.tolist()
        return stages

    only = SearchParams(off=("stage_times",))
    hot = SpanParameters(hot_steps=4.0)
    assert made(only) != made(replace(only, core=CoreParameters(spans=hot)))


def test_a_bound_without_its_arguments_is_weaker() -> None:
    bounds = [
        solve(
            PROBLEMS["memory"], limits=Limits(work=1), params=SearchParams(bounds=BoundParams(off=off))
        ).bound
        for off in ((), ("kv_tokens", "memory_growth"))
    ]
    assert bounds[0] is not None
    assert bounds[1] is not None
    assert bounds[0].seconds > bounds[1].seconds


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("[search]\nshare = 2", "share is 2.0; it must be from 0 to 1"),
        ("[search]\nshares = {spans = true}", "shares.spans': True is not a number"),
        ("[search]\nshares = 3", "shares': 3 is not an object"),
        ("[search]\noff = 'orders'", "off': 'orders' is not a list"),
        ("[search]\nexact_requests = -1", "exact_requests is -1"),
        ("[search]\nseed = 1", "field 'search.seed': the field is unknown. Choose from off"),
        ("[search]\nbounds = {lifting = false}", "field 'search.bounds': the field is unknown"),
        ("[search.stage_times]\nhot = 0", "hot is 0.0; it must be above 0"),
        ("[search]\nrest_seconds = {spans = -1}", "rest_seconds.spans is -1.0"),
        ("[search]\npatiences = []", "name one at least"),
        ("[search]\npatiences = [nan]", "patiences are (nan,)"),
        ("[search.stage_times]\nrounding_share = 7", "it must be at most 1"),
        ("[search.stage_times]\nstart_spans = []", "start_spans is empty"),
        ("[search.stage_times]\ncount_ratio = 1", "it must be above 1"),
        ("[search.core.spans]\nheat = 1", "field 'search.core.spans.heat': the field is unknown"),
        ("[search.core.spans]\ncoldest = -1", "coldest is -1.0; it must be above 0"),
        ("[search.core.spans]\ncoldest = nan", "coldest is nan"),
        ("[search.core]\nspans_memory_shares = [0.4, 2]", "spans_memory_shares"),
        ("[bounds]\nheat = 1", "field 'bounds.heat': the field is unknown. Choose from off"),
        ("[serach]\nshare = 1", "has 'serach'. Its tables are search"),
        ("search = 3", "3 is not an object"),
        ("share 1", "is not a TOML file"),
    ],
)
def test_a_file_of_parameters_that_cannot_be_used_is_refused(text: str, refusal: str, tmp_path: Path) -> None:
    file = tmp_path / "params.toml"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        SearchParams.from_file(file)
    assert refusal in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_search_ends_at_the_gap_asked_for_and_tells_each_better_schedule() -> None:
    heard: list[TracePoint] = []
    limits = Limits(work=2_000, gap=0.5)
    found = solve(PROBLEMS["slots"], limits=limits, on_improvement=heard.append)
    assert found.stopped_by is StoppedBy.GAP
    assert found.gap is not None
    assert found.gap <= 0.5
    assert [(point.seconds, point.makespan) for point in heard] == list(found.improvements)
    assert found.trace[-1][1:] == (found.makespan, found.bound.seconds if found.bound else None)


def test_a_search_ends_where_nothing_better_comes_for_some_time() -> None:
    found = solve(PROBLEMS["slots"], limits=Limits(work=10**6, stalled=0.0))
    assert found.stopped_by is StoppedBy.STALLED


@pytest.mark.slow
def test_an_initial_schedule_is_improved_on() -> None:
    problem = PROBLEMS["memory"]
    good = solve(problem, limits=Limits(work=10)).schedule
    assert good is not None
    again = solve(problem, limits=Limits(work=1), initial=good)
    assert again.makespan is not None
    assert again.makespan <= good.makespan(problem)
