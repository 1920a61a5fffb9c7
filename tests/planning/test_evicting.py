"""Plans that follow a policy which evicts requests, where that takes less than the best schedule."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow

import batchbound
from batchbound import Limits, Plan, make_plan
from batchbound.cli import main
from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.policy import Policy
from batchbound.heuristics.registry import POLICIES, policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.simulator import KEEPS_KV
from batchbound.models.bounds.fleet import work_bound
from batchbound.models.bounds.prove import evicting_bound
from batchbound.planning import evicting
from batchbound.planning.evicting import EVICTING, following_plan
from batchbound.planning.fleet import make_fleet_plan
from batchbound.simulating import _carried_out as simulate_plan

COST = CostModel(0.004, 1e-5, 0.006, 2e-5)
EIGHT = Problem(Workload.from_lengths([50] * 8, [64] * 8), COST, 8, kv_capacity=300)


PAIRS = replace(EIGHT, workload=replace(EIGHT.workload, group=np.arange(8) // 2))
"""The same in pairs, whose lengths the policy `learned` learns step by step."""


def planned(problem: Problem) -> Plan:
    return make_plan(problem, limits=Limits(work=4))


@pytest.fixture(scope="module")
def eight() -> Plan:
    return planned(EIGHT)


def drawn(seed: int) -> Problem:
    """Return a job of 2 to 40 requests whose KV capacity holds 1 to 4 of the longest."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 41))
    prompts = rng.integers(1, 100, count)
    lengths = np.maximum(1, rng.lognormal(3.5, 0.8, count)).astype(int)
    cost = replace(COST, prefill_base=float(rng.choice([0.004, 0.1])))
    capacity = int((prompts + lengths).max() * rng.uniform(1.05, 4))
    work = Workload.from_lengths(prompts.tolist(), lengths.tolist())
    return Problem(work, cost, int(rng.integers(2, 17)), kv_capacity=capacity)


def test_a_plan_follows_a_policy_that_takes_less_by_evicting_requests(eight: Plan) -> None:
    plan = eight
    assert plan.followed is not None
    assert plan.followed.evictions > 0
    assert plan.claim is not None
    assert plan.claim.seconds <= plan.seconds < plan.makespan
    assert batchbound.verify(plan) is None


