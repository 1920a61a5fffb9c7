"""Plans for total completion time and for the first K requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import UNIT

import batchbound
from batchbound.cli import main
from batchbound.data.claims.assumptions import DISTINCT, Assumption, assumed_of
from batchbound.data.files.disk import InputError
from batchbound.data.iteration_plan import IterationPlan
from batchbound.data.iterations import EngineLimits
from batchbound.data.objective import Goal, Objective
from batchbound.data.plan import Plan
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.prefixes.vllm_cache import BlockTree
from batchbound.heuristics.serving.published import PUBLISHED
from batchbound.heuristics.serving.release import predict, simulated
from batchbound.planning.aimed import on_prefix_cache, published_orders
from batchbound.planning.iterations import Engines, make_iteration_plan
from batchbound.planning.mixed_job import MixedJob
from batchbound.planning.release import Releasable
from batchbound.planning.staged import make_aimed_plan
from batchbound.solvers.result import Limits, StoppedBy

OBJECTIVES = (Objective("total"), Objective("first", 9), Objective("groups", 2))


def drawn_job(seed: int, count: int = 14, *, shared: bool = False) -> MixedJob:
    rng = np.random.default_rng(seed)
    prompt, output, group = rng.integers(40, 90, count), rng.integers(1, 60, count), rng.integers(0, 4, count)
    work = replace(Workload.from_lengths(prompt, output), group=group)
    tree = PrefixTree.of_groups(prompt, group, np.full(count, 32), 16) if shared else None
    if tree is None:
        return MixedJob(work)
    return MixedJob(work, tree=tree, assumptions=(Assumption(DISTINCT, "assumed"), *assumed_of(tree)))


def planned(
    job: MixedJob, limits: EngineLimits, objective: Objective | None, work: int = 60
) -> IterationPlan:
    return make_iteration_plan(job, Engines((limits,)), limits=Limits(work=work), objective=objective)


@pytest.mark.parametrize("limits", [EngineLimits(4, 64), EngineLimits(6, 128, 320, 16)], ids=["slots", "KV"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_no_published_order_is_better_and_verify_agrees(
    limits: EngineLimits, objective: Objective, shared: bool
) -> None:
    for seed in range(2):
        job = drawn_job(seed, shared=shared)
        plan = planned(job, limits, objective)
        assert plan.aim is not None
        assert plan.value is not None
        assert batchbound.verify(plan) is None
        assert plan.aim.bound.value <= plan.value
        rows = job.rows()
        releasable = Releasable.of_rows(rows, job.requests(), exact=True)
        for order in published_orders(releasable, limits).values():
            if job.tree is not None:
                tree = BlockTree.of(job.tree, limits.block_tokens)
                run = on_prefix_cache(tree, rows.output, limits, order, plan.aim.goal)
            else:
                run = predict(rows, limits, order, lag=1, goal=plan.aim.goal)
            assert run is not None
            assert run.value is not None
            assert plan.value <= run.value


def test_the_referee_counts_what_the_fast_engine_counts() -> None:
    limits = EngineLimits(6, 64, 240, 8)
    for seed in range(20):
        rows = drawn_job(seed).rows()
        for goal in (Goal(Objective("total")), Goal(Objective("first", 5))):
            fast = predict(rows, limits, np.arange(len(rows)), goal=goal)
            assert fast == simulated(rows, limits, goal=goal)


def test_the_makespan_is_planned_as_before() -> None:
    job, limits = drawn_job(1), EngineLimits(6, 128, 320, 16)
    plain, objective = planned(job, limits, None), planned(job, limits, Objective("total"))
    assert plain.aim is None
    assert "aim" not in plain.to_json()
    assert plain.shares[0].predicted is not None
    assert plain.shares[0].predicted.value is None
    assert objective.bound == plain.bound


def test_a_raised_bound_or_value_is_refused_by_verify() -> None:
    plan = planned(drawn_job(2), EngineLimits(6, 128, 320, 16), Objective("total"))
    assert plan.aim is not None
    bound = plan.aim.bound
    forged = replace(plan, aim=replace(plan.aim, bound=replace(bound, value=bound.value + 1)))
    assert "proves" in str(batchbound.verify(forged))
    share = plan.shares[0]
    assert share.predicted is not None
    lower = replace(share, predicted=replace(share.predicted, value=bound.value))
    assert "simulated again" in str(batchbound.verify(replace(plan, shares=(lower,))))


def test_plans_of_an_objective_are_read_again(tmp_path: Path) -> None:
    plan = planned(drawn_job(3), EngineLimits(4, 64), Objective("groups", 2))
    plan.save(tmp_path / "plan.json")
    again = IterationPlan.load(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert batchbound.verify(tmp_path / "plan.json") is None


def test_stages_are_planned_for_an_objective_without_a_bound(tmp_path: Path) -> None:
    work = replace(Workload.from_lengths([9] * 12, [40] + [3] * 11), group=np.arange(12) // 3)
    problem = Problem(work, UNIT, 3)
    makespan = batchbound.make_plan(problem, limits=Limits(work=100))
    for objective in OBJECTIVES:
        plan = make_aimed_plan(problem, objective, limits=Limits(work=150))
        assert plan.goal is not None
        assert plan.value is not None
        assert plan.value <= plan.goal.value(makespan.schedule.finishes(problem))
        assert plan.schedule.check(problem) is None
        assert (plan.maker.status, plan.maker.stopped_by) == ("feasible", StoppedBy.WORK)
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").value == plan.value
        assert batchbound.verify(plan) is None


def test_short_requests_come_first_in_stages() -> None:
    work = Workload.from_lengths([5] * 6, [30, 30, 2, 2, 2, 2])
    plan = make_aimed_plan(Problem(work, UNIT, 2), Objective("first", 4), limits=Limits(work=100))
    assert set(np.argsort(plan.schedule.finishes(plan.problem))[:4]) == {2, 3, 4, 5}


def test_the_command_states_objective_bound_and_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("input_tokens,output_tokens\n10,20\n30,5\n5,40\n8,12\n9,9\n70,3\n", encoding="utf-8")
    words = [
        "plan",
        str(table),
        "--slots",
        "2",
        "--work",
        "30",
        "-o",
        str(tmp_path / "plan.json"),
        "--overwrite",
    ]
    assert main([*words, "--for", "vllm", "--objective", "total"]) == 0
    # Shortest first on two slots: 3 + 5 + 12 + 17 + 32 + 57.
    assert "predicted total" in (out := capsys.readouterr().out)
    assert "126, by shortest first" in out
    assert main([*words, "--for", "vllm", "--objective", "first:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["objective"], found["value"], found["bound_value"], found["status"]) == (
        "first:2",
        5,
        5,
        "optimal",
    )
    assert main([*words, "--objective", "total", "--cost", "paper"]) == 0
    assert "no bound" in (out := capsys.readouterr().out)
    assert "gap to the bound" not in out
    assert main([*words, "--objective", "first:7"]) == 2
    assert "there are 6 requests" in capsys.readouterr().err
    assert main([*words, "--objective", "total", "--replicas", "2"]) == 2


def test_unknown_lengths_and_objectives_are_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one", "max_tokens": 5}\n{"prompt": "two", "max_tokens": 7}\n', "utf-8")
    for objective, message in (
        ("total", "lengths of its completions are unknown"),
        ("soon", "none of makespan"),
    ):
        with pytest.raises(InputError, match=message):
            batchbound.plan(prompts, slots=2, prompt_column="prompt", objective=objective)
        with pytest.raises(InputError, match=message):
            batchbound.plan_for_engine(
                prompts,
                slots=2,
                prompt_column="prompt",
                objective=objective,
                engine="vllm",
                output=tmp_path / "plan.json",
            )


def test_published_orders_are_permutations() -> None:
    job = drawn_job(4, 30, shared=True)
    releasable = Releasable.of_rows(job.rows(), job.requests(), exact=True)
    for limits in (EngineLimits(4), EngineLimits(6, 64, 320, 16)):
        orders = published_orders(releasable, limits)
        assert orders.keys() == PUBLISHED.keys()
        for order in orders.values():
            assert sorted(order.tolist()) == list(range(30))
