"""Plans for engines that mix prompts with generated tokens: never worse than a simple rule, and proven."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tree_of, workload_of
from hypothesis import given, settings
from hypothesis import strategies as st

import batchbound
from batchbound import EngineLimits, Engines, IterationPlan, Limits, MixedJob, make_iteration_plan
from batchbound.data.claims.assumptions import DISTINCT, Assumption, assumed_line, assumed_of, least_label
from batchbound.data.costs.iteration_rates import IterationRates
from batchbound.data.files.disk import InputError
from batchbound.data.iterations import IterationBound, Predicted, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.readers.measured_run import read_vllm_run
from batchbound.data.readers.profile_readers import read_profile
from batchbound.heuristics.dispatch import RULES
from batchbound.heuristics.serving.release import predict
from batchbound.models.bounds.iterations import iteration_bound
from batchbound.planning import release_search
from batchbound.planning.release import Releasable, named_orders

RATES = IterationRates(0.01, decodes=1e-4, prompt_tokens=2e-4, kv_tokens=1e-5)
TIGHT = EngineLimits(4, 16, 48, 4)
WORK = Limits(work=40)


def job_of(prompts: list[int], outputs: list[int], **more: Any) -> MixedJob:
    return MixedJob(workload_of(prompts, outputs), **more)


def random_job(seed: int, count: int = 12) -> MixedJob:
    rng = np.random.default_rng(seed)
    return job_of(rng.integers(1, 12, count).tolist(), rng.integers(1, 30, count).tolist())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_no_simple_rule_takes_fewer_iterations_or_seconds(seed: int, short: bool, priced: bool) -> None:
    job, limits = random_job(seed), TIGHT if short else replace(TIGHT, kv_tokens=None)
    engines = Engines((limits,), rates=RATES if priced else None)
    plan = make_iteration_plan(job, engines, limits=Limits(work=10))
    rows = job.rows()
    for order in named_orders(Releasable.of_rows(rows, job.requests(), exact=True), None).values():
        rule = predict(rows, limits, order, prices=engines.prices())
        assert rule is not None
        assert plan.iterations is not None
        if not priced:
            assert plan.bound.iterations <= plan.iterations <= rule.iterations
        else:
            assert plan.least_seconds is not None
            assert plan.seconds is not None
            assert rule.seconds is not None
            assert plan.least_seconds.seconds * (1 - 1e-12) <= plan.seconds
            assert plan.seconds <= rule.seconds * (1 + 1e-12)
    assert batchbound.verify(plan) is None


@pytest.mark.slow
def test_a_search_finds_what_no_simple_rule_does_where_keys_and_values_run_out() -> None:
    job = random_job(3, 40)
    few, more = (
        make_iteration_plan(job, Engines((TIGHT,)), limits=Limits(work=work)).iterations for work in (1, 1500)
    )
    assert few is not None
    assert more is not None
    assert more < few


def test_the_same_work_and_seed_give_the_same_plan() -> None:
    job = random_job(5, 30)
    one, again, other = (
        make_iteration_plan(job, Engines((TIGHT,)), limits=Limits(work=90, seed=seed)) for seed in (0, 0, 1)
    )
    assert one.shares[0].requests.tolist() == again.shares[0].requests.tolist()
    assert one.shares[0].requests.tolist() != other.shares[0].requests.tolist()


def test_a_plan_at_its_bound_is_said_to_be_optimal() -> None:
    # Two slots: 3 + 3 beside 2 + 2 + 2.
    plan = make_iteration_plan(job_of([1] * 5, [3, 3, 2, 2, 2]), Engines((EngineLimits(2),)))
    assert (plan.iterations, plan.bound.iterations, plan.gap) == (6, 6, 0.0)
    assert (plan.maker.status, plan.maker.stopped_by) == ("optimal", "proof")
    assert plan.shares[0].in_flight == 6


def test_with_a_cost_a_plan_is_optimal_by_its_seconds() -> None:
    # One order is as good as any in iterations; a profile's bound in seconds need not be reached.
    work, engines = job_of([1], [4]), Engines((EngineLimits(2),), rates=RATES)
    plan = make_iteration_plan(work, engines)
    assert (plan.maker.status, plan.maker.stopped_by) == ("optimal", "proof")
    assert plan.seconds_gap == 0.0
    assert plan.least_seconds is not None
    least = replace(plan.least_seconds, seconds=plan.least_seconds.seconds / 2)
    violation = batchbound.verify(replace(plan, least_seconds=least))
    assert violation is not None
    assert "is marked optimal" in violation.message


def test_lengths_that_are_predictions_are_not_fitted_to() -> None:
    plan = make_iteration_plan(job_of([1] * 5, [3, 3, 2, 2, 2], exact=False), Engines((EngineLimits(2),)))
    assert plan.shares[0].order == "longest first"


def test_completions_of_a_request_stand_side_by_side_on_one_engine() -> None:
    request = np.array([0, 0, 0, 1, 2, 2])
    job = job_of([2, 2, 2, 3, 4, 4], [5, 5, 5, 9, 2, 2], request=request)
    plan = make_iteration_plan(job, Engines((TIGHT, TIGHT)), limits=WORK)
    for share in plan.shares:
        numbers = request[share.requests]
        assert len(np.flatnonzero(np.diff(numbers))) + 1 == len(np.unique(numbers))
    assert plan.replica_of[0] == plan.replica_of[1] == plan.replica_of[2]
    with pytest.raises(ValueError, match="cannot be spread"):
        make_iteration_plan(job, Engines((TIGHT, TIGHT)), groups="spread")


def test_several_engines_share_the_job_and_have_one_bound() -> None:
    job = random_job(1, 30)
    one, two = (
        make_iteration_plan(job, Engines((TIGHT,) * count, rates=RATES), limits=WORK) for count in (1, 2)
    )
    assert two.iterations is not None
    assert one.iterations is not None
    assert two.bound.iterations <= two.iterations < one.iterations
    assert two.least_seconds is not None
    assert one.least_seconds is not None
    assert one.least_seconds.seconds / 2 <= two.least_seconds.seconds * (1 + 1e-12) <= (two.seconds or 0)
    assert batchbound.verify(two) is None
    assert sorted(two.order.tolist()) == list(range(30))


def test_more_engines_than_requests_leave_some_idle() -> None:
    plan = make_iteration_plan(job_of([1, 1], [4, 2]), Engines((TIGHT,) * 3, rates=RATES))
    assert sorted(len(share.requests) for share in plan.shares) == [0, 1, 1]
    assert plan.iterations == 4
    assert batchbound.verify(plan) is None


def test_what_nobody_states_the_bound_does_without() -> None:
    job, limits = job_of([64] * 4, [1] * 4), EngineLimits(4, 16, 256, 16)
    stated = make_iteration_plan(job, Engines((limits,)))
    unstated = make_iteration_plan(job, Engines((limits,), budget_stated=False, blocks_stated=False))
    assert (stated.bound.iterations, stated.bound.source) == (16, "tokens")
    assert unstated.bound.iterations == 1
    assert unstated.proven.block_tokens == 1
    # A tokenizer that nobody named may say that a prompt is one token.
    uncounted = make_iteration_plan(replace(job, counted=False), Engines((limits,)))
    assert uncounted.bound.iterations == 1
    assert uncounted.iterations == stated.iterations
    assert batchbound.verify(uncounted) is None


def test_where_prompts_are_not_counted_and_room_is_scarce_nothing_is_packed() -> None:
    job = job_of([40] * 3, [4] * 3, counted=False)
    roomy, tight = (
        make_iteration_plan(job, Engines((EngineLimits(2, 64, room, 1),)), limits=WORK).bound
        for room in (None, 90)
    )
    assert (roomy.source, roomy.iterations) == ("packing", 8)
    assert (tight.source, tight.iterations) == ("slots", 6)


def test_a_request_too_large_for_its_engine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 60 tokens of KV cache.*, an engine has 48"):
        make_iteration_plan(job_of([50], [10]), Engines((TIGHT,)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"limits": ()}, "no engine"),
        ({"limits": (TIGHT, replace(TIGHT, sequences=2)), "rates": RATES}, "differ in their limits"),
    ],
)
def test_engines_that_make_no_sense_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engines(**more)


def test_an_interrupt_keeps_the_best_order_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))

    def stop_at_the_tenth(*given: Any, **more: Any) -> Predicted | None:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return predict(*given, **more)

    monkeypatch.setattr(release_search, "predict", stop_at_the_tenth)
    plan = make_iteration_plan(random_job(2, 30), Engines((TIGHT,)))
    assert plan.maker.stopped_by == "interrupt"
    assert batchbound.verify(plan) is None


def test_a_plan_is_the_same_once_it_was_on_disk(tmp_path: Path) -> None:
    tree = tree_of([-1], [3], [0, 0, -1, -1], [1, 1, 6, 2])
    job = job_of([4, 4, 6, 2], [5, 3, 2, 9], tree=tree)
    plan = make_iteration_plan(job, Engines((TIGHT,), rates=RATES), limits=WORK)
    plan.save(tmp_path / "plan.json")
    again = IterationPlan.load(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert again.sequences().cached.tolist() == [0, 3, 0, 0]
    assert batchbound.verify(again) is None


def tampered(plan: IterationPlan) -> dict[str, IterationPlan]:
    """Return plans that claim what does not hold, by what they claim."""
    share, least, predicted = plan.shares[0], plan.least_seconds, plan.shares[0].predicted
    assert least is not None
    assert predicted is not None
    rates = dict(least.rates)

    def with_share(**more: Any) -> IterationPlan:
        return replace(plan, shares=(replace(share, **more), *plan.shares[1:]))

    def with_seconds(**more: Any) -> IterationPlan:
        return replace(plan, least_seconds=replace(least, **more))

    return {
        "a request twice": with_share(requests=np.append(share.requests[:-1], share.requests[0])),
        "a request left out": with_share(requests=share.requests[:-1]),
        "a request from nowhere": with_share(requests=np.append(share.requests[:-1], 99)),
        "fewer sequences": replace(plan, proven=replace(plan.proven, sequences=3)),
        "fewer tokens": replace(plan, proven=replace(plan.proven, batched_tokens=15)),
        "less room": replace(plan, proven=replace(plan.proven, kv_tokens=44)),
        "other blocks": replace(plan, proven=replace(plan.proven, block_tokens=8)),
        "room that engines do not have": with_share(limits=replace(share.limits, kv_tokens=None)),
        "a bound too high": replace(plan, bound=replace(plan.bound, iterations=plan.bound.iterations + 1)),
        "another argument": replace(
            plan, bound=IterationBound(plan.bound.iterations, "longest", {"kind": "longest"})
        ),
        "no certificate": replace(plan, bound=replace(plan.bound, certificate={})),
        "a prediction too low": with_share(predicted=replace(predicted, iterations=plan.bound.iterations)),
        "below the bound": with_share(predicted=replace(predicted, iterations=1)),
        "fewer preemptions": with_share(predicted=replace(predicted, preemptions=predicted.preemptions + 1)),
        "other seconds": with_share(predicted=replace(predicted, seconds=1.001 * (predicted.seconds or 0))),
        "another concurrency": with_share(in_flight=1),
        "optimal": replace(plan, maker=replace(plan.maker, status="optimal")),
        "seconds too high": with_seconds(seconds=1.001 * least.seconds),
        "seconds of nan": with_seconds(seconds=float("nan")),
        "dearer iterations": with_seconds(rates=rates | {"iterations": 1.001 * rates["iterations"]}),
        "dearer prompts": with_seconds(rates=rates | {"prompt_tokens": 2 * rates["prompt_tokens"]}),
        "a rate below zero": with_seconds(rates=rates | {"pairs": -1e-6}),
        "a rate left out": with_seconds(rates={"iterations": 0.0}),
        "seconds of smaller engines": with_seconds(limits=replace(least.limits, sequences=1)),
        "seconds at no cost": replace(plan, rates=None),
        "a tree of other prompts": replace(plan, tree=tree_of([], [], [-1], [1])),
    }


def test_what_a_tampered_plan_claims_is_refused(tmp_path: Path) -> None:
    plan = make_iteration_plan(random_job(4), Engines((TIGHT,), rates=RATES), limits=WORK)
    assert plan.bound.source != "longest request"
    assert plan.gap
    assert batchbound.verify(plan) is None
    for name, other in tampered(plan).items():
        assert batchbound.verify(other) is not None, name


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    make_iteration_plan(random_job(4), Engines((TIGHT,)), limits=WORK).save(path)
    value = json.loads(path.read_text())
    value["shares"][0]["requests"][0] = value["shares"][0]["requests"][1]
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match="do not hold each completion once"):
        IterationPlan.load(path)
    path.write_text(json.dumps(value | {"batchbound_iteration_plan": 9}))
    with pytest.raises(InputError, match="version 9"):
        IterationPlan.load(path)


@pytest.mark.parametrize("column", ["cached", "shared", "anything"])
def test_a_file_of_columns_that_are_no_more_is_refused(tmp_path: Path, column: str) -> None:
    path = tmp_path / "plan.json"
    make_iteration_plan(random_job(4), Engines((TIGHT,)), limits=WORK).save(path)
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {column: [0] * 12}))
    with pytest.raises(InputError, match=rf"field '{column}': the field is unknown"):
        IterationPlan.load(path)


@pytest.mark.parametrize("name", ["RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B"])
@pytest.mark.slow
def test_on_the_public_vllm_runs_nothing_proven_is_above_what_was_measured(
    public_data: Path, name: str
) -> None:
    ran = read_vllm_run(public_data / "vllm_runs" / name)
    profile = read_profile(public_data / "layer_profiles" / f"{name}-tp1")
    limits = EngineLimits(ran.sequences, ran.batched_tokens, ran.kv_capacity, ran.block_tokens)
    plan = make_iteration_plan(
        MixedJob(ran.workload), Engines((limits,), profile=profile), limits=Limits(work=1)
    )
    assert plan.least_seconds is not None
    assert plan.least_seconds.seconds < ran.makespan
    assert batchbound.verify(plan) is None
    # Two percent more for an iteration is more than some iteration of the profile takes.
    rates = dict(plan.least_seconds.rates)
    rates["iterations"] *= 1.02
    dearer = replace(plan, least_seconds=replace(plan.least_seconds, rates=rates))
    violation = batchbound.verify(dearer)
    assert violation is not None
    assert "more than it costs" in violation.message


def test_no_rule_shares_requests_out_better_than_the_plan() -> None:
    # Shares of the rule round-robin have the lowest bound, which no order of them comes near.
    outputs = [35, 37, 29, 32, 38, 14, 28, 24, 24, 36, 23, 40]
    job = job_of([20] * 12, outputs)
    engines = Engines((EngineLimits(3, 512),) * 2)

    def iterations(rule: str | None) -> int:
        plan = make_iteration_plan(job, engines, rule=rule, limits=Limits(work=1))
        return max(share.predicted.iterations for share in plan.shares if share.predicted is not None)

    assert iterations(None) == min(map(iterations, RULES)) == 63
    assert iterations("round-robin") == 68


def test_requests_are_shared_out_by_seconds_where_an_iteration_has_a_price() -> None:
    job, engines = random_job(1, 14), Engines((replace(TIGHT, kv_tokens=None),) * 3, rates=RATES)

    def seconds(rule: str | None) -> float:
        found = make_iteration_plan(job, engines, rule=rule, limits=Limits(work=1)).seconds
        assert found is not None
        return found

    assert seconds(None) == min(map(seconds, RULES)) < seconds("lpt")


def test_a_plan_claims_a_proof_only_under_assumptions_that_are_checked_or_stated() -> None:
    job, engines = job_of([3, 3, 3], [2, 2, 4]), Engines((EngineLimits(2),), budget_stated=False)
    plan = make_iteration_plan(job, engines, limits=WORK)
    line = "assuming: one token a sequence and iteration, cold prefix cache"
    assert assumed_line(plan.relied_on) == line
    assert least_label(plan.assumptions, *plan.kinds) == "least, if assumptions hold"
    known = tuple(replace(one, basis="checked") for one in plan.assumptions)
    assert least_label(known, *plan.kinds) == "proven least"


def test_no_packing_bounds_engines_of_which_one_may_evict() -> None:
    # Together they have room for the four largest, 8 + 8 + 2 + 2 of 25 tokens; the small engine has not.
    job = job_of([4, 4, 1, 1, 1], [5, 5, 2, 2, 2])
    roomy, small = EngineLimits(2, 16, 16, 1), EngineLimits(2, 16, 9, 1)
    plan = make_iteration_plan(job, Engines((roomy, small)), limits=WORK)
    assert plan.bound.certificate["kind"] != "packing"
    packed = replace(plan, bound=iteration_bound(job.rows(), plan.proven, kinds=("packing",)))
    violation = "iterations: a packing does not hold for an engine that may evict requests"
    assert str(batchbound.verify(packed)) == violation


def test_a_plan_keeps_documents_together_where_a_prefix_cache_does_not_hold_them_all() -> None:
    # Four documents of 40 tokens, asked in turn; the cache holds two.
    leaf = np.tile(np.arange(4), 5)
    tree = PrefixTree(np.full(4, -1), np.full(4, 40), leaf, np.full(20, 4), unit=4)
    work = workload_of(tree.prompt_tokens.tolist(), (3 + np.arange(20) % 4).tolist())
    limits = EngineLimits(2, 64, 100, 4)
    plan = make_iteration_plan(MixedJob(work, tree=tree), Engines((limits,)), limits=WORK)
    (share,) = plan.shares
    assert share.predicted is not None
    documents = leaf[share.requests].tolist()
    assert sum(one != other for one, other in pairwise(documents)) < 10
    assert share.predicted.tokens - int((work.output_tokens - 1).sum()) < 1.2 * tree.distinct_tokens
    assert plan.bound.iterations <= share.predicted.iterations
    whole = predict(Sequences(work.input_tokens, work.output_tokens), limits, np.arange(20))
    assert whole is not None
    assert share.predicted.iterations < whole.iterations


def test_completions_of_a_request_stand_together_within_its_document() -> None:
    # Four documents of 40 tokens, asked in turn by requests of two completions.
    leaf = np.repeat(np.tile(np.arange(4), 5), 2)
    tree = PrefixTree(np.full(4, -1), np.full(4, 40), leaf, np.full(40, 4), unit=4)
    work = workload_of(tree.prompt_tokens.tolist(), (3 + np.arange(40) % 4).tolist())
    request = np.repeat(np.arange(20), 2)
    job = MixedJob(work, request, tree=tree)
    (share,) = make_iteration_plan(job, Engines((EngineLimits(2, 16, 100, 4),)), limits=WORK).shares
    requests = request[share.requests].tolist()
    assert sum(one != other for one, other in pairwise(requests)) == 19
    # Two documents fit at a time, and each is computed once; in file order each is computed five times.
    assert share.predicted is not None
    assert share.predicted.tokens - int((work.output_tokens - 1).sum()) == tree.distinct_tokens


def test_whole_documents_go_to_one_engine_each() -> None:
    # Eight documents of 400 tokens, asked in turn; each engine's cache holds two.
    leaf = np.tile(np.arange(8), 6)
    tree = PrefixTree(np.full(8, -1), np.full(8, 400), leaf, np.full(48, 4), unit=4)
    drawn = np.random.default_rng(1).integers(3, 8, 48)
    work = workload_of(tree.prompt_tokens.tolist(), drawn.tolist())
    limits = EngineLimits(2, 64, 880, 4)
    job = MixedJob(work, tree=tree, assumptions=(Assumption(DISTINCT, "assumed"), *assumed_of(tree)))
    plan = make_iteration_plan(job, Engines((limits, limits)), limits=WORK)
    documents = [set(leaf[share.requests].tolist()) for share in plan.shares]
    assert [len(each) for each in documents] == [4, 4]
    assert not documents[0] & documents[1]
    # A rule that is named knows no beginnings.
    ruled = make_iteration_plan(MixedJob(work, tree=tree), Engines((limits, limits)), rule="lpt", limits=WORK)
    assert ruled.iterations is not None
    assert plan.iterations is not None
    assert plan.iterations < 0.9 * ruled.iterations
    assert batchbound.verify(plan) is None
