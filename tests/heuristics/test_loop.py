from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload, numbered_ids
from batchbound.heuristics.loop import Execution, PolicyError, execute, schedule_of
from batchbound.heuristics.policy import UNTIL_CHANGE, Policy, State, Step
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.simulator import Progress, Simulator

COST = CostModel(prefill_base=10.0, prefill_per_token=1.0, decode_base=2.0, decode_per_slot=0.5)


def problem_of(
    inputs: list[int],
    outputs: list[int],
    slots: int,
    arrival: list[float] | None = None,
    cost: CostModel = COST,
    first_token: bool = False,
) -> Problem:
    times = None if arrival is None else np.array(arrival)
    workload = Workload(numbered_ids(len(inputs)), np.array(inputs), np.array(outputs), times)  # type: ignore[arg-type]
    return Problem(workload, cost, slots, prefill_emits_first_token=first_token)


def script(*steps: Step | Callable[[State], Step]) -> Policy:
    """Give a policy that takes these steps, then decodes until something changes."""
    left = list(steps)

    def policy(state: State) -> Step:
        step = left.pop(0) if left else Step(decode_steps=UNTIL_CHANGE)
        return step if isinstance(step, Step) else step(state)

    return policy


def test_two_requests_side_by_side_take_one_stage_and_the_longer_answer() -> None:
    problem = problem_of([3, 4], [2, 5], slots=2)
    trace = simulate(problem, script(Step([0, 1], [0, 1], UNTIL_CHANGE)))
    kinds = [(stage.kind, stage.decode_steps, stage.active, stage.tokens) for stage in trace.stages]
    assert kinds == [("prefill", 0, 2, 7), ("decode", 2, 2, 4), ("decode", 3, 1, 3)]
    assert trace.makespan == pytest.approx(17 + 2 * 3 + 3 * 2.5)
    assert trace.prefilled.tolist() == [0, 0]
    assert trace.first_token.tolist() == [20, 20]
    assert trace.finished == pytest.approx([23, 30.5])
    assert trace.tokens.tolist() == [2, 5]


def test_kept_keys_and_values_are_paid_for_in_every_step() -> None:
    cost = CostModel(0.0, 0.0, 1.0, 0.0, decode_per_kv_token=0.25)
    trace = simulate(problem_of([4], [3], 1, cost=cost), script(Step([0], [0], UNTIL_CHANGE)))
    assert trace.makespan == pytest.approx(3 + 0.25 * (4 + 5 + 6))
    assert trace.stages[-1].kv_tokens == 4 + 5 + 6


def test_an_answer_of_one_token_is_done_with_its_prefill_when_that_emits_it() -> None:
    problem = problem_of([3, 4], [1, 2], slots=2, first_token=True)
    trace = simulate(problem, script(Step([0, 1], [0, 1], UNTIL_CHANGE)))
    assert trace.finished == pytest.approx([17, 19.5])
    assert trace.first_token.tolist() == [17, 17]
    assert trace.tokens.tolist() == [1, 2]
    assert [stage.active for stage in trace.stages] == [2, 1]


def test_a_slot_freed_by_prefill_alone_is_free_for_the_next_stage() -> None:
    problem = problem_of([1, 1], [1, 1], slots=1, first_token=True)
    trace = simulate(problem, script(Step([0], [0], 0), Step([1], [0], 0)))
    assert trace.makespan == pytest.approx(22)
    assert schedule_of(trace).decode_steps.tolist() == [0, 0]


def test_the_state_tells_what_is_held_who_waits_and_who_finished() -> None:
    problem = problem_of([3, 4, 2], [2, 5, 1], slots=2)
    seen: list[tuple[list[int], list[bool], list[int], int, int]] = []

    def look(state: State, step: Step) -> Step:
        slots, waiting = state.slot_request.tolist(), state.waiting.tolist()
        seen.append((slots, waiting, list(state.finished), state.kv_held, state.steps_done))
        return step

    steps = [
        Step([0, 1], [0, 1], UNTIL_CHANGE),
        Step([2], [0], UNTIL_CHANGE),
        Step(decode_steps=UNTIL_CHANGE),
    ]
    simulate(problem, script(*(lambda state, step=step: look(state, step) for step in steps)))
    assert seen == [
        ([-1, -1], [True] * 3, [], 0, 0),
        ([-1, 1], [False, False, True], [0], 6, 2),
        ([-1, 1], [False] * 3, [2], 7, 3),
    ]


def test_nothing_happens_before_the_first_arrival_and_decoding_pauses_at_the_next() -> None:
    problem = problem_of([2, 2], [9, 1], slots=2, arrival=[5.0, 25.0])
    seen: list[tuple[float, int]] = []

    def first_come(state: State) -> Step:
        seen.append((state.time, state.unarrived))
        waiting = np.flatnonzero(state.waiting).tolist()
        return Step(waiting, state.free_slots[: len(waiting)].tolist(), UNTIL_CHANGE)

    trace = simulate(problem, first_come)
    assert seen[:2] == [(0.0, 2), (5.0, 1)]
    # The stage ends at 17 s; decode steps of 2.5 s end at 19.5, 22, 24.5 and 27 s, after the arrival at 25 s.
    assert seen[2] == (27.0, 0)
    assert trace.queued.tolist() == [5, 25]
    assert trace.prefilled.tolist() == [5, 27]
    assert schedule_of(trace).makespan(problem) == pytest.approx(trace.makespan)


