"""Calls whose lengths nobody states: which are served when, on a model as in the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.data.costs.cost import CostModel
from batchbound.data.lengths.steps import BARRIER, Way
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.readers.sampling import Sampling
from batchbound.data.workload import Workload
from batchbound.executor.completion import Completion
from batchbound.executor.engines.huggingface import NO_EOS, DecodeOptions, HuggingFaceEngine
from batchbound.executor.llm import LLM
from batchbound.executor.models.request_rules import rules_of
from batchbound.executor.models.tokenizers import end_tokens
from batchbound.heuristics.loop import execute
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.lengths import Known, Observed
from batchbound.heuristics.unknown_lengths.registry import hidden_policy, without_lengths
from batchbound.heuristics.unknown_lengths.steps import StepsRun, serve_steps, simulate_steps

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = ("fcfs", "fcfs-ski", "learned")
GROUPS, SAMPLES, SLOTS, MOST = 8, 4, 8, 60
COST = CostModel.paper()


@pytest.fixture(scope="module")
def model() -> LLM:
    return LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=SLOTS)


def prompts() -> list[list[int]]:
    return [[5 + group] * (3 + group % 3) for group in range(GROUPS) for _ in range(SAMPLES)]


def samplings(end: int) -> list[Sampling]:
    """Return a sampling for each completion: the end of a sequence is likelier for some prompts."""
    return [
        Sampling(temperature=1.0, seed=100 * group + sample, logit_bias=((end, bias),))
        for group, bias in enumerate((1.0, 4.5, 2.5, 0.0, 4.0, 1.5, 3.5, 0.5))
        for sample in range(SAMPLES)
    ]


def served(policy: str, end: int) -> tuple[list[Completion], LLM]:
    one = LLM.from_pretrained(
        "tiny:llama", dtype="float64", device="cpu", slots=SLOTS, cost=COST, policy=policy
    )
    one.model.generation_config.eos_token_id = end
    done = list(one.generate(prompts(), samplings(end), max_tokens=MOST))
    return sorted(done, key=lambda completion: completion.index), one


def simulated(policy: str, tokens: Sequence[int]) -> tuple[float, int, int]:
    """Return model seconds, prefill stages and decode steps of the same lengths in the simulator."""
    group = np.repeat(np.arange(GROUPS), SAMPLES)
    workload = Workload.from_lengths([len(prompt) for prompt in prompts()], tokens)
    workload = Workload(workload.ids, workload.input_tokens, workload.output_tokens, group=group)
    shared = workload.with_shared_prompts()
    kept = SLOTS * (max(map(len, prompts())) + MOST) // 4
    problem = Problem(shared, COST, SLOTS, prefill_emits_first_token=True, prefix_cache=kept)
    alone = Problem(workload, COST, SLOTS, prefill_emits_first_token=True)
    made = hidden_policy(policy, without_lengths(alone), Known(longest=MOST - 1))
    trace = simulate(problem, made)
    return trace.makespan, trace.prefill_stages, sum(stage.decode_steps for stage in trace.stages)


@pytest.mark.slow
def test_the_order_of_the_policies_on_a_model_is_that_of_the_simulator() -> None:
    end = 7
    ran, expected, tokens = {}, {}, None
    for policy in POLICIES:
        done, engine = served(policy, end)
        lengths = [len(completion.completion_ids) for completion in done]
        # Each completion draws from a stream of its own, whoever is served beside it.
        assert tokens in (None, lengths)
        tokens = lengths
        found = engine.report()
        ran[policy] = found.schedule_makespan, found.prefill_stages, found.decode_steps
        expected[policy] = simulated(policy, lengths)
    assert tokens is not None
    assert len(set(tokens)) > 10
    assert any(length < MOST for length in tokens)
    for policy in POLICIES:
        assert ran[policy][1:] == expected[policy][1:]
        assert ran[policy][0] == pytest.approx(expected[policy][0])
    assert sorted(POLICIES, key=lambda name: ran[name][0]) == sorted(
        POLICIES, key=lambda name: expected[name][0]
    )
    assert len({round(seconds, 6) for seconds, _, _ in ran.values()}) > 2


def test_moved_kv_caches_change_no_token(model: LLM) -> None:
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(8), 4)
    scores = 0.97 * rng.standard_normal(8)[group] + 0.2 * rng.standard_normal(len(group))
    lengths = np.clip(np.exp(3 + 0.7 * scores), 2, 30).astype(np.int64)
    tokens = [[5 + index] * 3 for index in range(len(lengths))]
    workload = Workload.from_lengths([3] * len(lengths), lengths)
    workload = Workload(workload.ids, workload.input_tokens, workload.output_tokens, group=group)
    problem = Problem(workload, COST, 18, prefill_emits_first_token=True)
    past = Known(past=Observed(group, lengths - 1, np.ones(len(lengths), dtype=np.bool_)))
    texts, evictions = [], []
    for swap in (None, 1e-9):
        engine = HuggingFaceEngine(problem, model.model, tokens, lengths)
        trace = execute(problem, hidden_policy("learned", without_lengths(problem), past, swap), engine)
        texts.append(engine.answers)
        evictions.append(trace.evictions)
    assert evictions[0] == 0
    assert evictions[1] > 0
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_an_engine_remembers_lengths_of_earlier_calls() -> None:
    _, engine = served("learned", 7)
    assert engine._setup.past is not None
    longest, past = engine._setup.past
    assert longest == MOST - 1
    assert len(past.tokens) == GROUPS * SAMPLES
    list(engine.generate(prompts(), samplings(7), max_tokens=MOST))
    assert len(engine._setup.past[1].tokens) == 2 * GROUPS * SAMPLES
    assert len(set(engine._setup.past[1].group.tolist())) == 2 * GROUPS
    list(engine.generate(prompts()[:2], max_tokens=MOST - 1))
    assert engine._setup.past[0] == MOST - 2
    assert len(engine._setup.past[1].tokens) == 2


def test_a_policy_that_goes_by_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="no policy 'lpt' needs no lengths"):
        LLM.from_pretrained("tiny:llama", policy="lpt")


WAYS = {
    "barrier": ("fcfs", BARRIER),
    "ahead": ("fcfs-ski", Way(ahead=1.0, keep_kv=True)),
    "three of four, ahead": ("learned", Way(ahead=1.0, keep=3, keep_kv=True)),
}
STEP = np.repeat(np.arange(4), GROUPS * SAMPLES // 4)


def in_steps(policy: str, way: Way, lengths: np.ndarray, engine: HuggingFaceEngine | None) -> StepsRun:
    """Return what four steps of two groups come to: on an engine, or in the simulator with these lengths."""
    blind = without_lengths(grouped(lengths))
    made = hidden_policy(policy, blind, Known(longest=MOST - 1))
    if engine is None:
        return simulate_steps(blind, STEP, way, made, lengths)
    return serve_steps(blind, STEP, way, made, engine)


def grouped(lengths: np.ndarray) -> Problem:
    workload = Workload.from_lengths([len(prompt) for prompt in prompts()], lengths)
    group = np.repeat(np.arange(GROUPS), SAMPLES)
    tree = PrefixTree.of_prompts(prompts()).worth_keeping()
    workload = replace(workload, group=group).with_tree(tree)
    return Problem(workload, COST, SLOTS // 2, prefill_emits_first_token=True, prefix_cache=100)


@pytest.mark.slow
def test_steps_on_a_model_take_what_they_take_in_the_simulator_and_the_ways_rank_alike(model: LLM) -> None:
    end = 7
    done, other = served("fcfs", end)
    ends = end_tokens(other.model, other.tokenizer)
    lengths = np.array([len(completion.completion_ids) for completion in done])
    assert len(set(lengths.tolist())) > 10
    ran, expected = {}, {}
    for name, (policy, way) in WAYS.items():
        problem = grouped(np.full(len(lengths), MOST))
        names = [str(each) for each in problem.workload.ids]
        most = np.full(len(names), MOST)
        asked = dict(zip(names, samplings(end), strict=True))
        rule = rules_of(asked, prompts(), most.tolist(), model.tokenizer, ends)
        options = DecodeOptions(NO_EOS if rule.ends else ends, rule)
        engine = HuggingFaceEngine(problem, model.model, prompts(), most, decoding=options)
        ran[name] = in_steps(policy, way, lengths, engine)
        expected[name] = in_steps(policy, way, lengths, None)
        assert ran[name].seconds == pytest.approx(expected[name].seconds)
        assert ran[name].begun.tolist() == expected[name].begun.tolist()
        assert ran[name].ended.tolist() == expected[name].ended.tolist()
        kept = ran[name].kept
        assert ran[name].tokens[kept].tolist() == lengths[kept].tolist()
    order = sorted(WAYS, key=lambda name: ran[name].makespan)
    assert order == sorted(WAYS, key=lambda name: expected[name].makespan)
    times = [ran[name].makespan for name in order]
    assert all(later > 1.02 * earlier for earlier, later in itertools.pairwise(times))
    assert ran["ahead"].stale_share > 0
    assert ran["three of four, ahead"].kept_bias(lengths) < 0
