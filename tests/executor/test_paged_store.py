"""Keys and values in pages: the answers of generate, in the memory that was planned and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from builders import mostly_slow
from tier_cases import (
    FAST,
    RAGGED,
    answers_of_generate,
    cut_short,
    draw_requests,
    generate_alone,
    run_at_random,
)

from batchbound import Limits, make_plan
from batchbound.data.costs.cost import CostModel
from batchbound.data.files.disk import InputError
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.engines.huggingface import HuggingFaceEngine
from batchbound.executor.engines.tiers import choose_tier
from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.models.faults import OutOfMemoryError
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.models.source import load_model
from batchbound.heuristics.follow import plan_policy
from batchbound.heuristics.loop import execute
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.solvers.search.constructive import ski_rental_schedule

CHEAP_STAGES = CostModel(0.001, 1e-6, 0.006, 2e-5)

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


@pytest.mark.parametrize("family", mostly_slow(RAGGED, FAST))
def test_rows_in_pages_give_the_answers_of_generate_alone(family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    requests = draw_requests(9, seed=1)
    # Prompts in chunks, moves to the host and back, and no more pages than the longest requests need.
    need = max(len(prompt) + tokens for prompt, tokens in requests)
    batch = RaggedBatch(model, slots=3, capacity=1, prefill_tokens=13, kv_tokens=3 * need)
    ends, expected = cut_short(answers_of_generate(family, requests))
    assert run_at_random(batch, requests, seed=2, until=ends) == expected
    store = batch._store
    assert sorted(store._free) == list(range(store.pages))
    assert all(not buffer.any() for layer in store._paged_layers for buffer in layer.buffers)


def test_a_batch_whose_pages_run_out_says_so_and_goes_on(llama: Any) -> None:
    batch = RaggedBatch(llama, slots=2, capacity=64, kv_tokens=62)
    # 64 pages; the prompt and its coming token fill 48 of them.
    prompt = [1] * 47
    batch.prefill([0], [prompt])
    with pytest.raises(OutOfMemoryError, match="the 64 tokens of the KV capacity"):
        batch.prefill([1], [[2] * 16])
    assert batch.occupied == (0,)
    batch.prefill([1], [[2] * 3])
    with pytest.raises(OutOfMemoryError) as stopped:
        batch.decode(20)
    before = stopped.value.tokens[:, 0].tolist()
    assert len(before) == 7
    batch.release(1)
    after = batch.decode(10)[:, 0].tolist()
    assert before + after == generate_alone(llama, prompt, 18)[1:]


def job(kv_capacity: int | None, slots: int = 8) -> tuple[Problem, list[list[int]]]:
    rng = np.random.default_rng(11)
    answers = np.minimum(90, 2 + np.exp(rng.normal(2, 1, 40))).astype(int)
    workload = Workload.from_lengths(rng.integers(3, 60, 40).tolist(), answers.tolist())
    problem = Problem(
        workload, CostModel.paper(), slots, kv_capacity=kv_capacity, prefill_emits_first_token=True
    )
    return problem, [list(tokens) for tokens in Prompts.random(workload, 200, seed=0).tokens]


def batch_of(engine: HuggingFaceEngine) -> RunningBatch:
    return engine._residence._batch


@pytest.mark.parametrize("capacity", [170, 260])
def test_a_plan_under_a_kv_capacity_allocates_it_and_at_most_a_token_a_slot_and_one_more(
    capacity: int, llama: Any
) -> None:
    problem, prompts = job(capacity)
    engine = HuggingFaceEngine(problem, llama, prompts, problem.workload.output_tokens)
    execute(problem, Replay(ski_rental_schedule(problem), problem), engine)
    free, _ = job(None)
    without = HuggingFaceEngine(free, llama, prompts, problem.workload.output_tokens)
    execute(free, Replay(ski_rental_schedule(free), free), without)
    assert engine.answers == without.answers
    assert "memory" not in engine.describe()
    store: Any = batch_of(engine)._store
    heads, size = llama.config.num_key_value_heads, llama.config.head_dim
    for layer in store._paged_layers:
        for buffer in layer.buffers:
            assert buffer.numel() / (heads * size) <= capacity + problem.slots + 1


def test_a_capacity_beyond_what_the_slots_can_hold_is_not_allocated(llama: Any) -> None:
    problem, prompts = job(10**9)
    engine = HuggingFaceEngine(problem, llama, prompts, problem.workload.output_tokens)
    store: Any = batch_of(engine)._store
    longest = int((problem.prompt_tokens + problem.workload.output_tokens).max())
    assert store.pages <= 8 * (longest + 1)


def test_answers_that_outgrow_the_plan_stay_in_its_memory(llama: Any) -> None:
    # Planned much shorter than they are: the policy evicts by what is held, and nothing is lost.
    problem, prompts = job(None)
    most = problem.workload.output_tokens
    planned = problem.workload.with_output_tokens(np.maximum(1, most // 9))
    tight = Problem(planned, CostModel.paper(), 8, kv_capacity=64, prefill_emits_first_token=True)
    engine = HuggingFaceEngine(tight, llama, prompts, most)
    trace = execute(tight, policy_named("lpt-ski", tight), engine)
    expected = HuggingFaceEngine(problem, llama, prompts, most)
    execute(problem, policy_named("lpt-ski", problem), expected)
    assert engine.answers == expected.answers
    assert trace.evictions > 0
    assert "memory" not in engine.describe()


def test_a_layout_that_lies_side_by_side_is_refused_where_it_does_not_fit(llama: Any) -> None:
    problem, prompts = job(260)
    tier = choose_tier(llama, "window")
    with pytest.raises(InputError, match=r"8 slots of \d+ tokens.*KV capacity is 260 .*Plan with --slots 1"):
        HuggingFaceEngine(problem, llama, prompts, problem.workload.output_tokens, tier=tier)
    narrow, _ = job(138)
    with pytest.raises(InputError, match=r"KV capacity is 138 .*Plan without --kv-capacity"):
        HuggingFaceEngine(narrow, llama, prompts, problem.workload.output_tokens, tier=tier)
    wide, _ = job(10**5)
    HuggingFaceEngine(wide, llama, prompts, problem.workload.output_tokens, tier=tier)


@pytest.mark.slow
def test_a_plan_that_follows_a_policy_is_run_in_the_steps_that_it_predicts(llama: Any) -> None:
    workload = Workload.from_lengths([20] * 12, [40] * 12)
    problem = Problem(workload, CHEAP_STAGES, 8, kv_capacity=170, prefill_emits_first_token=True)
    plan = make_plan(problem, limits=Limits(work=2))
    assert plan.followed is not None
    prompts = [list(tokens) for tokens in Prompts.random(workload, 200, seed=0).tokens]
    engine = HuggingFaceEngine(plan.problem, llama, prompts, workload.output_tokens)
    trace = execute(plan.problem, plan_policy(plan, plan.schedule, plan.problem), engine)
    assert trace.decode_steps == plan.followed.decode_steps
    assert trace.evictions == plan.followed.evictions > 0
    assert engine.answers == [generate_alone(llama, prompt, 40) for prompt in prompts]
