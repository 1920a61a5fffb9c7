"""What a run gained, on jobs small enough to count by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np
import pytest
from builders import UNIT, problem_of

from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.gain import Course, Gain, gain_and_plan, gain_of, gain_of_fleet
from batchbound.heuristics.fleet.simulation import simulate_fleet
from batchbound.heuristics.simulate import simulate
from batchbound.screen.gain import gain_lines

PRICED = CostModel(prefill_base=0.7, prefill_per_token=0.03, decode_base=0.4, decode_per_slot=0.05)


def two_slots() -> Problem:
    """Return two short requests and a long one on two slots, a second a stage and a second a step."""
    return problem_of([1, 1, 1], [1, 1, 4], 2, UNIT)


def slower(trace: Trace, times: float) -> Trace:
    """Return a run whose clock goes so many times slower."""
    return replace(
        trace,
        stages=tuple(replace(one, start=times * one.start, end=times * one.end) for one in trace.stages),
        prefilled=times * trace.prefilled,
        first_token=times * trace.first_token,
        finished=times * trace.finished,
    )


def gain(problem: Problem, policy: str, times: float = 1.0) -> Gain:
    found = gain_of(Fleet.of(problem, 1), slower(simulate(problem, policy), times), cost=problem.cost)
    assert found is not None
    return found


def test_first_come_first_served_takes_a_step_more_than_longest_first() -> None:
    # First come: both short ones (1 stage, 1 step), then the long one alone (1 stage, 4 steps): 7 s.
    # Longest first: the long one and a short one (1, 1), the other short one (1, 1), 2 more steps: 6 s.
    found = gain(two_slots(), "lpt")
    assert (found.first_come.seconds, found.first_come.decode_steps) == (7.0, 5)
    assert (found.this_run.seconds, found.this_run.decode_steps) == (6.0, 4)
    assert found.least == pytest.approx(6.0)
    assert found.saved == pytest.approx(1 / 7)
    assert found.above_least == pytest.approx(0.0)


def test_known_lengths_would_save_a_step_of_first_come_first_served() -> None:
    found = gain(two_slots(), "fcfs")
    assert found.saved == 0
    assert found.known is not None
    assert (found.known.seconds, found.known.decode_steps) == (6.0, 4)


def test_all_seconds_are_on_the_clock_of_the_run() -> None:
    found = gain(two_slots(), "lpt", times=3.0)
    assert found.clock == pytest.approx(3.0)
    assert found.first_come.seconds == pytest.approx(21.0)
    assert found.this_run.seconds == pytest.approx(18.0)
    assert found.least == pytest.approx(18.0)
    assert found.first_come.decode_steps == 5


def test_a_run_that_served_nothing_gained_nothing() -> None:
    assert gain_of(Fleet.of(two_slots(), 1), Trace.empty(2)) is None


def two_replicas() -> Fleet:
    """Return two short requests and a long one on two replicas of a slot each."""
    return Fleet.of(problem_of([1, 1, 1], [1, 1, 4], 1, UNIT), 2)


@pytest.mark.parametrize("times", [1.0, 3.0])
def test_replicas_end_with_the_same_four_lines(times: float) -> None:
    # First come: a short one on each replica (1 + 1), then the long one on the first (1 + 4): 7 s.
    # The long one alone and both short ones on the other: 5 s, which is what the long one takes anyway.
    fleet = two_replicas()
    run = simulate_fleet(fleet, np.array([1, 1, 0]), backoff=False)
    traces = [slower(trace, times) for trace in run.traces]
    found = gain_of_fleet(fleet, traces, costs=[UNIT, UNIT])
    assert found is not None
    assert found.first_come == Course(7.0 * times, 5, 2, 2)
    assert found.this_run == Course(5.0 * times, 4, 1, 1)
    assert found.known == found.this_run
    assert found.least == pytest.approx(5.0 * times)
    lines = gain_lines(found, "M", None)
    assert lines[0] == "3 prompts, 2 at a time on 2 replicas, M"
    assert [line[2:26].strip() for line in lines[1:5]] == [
        "first come, first served",
        "this run",
        "lengths known beforehand",
        "least possible",
    ]
    assert lines[5] == "  steps and stages of the replica that ends last"


@pytest.mark.parametrize("seed", range(8))
def test_the_least_of_replicas_is_below_every_way_to_serve_the_job(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = problem_of(
        rng.integers(1, 9, 6).tolist(), rng.integers(1, 7, 6).tolist(), int(rng.integers(1, 3)), PRICED
    )
    fleet = Fleet.of(problem, 2)
    runs = [
        simulate_fleet(fleet, np.array([mask >> k & 1 for k in range(6)]), backoff=False)
        for mask in range(64)
    ]
    best = min(run.makespan for run in runs)
    found = gain_of_fleet(fleet, runs[seed].traces, costs=[PRICED, PRICED])
    assert found is not None
    assert found.known is not None
    assert 0 < found.least <= best * (1 + 1e-9)
    assert found.least <= found.known.seconds <= min(found.first_come.seconds, found.this_run.seconds)


def test_nothing_is_proven_of_replicas_that_may_share_beginnings() -> None:
    fleet = two_replicas()
    found = gain_of_fleet(fleet, simulate_fleet(fleet, None).traces, shared=True, costs=[UNIT, UNIT])
    assert found is not None
    assert found.above_least is None
    assert gain_lines(found, "M", None)[4].endswith("nothing is proven")


def test_a_fleet_that_served_nothing_gained_nothing() -> None:
    assert gain_of_fleet(two_replicas(), [Trace.empty(1), Trace.empty(1)]) is None


def test_lengths_that_came_out_count_and_not_those_planned() -> None:
    planned = two_slots()
    trace = simulate(planned, "fcfs", np.array([1, 1, 2]))
    found = gain_of(Fleet.of(planned, 1), trace, cost=planned.cost)
    assert found is not None
    # The long one turned out to take two steps: 1 stage, 1 step, 1 stage, 2 steps.
    assert found.first_come.seconds == 5.0


@pytest.mark.parametrize("policy", ["fcfs", "lpt", "fcfs-ski", "learned"])
def test_no_run_is_below_the_least_possible(policy: str) -> None:
    rng = np.random.default_rng(7)
    problem = problem_of(rng.integers(1, 40, 30).tolist(), rng.integers(1, 60, 30).tolist(), 4)
    found = gain(problem, policy, times=1.7)
    assert found.least <= found.this_run.seconds * (1 + 1e-9)
    assert found.least <= found.first_come.seconds
    assert found.known is not None
    assert found.least <= found.known.seconds * (1 + 1e-9)


def test_the_end_screen_says_what_was_gained_what_is_possible_and_what_next() -> None:
    lines = gain_lines(gain(two_slots(), "fcfs"), "tiny:speller", "batchbound run p.jsonl --model M")
    assert lines == [
        "3 prompts, 2 at a time, tiny:speller",
        "  first come, first served  5 steps  2 stages   7.00 s  simulated",
        "  this run                  5        2          7.00 s  no gain",
        "  lengths known beforehand  4        2          6.00 s  14% less than this run",
        "  least possible                                6.00 s  proven; run 17% above",
        "  next time: batchbound run p.jsonl --model M",
    ]


def test_the_end_screen_promises_nothing_of_lengths_that_do_not_repeat() -> None:
    lines = gain_lines(gain(two_slots(), "fcfs"), "tiny:speller", None)
    assert lines[3].endswith("14% less, if they repeat")
    assert len(lines) == 5
    assert gain_lines(gain(two_slots(), "lpt"), "M", "again")[3].endswith("no more to gain")


def test_the_end_screen_explains_a_better_order_of_lengths_that_were_known() -> None:
    lines = gain_lines(gain(two_slots(), "fcfs"), "tiny:speller", "again", planned=True)
    assert lines[3].endswith("14% less than this run")
    told = " ".join(lines[5:])
    assert "planned with earlier lengths and costs" in told
    assert "next time" not in told


def test_a_long_command_is_wrapped_as_a_shell_reads_it() -> None:
    command = f"batchbound run '{'a b ' * 8}.jsonl' --model M --slots 8 -o answers.jsonl --overwrite"
    lines = gain_lines(gain(two_slots(), "fcfs"), "M", command)[5:]
    assert all(len(line) <= 80 for line in lines)
    typed = "\n".join(lines).removeprefix("  next time: ").replace("\\\n", "")
    assert shlex.split(typed) == shlex.split(command)


def limited() -> Problem:
    """Return four requests of which two fit the KV capacity when they are long."""
    return problem_of([4, 4, 4, 4], [5, 3, 5, 3], 4, UNIT, kv_capacity=20, prefill_token_cap=8)


def test_first_come_first_served_has_the_limits_of_the_run() -> None:
    problem = limited()
    trace = simulate(problem, "fcfs", swap=0.0)
    assert trace.evictions
    assert trace.prefill_stages > 2  # the token cap lets two prompts into a stage
    found = gain_of(Fleet.of(problem, 1), trace, cost=problem.cost)
    assert found is not None
    assert found.first_come == found.this_run
    assert found.evicts
    lines = gain_lines(found, "M", None)
    assert lines[2].endswith("no gain")
    assert "  least possible with evictions or without, in 20 tokens of KV cache" in lines


def test_a_plan_of_known_lengths_keeps_the_limits() -> None:
    problem = limited()
    found, plan = gain_and_plan(Fleet.of(problem, 1), simulate(problem, "lpt"), cost=problem.cost)
    assert found is not None
    assert plan is not None
    assert plan.problem.kv_capacity == 20
    assert plan.problem.prefill_token_cap == 8
    assert plan.schedule.check(plan.problem) is None


def test_nothing_is_planned_where_a_completion_outgrew_the_capacity() -> None:
    problem = limited()
    trace = simulate(problem, "fcfs", np.array([30, 3, 5, 3]), swap=0.0)
    found = gain_of(Fleet.of(problem, 1), trace, cost=problem.cost)
    assert found is not None
    assert found.known is None
    assert found.first_come == found.this_run
    assert not any("lengths known" in line for line in gain_lines(found, "M", None))


def test_prompts_that_fit_at_once_leave_no_order_to_choose() -> None:
    found = gain(problem_of([1, 1, 1], [1, 2, 4], 5, UNIT), "fcfs")
    lines = gain_lines(found, "M", "again")
    assert lines[-1] == "  3 prompts fit into 5 slots at once: no order can help"
    assert not any("known beforehand" in line for line in lines)


def test_a_busy_machine_is_named() -> None:
    assert not any("may be off" in line for line in gain_lines(gain(two_slots(), "fcfs", 2.0), "M", None))
    trace = simulate(two_slots(), "fcfs")
    first, *later = trace.stages
    odd = replace(trace, stages=(replace(first, end=first.end + 2.0), *later))
    found = gain_of(Fleet.of(two_slots(), 1), odd, cost=UNIT)
    assert found is not None
    said = " ".join(gain_lines(found, "M", None)[-2:])
    assert "seconds are measured: the others may be off by 29%;" in " ".join(said.split())
