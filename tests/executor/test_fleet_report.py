"""The report of a fleet, on replicas small enough to add up by hand, and as the command prints it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.fleet import Fleet, FleetSchedule, Replica
from batchbound.data.plan import Maker, Plan
from batchbound.data.report import Report
from batchbound.data.schedule import Schedule
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload
from batchbound.executor.processes.ray_fleet import FleetOutcome
from batchbound.executor.reports.report import plan_report, served_part, simulated
from batchbound.executor.reports.tables import report_rows
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.heuristics.simulate import simulate
from batchbound.judging import report as report_of
from batchbound.models.bounds.fleet import fleet_bound

COST = CostModel(prefill_base=1.0, prefill_per_token=0.5, decode_base=1.0, decode_per_slot=0.5)
MAKER = Maker("by hand", "0", "feasible", "time", 0.0, 0)


def plan(replicas: int = 2, busy: float = 0.0) -> Plan:
    """Return requests of 2 and 3 steps side by side on replica 0, and one of 4 decode steps on replica 1."""
    workload = Workload.from_lengths([2, 2, 2], [2, 4, 3])
    one = Replica(COST, slots=2)
    fleet = Fleet(workload, (one, replace(one, busy=busy), *[one] * (replicas - 2)))
    both = Schedule(np.array([0, 0]), np.array([0, 1]), np.array([3]))
    alone = Schedule(np.array([0]), np.array([0]), np.array([4]))
    schedule = FleetSchedule(np.array([0, 1, 0]), (both, alone, *[None] * (replicas - 2)))
    # Replica 0: a stage of 4 tokens, 3 s; two decode steps of both, 4 s; one of one, 1.5 s.
    # Replica 1: a stage of 2 tokens, 2 s; four decode steps of one, 6 s.
    bound = Bound(8.0, "by hand", {"decode_steps": 8.0}, {"kind": "none"})
    return Plan(fleet, schedule, schedule.makespan(fleet), bound, MAKER)


def reported(plan: Plan, traces: Sequence[Trace]) -> Report:
    """Return the report of a run against the bound of what it served."""
    served = served_part(plan.fleet, traces)
    return plan_report(plan, traces, run_bound=None if served is None else fleet_bound(served))


def test_the_fleets_makespan_is_that_of_its_last_replica() -> None:
    report = reported(plan(), simulated(plan()))
    assert report.planned_ends == (8.5, 8.0)
    assert (report.makespan, report.model_makespan, report.planned_makespan) == (8.5, 8.5, 8.5)
    assert report.plan_gap == report.run_gap == 0.5 / 8
    assert (report.requests, report.resumed, report.moved, report.lost) == (3, 0, 0, {})
    first, second = report.replicas
    assert first is not None
    assert second is not None
    assert (first.requests, first.decode_steps, second.requests, second.decode_steps) == (2, 3, 1, 4)
    assert first.utilization == pytest.approx((5 / 2) * 2.0 / 8.5)


def test_what_the_engines_of_a_fleet_add_counts_as_far_as_the_last_replica_is_later() -> None:
    def noted(costs: CostModel, replica: int) -> str:
        made = plan()
        priced = list(made.fleet.replicas)
        priced[replica] = replace(priced[replica], cost=costs)
        made = replace(made, fleet=replace(made.fleet, replicas=tuple(priced)))
        traces = [replace(trace, engine={"name": "a machine"}) for trace in simulated(made)]
        report = plan_report(made, traces, run_bound=made.bound)
        return next(row.note for row in report_rows(report) if row.name == "gap of the run")

    # Two bursts on replica 0, which ends at 8.5 s, one on replica 1, which ends at 8 s; the bound is 8 s.
    dearer = replace(COST, decode_per_change=0.4)
    assert noted(dearer, 0).endswith("6.25 % by its schedule, 10.00 % by changes of the batch")
    assert noted(dearer, 1).endswith("6.25 % by its schedule, 0.00 % by changes of the batch")


def test_what_a_replica_was_busy_with_counts_as_the_plan_counts_it() -> None:
    busy = plan(busy=4.0)
    report = reported(busy, simulated(busy))
    assert report.planned_makespan == report.model_makespan == 12.0
    # The requests of replica 0 end at 7 and 8.5 s, the other's at 12 s.
    assert report.finish is not None
    assert report.finish.p50 == 8.5
    assert report.finish.p99 == pytest.approx(12.0, abs=0.1)


def served(replica: int, members: list[int], schedule: Schedule, tokens: list[int] | None = None) -> Trace:
    problem = plan().fleet.problem_of(replica, members)
    actual = None if tokens is None else np.array(tokens, dtype=np.int64)
    return simulate(problem, Replay(schedule, problem), actual)


def test_a_request_served_elsewhere_is_told_as_moved() -> None:
    early = served(0, [0], Schedule(np.array([0]), np.array([0]), np.array([2])))
    late = served(1, [1, 2], Schedule(np.array([0, 0]), np.array([0, 1]), np.array([4])))
    report = reported(plan(), (early, late))
    assert report.moved == 1
    # Replica 1 now has 4 and 3 steps beside each other: a stage of 3 s, 3 decode steps of 2 s, one of 1.5 s.
    assert report.model_makespan == 10.5


def test_lengths_that_came_out_shorter_have_a_bound_of_their_own() -> None:
    first = served(0, [0, 2], Schedule(np.array([0, 0]), np.array([0, 1]), np.array([3])), [1, 1])
    second = served(1, [1], Schedule(np.array([0]), np.array([0]), np.array([4])), [1])
    report = reported(plan(), (first, second))
    assert report.run_bound is not None
    assert report.bound is not None
    assert report.run_bound < report.bound
    assert report.model_makespan == 5.0
    assert report.run_gap == pytest.approx((5.0 - report.run_bound) / report.run_bound)


def test_a_replica_without_work_is_a_line_of_the_table() -> None:
    idle = plan(replicas=3)
    report = reported(idle, simulated(idle))
    assert report.replicas[2] is None
    line = next(row for row in report_rows(report) if row.name == "replica 2")
    assert line.note == "no completion; planned 0.00 ms"


def test_a_dead_replica_is_named_with_its_cause() -> None:
    first, second = simulated(plan())
    report = reported(plan(), (first, replace(second, engine={"lost": "ActorDiedError"})))
    assert report.lost == {1: "ActorDiedError"}
    assert any("died (ActorDiedError)" in row.note for row in report_rows(report) if row.name == "replica 1")


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        (lambda first, second: (first,), "1 traces for 2 replicas"),
        (lambda first, second: (first, first), "two traces serve 'request-0'"),
        (lambda first, second: (first, replace(second, ids=("other",))), "'other', which is not a request"),
    ],
)
def test_traces_of_another_plan_are_refused(traces: object, said: str) -> None:
    assert callable(traces)
    with pytest.raises(ValueError, match=said):
        reported(plan(), traces(*simulated(plan())))


def test_a_report_needs_the_trace_of_each_replica() -> None:
    with pytest.raises(InputError, match=r"0 traces for 2 replicas\. Give the trace of each"):
        report_of(plan(), [])


def command(folder: Path, *words: str) -> int:
    return main(["report", str(folder / "plan.json"), *words])


def test_the_command_reports_the_plan_and_the_run_of_a_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan().save(tmp_path / "plan.json")
    assert command(tmp_path, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["requests"], planned["plan_makespan_s"], planned["gap"]) == (3, 8.5, 0.0625)
    first, second = simulated(plan())
    first.save(tmp_path / "trace.0.jsonl")
    replace(second, engine={"name": "huggingface", "lost": "died"}).save(tmp_path / "trace.1.jsonl")
    assert command(tmp_path, "trace.1.jsonl", "--perfetto", "events.json", "--gantt", "gantt.png") == 0
    said = capsys.readouterr().out
    assert "replica 1" in said
    assert "died (died)" in said
    events = json.loads((tmp_path / "events.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "trace.1.jsonl").unlink()
    assert command(tmp_path) == 2
    assert "trace.1.jsonl: no such file" in capsys.readouterr().err


def test_a_fleets_trace_survives_its_file_when_it_is_empty(tmp_path: Path) -> None:
    Trace.empty(3).save(tmp_path / "trace.jsonl")
    again = Trace.load(tmp_path / "trace.jsonl")
    assert (len(again), again.slots, again.makespan, again.stages) == (0, 3, 0.0, ())


class ReplicasHere:
    """What `run` has of a fleet, without Ray: every answer is of one and the same token."""

    def __init__(self, spec: object, replicas: int, address: str | None, patience: float | None) -> None:
        self.replicas = replicas

    def serve(
        self,
        fleet: Fleet,
        schedule: FleetSchedule,
        prompts: object,
        most_tokens: object,
        on_answer: Callable[[int, list[int]], None],
        backoff: bool,
        policy: object,
        listener: object,
    ) -> FleetOutcome:
        for request, length in enumerate(fleet.workload.output_tokens.tolist()):
            on_answer(request, [65] * length)
        whole = Plan(fleet, schedule, 1.0, Bound(1.0, "none", {}, {}), MAKER)
        return FleetOutcome(simulated(whole), {}, 0)

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_a_plan_for_one_replica_that_ran_on_two_is_reported_as_of_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    monkeypatch.setattr("batchbound.executor.processes.ray_fleet.RayFleet", ReplicasHere)
    monkeypatch.chdir(tmp_path)
    lines = [{"custom_id": f"r{i}", "body": {"prompt": "Hi", "max_tokens": 3 + i}} for i in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "out").mkdir()
    assert main(["plan", "in.jsonl", "--slots", "1", "--time-limit", "0.1", "--model", "tiny:llama"]) == 0
    assert main(["run", "--model", "tiny:llama", "--replicas", "2", "--trace", "out/t.jsonl", "--json"]) == 0
    ran = json.loads(capsys.readouterr().out.splitlines()[-1])
    for trace in ("out/t.jsonl", "out/t.0.jsonl", "out/t.1.jsonl"):
        assert main(["report", "plan.json", trace, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [each["requests"] for each in told["replicas"]] == [
            each["requests"] for each in ran["replicas"]
        ]
        assert told["gap"] == ran["gap"]
    assert main(["verify", "out/t.plan.json"]) == 0
    kept = Plan.load("out/t.plan.json")
    assert kept.provenance.prompts is not None
    assert (tmp_path / "out" / kept.provenance.prompts.path).resolve() == tmp_path / "in.jsonl"
    # Typed again it is reported as it was shared out then, though the replicas might change places now.
    swapped = FleetSchedule(1 - kept.shares.replica_of, kept.shares.schedules[::-1])
    other = replace(kept, shares=swapped, provenance=Plan.load("plan.json").provenance)
    monkeypatch.setattr("batchbound.run_job.run.shared_out", lambda *_: other)
    assert main(["run", "--model", "tiny:llama", "--replicas", "2", "--trace", "out/t.jsonl", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (again["requests"], again["gap"]) == (ran["requests"], ran["gap"])
    assert main(["plan", "in.jsonl", "--lengths", "constant:2", "--slots", "1", "-o", "other.json"]) == 0
    assert main(["report", "other.json", "out/t.0.jsonl"]) == 2
    assert "t.plan.json: is not of the plan other.json" in capsys.readouterr().err
