"""The referee finds every broken rule and no other, and a schedule's figures are those of a walk."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from builders import UNIT, problem_of, schedule_of, sharing
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import MOST_STEPS, Problem
from batchbound.data.schedule import Schedule, Violation

LEGAL = schedule_of([0, 0, 1], [0, 1, 0], [2, 1])
"""Of three requests on two slots: the first ends after two decode steps, the third takes its slot."""


def three(**limits: Any) -> Problem:
    return problem_of([2, 3, 4], [2, 3, 1], 2, **limits)


def one_token(count: int) -> Problem:
    """Requests that are done once they are prefilled."""
    return problem_of([2] * count, [1] * count, 2, prefill_emits_first_token=True)


RULES: dict[str, tuple[Problem, Schedule, Problem, Schedule, str]] = {
    "a bin for each request": (
        three(),
        schedule_of([0, 0], [0, 1, 0], [2, 1]),
        three(),
        LEGAL,
        "every request is scheduled: bin_of has shape (2,) for 3 requests",
    ),
    "a slot for each request": (
        three(),
        schedule_of([0, 0, 1], [0, 1, 0, 1], [2, 1]),
        three(),
        LEGAL,
        "every request is scheduled: slot_of has shape (4,) for 3 requests",
    ),
    "decode steps are one row": (
        three(),
        Schedule(np.array([0, 0, 1]), np.array([0, 1, 0]), np.array([[2, 1]])),
        three(),
        LEGAL,
        "every request is scheduled: decode_steps has shape (1, 2) for 3 requests",
    ),
    "no bin has negative decode steps": (
        three(),
        schedule_of([0, 0, 3], [0, 1, 0], [2, 0, -1, 2]),
        three(),
        schedule_of([0, 0, 3], [0, 1, 0], [2, 0, 0, 1]),
        "decode steps are counted: -1 decode steps (bin 2)",
    ),
    "no more decode steps than all requests have": (
        three(),
        schedule_of([0, 0, 1], [0, 1, 0], [2, 5]),
        three(),
        schedule_of([0, 0, 1], [0, 1, 0], [2, 4]),
        "decode steps are of use: 7 decode steps for requests of 6 in all, 100,000,000 at most",
    ),
    "no more decode steps than memory holds": (
        problem_of([1], [MOST_STEPS + 1], 1),
        schedule_of([0], [0], [MOST_STEPS + 1]),
        problem_of([1], [MOST_STEPS], 1),
        schedule_of([0], [0], [MOST_STEPS]),
        "decode steps are of use: 100,000,001 decode steps for requests of 100,000,001 in all,"
        " 100,000,000 at most",
    ),
    "no bin before the first": (
        three(),
        schedule_of([0, -1, 1], [0, 1, 0], [2, 1]),
        three(),
        LEGAL,
        "every request is scheduled: prefilled in bin -1 of 2 (request 1)",
    ),
    "no bin after the last": (
        three(),
        schedule_of([0, 0, 2], [0, 1, 0], [2, 1]),
        three(),
        LEGAL,
        "every request is scheduled: prefilled in bin 2 of 2 (request 2)",
    ),
    "no slot before the first": (
        three(),
        schedule_of([0, 0, 1], [-1, 1, 0], [2, 1]),
        three(),
        LEGAL,
        "every request is scheduled: prefilled in slot -1 of 2 (request 0)",
    ),
    "no slot after the last": (
        three(),
        schedule_of([0, 0, 1], [0, 2, 0], [2, 1]),
        three(),
        LEGAL,
        "every request is scheduled: prefilled in slot 2 of 2 (request 1)",
    ),
    "every request finishes": (
        three(),
        schedule_of([0, 0, 1], [0, 1, 0], [2, 0]),
        three(),
        LEGAL,
        "every request finishes: needs 3 decode steps, 2 are left (request 1, slot 1, bin 0)",
    ),
    "every request of a later bin finishes": (
        problem_of([2, 2], [1, 3], 1),
        schedule_of([0, 1], [0, 0], [1, 2]),
        problem_of([2, 2], [1, 2], 1),
        schedule_of([0, 1], [0, 0], [1, 2]),
        "every request finishes: needs 3 decode steps, 2 are left (request 1, slot 0, bin 1)",
    ),
    "a slot is free again only when its request is done": (
        three(),
        schedule_of([0, 0, 1], [0, 1, 0], [1, 2]),
        three(),
        LEGAL,
        "one request per slot: request 0 still holds the slot (request 2, slot 0, bin 1)",
    ),
    "a later slot is free again only when its request is done": (
        problem_of([1] * 4, [1, 1, 2, 1], 2),
        schedule_of([0, 1, 0, 1], [0, 0, 1, 1], [1, 2]),
        problem_of([1] * 4, [1, 1, 1, 1], 2),
        schedule_of([0, 1, 0, 1], [0, 0, 1, 1], [1, 2]),
        "one request per slot: request 2 still holds the slot (request 3, slot 1, bin 1)",
    ),
    "a slot takes one request a stage, even those of no decode steps": (
        one_token(2),
        schedule_of([0, 0], [1, 1], [0]),
        one_token(2),
        schedule_of([0, 0], [1, 0], [0]),
        "one request per slot: request 0 still holds the slot (request 1, slot 1, bin 0)",
    ),
    "the token cap of a stage": (
        three(prefill_token_cap=4),
        LEGAL,
        three(prefill_token_cap=5),
        LEGAL,
        "token cap of a prefill stage: 5 prompt tokens in one prefill stage, 4 allowed (request 1, bin 0)",
    ),
    "a prompt that a stage's requests share counts once": (
        sharing([1, 2, 3], [0, 0, -1], 5, 3, prefill_token_cap=10),
        schedule_of([0, 0, 0], [0, 1, 2], [1]),
        sharing([1, 2, 3], [0, 0, -1], 5, 3, prefill_token_cap=11),
        schedule_of([0, 0, 0], [0, 1, 2], [1]),
        "token cap of a prefill stage: 11 prompt tokens in one prefill stage, 10 allowed (bin 0)",
    ),
    "a shared prompt that memory drops is computed again": (
        sharing([1] * 4, [0, 1, 0, 0], 5, 2, kv_capacity=9, prefill_token_cap=6),
        schedule_of([0, 1, 2, 2], [0, 0, 0, 1], [1, 1, 1]),
        sharing([1] * 4, [0, 1, 0, 0], 5, 2, kv_capacity=9, prefill_token_cap=6, prefix_cache=1),
        schedule_of([0, 1, 2, 2], [0, 0, 0, 1], [1, 1, 1]),
        "token cap of a prefill stage: 7 prompt tokens in one prefill stage, 6 allowed (bin 2)",
    ),
    "the KV capacity in a prefill stage of all prompts": (
        problem_of([5, 5], [1, 1], 2, kv_capacity=9),
        schedule_of([0, 0], [0, 1], [1]),
        problem_of([5, 5], [1, 1], 2, kv_capacity=10),
        schedule_of([0, 0], [0, 1], [1]),
        "KV capacity: a prefill stage holds 10 of 9 tokens (bin 0)",
    ),
    "the KV capacity in a prefill stage beside a running request": (
        problem_of([5, 5], [3, 1], 2, kv_capacity=10),
        schedule_of([0, 1], [0, 1], [1, 2]),
        problem_of([5, 5], [3, 1], 2, kv_capacity=11),
        schedule_of([0, 1], [0, 1], [1, 2]),
        "KV capacity: a prefill stage holds 11 of 10 tokens (bin 1)",
    ),
    "the KV capacity in the last of several decode steps": (
        problem_of([2, 2], [3, 3], 2, kv_capacity=7),
        schedule_of([0, 0], [0, 1], [3]),
        problem_of([2, 2], [3, 3], 2, kv_capacity=8),
        schedule_of([0, 0], [0, 1], [3]),
        "KV capacity: a decode step holds 8 of 7 tokens (bin 0)",
    ),
    "the KV capacity in a single decode step after another request is done": (
        problem_of([2, 2, 1], [2, 2, 1], 3, kv_capacity=5),
        schedule_of([0, 0, 0], [0, 1, 2], [2]),
        problem_of([2, 2, 1], [2, 2, 1], 3, kv_capacity=6),
        schedule_of([0, 0, 0], [0, 1, 2], [2]),
        "KV capacity: a decode step holds 6 of 5 tokens (bin 0)",
    ),
    "the KV capacity with the token that prefill gives": (
        problem_of([2, 2], [2, 2], 2, kv_capacity=5, prefill_emits_first_token=True),
        schedule_of([0, 0], [0, 1], [1]),
        problem_of([2, 2], [2, 2], 2, kv_capacity=6, prefill_emits_first_token=True),
        schedule_of([0, 0], [0, 1], [1]),
        "KV capacity: a decode step holds 6 of 5 tokens (bin 0)",
    ),
    "the KV capacity in a later bin": (
        problem_of([1, 1], [5, 2], 2, kv_capacity=6),
        schedule_of([0, 1], [0, 1], [3, 2]),
        problem_of([1, 1], [5, 2], 2, kv_capacity=7),
        schedule_of([0, 1], [0, 1], [3, 2]),
        "KV capacity: a decode step holds 7 of 6 tokens (bin 1)",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_schedule_that_breaks_one_rule_is_refused_by_name_and_its_neighbour_passes(rule: str) -> None:
    problem, broken, near, legal, message = RULES[rule]
    assert str(broken.check(problem)) == message
    assert legal.check(near) is None


def test_a_capacity_counts_no_request_that_is_done() -> None:
    # The first is done after a decode step, so the second never holds its tokens beside it.
    problem = problem_of([4, 1], [1, 6], 2, kv_capacity=6)
    assert schedule_of([0, 1], [0, 1], [1, 6]).check(problem) is None
    assert schedule_of([0, 0], [0, 1], [6]).check(problem) is None
    assert str(
        schedule_of([0, 0], [0, 1], [6]).check(problem_of([4, 1], [2, 6], 2, kv_capacity=6))
    ).startswith("KV capacity: a decode step holds 7 of 6 tokens")


def test_a_capacity_counts_no_request_that_has_no_steps() -> None:
    # The first is done with its prefill stage, so the second has its tokens to itself.
    problem = problem_of([4, 1], [1, 4], 2, kv_capacity=5, prefill_emits_first_token=True)
    assert schedule_of([0, 0], [0, 1], [3]).check(problem) is None
    tight = problem_of([4, 1], [1, 5], 2, kv_capacity=5, prefill_emits_first_token=True)
    assert schedule_of([0, 0], [0, 1], [4]).check(tight) is None


def test_a_violation_says_where_as_far_as_there_is_a_place() -> None:
    assert str(Violation("a rule", "is broken")) == "a rule: is broken"
    assert str(Violation("a rule", "is broken", 0, 1, 2)) == "a rule: is broken (request 0, slot 1, bin 2)"


@pytest.mark.parametrize("column", [[0.5], [0.0], ["0"], [True]])
def test_what_is_no_whole_number_is_refused(column: list[Any]) -> None:
    for at, name in enumerate(("bin_of", "slot_of", "decode_steps")):
        arrays: list[list[Any]] = [[0], [0], [1]]
        arrays[at] = column
        with pytest.raises(ValueError, match=f"{name} is of .*; it must be of whole numbers"):
            Schedule(*arrays)  # type: ignore[arg-type]


def test_a_schedule_shares_no_memory_and_cannot_be_changed() -> None:
    bins = np.array([0])
    schedule = Schedule(bins, np.array([0]), np.array([1]))
    bins[0] = 5
    assert schedule.bin_of.tolist() == [0]
    for name in ("bin_of", "slot_of", "decode_steps"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(schedule, name)[0] = 1


def test_slots_are_found_and_handed_on_when_they_have_been_free_longest() -> None:
    schedule = Schedule.from_bins(three(), [0, 0, 1], [2, 1])
    assert schedule.slot_of.tolist() == [0, 1, 0]
    four = problem_of([1] * 4, [1, 2, 1, 1], 2)
    assert Schedule.from_bins(four, [0, 0, 2, 2], [1, 1, 1]).slot_of.tolist() == [0, 1, 0, 1]


def test_the_requests_of_a_bin_get_slots_in_their_order() -> None:
    forty = problem_of([1] * 80, [1] * 80, 40)
    slots = Schedule.from_bins(forty, [1, 0] * 40, [1, 1]).slot_of
    assert slots[1::2].tolist() == slots[::2].tolist() == list(range(40))


@pytest.mark.parametrize(("bins", "decode_steps", "at"), [([0, 0, 0], [3], 0), ([0, 0, 1], [1, 2], 1)])
def test_more_requests_than_slots_have_no_colouring(
    bins: list[int], decode_steps: list[int], at: int
) -> None:
    with pytest.raises(ValueError, match=f"more than 2 requests overlap in bin {at}"):
        Schedule.from_bins(three(), bins, decode_steps)


def test_a_slot_of_a_request_of_no_steps_is_free_in_the_next_bin_only() -> None:
    with pytest.raises(ValueError, match="overlap in bin 0"):
        Schedule.from_bins(one_token(3), [0, 0, 0], [0])
    assert Schedule.from_bins(one_token(3), [0, 0, 1], [0, 0]).slot_of.tolist() == [0, 1, 0]


@dataclass
class Walk:
    """What a walk through a schedule meets, token by token."""

    broken: set[str] = field(default_factory=set)
    active: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    seconds: float = 0.0
    worked: float = 0.0
    done_at: dict[int, float] = field(default_factory=dict)
    bursts: int = 0


def walk(problem: Problem, schedule: Schedule) -> Walk:
    """Return what plain counting finds; it shares nothing with the referee."""
    found, first = Walk(), int(problem.prefill_emits_first_token)
    outputs, arrival = problem.workload.output_tokens.tolist(), problem.workload.arrival.tolist()
    prompts = problem.workload.input_tokens.tolist()
    capacity = problem.kv_capacity or 10**9
    running: dict[int, tuple[int, int]] = {}  # by slot: request and tokens generated
    decoded: set[int] = set()  # since the last stage or round
    for k, decode_steps in enumerate(schedule.decode_steps.tolist()):
        new = [i for i, at in enumerate(schedule.bin_of.tolist()) if at == k]
        tokens = sum(prompts[i] for i in new)
        found.stages.append(tokens)
        if tokens > (problem.prefill_token_cap or 10**9):
            found.broken.add("token cap of a prefill stage")
        if sum(prompts[i] + done for i, done in running.values()) + tokens > capacity:
            found.broken.add("KV capacity")
        if new:
            ready = max([found.seconds, *(arrival[i] for i in new)])
            found.seconds = ready + problem.cost.prefill_seconds(tokens)
            found.worked += problem.cost.prefill_seconds(tokens)
            found.done_at |= {i: found.worked for i in new if outputs[i] == first}
            decoded = set()
        slots = [int(schedule.slot_of[i]) for i in new]
        if len(set(slots)) < len(slots) or set(slots) & set(running):
            found.broken.add("one request per slot")
            return found
        running |= {slot: (i, first) for slot, i in zip(slots, new, strict=True) if outputs[i] > first}
        for _ in range(decode_steps):
            held = sum(prompts[i] + done for i, done in running.values())
            if held > capacity:
                found.broken.add("KV capacity")
            found.active.append(len(running))
            found.held.append(held)
            found.seconds += problem.cost.decode_seconds(len(running), held)
            found.worked += problem.cost.decode_seconds(len(running), held)
            requests = {i for i, _ in running.values()}
            found.bursts += bool(requests - decoded or (requests and decoded - requests))
            decoded = requests
            found.done_at |= {i: found.worked for i, done in running.values() if done + 1 == outputs[i]}
            running = {s: (i, done + 1) for s, (i, done) in running.items() if done + 1 < outputs[i]}
    if running:
        found.broken.add("every request finishes")
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    count = draw(st.integers(1, 5))

    def many(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    prompts, outputs = many(1, 4), many(1, 4)
    tight = max(p + o for p, o in zip(prompts, outputs, strict=True))
    problem = problem_of(
        prompts,
        outputs,
        draw(st.integers(1, 3)),
        CostModel(0.5, 0.25, 1.0, 0.125, prefill_floor=1.0, decode_per_kv_token=0.0625),
        arrival=draw(st.sampled_from([None, [0.75 * i for i in range(count)]])),
        prefill_emits_first_token=draw(st.booleans()),
        kv_capacity=draw(st.sampled_from([None, tight, tight + 3])),
        prefill_token_cap=draw(st.sampled_from([None, max(prompts), max(prompts) + 2])),
    )
    bins = draw(st.integers(1, 4))
    bin_of = draw(st.lists(st.integers(0, bins - 1), min_size=count, max_size=count))
    slot_of = draw(st.lists(st.integers(0, problem.slots - 1), min_size=count, max_size=count))
    most = max(1, int(problem.decode_steps.sum()))
    decode_steps = draw(
        st.lists(st.integers(0, 6), min_size=bins, max_size=bins).filter(lambda r: sum(r) <= most)
    )
    return problem, schedule_of(bin_of, slot_of, decode_steps)


@settings(max_examples=250, deadline=None)
@given(cases())
def test_the_referee_finds_what_a_walk_token_by_token_finds(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    if schedule.decode_steps.sum() > problem.decode_steps.sum():
        return
    found, violation = walk(problem, schedule), schedule.check(problem)
    assert (violation is None) == (not found.broken)
    assert violation is None or violation.rule in found.broken or "one request per slot" in found.broken


@st.composite
def legal_cases(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """A problem and a schedule that has room for idle decode steps and empty bins."""
    problem, schedule = draw(cases())
    bins, ends, decode_steps = [0] * len(problem), [0] * problem.slots, [0] * len(problem)
    for i in range(len(problem)):
        # One bin a request: it starts once its slot is free.
        slot = int(schedule.slot_of[i])
        start = max(ends[slot], sum(decode_steps[:i]))
        bins[i], decode_steps[max(0, i - 1)] = i, decode_steps[max(0, i - 1)] + start - sum(decode_steps[:i])
        ends[slot] = start + int(problem.decode_steps[i])
    decode_steps[-1] += max(ends) - sum(decode_steps)
    unlimited = problem_of(
        problem.prompt_tokens.tolist(),
        problem.workload.output_tokens.tolist(),
        problem.slots,
        problem.cost,
        arrival=problem.workload.arrival.tolist(),
        prefill_emits_first_token=problem.prefill_emits_first_token,
    )
    return unlimited, schedule_of(bins, schedule.slot_of.tolist(), decode_steps)


@settings(max_examples=80, deadline=None)
@given(legal_cases())
def test_the_figures_of_a_schedule_are_those_of_a_walk(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    assert schedule.check(problem) is None
    found = walk(problem, schedule)
    assert schedule.active(problem).tolist() == found.active
    assert schedule.kv_tokens(problem).tolist() == found.held
    assert schedule.bins == len(found.stages)
    assert schedule.stage_tokens(problem).tolist() == found.stages
    assert schedule.prefill_stages() == sum(tokens > 0 for tokens in found.stages)
    assert schedule.starts.tolist() == np.concatenate(([0], np.cumsum(schedule.decode_steps))).tolist()
    assert schedule.makespan(problem) == pytest.approx(found.seconds)
    assert schedule.finishes(problem).tolist() == pytest.approx(
        [found.done_at[i] for i in range(len(problem))]
    )
    assert schedule.changes(problem) == found.bursts
    prefill, decode = schedule.stage_seconds(problem)
    assert (prefill > 0).tolist() == [tokens > 0 for tokens in found.stages]
    assert len(decode) == len(found.active)


def test_a_request_is_done_with_its_last_step_or_with_its_stage_if_it_has_none() -> None:
    # Stages of a second before steps 0, 2 and 3; the second request has no decode steps, the third one.
    problem = problem_of([1] * 4, [3, 1, 2, 2], 3, UNIT, prefill_emits_first_token=True)
    schedule = schedule_of([0, 1, 1, 2], [0, 1, 2, 0], [2, 1, 1])
    assert schedule.check(problem) is None
    assert schedule.finishes(problem).tolist() == [3.0, 4.0, 5.0, 7.0]
    assert schedule.changes(problem) == 3
    # Decode steps in which nothing decodes take time, and begin no burst.
    idle = schedule_of([0, 1], [0, 0], [3, 2])
    assert idle.finishes(problem_of([1, 1], [2, 2], 1, UNIT)).tolist() == [3.0, 7.0]
    assert idle.changes(problem_of([1, 1], [2, 2], 1, UNIT)) == 2


def test_steps_in_which_nothing_decodes_are_left_out() -> None:
    problem = problem_of([1, 1], [2, 3], 1, UNIT)
    idle = schedule_of([0, 2], [0, 0], [3, 0, 4])
    assert idle.without_idle_steps(problem).decode_steps.tolist() == [2, 0, 3]
    assert idle.without_idle_steps(problem).check(problem) is None
    # Idle decode steps at the end of the problem's longest schedule count as well.
    short = schedule_of([0, 1], [0, 0], [2, 3])
    assert short.without_idle_steps(problem).decode_steps.tolist() == [2, 3]


def test_steps_are_idle_only_if_no_slot_decodes() -> None:
    busy = schedule_of([0, 0, 1], [0, 1, 0], [2, 2])
    assert busy.without_idle_steps(three()).decode_steps.tolist() == [2, 1]


def test_bins_without_requests_prefill_nothing_and_take_no_time() -> None:
    problem = problem_of([3], [2], 1, CostModel(1.0, 0.5, 1.0, 0.0, decode_per_kv_token=0.25))
    schedule = schedule_of([1], [0], [1, 1, 1, 1])
    assert schedule.stage_tokens(problem).tolist() == [0, 3, 0, 0]
    prefill, decode = schedule.stage_seconds(problem)
    assert prefill.tolist() == [0.0, 2.5, 0.0, 0.0]
    assert decode.tolist() == [1.0, 1.75, 2.0, 1.0]
    assert schedule.active(problem).tolist() == [0, 1, 1, 0]
    assert schedule.kv_tokens(problem).tolist() == [0, 3, 4, 0]
    for counts in (schedule.stage_tokens(problem), schedule.active(problem), schedule.kv_tokens(problem)):
        assert counts.dtype == np.int64


def test_a_stage_waits_for_the_last_of_its_requests_to_arrive() -> None:
    problem = problem_of([1, 1], [2, 1], 2, UNIT, arrival=[0.0, 7.5])
    # A second of prefill, one decode step, then the wait until 7.5, a second of prefill and a decode step.
    assert schedule_of([0, 1], [0, 1], [1, 1]).makespan(problem) == pytest.approx(9.5)
    assert schedule_of([0, 0], [0, 1], [2]).makespan(problem) == pytest.approx(10.5)


def test_utilization_is_full_steps_of_the_work_over_the_makespan() -> None:
    # Eight slot-steps on two slots are four full decode steps, of four seconds in a makespan of one and six.
    problem = problem_of([1, 1], [2, 6], 2, UNIT)
    schedule = schedule_of([0, 0], [0, 1], [6])
    assert schedule.makespan(problem) == 7.0
    assert schedule.utilization(problem) == pytest.approx(4 / 7)
    # With a price of keys and values, a full decode step reads as many as there are in all, spread evenly.
    dear = problem_of([1, 1], [2, 6], 2, CostModel(1.0, 0.0, 1.0, 0.0, decode_per_kv_token=0.5))
    read = (1 + 2) + (1 + 2 + 3 + 4 + 5 + 6)
    assert schedule.utilization(dear) == pytest.approx(4 * (1 + 0.5 * 6) / (1 + 6 + 0.5 * read))
    # One decode step on one slot is a full one, and reads the three tokens of its prompt.
    single = problem_of([3], [1], 1, dear.cost)
    assert schedule_of([0], [0], [1]).utilization(single) == pytest.approx(2.5 / 3.5)
    # A stage that is free, and nothing to decode.
    free = problem_of([3], [1], 1, CostModel(0.0, 0.0, 1.0, 0.0), prefill_emits_first_token=True)
    assert schedule_of([0], [0], [0]).utilization(free) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(0, 5), st.booleans())
def test_figures_of_runs_of_steps_are_those_of_single_steps(
    lengths: list[int], between: int, emits: bool
) -> None:
    cost = CostModel(0.1, 0.01, 0.02, 0.003, decode_per_kv_token=1e-4)
    problem = problem_of(
        [3] * len(lengths), lengths, len(lengths), cost=cost, prefill_emits_first_token=emits
    )
    half = len(lengths) // 2
    bins = np.arange(len(lengths)) >= half
    steps = np.array([between, int(problem.decode_steps.max())])
    schedule = Schedule(bins.astype(int), np.arange(len(lengths)), steps)
    prefill, decode = schedule.stage_seconds(problem)
    active = schedule.active(problem)
    assert schedule.makespan(problem) == pytest.approx(prefill.sum() + decode.sum(), rel=1e-12)
    assert schedule.without_idle_steps(problem).decode_steps.sum() == np.count_nonzero(active)
    first = schedule.starts[schedule.bin_of]
    points = np.unique(np.concatenate((first, first + problem.decode_steps)))
    assert schedule.changes(problem) == np.count_nonzero(active[points[points < len(active)]])


def test_a_completion_of_many_steps_takes_no_memory_for_each() -> None:
    problem = problem_of([10, 10], [99_000_000, 5], 2)
    schedule = schedule_of([0, 0], [0, 1], [99_000_000])
    tracemalloc.start()
    assert schedule.check(problem) is None
    assert schedule.makespan(problem) > 1e6
    schedule.finishes(problem)
    schedule.without_idle_steps(problem)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1e6