def tiny(seed: int) -> Problem:
    """Return 2 to 4 requests of 1 to 4 tokens, in scarce memory."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 5))
    prompts, lengths = rng.integers(1, 5, count), rng.integers(1, 5, count)
    cost = CostModel(*rng.choice([0.0, 0.3, 1.0], 2), *rng.choice([0.1, 0.5, 1.0], 2))
    capacity = int((prompts + lengths).max() + rng.integers(0, 6))
    work = Workload.from_lengths(prompts.tolist(), lengths.tolist())
    return Problem(
        work, cost, int(rng.integers(1, 4)), kv_capacity=capacity, prefill_emits_first_token=bool(seed % 2)
    )


def least_seconds_where_evictions_are_free(problem: Problem) -> float:
    """Return the least seconds if any requests may run at each step, and none is computed twice."""
    count, steps = len(problem), problem.decode_steps.tolist()
    prompts, held = problem.prompt_tokens.tolist(), problem.kv_at_start.tolist()
    capacity = problem.kv_capacity or 0

    @cache
    def least(begun: tuple[bool, ...], done: tuple[int, ...]) -> float:
        left = [i for i in range(count) if not begun[i] or done[i] < steps[i]]
        best = float("inf") if left else 0.0
        for size in range(1, min(problem.slots, len(left)) + 1):
            for chosen in combinations(left, size):
                kv_tokens = sum(held[i] + done[i] for i in chosen)
                if kv_tokens > capacity:
                    continue
                fresh = [i for i in chosen if not begun[i]]
                seconds = problem.cost.prefill_seconds(sum(prompts[i] for i in fresh)) if fresh else 0.0
                active = [i for i in chosen if steps[i] > done[i]]
                if active:
                    seconds += problem.cost.decode_seconds(len(active), kv_tokens)
                after = least(
                    tuple(begun[i] or i in chosen for i in range(count)),
                    tuple(done[i] + (i in active) for i in range(count)),
                )
                best = min(best, seconds + after)
        return best

    return least((False,) * count, (0,) * count)


@pytest.mark.parametrize("seed", mostly_slow(range(400), fast=range(25)))
def test_the_bound_of_a_followed_policy_holds_for_engines_that_keep_evicted_kv_cache(seed: int) -> None:
    problem = tiny(seed)
    least = least_seconds_where_evictions_are_free(problem)
    assert evicting_bound(problem).seconds <= least + 1e-9
    assert work_bound(Fleet.of(problem, 1)).seconds <= least + 1e-9
    for name in EVICTING:
        trace = simulate(problem, name, swap=KEEPS_KV)
        assert trace.makespan >= least - 1e-9, name


@pytest.mark.slow
def test_no_plan_takes_longer_than_a_policy_that_evicts() -> None:
    for seed in range(3):
        problem = drawn(seed)
        plan, rules = planned(problem), [simulate(problem, name, swap=0.0).makespan for name in POLICIES]
        assert plan.seconds <= min(rules) * (1 + 1e-9), seed
        assert batchbound.verify(plan) is None, seed


def test_without_evictions_a_plan_follows_its_schedule() -> None:
    assert planned(replace(EIGHT, kv_capacity=10_000)).followed is None
    schedule = make_plan(EIGHT, limits=Limits(work=4), evicting=False)
    assert schedule.followed is None


def test_a_plan_names_the_rules_that_there_was_no_time_for() -> None:
    schedule = make_plan(PAIRS, limits=Limits(work=4), evicting=False)
    few = following_plan(schedule, most_requests=1)
    assert (few.followed, few.maker.message) == (None, "rules that evict requests, not tried: fcfs, learned")
    late = following_plan(schedule, until=0.0)
    assert late.followed is not None
    # Eight requests are counted before the clock is looked at.
    assert (late.followed.policy, late.maker.message) == (
        "fcfs",
        "rules that evict requests, not tried: learned",
    )


def test_counted_rules_run_to_their_end_on_small_jobs_though_late(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload.from_lengths([50] * 200, [64] * 200)
    schedule = make_plan(replace(EIGHT, workload=work), limits=Limits(work=1), evicting=False)
    plan = following_plan(schedule, until=0.0)
    assert plan.followed is not None
    assert plan.maker.message == ""
    monkeypatch.setattr(evicting, "QUICK_REQUESTS", 0)
    late = following_plan(schedule, until=0.0)
    assert (late.followed, late.maker.message) == (
        None,
        "rules that evict requests, not tried: fcfs, learned",
    )


def test_ctrl_c_while_rules_are_simulated_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_plan(PAIRS, limits=Limits(work=4), evicting=False)

    def pressed(name: str, problem: Problem) -> Policy:
        if name != "fcfs":
            raise KeyboardInterrupt
        return policy_named(name, problem)

    monkeypatch.setattr("batchbound.planning.evicting.policy_named", pressed)
    plan = following_plan(schedule)
    assert plan.followed is not None
    assert plan.followed.policy == "fcfs"
    assert plan.maker.stopped_by == "interrupt"
    assert batchbound.verify(plan) is None


@pytest.mark.parametrize("moment", ["batchbound.planning.plan.Maker", "batchbound.solvers.solve._result"])
def test_ctrl_c_between_the_parts_of_a_plan_keeps_it(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = moment.rsplit(".", 1)
    real, pressed = getattr(importlib.import_module(module), name), list[bool]()

    def once(*given: object, **named: object) -> object:
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(importlib.import_module(module), name, once)
    plan = make_plan(EIGHT, limits=Limits(work=4))
    assert (plan.maker.stopped_by, plan.schedule.check(EIGHT)) == ("interrupt", None)


def test_a_proof_about_schedules_is_none_about_the_followed_policy() -> None:
    schedule = make_plan(EIGHT, limits=Limits(work=4), evicting=False)
    proven = replace(schedule, maker=replace(schedule.maker, stopped_by="proof"))
    plan = following_plan(proven)
    assert plan.followed is not None
    assert (plan.maker.status, plan.maker.stopped_by) == ("feasible", "finished")


def test_a_fleet_follows_a_policy_that_takes_less_by_evicting_requests(tmp_path: Path) -> None:
    fleet = Fleet.of(replace(EIGHT, workload=Workload.from_lengths([50] * 16, [64] * 16)), 2)
    plan = make_fleet_plan(fleet, limits=Limits(work=4))
    assert plan.followed is not None
    assert plan.followed.evictions > 0
    assert plan.claim is not None
    assert plan.claim.seconds <= plan.seconds < plan.makespan
    assert batchbound.verify(plan) is None
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    simulated = simulate_plan(loaded, loaded.workload.output_tokens)
    assert max(trace.makespan for trace in simulated) == pytest.approx(plan.seconds)
    assert sum(trace.evictions for trace in simulated) == plan.followed.evictions
    for changed in ({"seconds": plan.seconds / 2}, {"evictions": 1}, {"bound": plan.bound}):
        false = replace(plan, followed=replace(plan.followed, **changed))
        assert batchbound.verify(false) is not None, changed


def test_what_a_followed_policy_is_said_to_take_is_simulated_again(eight: Plan) -> None:
    plan = eight
    assert plan.followed is not None
    assert plan.bound is not None
    false = {
        "no policy is called 'none'": replace(plan.followed, policy="none"),
        "simulated again": replace(plan.followed, seconds=plan.followed.seconds / 2),
        "without evictions": replace(plan.followed, bound=plan.bound),
    }
    for said, followed in false.items():
        assert said in str(batchbound.verify(replace(plan, followed=followed)))


def test_a_plan_that_follows_a_policy_is_written_read_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, cost = tmp_path / "job.csv", tmp_path / "cost.json"
    job.write_text("input_tokens,output_tokens\n" + "50,64\n" * 8)
    cost.write_text(json.dumps({"batchbound_cost": 2, "cost": asdict(COST)}))
    path = str(tmp_path / "plan.json")
    words = [str(job), "--slots", "8", "--kv-capacity", "300", "--first-token", "decode"]
    assert main(["plan", *words, "--cost", str(cost), "--work", "4", "-o", path, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "the plan follows" in said.err
    assert found["bound_of"] == "every schedule, evicting or not"
    assert found["bound_s"] <= found["makespan_s"] < found["schedule_s"]
    assert found["status"] == "feasible"
    plan = Plan.load(path)
    assert plan.followed is not None
    assert plan.seconds == found["makespan_s"]
    assert main(["verify", path]) == 0
    told = capsys.readouterr().out
    assert "simulated again" in told
    assert "no schedule takes less than" in told


def test_each_claim_says_that_it_is_of_schedules_without_evictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, cost = tmp_path / "job.csv", tmp_path / "cost.json"
    job.write_text("input_tokens,output_tokens\n" + "50,64\n" * 8)
    cost.write_text(json.dumps({"batchbound_cost": 2, "cost": asdict(COST)}))
    words = [str(job), "--slots", "8", "--first-token", "decode", "--cost", str(cost)]
    commands = {"compare": ["--solvers", "lpt-ski"], "bound": [], "simulate": ["--policy", "lpt"]}
    for command, more in commands.items():
        for capacity, said in (("300", True), ("9000", False)):
            assert main([command, *words, "--kv-capacity", capacity, *more]) == 0
            shown = capsys.readouterr()
            assert ("evict no request" in shown.out + shown.err or "evicts no request" in shown.out) is said
    schedule = make_plan(EIGHT, limits=Limits(work=4), evicting=False)
    assert "every schedule that evicts no request" in str(schedule)
    assert "every schedule that evicts no request" in str(batchbound.solve(EIGHT, limits=Limits(work=4)))
    assert "evicts" not in str(batchbound.solve(replace(EIGHT, kv_capacity=9_000), limits=Limits(work=4)))


def test_a_plan_that_contradicts_its_bound_or_its_followed_policy_is_not_loaded(
    eight: Plan, tmp_path: Path
) -> None:
    plan, path = eight, tmp_path / "plan.json"
    assert plan.bound is not None
    assert plan.followed is not None
    high = Bound(2 * plan.makespan, plan.bound.source, {"all": 2 * plan.makespan}, plan.bound.certificate)
    false = {
        "its bound is": replace(plan, bound=high),
        "above the plan's 0.1 s": replace(plan, followed=replace(plan.followed, seconds=0.1)),
        "the schedule": replace(plan, followed=replace(plan.followed, seconds=2 * plan.makespan)),
    }
    for said, forged in false.items():
        forged.save(path)
        with pytest.raises(InputError, match=said):
            Plan.load(path)


def test_a_fleets_plan_names_how_many_rules_there_was_no_time_for() -> None:
    fleet = Fleet.of(replace(EIGHT, kv_capacity=9_000), 2)
    assert make_fleet_plan(fleet, limits=Limits(work=4)).maker.message == ""
    late = make_fleet_plan(fleet, limits=Limits(seconds=1e-9)).maker.message
    assert late.endswith(f"of {len(POLICIES)} simple rules were tried")
