"""One plan for several replicas: made, written, read again, and made by the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.costs.cost import CalibratedCost, CostModel, FitError
from batchbound.data.files.disk import InputError
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.lengths.prediction_error import LogNormalError
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload
from batchbound.executor.jobs.fleet_run import remaining_shares
from batchbound.heuristics.dispatch import dispatch
from batchbound.heuristics.fleet.simulation import simulate_fleet
from batchbound.heuristics.registry import policy_named
from batchbound.models.certificates.fleet import verify_fleet_bound
from batchbound.planning.fleet import fleet_of, make_fleet_plan, make_robust_fleet_plan
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import Limits
from batchbound.solvers.search.constructive import ski_rental_schedule

BRIEF = Limits(work=1)


def problem(count: int = 24, slots: int = 4) -> Problem:
    return Problem(generate("table3", 0, count), CostModel.paper(), slots)


def test_a_fleets_plan_survives_its_file(tmp_path: Path) -> None:
    plan = make_fleet_plan(Fleet.of(problem(), 3), limits=BRIEF)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.digest() == plan.digest()
    assert again.shares.check(plan.fleet) is None
    assert again.gap == plan.gap
    assert again.bound is not None
    assert verify_fleet_bound(again.fleet, again.bound) is None


def test_a_fleets_plan_is_no_worse_than_any_policy_after_any_dispatch() -> None:
    # The quick replica is busy at first: who is there last decides.
    quick = Replica(CostModel(0.0025, 0.000013, 0.0029, 0.000021), 16, busy=3.0)
    workload = Workload.from_lengths([1793, 2878, 2878, 1793, 2878, 1793], [16] * 6)
    fleet = Fleet(workload, (quick, Replica(CostModel.paper(), 1)), prefill_emits_first_token=True)
    plan = make_fleet_plan(fleet, limits=BRIEF)
    for rule in ("lpt", "mico", "hash", "round-robin"):
        for name in ("fcfs", "lpt", "packing"):
            ran = simulate_fleet(fleet, dispatch(fleet, rule), policy=partial(policy_named, name))
            assert plan.makespan <= ran.makespan * (1 + 1e-9), (rule, name)


def test_where_no_time_is_left_each_replica_is_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # A request that is long beside the others has requests shared out in other ways, too.
    outputs = np.append(900, np.full(11, 10))
    fleet = Fleet.of(Problem(Workload.from_lengths(outputs, outputs), CostModel.paper(), 4), 3)
    passes: list[int] = []

    def counted(problem: Problem, **options: float) -> Schedule:
        passes.append(len(problem))
        return ski_rental_schedule(problem, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("batchbound.solvers.fleet.ski_rental_schedule", counted)
    found = plan_fleet(fleet, limits=Limits(seconds=1e-9))
    assert found.schedule.check(fleet) is None
    assert sum(passes) == len(fleet)


def test_a_rule_that_cannot_share_out_predicted_lengths_is_refused() -> None:
    with pytest.raises(InputError, match="does not spread groups"):
        make_robust_fleet_plan(
            Fleet.of(problem(), 2), LogNormalError(0.3), groups="spread", rule="karmarkar-karp"
        )


@pytest.fixture(scope="module")
def plan_of_two() -> Plan:
    return make_fleet_plan(Fleet.of(problem(), 2), limits=BRIEF)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"makespan_s": 1.0}, "not 1.0"),
        ({"groups": "apart"}, r"field 'groups': 'apart' is none of any, together, spread"),
        ({"fleet": []}, "field 'fleet': is not an object"),
        ({"batchbound_plan": 99}, "of version 99, not 3"),
    ],
)
def test_a_damaged_plan_is_refused(
    plan_of_two: Plan, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**plan_of_two.to_json(), **change}))
    with pytest.raises(InputError, match=said):
        Plan.load(tmp_path / "plan.json")


def test_what_is_left_stays_where_it_was_planned() -> None:
    plan = make_fleet_plan(Fleet.of(problem(), 3), limits=BRIEF)
    left = np.flatnonzero(plan.shares.replica_of != 1)[::2]
    fleet, schedule = remaining_shares(plan, left)
    assert schedule.check(fleet) is None
    assert schedule.schedules[1] is None
    assert fleet.workload.ids.tolist() == plan.fleet.workload.ids[left].tolist()
    assert schedule.replica_of.tolist() == plan.shares.replica_of[left].tolist()


def test_a_file_says_how_replicas_differ(tmp_path: Path) -> None:
    path = tmp_path / "replicas.json"
    entries = [{"count": 2}, {"speed": 2, "slots": 8, "busy": 3.5}]
    path.write_text(json.dumps({"replicas": entries}))
    fleet = fleet_of(problem(), str(path))
    assert [replica.slots for replica in fleet.replicas] == [4, 4, 8]
    assert fleet.replicas[2].cost.decode_base == CostModel.paper().decode_base / 2
    assert fleet.replicas[2].busy == 3.5
    plan = make_fleet_plan(fleet, limits=BRIEF)
    tokens = np.bincount(plan.shares.replica_of, weights=fleet.workload.output_tokens)
    assert tokens[2] > 2 * tokens[0]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "lists no replicas"),
        ([3], "not an object"),
        ([{"size": 3}], "field 'replicas.0.size': the field is unknown"),
        ([{"slots": 1.5}], "not a whole number"),
        ([{"speed": 0}], "above 0"),
        ([{"busy": -1}], "not negative"),
    ],
)
def test_a_wrong_file_of_replicas_names_the_entry(tmp_path: Path, entries: list[object], said: str) -> None:
    path = tmp_path / "replicas.json"
    path.write_text(json.dumps({"replicas": entries}))
    with pytest.raises(InputError, match=said):
        fleet_of(problem(), str(path))


@pytest.mark.parametrize("spec", ["0", "-1", "many"])
def test_replicas_are_a_number_or_a_file(spec: str) -> None:
    with pytest.raises(InputError, match=r"neither a number of replicas nor a file|replicas serve nothing"):
        fleet_of(problem(), spec)


def batch(path: Path, prompts: list[str]) -> str:
    with path.open("w") as stream:
        for i, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": 4 + i % 7}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            stream.write(json.dumps(line) + "\n")
    return str(path)


@pytest.mark.parametrize(("groups", "spread"), [("together", 1), ("spread", 2)])
def test_the_command_plans_for_a_fleet(
    tmp_path: Path, groups: str, spread: int, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = batch(tmp_path / "prompts.jsonl", [f"prompt {i // 3}" for i in range(24)])
    output = tmp_path / "plan.json"
    words = ["plan", prompts, "--model", "tiny:llama", "--replicas", "2", "--time-limit", "0.2"]
    assert main([*words, "--slots", "2", "--groups", groups, "-o", str(output)]) == 0
    assert "24 requests on 2 replicas" in " ".join(capsys.readouterr().out.split())
    plan = Plan.load(output)
    for first in range(0, 24, 3):
        assert len(set(plan.shares.replica_of[first : first + 3].tolist())) == spread
    assert main([*words, "--slots", "auto", "-o", str(tmp_path / "other.json")]) == 2
    assert "--slots auto has no effect with --replicas" in capsys.readouterr().err
    assert main(["verify", str(output)]) == 0
    assert "takes less than" in capsys.readouterr().out
    for other in ("1", "3"):
        assert main(["run", str(output), "--model", "tiny:llama", "--replicas", other]) == 2
        assert f"for 2 replicas, not {other}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fleet_of_predicted_lengths_follows_what_reaches_most_and_is_carried_out_on_true_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing tells the completions apart but what they have outlived; none has more than 500 tokens.
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    truth = np.minimum(500, 1 + rng.exponential(100, 600).astype(np.int64))
    past = np.minimum(500, 1 + rng.exponential(100, 2000).astype(np.int64))
    for name, lengths in (("told.csv", [100] * 600), ("true.csv", truth.tolist())):
        rows = "".join(f"5,{length}\n" for length in lengths)
        Path(name).write_text("input_tokens,output_tokens\n" + rows)
    Path("pairs.csv").write_text("predicted,actual\n" + "".join(f"100,{each}\n" for each in past.tolist()))
    fit = FitError(0.0, 0.0, 0.0, 1, 1)
    CalibratedCost(CostModel(0.01, 0.0, 1.0, 0.0), fit, {"name": "by hand"}, "2026-01-01", (), ()).save(
        "c.json"
    )
    words = ["--replicas", "2", "--slots", "8", "--cost", "c.json"]
    assert main(["plan", "told.csv", *words, "--length-error", "pairs.csv", "--dispatch", "mico"]) == 0
    assert main(["verify"]) == 0
    plan = Plan.load("plan.json")
    assert plan.expected is not None
    assert plan.expected.tail is not None
    assert plan.expected.low <= plan.expected.mean <= plan.expected.high
    assert plan.expected.samples == 19
    capsys.readouterr()
    assert main(["simulate", "true.csv", "--plan", "plan.json", "--json", "--trace", "t.jsonl"]) == 0
    followed = json.loads(capsys.readouterr().out)
    assert main(["simulate", "true.csv", *words, "--dispatch", "mico", "--policy", "fcfs", "--json"]) == 0
    served = json.loads(capsys.readouterr().out)
    assert followed["requests"] == served["requests"] == 600
    assert 0 <= followed["gap"] < 0.7 * served["gap"]
    # One puts requests back, and is held against what no run of the same lengths that may do so can beat.
    assert 0.999 * served["run_bound_s"] <= followed["run_bound_s"] <= served["run_bound_s"]
    # Requests that gave way went on elsewhere: no replica has a bound of its own then.
    assert followed["evictions"] > 0
    assert all(each["gap"] is None for each in followed["replicas"])
    assert all(each["gap"] >= 0 for each in served["replicas"])
    assert len(Trace.load("t.0.jsonl")) + len(Trace.load("t.1.jsonl")) == 600


def test_dispatch_shares_out_as_its_rule_says(tmp_path: Path) -> None:
    fleet = Fleet.of(problem(), 3)
    plan = make_fleet_plan(fleet, rule="round-robin", limits=BRIEF)
    assert plan.shares.replica_of.tolist() == [i % 3 for i in range(24)]
    assert plan.shares.check(plan.fleet) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "table3:0:8", "--dispatch", "mico"], "--dispatch has no effect without --replicas"),
        (["simulate", "table3:0:8", "--dispatch", "mico"], "--dispatch has no effect without --replicas"),
        (
            ["simulate", "table3:0:8", "--replicas", "2", "--assignment", "optimal"],
            "--assignment has no effect with --replicas",
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_ray_names_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        prompts = batch(tmp_path / "prompts.jsonl", ["one", "two", "three"])
        words = [
            "plan",
            prompts,
            "--model",
            "tiny:llama",
            "--replicas",
            "2",
            "-o",
            str(tmp_path / "plan.json"),
        ]
        assert main([*words, "--time-limit", "0.2"]) == 0
        answers = ["-o", str(tmp_path / "answers.jsonl"), "--trace", str(tmp_path / "trace.jsonl")]
        assert main(["run", str(tmp_path / "plan.json"), "--model", "tiny:llama", *answers]) == 2
        assert "run `pip install '.[ray]'`" in capsys.readouterr().err