def test_an_evicted_request_keeps_its_tokens_and_is_prefilled_with_them() -> None:
    problem = problem_of([3, 4], [6, 4], slots=2)
    trace = simulate(
        problem,
        script(Step([0, 1], [0, 1], 2), Step(evict=[1], decode_steps=1), Step([1], [1], UNTIL_CHANGE)),
    )
    kinds = [(stage.kind, stage.decode_steps, stage.active, stage.tokens) for stage in trace.stages]
    assert kinds == [
        ("prefill", 0, 2, 7),
        ("decode", 2, 2, 4),
        ("decode", 1, 1, 1),
        ("prefill", 0, 1, 6),
        ("decode", 2, 2, 4),
        ("decode", 1, 1, 1),
    ]
    assert trace.evictions == 1
    assert trace.tokens.tolist() == [6, 4]
    assert trace.prefilled.tolist() == [0, 0]
    with pytest.raises(ValueError, match="1 evictions"):
        schedule_of(trace)


def test_answers_may_turn_out_longer_or_shorter_than_the_problem_says() -> None:
    problem = problem_of([3, 4], [2, 5], slots=2)
    trace = simulate(problem, script(Step([0, 1], [0, 1], UNTIL_CHANGE)), np.array([4, 1]))
    assert trace.tokens.tolist() == [4, 1]
    assert trace.decode_steps == 4


def test_each_stage_and_each_finish_is_told_as_it_happens() -> None:
    problem = problem_of([3, 4], [2, 5], slots=2)
    finished: list[int] = []
    stages: list[tuple[str, int]] = []
    execute(
        problem,
        script(Step([0, 1], [0, 1], UNTIL_CHANGE)),
        Simulator(problem),
        on_finish=finished.append,
        on_stage=lambda stage, done: stages.append((stage.kind, done)),
    )
    assert finished == [0, 1]
    assert stages == [("prefill", 0), ("decode", 1), ("decode", 2)]


def test_a_run_becomes_a_schedule_of_one_bin_per_stage() -> None:
    problem = problem_of([3, 4, 2], [2, 5, 1], slots=2)
    trace = simulate(problem, script(Step([0, 1], [0, 1], UNTIL_CHANGE), Step([2], [0], UNTIL_CHANGE)))
    schedule = schedule_of(trace)
    assert schedule.bin_of.tolist() == [0, 0, 1]
    assert schedule.slot_of.tolist() == [0, 1, 0]
    assert schedule.decode_steps.tolist() == [2, 3]
    assert schedule.check(problem) is None
    assert schedule.makespan(problem) == pytest.approx(trace.makespan)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step([0], [0], 1), Step([0], [1], 1)], "request 0 is prefilled but not waiting"),
        ([Step([0, 0], [0, 1], 1)], "request 0 is prefilled but not waiting"),
        ([Step([0], [0], 1), Step([1], [0], 1)], "slot 0 is given to request 1 but not free"),
        ([Step([0], [-1], 1)], "slot -1 is given to request 0, of 2 slots"),
        ([Step([0], [2], 1)], "slot 2 is given to request 0, of 2 slots"),
        ([Step([0, 1], [0], 1)], "2 requests are prefilled into 1 slots"),
        ([Step(evict=[1])], "request 1 is evicted but not running"),
        ([Step()], "the policy does nothing while 2 requests wait"),
    ],
)
def test_a_step_that_cannot_be_done_is_refused(steps: list[Step], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        simulate(problem_of([3, 4], [5, 5], slots=2), script(*steps))


def test_two_executions_share_a_queue_and_what_its_requests_have_decoded() -> None:
    problem = problem_of([3, 4], [5, 5], slots=1)
    queue = np.array([True, True]), np.zeros(2, dtype=np.int64)
    progress = Progress.none(problem)
    begins = script(Step([0], [0], 1), Step(evict=[0]))
    first = Execution(problem, begins, Simulator(problem, progress=progress), queue=queue)
    assert [*first.step(), *first.step()] == []
    assert (queue[0].tolist(), queue[1].tolist()) == ([True, True], [1, 0])
    # The other goes on with the four decode steps left, two at most in this step.
    other = Execution(problem, script(Step([0], [0], 9)), Simulator(problem, progress=progress), queue=queue)
    assert list(other.step(2)) == []
    assert list(other.step()) == [0]
    assert other.trace(np.array([0])).tokens.tolist() == [5]
    assert [stage.tokens for stage in other.stages] == [3 + 1, 2, 2]
    with pytest.raises(PolicyError, match="the policy does nothing while 1 requests wait"):
        list(Execution(problem, script(Step()), Simulator(problem), queue=queue).step())
