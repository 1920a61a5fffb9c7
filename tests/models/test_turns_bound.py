"""Conversations: turns arrive when tools have answered, and no bound lies above the least makespan."""

from __future__ import annotations

import heapq
from itertools import combinations

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Turns, Workload
from batchbound.executor.reports.report import report
from batchbound.heuristics.loop import execute
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulator import Simulator
from batchbound.models.bounds.makespan import longest_conversation, turns_bound

UNIT = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)


def job(
    inputs: list[int], outputs: list[int], after: list[int], pause: list[float], *, slots: int = 1
) -> tuple[Problem, Turns]:
    turns = Turns(np.array(after), np.array(pause))
    return Problem(Workload.from_lengths(inputs, outputs), UNIT, slots), turns


def test_a_turn_arrives_when_its_tool_has_answered() -> None:
    # One conversation of two turns, two decode steps each, and a tool of 5 s.
    problem, turns = job([1, 1], [2, 2], [-1, 0], [0.0, 5.0])
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem), turns=turns)
    assert trace.queued.tolist() == [0.0, 8.0]
    assert trace.finished.tolist() == [3.0, 11.0]


def test_a_slot_serves_others_while_a_tool_works() -> None:
    # The tool of the first conversation takes as long as the second one: 1 stage and 4 steps.
    problem, turns = job([1, 1, 1], [2, 2, 4], [-1, 0, -1], [0.0, 5.0, 0.0])
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem), turns=turns)
    assert trace.finished.tolist() == [3.0, 11.0, 8.0]
    assert turns_bound(problem, turns).seconds == pytest.approx(11.0)


def test_the_report_says_how_long_slots_waited_for_tools() -> None:
    problem, turns = job([1, 1], [2, 2], [-1, 0], [0.0, 5.0])
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem), turns=turns)
    found = report(problem, trace, None, None, run_bound=turns_bound(problem, turns), turns=turns)
    assert found.slot_seconds["waiting for tools"] == pytest.approx(5.0)
    assert found.slot_seconds["nothing has arrived"] == 0.0
    assert sum(found.slot_seconds.values()) == pytest.approx(11.0)
    assert found.run_gap == pytest.approx(0.0)


def test_the_longest_conversation_alone_is_a_bound() -> None:
    problem, turns = job([1, 1, 1], [3, 1, 2], [-1, 0, 1], [0.0, 2.0, 3.0], slots=4)
    bound = longest_conversation(problem, turns)
    # Three stages, six steps, two pauses.
    assert bound.seconds == pytest.approx(3 + 6 + 5)
    assert bound.terms == {"turns": pytest.approx(9.0), "tools": pytest.approx(5.0)}


@pytest.mark.parametrize(
    ("after", "pause", "says"),
    [
        ([0], [0.0], "no earlier request"),
        ([-1, 2], [0.0, 0.0], "no earlier"),
        ([-1], [-1.0], "must be seconds"),
    ],
)
def test_impossible_turns_are_refused(after: list[int], pause: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Turns(np.array(after), np.array(pause))


def least_makespan(problem: Problem, turns: Turns) -> float:
    """Return the optimum by Dijkstra over all states: of each request, what it waits for or has left."""
    steps, held = problem.decode_steps.tolist(), problem.kv_at_start.tolist()
    cost, followers = problem.cost, turns.followers()
    # (0, 0) waits for another, (1, t) arrives at t, (2, 0) waits, (3, k) has k steps left, (4, 0) is done.
    start = tuple((2, 0.0) if first else (0, 0.0) for first in turns.first.tolist())
    queue, seen = [(0.0, start)], set()

    def finished(state: list[tuple[int, float]], time: float) -> tuple[tuple[int, float], ...]:
        for i, (kind, left) in enumerate(state):
            if kind == 3 and left == 0:
                state[i] = (4, 0.0)
                for j in followers.get(i, ()):
                    state[j] = (1, time + float(turns.pause[j]))
        return tuple((2, 0.0) if kind == 1 and at <= time else (kind, at) for kind, at in state)

    while queue:
        time, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        running = [i for i, (kind, _) in enumerate(state) if kind == 3]
        waiting = [i for i, (kind, _) in enumerate(state) if kind == 2]
        coming = [at for kind, at in state if kind == 1]
        if all(kind == 4 for kind, _ in state):
            return time
        for count in range(1, min(len(waiting), problem.slots - len(running)) + 1):
            for chosen in combinations(waiting, count):
                end = time + cost.prefill_seconds(int(problem.prompt_tokens[list(chosen)].sum()))
                after = [(3, steps[i]) if i in chosen else each for i, each in enumerate(state)]
                heapq.heappush(queue, (end, finished(after, end)))
        if running:
            kv = sum(held[i] + steps[i] - int(state[i][1]) for i in running)
            end = time + cost.decode_seconds(len(running), kv)
            after = [(3, left - 1) if i in running else (kind, left) for i, (kind, left) in enumerate(state)]
            heapq.heappush(queue, (end, finished(after, end)))
        if coming:
            heapq.heappush(queue, (min(coming), finished(list(state), min(coming))))
    raise AssertionError("a job has an end")


def drawn(rng: np.random.Generator) -> tuple[Problem, Turns]:
    """Return a tiny job of conversations with at most four turns in all."""
    after: list[int] = []
    while len(after) < 4:
        first = len(after)
        for turn in range(min(int(rng.integers(1, 4)), 4 - first)):
            after.append(first + turn - 1 if turn else -1)
    cost = CostModel(
        prefill_base=float(rng.uniform(0, 2)),
        prefill_per_token=float(rng.uniform(0, 0.3)),
        decode_base=float(rng.uniform(0.1, 1)),
        decode_per_slot=float(rng.uniform(0, 0.5)),
        decode_per_kv_token=float(rng.choice([0.0, 0.05])),
    )
    work = Workload.from_lengths(rng.integers(1, 6, 4), rng.integers(1, 4, 4))
    problem = Problem(work, cost, int(rng.integers(1, 4)), prefill_emits_first_token=bool(rng.integers(0, 2)))
    return problem, Turns(np.array(after), np.where(np.array(after) < 0, 0.0, rng.uniform(0, 3, 4)))


def test_no_bound_lies_above_the_optimum_of_100_tiny_jobs() -> None:
    rng = np.random.default_rng(52)
    tight = 0
    for _ in range(100):
        problem, turns = drawn(rng)
        optimum, bound = least_makespan(problem, turns), turns_bound(problem, turns).seconds
        assert bound <= optimum * (1 + 1e-9)
        tight += bound >= optimum * (1 - 1e-9)
        for policy in ("fcfs", "fcfs-ski"):
            trace = execute(problem, policy_named(policy, problem), Simulator(problem), turns=turns)
            assert trace.makespan >= optimum * (1 - 1e-9)
            told = report(problem, trace, None, None, run_bound=turns_bound(problem, turns), turns=turns)
            assert told.model_makespan == pytest.approx(trace.makespan)
    # The bound is no trivial one: on some jobs it is the optimum.
    assert tight >= 10
