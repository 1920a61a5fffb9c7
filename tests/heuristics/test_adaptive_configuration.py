"""Changing a configuration while it runs, once answers are not as long as planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchbound.data.arrays import IntArray
from batchbound.data.configuration import PlannedConfiguration
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload
from batchbound.heuristics.exegpt.adaptive_configuration import AdaptiveConfiguration, Replanning
from batchbound.heuristics.exegpt.round_robin import RoundRobinAllocation
from batchbound.heuristics.loop import execute, schedule_of
from batchbound.heuristics.simulator import Simulator

# Two prompts every four decode steps, for answers of four iterations.
PLANNED = PlannedConfiguration("RRA", 2, 4, 0.0, 0, 5.0, 0.0, 4.0, 0.0, None, 1.0, 1.0)


def jobs(tokens: list[int]) -> Problem:
    workload = Workload.from_lengths([5] * len(tokens), tokens)
    return Problem(workload, CostModel.paper(), 8, prefill_emits_first_token=True)


def run(problem: Problem, replanning: Replanning) -> tuple[Trace, AdaptiveConfiguration]:
    policy = AdaptiveConfiguration(RoundRobinAllocation.of(PLANNED), PLANNED, replanning, cohort=4)
    trace = execute(problem, policy, Simulator(problem))
    assert schedule_of(trace).check(problem) is None
    return trace, policy


def test_a_configuration_changes_when_answers_are_longer_than_planned() -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def longer(running: PlannedConfiguration, tokens: IntArray, iterations: IntArray) -> PlannedConfiguration:
        asked.append((tokens.tolist(), iterations.tolist()))
        return replace(running, decode_steps=8, iterations=8.0)

    # Nine tokens are eight iterations: twice as many as planned.
    trace, policy = run(jobs([9] * 16), longer)
    assert asked == [([5] * 4, [8] * 4)]
    assert policy.configuration.decode_steps == 8
    starts = [number for number, stage in enumerate(trace.stages) if stage.kind == "prefill"]
    decode_steps = np.cumsum([stage.decode_steps for stage in trace.stages])
    between = np.diff(decode_steps[starts])
    # The first four are done after twelve steps; two more have joined by then, and the next join at once.
    assert between.tolist() == [4, 4, 4, 8, 8, 8, 8]


def test_a_configuration_stays_when_answers_are_as_planned() -> None:
    def never(*_: object) -> PlannedConfiguration:
        pytest.fail("nothing has drifted")

    trace, policy = run(jobs([5] * 16), never)
    assert policy.configuration is PLANNED
    assert {stage.decode_steps for stage in trace.stages if stage.kind == "decode"} == {4}


def test_answers_that_are_done_first_do_not_count_as_short() -> None:
    asked: list[list[int]] = []

    def note(running: PlannedConfiguration, tokens: IntArray, iterations: IntArray) -> None:
        asked.append(iterations.tolist())

    # Long and short ones in turn, as planned on average: the short ones alone would have drifted.
    run(jobs([8, 2] * 8), note)
    assert asked == []


def test_what_is_kept_is_not_asked_for_again() -> None:
    asked: list[list[int]] = []

    def keep(running: PlannedConfiguration, tokens: IntArray, iterations: IntArray) -> None:
        asked.append(iterations.tolist())

    _, policy = run(jobs([9] * 20), keep)
    assert asked == [[8] * 4]
    assert policy.configuration.decode_steps == PLANNED.decode_steps
    assert policy.configuration.iterations == 8
