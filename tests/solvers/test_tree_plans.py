"""Plans of prompts that share beginnings, which the engine holds and computes once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import tree_of

from batchbound.data.costs.cost import CostModel
from batchbound.data.kept_beginnings import CountedAhead, HeldBeginnings, KeptBeginnings
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.queues.ordered import group_by_group
from batchbound.heuristics.simulate import simulate
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits

COST = CostModel(prefill_base=1.0, prefill_per_token=0.25, decode_base=1.0, decode_per_slot=0.0)


def questions(documents: int, each: int, slots: int, capacity: int | None, room: int = 0) -> Problem:
    """Documents of 20 tokens, a question of 2 on each in turn, and completions of 3 tokens."""
    leaf = np.tile(np.arange(documents), each)
    tree = tree_of([-1] * documents, [20] * documents, leaf.tolist(), [2] * len(leaf))
    work = Workload.from_lengths(tree.prompt_tokens, [3] * len(leaf)).with_tree(tree)
    return Problem(work, COST, slots, kv_capacity=capacity, prefix_cache=room, prefill_emits_first_token=True)


def computed(problem: Problem, policy: str) -> list[int]:
    return [stage.tokens for stage in simulate(problem, policy).stages if stage.kind == "prefill"]


def test_a_document_that_gave_way_is_computed_again() -> None:
    # One at a time: 25 tokens, and one to come. The other document takes the room of the first.
    assert computed(questions(2, 3, 1, None), "fcfs") == [22] * 6
    assert computed(questions(2, 3, 1, None, room=20), "fcfs") == [22, 22, 2, 2, 2, 2]
    # Both run together: each is there as long as somebody reads it.
    assert computed(questions(2, 2, 2, None), "fcfs") == [44, 4]


def test_the_least_recently_used_document_gives_way() -> None:
    problem = questions(3, 2, 1, None, room=20)
    kept = KeptBeginnings(problem)
    tokens = []
    for request in (0, 1, 3, 2, 4, 5):
        tokens.append(kept.begin([request]))
        kept.decode(2)
        kept.end([request])
    # Requests 0 and 3 read the first document, after which none waits for it: the third finds room.
    assert tokens == [22, 22, 2, 22, 2, 2]


def test_running_requests_hold_a_document_once() -> None:
    problem = questions(1, 4, 4, 36)
    together = Schedule.from_bins(problem, [0, 0, 0, 0], [2])
    # 20 tokens once, and 4 x 4 in the last step; whole prompts would take 96.
    assert together.check(problem) is None
    assert together.stage_tokens(problem).tolist() == [28]
    assert "holds 36 of 35 tokens" in str(together.check(replace(problem, kv_capacity=35)))
    held = HeldBeginnings(problem)
    held.count([0, 1], 1)
    held.count([0], -1)
    assert held.tokens == 20
    held.count([1], -1)
    assert held.tokens == 0
    assert schedule_of(simulate(problem, "lpt")).bins == 1, "admission counts it once as well"


def test_a_stage_counts_what_may_have_been_dropped() -> None:
    kept, dropped = questions(2, 2, 2, None, room=40), questions(2, 2, 2, None)
    for problem, more in ((kept, 2), (dropped, 22)):
        ahead = CountedAhead(problem)
        assert ahead.tokens([0, 1, 2]) == [22, 22, 2]
        ahead.begin([0])
        assert ahead.tokens([2]) == [more]
        assert ahead.tokens([2], running=[0]) == [2]


@pytest.mark.parametrize("cap", [22, 30, 48])
def test_stages_keep_the_token_cap_by_what_they_compute(cap: int) -> None:
    problem = replace(questions(3, 4, 6, None, room=60), prefill_token_cap=cap)
    plan = make_plan(problem, limits=Limits(work=2))
    assert plan.schedule.stage_tokens(problem).max() <= cap
    assert plan.schedule.stage_tokens(problem).sum() == 3 * 20 + 12 * 2


def test_orders_keep_the_questions_of_a_document_together() -> None:
    problem = questions(3, 2, 1, None)
    assert problem.tree is not None
    leaves = problem.tree.leaf[group_by_group(problem)].tolist()
    assert sorted(leaves) == leaves


def test_a_plan_takes_documents_in_turn_where_memory_is_scarce() -> None:
    problem = questions(6, 8, 4, 60)
    distinct = 6 * 20 + 48 * 2
    assert sum(computed(problem, "fcfs")) > 2 * distinct
    plan = make_plan(problem, limits=Limits(work=2))
    assert plan.schedule.check(problem) is None
    assert plan.schedule.stage_tokens(problem).sum() == distinct
    assert plan.bound is not None
    assert plan.bound.terms["prompt tokens"] == distinct * COST.prefill_per_token
