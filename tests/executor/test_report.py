"""The report of a run, on traces small enough to add up by hand, and the Perfetto trace of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.cli import main
from batchbound.data.bound import Bound
from batchbound.data.configuration import Reached
from batchbound.data.costs.cost import CostModel, FitError
from batchbound.data.files.disk import InputError
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.report import (
    BETWEEN,
    BUBBLES,
    BUSY,
    DECODE,
    NO_ARRIVAL,
    PREFILL,
    STALL,
    TAIL,
    WAITING,
    Report,
)
from batchbound.data.trace import Stage, Trace
from batchbound.data.workload import Workload, numbered_ids
from batchbound.executor.reports.bubbles import occupied_slots, slot_seconds
from batchbound.executor.reports.perfetto import chrome_events, save_perfetto
from batchbound.executor.reports.report import model_seconds, report
from batchbound.executor.reports.tables import report_rows, rows_table
from batchbound.heuristics.loop import execute
from batchbound.heuristics.policy import UNTIL_CHANGE, Policy, State, Step
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.simulator import Simulator
from batchbound.models.bounds.fleet import work_bound
from batchbound.models.bounds.makespan import best_bound
from batchbound.models.bounds.prove import evicting_bound
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits

COST = CostModel(prefill_base=1.0, prefill_per_token=0.5, decode_base=1.0, decode_per_slot=0.5)


def first_come(state: State) -> Step:
    chosen = np.flatnonzero(state.waiting)[: len(state.free_slots)]
    return Step(chosen.tolist(), state.free_slots[: len(chosen)].tolist(), UNTIL_CHANGE)


def once_empty(state: State) -> Step:
    return first_come(state) if not state.running.size else Step(decode_steps=UNTIL_CHANGE)


def prefills_in_a_row(state: State) -> Step:
    step = first_come(state)
    return replace(step, decode_steps=0) if len(step.prefill) else step


def three_requests(**limits: Any) -> Problem:
    return Problem(Workload.from_lengths([2, 2, 2], [2, 4, 1]), COST, slots=2, **limits)


def served(problem: Problem, policy: Policy = first_come, tokens: Sequence[int] | None = None) -> Trace:
    actual = None if tokens is None else np.array(tokens, dtype=np.int64)
    return execute(problem, policy, Simulator(problem, actual))


def some(seconds: Mapping[str, float]) -> dict[str, float]:
    return {cause: value for cause, value in seconds.items() if value}


def test_the_slots_time_adds_up_by_hand() -> None:
    # Prefill 0 and 1 (3 s), 2 steps of both (4 s), prefill 2 while 1 pauses (2 s), a step of both (2 s),
    # a decode step of 1 alone (1.5 s).
    trace = served(three_requests())
    assert trace.makespan == 12.5
    assert occupied_slots(trace).tolist() == [2, 2, 2, 2, 1]
    assert some(slot_seconds(trace)) == {DECODE: 13.5, PREFILL: 8.0, STALL: 2.0, TAIL: 1.5}


def test_a_free_slot_waits_while_a_request_waits() -> None:
    # Prefill 0 and 1 (3 s), 2 rounds over both (4 s), 2 steps of 1 with the other slot free (3 s), prefill 2
    # (2 s), a decode step of it (1.5 s): meanwhile the other slot is the tail.
    trace = served(three_requests(), once_empty)
    assert trace.makespan == 13.5
    assert some(slot_seconds(trace)) == {DECODE: 12.5, PREFILL: 8.0, WAITING: 3.0, TAIL: 3.5}


def test_a_free_slot_before_the_next_arrival_waits_for_nobody() -> None:
    # Prefill 0 (2 s), decode it (1.5 s); nothing until 10 s; prefill 1 (2 s), decode it (1.5 s).
    ids = numbered_ids(2)
    workload = Workload(ids, np.array([2, 2]), np.array([1, 1]), arrival=np.array([0.0, 10.0]))
    problem = Problem(workload, COST, slots=2)
    trace = served(problem)
    assert trace.makespan == 13.5
    # Both slots are free from 3.5 s to 10 s, and one of them before.
    assert some(slot_seconds(trace)) == {DECODE: 3.0, PREFILL: 4.0, NO_ARRIVAL: 3.5 + 13.0, TAIL: 3.5}
    assert model_seconds(COST, trace) == 13.5


def test_stages_that_take_no_time_stall_nobody_in_the_one_before_them() -> None:
    # A stage of nine tokens takes four seconds, and one of a token none.
    cost = CostModel(0.0, 0.0, 1.0, 0.0, prefill_bend=5.0, prefill_per_token_beyond=1.0)
    workload = Workload.from_lengths([9, 1, 1], [1, 1, 1])
    problem = Problem(workload, cost, 3, prefill_token_cap=9, prefill_emits_first_token=True)
    trace = simulate(
        problem, lambda state: Step([int(np.flatnonzero(state.waiting)[0])], [0], decode_steps=0)
    )
    assert [stage.seconds for stage in trace.stages] == [4.0, 0.0, 0.0]
    assert some(slot_seconds(trace)) == {PREFILL: 4.0, WAITING: 8.0}


def test_time_between_stages_is_a_bubble_of_its_own() -> None:
    stages = (
        Stage("prefill", 1.0, 2.0, 0, 1, 5, 5, 5),
        Stage("decode", 2.5, 4.5, 2, 1, 2, 11, 22),
    )
    trace = one_request_trace(stages, finished=4.5)
    assert some(slot_seconds(trace)) == {
        DECODE: 2.0,
        PREFILL: 1.0,
        BETWEEN: 0.5,
        WAITING: 2.0,
        TAIL: 3.5,
    }


def test_a_request_that_ends_with_its_prefill_holds_its_slot_during_it() -> None:
    problem = Problem(
        Workload.from_lengths([2, 2, 2], [1, 3, 1]), COST, slots=2, prefill_emits_first_token=True
    )
    trace = served(problem, prefills_in_a_row)
    # Prefill 1 and 0, done at once (3 s); 2, done at once, while 1 pauses (2 s); 2 decode steps of 1 (3 s).
    assert occupied_slots(trace).tolist() == [2, 2, 1]
    assert some(slot_seconds(trace)) == {DECODE: 3.0, PREFILL: 8.0, STALL: 2.0, TAIL: 3.0}


def paused_slot_seconds(trace: Trace) -> float:
    """Return the slot-seconds during which a request that had been prefilled before was paused."""
    total = 0.0
    for index, stage in enumerate(trace.stages):
        if stage.kind == "prefill":
            running = (trace.stage_of < index) & (trace.finished > stage.start)
            total += stage.seconds * int(running.sum())
    return total


def test_a_run_that_puts_requests_back_is_held_against_what_such_runs_cannot_beat() -> None:
    beaten = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        prompts, outputs = rng.integers(2, 9, 3), rng.integers(2, 40, 3)
        capacity = int((prompts + outputs).max() * 1.5)
        problem = Problem(
            Workload.from_lengths(prompts, outputs),
            CostModel.paper(),
            slots=3,
            kv_capacity=capacity,
            prefill_emits_first_token=bool(seed % 2),
        )
        trace = simulate(problem, policy_named("fcfs", problem))
        found = report(problem, trace, best_bound(problem), None)
        assert found.run_gap is not None
        assert found.run_gap >= -1e-9, seed
        beaten += found.model_makespan < best_bound(problem).seconds - 1e-9
    assert beaten > 0, "by runs that put requests back, or the bound of schedules would do"


def test_an_evicted_request_leaves_no_slot_time_unexplained() -> None:
    problem = Problem(Workload.from_lengths([2, 3, 4], [6, 6, 6]), COST, slots=2)

    class EvictOnce:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, state: State) -> Step:
            self.calls += 1
            if self.calls == 2:
                return Step(evict=[0], prefill=[2], slots=[0], decode_steps=UNTIL_CHANGE)
            chosen = np.flatnonzero(state.waiting)[: len(state.free_slots)]
            return Step(chosen.tolist(), state.free_slots[: len(chosen)].tolist(), decode_steps=2)

    trace = served(problem, EvictOnce())
    assert trace.evictions == 1
    found = report(problem, trace, best_bound(problem), None)
    assert found.bound == best_bound(problem).seconds
    both = (work_bound(Fleet.of(problem, 1)), evicting_bound(problem))
    assert found.run_bound == max(bound.seconds for bound in both) < found.bound
    said = next(row for row in report_rows(found) if row.name == "bound of the run")
    assert said.note.endswith("even if some are evicted")
    assert occupied_slots(trace)[:3].tolist() == [2, 2, 2]
    seconds = slot_seconds(trace)
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(2 * trace.makespan)


def one_request_trace(stages: tuple[Stage, ...], finished: float) -> Trace:
    return Trace(
        ids=("request-0",),
        slots=2,
        stages=stages,
        stage_of=np.array([0]),
        slot_of=np.array([0]),
        queued=np.array([0.0]),
        prefilled=np.array([stages[0].start]),
        first_token=np.array([stages[0].end]),
        finished=np.array([finished]),
        tokens=np.array([3]),
        engine={"name": "fake"},
    )


def problems() -> st.SearchStrategy[Problem]:
    def make(rows: list[tuple[int, int, float]], slots: int, first: bool, kv: float) -> Problem:
        prompts, outputs, arrivals = zip(*rows, strict=True)
        workload = Workload(numbered_ids(len(rows)), np.array(prompts), np.array(outputs), np.array(arrivals))
        cost = replace(COST, decode_per_kv_token=kv)
        return Problem(workload, cost, slots=slots, prefill_emits_first_token=first)

    arrival = st.one_of(st.just(0.0), st.floats(0, 40))
    rows = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), arrival), min_size=1, max_size=12)
    return st.builds(make, rows, st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.01]))


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([first_come, once_empty, prefills_in_a_row]))
def test_work_and_bubbles_fill_the_slots_time(problem: Problem, policy: Policy) -> None:
    trace = served(problem, policy)
    seconds = slot_seconds(trace)
    assert set(seconds) == {*BUSY, *BUBBLES}
    assert min(seconds.values()) >= -1e-9
    assert sum(seconds.values()) == pytest.approx(problem.slots * trace.makespan)
    assert seconds[STALL] == pytest.approx(paused_slot_seconds(trace))
    assert model_seconds(problem.cost, trace) == pytest.approx(trace.makespan)


def test_the_report_of_the_example_by_hand() -> None:
    problem = three_requests()
    bound = Bound(10.0, "by hand")
    result = report(problem, served(problem), bound, planned_makespan=12.0)
    assert (result.clock, result.makespan, result.model_makespan) == ("model", 12.5, 12.5)
    assert result.plan_gap == pytest.approx(0.2)
    assert result.run_gap == pytest.approx(0.25)
    assert (result.prefill_stages, result.decode_steps, result.requests, result.slots) == (2, 4, 3, 2)
    # 7 slot-steps over 2 slots of 2 s a full decode step.
    assert result.utilization == pytest.approx(7.0 / 12.5)
    assert result.output_tokens_per_second == pytest.approx(7 / 12.5)
    assert result.total_tokens_per_second == pytest.approx(13 / 12.5)
    # Finished at 7, 12.5 and 11 s; first tokens at 5, 5 and 11 s.
    assert result.finish is not None
    assert result.finish.p50 == 11.0
    assert result.first_token is not None
    assert result.first_token.p50 == 5.0
    # (7 - 5) / 1 and (12.5 - 5) / 3; the third answer has one token.
    assert result.per_token is not None
    assert result.per_token.p50 == pytest.approx(2.25)
    assert result.share(STALL) == pytest.approx(2 / 25)
    assert result.plan_error == pytest.approx(12.0 / 12.5 - 1)


def test_lengths_that_turn_out_different_need_a_bound_of_their_own() -> None:
    problem = three_requests()
    trace = served(problem, tokens=[2, 3, 2])
    bound = Bound(10.0, "by hand")
    result = report(problem, trace, bound, planned_makespan=12.5)
    assert result.lengths.mean_absolute == pytest.approx(2 / 3)
    assert (result.lengths.bias, result.lengths.wrong) == (0.0, 2)
    assert result.run_gap is None
    again = report(problem, trace, bound, planned_makespan=12.5, run_bound=Bound(11.0, "by hand"))
    assert again.run_gap == pytest.approx((trace.makespan - 11) / 11)
    assert again.plan_gap == pytest.approx(0.25)


def test_the_larger_of_two_bounds_of_a_run_as_planned_counts() -> None:
    problem = three_requests()
    trace = served(problem)
    for first, second in ((10.0, 9.0), (9.0, 10.0)):
        result = report(problem, trace, Bound(first, "a"), 12.5, run_bound=Bound(second, "b"))
        assert (result.run_bound, result.run_gap) == (10.0, 0.25)


def test_a_formula_that_is_no_bound_gives_no_gap() -> None:
    problem = three_requests()
    result = report(problem, served(problem), Bound(10.0, "as printed", valid=False), planned_makespan=12.0)
    assert (result.bound, result.plan_gap, result.run_gap) == (None, None, None)


def test_a_measured_run_meets_the_bound_through_the_cost_model() -> None:
    cost = replace(COST, decode_per_kv_token=0.01)
    problem = Problem(Workload.from_lengths([5], [3]), cost, slots=2, prefill_emits_first_token=True)
    stages = (Stage("prefill", 0.0, 4.0, 0, 1, 5, 5, 5), Stage("decode", 4.0, 7.0, 2, 1, 2, 13, 26))
    fit = FitError(0.1, 0.05, 0.02, 10, 100)
    result = report(problem, one_request_trace(stages, 7.0), Bound(5.0, "by hand"), 6.5, fit)
    # The model gives the prefill 3.5 s, a step 1.5 s, and reading 26 tokens 0.26 s, half of it for padding.
    assert (result.clock, result.makespan, result.model_makespan) == ("measured", 7.0, 6.76)
    assert result.run_gap == pytest.approx(1.76 / 5)
    assert result.model_error == pytest.approx(-0.24 / 7)
    assert result.padding == 0.5
    assert result.padding_seconds == pytest.approx(0.13)
    assert result.fit == fit


def test_a_resumed_run_counts_what_was_answered_before_and_states_no_gap() -> None:
    whole = three_requests()
    rest = Problem(whole.workload.select([1]), COST, slots=2)
    result = report(whole, served(rest), Bound(5.0, "by hand"), 12.5)
    assert (result.requests, result.resumed) == (1, 2)
    assert (result.run_gap, result.plan_error) == (None, None)
    again = report(whole, served(rest), Bound(5.0, "by hand"), 12.5, run_bound=Bound(4.0, "by hand"))
    # Prefill 1 (2 s) and 4 decode steps of it alone (6 s).
    assert again.run_gap == pytest.approx(1.0)


def test_a_trace_of_another_plan_is_refused() -> None:
    other = Problem(Workload.from_lengths([1] * 4, [1] * 4), COST, slots=2)
    with pytest.raises(ValueError, match="'request-3', which is not a request of the plan"):
        report(three_requests(), served(other), None, None)


@pytest.fixture
def example() -> Report:
    problem = three_requests()
    return report(
        problem,
        served(problem),
        Bound(10.0, "by hand"),
        12.5,
        FitError(0.1, 0.05, 0.02, 10, 100),
        seconds=0.5,
    )


def test_a_report_survives_its_file(example: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    example.save(path)
    assert Report.load(path) == example
    written = json.loads(path.read_text())
    assert written["makespan_s"] == 12.5
    assert written["gap"] == pytest.approx(0.25)
    assert written["bound_source"] == "by hand"
    assert {
        "utilization",
        "prefill_stages",
        "decode_steps",
        "requests",
        "slots",
        "seconds",
    } <= written.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [("batchbound_report", 9), ("makespan_s", "12"), ("slots", 2.5), ("slot_seconds", []), ("clock", 1)],
)
def test_a_damaged_report_names_the_field(example: Report, field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Report.from_json(example.to_json() | {field: value}, file="report.json")


def text_of(report: Report) -> str:
    return "\n".join(f"{row.name} {row.value} {row.note}" for row in report_rows(report))


def test_the_table_says_what_a_configuration_reached_and_how_fast_the_machine_was(
    example: Report, tmp_path: Path
) -> None:
    reached = Reached(12.0, 10.0, 0.4, 0.5, 0.45, 40, 1.25)
    found = replace(example, reached=reached)
    found.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").reached == reached
    text = text_of(found)
    for said in (
        "planned 12.00: +20.0 %",
        "1.25 x",
        "the bound of 450.0 ms is missed",
    ):
        assert said in text
    assert "machine slower by" not in text_of(replace(found, reached=replace(reached, slowdown=None)))


def test_the_table_says_what_each_figure_is(example: Report) -> None:
    text = text_of(example)
    for word in ("12.50 s", "by hand", "25.00 %", "10.0 % / 5.0 %", "utilization", "tail", STALL, "TTFT"):
        assert word in text
    assert len({row.name for row in report_rows(example)}) == len(report_rows(example))


def test_the_table_can_be_a_rich_one(example: Report) -> None:
    assert rows_table(report_rows(example)).row_count == len(report_rows(example))


def test_every_request_and_stage_is_an_event_of_the_perfetto_trace(tmp_path: Path) -> None:
    trace = served(three_requests())
    events = chrome_events(trace, replica=1)
    slices = [event for event in events if event["ph"] == "X"]
    requests = {event["name"]: event for event in slices if event["cat"] == "request"}
    assert requests["request-2"]["ts"] == 7e6
    assert requests["request-2"]["dur"] == 4e6
    assert (requests["request-2"]["pid"], requests["request-2"]["tid"]) == (1, 0)
    assert sum(event["cat"] == "stage" for event in slices) == len(trace.stages)
    path = tmp_path / "trace.json"
    save_perfetto(path, [trace])
    assert len(json.loads(path.read_text())["traceEvents"]) == len(events)


def test_a_plan_of_no_time_has_no_gap_and_is_verified_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeless = Problem(Workload.from_lengths([2, 3], [2, 4]), CostModel(0.0, 0.0, 0.0, 0.0), slots=1)
    plan = make_plan(timeless, limits=Limits(work=1))
    assert plan.gap is None
    plan.save(tmp_path / "plan.json")
    assert main(["verify", str(tmp_path / "plan.json")]) == 0
    assert "no gap: the bound is zero" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == 0


def test_a_trace_of_another_plan_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = three_requests()
    served(replace(problem, workload=replace(problem.workload, ids=np.array(["x", "y", "z"])))).save(
        tmp_path / "trace.jsonl"
    )
    make_plan(problem, limits=Limits(work=1)).save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json"), str(tmp_path / "trace.jsonl")]) == 2
    assert capsys.readouterr().err.count("Give the plan that was run") == 1
