"""The compiled searches: valid, never worse than their start, repeatable, and ended by Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet, FleetSchedule, Replica
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.solvers import Limits, solve
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.core import compiled as core_library
from batchbound.solvers.search.core.compiled import Allowance, Parameters, compiled_core
from batchbound.solvers.search.core.parameters import CoreParameters
from batchbound.solvers.search.core.phases import is_compiled
from batchbound.solvers.search.core.plans import CompiledJob
from batchbound.solvers.search.incumbent import Budget, Incumbent, SearchRun
from batchbound.solvers.search.params import SearchParams
from batchbound.solvers.search.phases import PHASES
from batchbound.solvers.search.replicas import anneal_replicas, are_one_search

pytestmark = pytest.mark.skipif(compiled_core() is None, reason="no C++ compiler at installation")

COMPILED = ("spans", "orders", "spans_within_memory", "ruin_recreate")
COSTS = (
    CostModel.paper(),
    CostModel(0.004, 2e-5, 0.012, 2e-5),
    CostModel(0.0, 1e-3, 0.003, 0.0, prefill_floor=0.01),
    CostModel(0.004, 1e-4, 0.012, 2e-5, prefill_bend=10, prefill_per_token_beyond=1e-3),
)


@st.composite
def problems(draw: st.DrawFn, most: int = 14) -> Problem:
    """Small jobs with all that a problem can have."""
    lengths = draw(st.lists(st.tuples(st.integers(2, 9), st.integers(1, 12)), min_size=1, max_size=most))
    prompts, completions = zip(*lengths, strict=True)
    workload = Workload.from_lengths(prompts, completions)
    if draw(st.booleans()):
        group = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
        workload = replace(workload, group=np.array(group)).sharing([1] * len(group))
    peak = max(p + n for p, n in lengths)
    return Problem(
        workload,
        draw(st.sampled_from(COSTS)),
        draw(st.integers(1, 4)),
        kv_capacity=draw(st.none() | st.integers(peak, 3 * peak)),
        prefill_token_cap=draw(st.none() | st.integers(9, 30)),
        prefill_emits_first_token=draw(st.booleans()),
        prefix_cache=draw(st.sampled_from([0, 1, 100])),
    )


def started(problem: Problem, work: int | None = 2) -> Incumbent:
    incumbent = Incumbent(problem, None, work)
    incumbent.offer(ski_rental_schedule(problem))
    return incumbent


def improve(incumbent: Incumbent, seed: int) -> None:
    """Run the compiled phases one after another."""
    problem = incumbent.problem
    run = SearchRun(problem, incumbent, np.random.default_rng(seed))
    for phase in PHASES:
        if phase.name in COMPILED and phase.applies(problem, SearchParams()):
            phase.improve(run, Budget(incumbent, 0.5))


def plan_of(problem: Problem, seed: int = 0, work: int = 2) -> Schedule:
    incumbent = started(problem, work)
    improve(incumbent, seed)
    return incumbent.schedule


@settings(max_examples=12, deadline=None)
@given(problems(), st.integers(0, 5))
def test_a_plan_keeps_every_rule_and_is_no_worse_than_its_start(problem: Problem, seed: int) -> None:
    if not is_compiled(problem):
        return
    incumbent = started(problem)
    before = incumbent.makespan
    improve(incumbent, seed)
    assert incumbent.schedule.check(problem) is None
    assert incumbent.schedule.makespan(problem) <= before


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(["core_spans", "core_events", "core_ruin_recreate"]))
def test_each_search_makes_valid_schedules_where_its_limits_are_modelled(problem: Problem, name: str) -> None:
    if not is_compiled(problem):
        return
    memory = name != "core_spans" and problem.kv_capacity is not None
    job = CompiledJob(problem, memory=memory)
    parameters = CoreParameters()
    values: Parameters = parameters.ruin
    if name != "core_ruin_recreate":
        values = parameters.spans if name == "core_spans" else parameters.events
    start = ski_rental_schedule(problem).without_idle_steps(problem)
    made = job.schedule(job.search(name, values, Allowance(moves=500), start))
    assert made is not None
    violation = made.check(problem)
    # Spans know no limits here, and no search knows what shared beginnings take of them.
    apart = name == "core_spans" or problem.tree is not None
    rules = {"KV capacity", "token cap of a prefill stage"} if apart else set()
    assert violation is None or violation.rule in rules


def chat_like(seed: int, count: int, slots: int, **limits: int) -> Problem:
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(200), 0.8, count), 1, 3000).astype(int)
    completions = np.clip(rng.gamma(1.5, 150, count), 1, 2000).astype(int)
    return Problem(Workload.from_lengths(prompts, completions), CostModel.paper(), slots, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [{}, {"kv_capacity": 6000}, {"prefill_token_cap": 4000}])
def test_the_same_seed_and_work_give_the_same_plan(limits: dict[str, int]) -> None:
    problem = chat_like(0, 40, 16, **limits)
    one, other = plan_of(problem, 1), plan_of(problem, 1)
    assert (one.bin_of == other.bin_of).all()
    assert (one.decode_steps == other.decode_steps).all()


def test_a_plan_made_in_another_thread_is_the_same() -> None:
    problem, made = chat_like(1, 40, 16), list[Schedule]()
    thread = threading.Thread(target=lambda: made.append(plan_of(problem, 1)))
    thread.start()
    thread.join()
    assert (made[0].bin_of == plan_of(problem, 1).bin_of).all()


def test_more_work_gives_no_worse_plans_on_the_whole() -> None:
    problem = chat_like(2, 60, 8)
    little = plan_of(problem, 0, 1).makespan(problem)
    assert plan_of(problem, 0, 20).makespan(problem) <= little


def least_makespan(problem: Problem) -> float:
    """Try every start of every request."""
    least = math.inf
    count = len(problem)
    longest = int(problem.decode_steps.sum())
    starts = np.zeros(count, dtype=np.int64)

    def place(k: int) -> None:
        nonlocal least
        if k == count:
            times, bin_of = np.unique(starts, return_inverse=True)
            end = int((starts + problem.decode_steps).max())
            try:
                made = Schedule.from_bins(problem, bin_of, np.diff(np.append(times, end)))
            except ValueError:
                return
            made = made.without_idle_steps(problem)
            if made.check(problem) is None:
                least = min(least, made.makespan(problem))
            return
        for at in range(longest - int(problem.decode_steps[k]) + 1):
            starts[k] = at
            place(k + 1)

    place(0)
    return least


@pytest.mark.parametrize("limits", [{}, {"kv_capacity": 9}, {"prefill_token_cap": 4}])
@pytest.mark.parametrize("lengths", [[3, 2, 1], [2, 2, 2], [1, 3, 1, 1]])
def test_tiny_jobs_are_planned_as_well_as_by_brute_force(lengths: list[int], limits: dict[str, int]) -> None:
    workload = Workload.from_lengths([2] * len(lengths), lengths)
    problem = Problem(workload, CostModel(0.5, 0.01, 1.0, 0.1), 2, **limits)  # type: ignore[arg-type]
    assert plan_of(problem, 0, 3).makespan(problem) == pytest.approx(least_makespan(problem))


def test_requests_without_a_decode_step_join_stages_with_room() -> None:
    workload = Workload.from_lengths([3, 3, 3, 3], [4, 1, 1, 1])
    problem = Problem(workload, CostModel.paper(), 2, prefill_emits_first_token=True)
    schedule = plan_of(problem)
    assert schedule.check(problem) is None
    assert schedule.prefill_stages() == 2


def test_ctrl_c_ends_a_search_and_keeps_its_best_schedule() -> None:
    problem = chat_like(3, 100, 16)
    incumbent = started(problem, None)
    incumbent.seconds = 60.0
    before = incumbent.makespan
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        improve(incumbent, 0)
    assert time.monotonic() - begun < 30.0
    assert incumbent.makespan < before


def test_a_plan_as_good_as_the_bound_ends_the_search() -> None:
    problem = Problem(Workload.from_lengths([2, 2], [3, 3]), CostModel.paper(), 2)
    incumbent = started(problem, None)
    incumbent.seconds, incumbent.bound = 60.0, incumbent.makespan
    improve(incumbent, 0)
    assert incumbent.elapsed < 30.0


def test_without_the_library_a_job_is_planned_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchbound.solvers.search.core.phases.compiled_core", lambda: None)
    problem = chat_like(4, 20, 4)
    assert not is_compiled(problem)
    found = solve(problem, limits=Limits(work=5))
    assert found.schedule is not None
    assert found.schedule.check(problem) is None


def test_a_library_of_another_version_is_refused() -> None:
    core = compiled_core()
    assert core is not None

    class Other:
        def core_bytes(self, structure: int) -> int:
            return 8

    with pytest.raises(RuntimeError, match="another version"):
        core_library._checked(Other())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_replicas_annealed_together_serve_every_request_and_keep_every_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    replicas, count = int(rng.integers(2, 5)), int(rng.integers(24, 40))
    workload = Workload.from_lengths(rng.integers(1, 60, count), rng.integers(1, 40, count))
    floor = CostModel(0.01, 1e-4, 0.02, 1e-4, prefill_floor=0.3 * (seed % 2), decode_per_kv_token=1e-6)
    fleet = Fleet(workload, (Replica(floor, int(rng.integers(1, 6))),) * replicas, seed % 3 == 0)
    dealt = [np.arange(k, count, replicas) for k in range(replicas)]
    problems = [fleet.problem_of(k, requests) for k, requests in enumerate(dealt)]
    parts = list(zip(dealt, map(ski_rental_schedule, problems), strict=True))
    assert are_one_search(fleet, [schedule for _, schedule in parts])
    core = CoreParameters(moves_per_work=3000)
    made, _ = anneal_replicas(fleet, parts, core, math.inf, 1, seed)
    again, _ = anneal_replicas(fleet, parts, core, math.inf, 1, seed)
    replica_of = np.empty(count, dtype=np.int64)
    for k, (requests, schedule) in enumerate(made):
        replica_of[requests] = k
        assert (schedule.bin_of == again[k][1].bin_of).all()
    planned = FleetSchedule(replica_of, tuple(schedule for _, schedule in made))
    assert len(made) == replicas
    assert planned.check(fleet) is None
