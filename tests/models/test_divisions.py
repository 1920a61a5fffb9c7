"""Bounds of jobs whose KV memory the search divides between requests and shared prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from builders import mostly_slow, workload_of
from tiny_instances import divided, divided_fleets

from batchbound import Limits, make_plan
from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.judging import verify
from batchbound.models.bounds.prove import evicting_bound, proven_bound
from batchbound.models.certificates.checker import verify_bound
from batchbound.solvers.cache_choice import choose_prefix_cache, divisions

COST = CostModel(prefill_base=1.0, prefill_per_token=0.001, decode_base=0.2, decode_per_slot=0.0)
FOUR = Problem(
    workload_of([5] * 4, [2] * 4, group=np.array([0, 0, 1, 1]), shared_tokens=np.array([4] * 4)),
    COST,
    slots=4,
    kv_capacity=24,
    prefill_emits_first_token=True,
)
"""Whole, the memory holds all four at once: one stage, one decode step."""

HALVED = replace(FOUR, kv_capacity=16, prefix_cache=8, memory_divided=True)
"""The rest of a third for prompts holds two at a time."""


@pytest.mark.parametrize("seed", mostly_slow(range(60), fast=range(3)))
def test_no_engine_with_one_memory_beats_a_bound(seed: int) -> None:
    assert divided(seed)[2] == []
    assert divided_fleets(seed)[2] == []


def test_a_bound_holds_for_a_division_that_was_not_chosen() -> None:
    whole = make_plan(FOUR, limits=Limits(work=20))
    assert whole.makespan == pytest.approx(1.0 + 0.001 * 12 + 0.2)
    assert proven_bound(replace(HALVED, memory_divided=False)).seconds > 2.0
    assert proven_bound(HALVED).seconds <= whole.makespan
    assert evicting_bound(HALVED).seconds <= whole.makespan


def test_a_bound_of_one_division_is_not_verified() -> None:
    alone = proven_bound(replace(HALVED, memory_divided=False))
    refused = verify_bound(HALVED, alone)
    assert refused is not None
    assert refused.rule == "every division"
    assert verify_bound(HALVED, proven_bound(HALVED)) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"holds": "nothing"}, "own tokens or prompts kept"),
        ({"evictions": True}, "that of the certificate within"),
        ({"of": {"kind": "every division"}}, "without a division"),
    ],
)
def test_a_forged_certificate_is_refused(changed: dict[str, object], said: str) -> None:
    bound = proven_bound(HALVED)
    forged = replace(bound, certificate={**bound.certificate, **changed})
    assert said in str(verify_bound(HALVED, forged))


def test_more_seconds_of_shared_prompts_are_refused() -> None:
    memory = replace(HALVED, kv_capacity=16, prefix_cache=0)
    bound = proven_bound(memory)
    assert bound.certificate["holds"] == "own tokens"
    terms = {**bound.terms, "shared prompts": bound.terms["shared prompts"] + 0.01}
    raised = replace(bound, seconds=bound.seconds + 0.01, terms=terms)
    assert "shared prompts" in str(verify_bound(memory, raised))


def test_a_plan_tries_other_divisions_and_is_no_worse_with_more_memory() -> None:
    seconds = []
    for capacity in range(10, 40, 5):
        problem = choose_prefix_cache(replace(FOUR, kv_capacity=capacity))
        assert problem.memory_divided
        plan = make_plan(problem, limits=Limits(work=20))
        assert verify(plan) is None
        seconds.append(plan.seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_the_user_divides_the_memory_alone() -> None:
    given = replace(FOUR, kv_capacity=16, prefix_cache=8)
    assert divisions(given) == [given]
    kept = [each.prefix_cache for each in divisions(choose_prefix_cache(FOUR))]
    assert 0 in kept
    assert len(set(kept)) == len(kept)


def test_a_written_plan_keeps_that_its_memory_was_divided(tmp_path: Path) -> None:
    job, cost = tmp_path / "job.csv", tmp_path / "cost.json"
    rows = "".join(f"{k},{k // 2},5,2,4\n" for k in range(4))
    job.write_text(f"id,group,input_tokens,output_tokens,shared_tokens\n{rows}")
    cost.write_text(json.dumps({"batchbound_cost": 2, "cost": asdict(COST)}))
    words = [str(job), "--slots", "4", "--kv-capacity", "24", "--cost", str(cost), "--work", "20"]
    for more, is_divided in (([], True), (["--prefix-cache", "8"], False)):
        path = tmp_path / "plan.json"
        assert main(["plan", *words, *more, "-o", str(path), "--overwrite"]) == 0
        replica = json.loads(path.read_text())["fleet"]["replicas"][0]
        assert replica.get("memory_divided", False) is is_divided
        assert Plan.load(path).problem.memory_divided is is_divided
        assert main(["verify", str(path)]) == 0
