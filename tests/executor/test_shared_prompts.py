"""A prompt is computed once for all that begin with it, and nobody's tokens change by it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import mostly_slow

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from tier_cases import FAST, RAGGED, answers_of_generate, generate_alone

from batchbound.data.costs.cost import CostModel
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.executor.engines.beginnings import ReusedBeginnings
from batchbound.executor.engines.huggingface import HuggingFaceEngine
from batchbound.executor.kv.kept_prompts import KeptPrompts
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.llm import LLM
from batchbound.executor.models.prompts import Prompts
from batchbound.executor.models.sampling import Sampler
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tiny import FAMILIES
from batchbound.executor.models.tokenizers import ByteTokenizer
from batchbound.executor.scoring import Scored, Scoring
from batchbound.heuristics.loop import execute, schedule_of
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


def pages_in_use(store: Any) -> int:
    """Return the pages of rows and of beginnings."""
    return int(store.pages - len(store._free))


def groups(count: int, size: int, seed: int, longest: int = 40) -> tuple[list[list[int]], list[int]]:
    """Prompts, each several times in a row, and lengths that differ within a group."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [prompt for prompt in prompts for _ in range(size)], [
        rng.randint(1, 12) for _ in range(count * size)
    ]


def test_random_prompts_of_a_workload_that_shares_them_are_the_same(llama: Any) -> None:
    workload = Workload(
        np.array(list("abcd")), np.array([9, 9, 4, 9]), np.array([2, 3, 2, 2]), group=np.array([0, 0, -1, 1])
    )
    plain = Prompts.random(workload, 256, seed=0).tokens
    shared = workload.sharing([8, 8, 0, 0])
    drawn = Prompts.random(shared, 256, seed=0).tokens
    assert drawn == (plain[0], plain[0], plain[2], plain[3])
    assert plain[0] != plain[1]
    some = Prompts.random(workload.sharing([5, 5, 0, 0]), 256, seed=0).tokens
    assert some[1] == plain[0][:5] + plain[1][5:]
    problem = Problem(shared, CostModel.paper(), 2, prefill_emits_first_token=True, prefix_cache=16)
    engine = HuggingFaceEngine(problem, llama, drawn, shared.output_tokens)
    trace = execute(problem, policy_named("fcfs", problem), engine)
    assert np.isfinite(trace.finished).all()
    assert engine.answers[0] == engine.answers[1][:2]


def answers(engine: LLM, prompts: Any, lengths: Any, **options: Any) -> list[list[int]]:
    done = engine.generate(prompts, max_tokens=lengths, ignore_eos=True, **options)
    return [list(one.completion_ids) for one in sorted(done, key=lambda one: one.index)]


QUICK = ("deepseek-v3", "llama")


@pytest.mark.parametrize(
    ("family", "tier"),
    [
        pytest.param(family, tier, marks=() if family in QUICK else pytest.mark.slow)
        for family in sorted(set(FAMILIES) - {"xglm"})
        for tier in ("ragged", "window")
        if tier == "window" or family in RAGGED
    ],
)
def test_groups_that_begin_in_different_stages_have_the_tokens_of_generate(family: str, tier: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    prompts, lengths = groups(3, 4, seed=1)
    expected = answers_of_generate(family, list(zip(prompts, lengths, strict=True)))
    engine = LLM(model, ByteTokenizer(), slots=3, tier=tier)
    assert answers(engine, prompts, lengths) == expected, "as they come: a group begins over several stages"
    assert answers(engine, prompts, lengths, expected_tokens=lengths) == expected, "the longest first: all do"


# Thirty tokens of examples, questions of twenty, and what follows a question.
EXAMPLES = list(range(30))
QUESTIONS = [EXAMPLES + [100 + 20 * q + k for k in range(20)] for q in range(3)]
ENDINGS = [[7], [8, 9], [8, 10, 11]]

BEGINNINGS: dict[str, list[list[int]]] = {
    "groups": [question for question in QUESTIONS for _ in range(4)],
    "turns": QUESTIONS + [question + ENDINGS[2] for question in QUESTIONS],
    "endings": [question + ending for question in QUESTIONS for ending in ENDINGS],
    "nothing": [[40 * k + t for t in range(20)] for k in range(6)],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pages": {"tier": "ragged"},
    "pages, four slots": {"tier": "ragged", "slots": 4},
    "pages in short memory": {"tier": "ragged", "kv_tokens": 3 * 60},
    "pages, nothing shared": {"tier": "ragged", "share_prompts": False},
    "rows side by side": {"tier": "window"},
}
ONCE, TWICE = 30 + 3 * 20, 3 * 50
"""Tokens of the questions, with the examples counted once and each time."""

COMPUTED = {
    # A further prompt that is equal to another, or begins with it, computes its last token again.
    "groups": {"pages": ONCE + 3 * 3, "nothing": 4 * TWICE, "rows": TWICE + 3 * 3},
    "turns": {"pages": ONCE + 3 * (3 + 1), "nothing": 2 * TWICE + 3 * 3, "rows": 2 * TWICE + 3 * 3},
    "endings": {"pages": ONCE + 3 * 6, "nothing": 3 * TWICE + 3 * 6, "rows": 3 * TWICE + 3 * 6},
    "nothing": {"pages": 6 * 20, "nothing": 6 * 20, "rows": 6 * 20},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", BEGINNINGS)
def test_a_beginning_is_computed_once_where_the_layout_shares_it(kind: str, layout: str) -> None:
    prompts, options = BEGINNINGS[kind], {"slots": 16, **LAYOUTS[layout]}
    lengths = [1 + at % 5 for at in range(len(prompts))]
    expected = answers_of_generate("llama", list(zip(prompts, lengths, strict=True)))
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    way = "nothing" if "nothing" in layout else layout.split()[0].strip(",")
    for order in ({}, {"expected_tokens": lengths}):
        engine = LLM(model, ByteTokenizer(), **options)
        assert answers(engine, prompts, lengths, **order) == expected
        assert engine._ran is not None
        stages = engine._ran.trace.stages
        computed = sum(stage.tokens for stage in stages if stage.kind == "prefill")
        assert engine.report().prompt_tokens == computed
        assert computed == COMPUTED[kind][way]
        assert (engine.report().run_gap or 0.0) >= -1e-9


@pytest.mark.parametrize("slots", [2, 9])
def test_scored_endings_of_the_table_compute_as_much_as_completed_ones(slots: int, llama: Any) -> None:
    sequences = [Scored((*question, *ending), len(ending)) for question in QUESTIONS for ending in ENDINGS]
    scoring = Scoring(llama, sequences, slots=slots)
    list(scoring.run())
    # The last token of a question is read with each ending, whose own last one is only predicted.
    assert scoring.computed == ONCE - 3 + 3 * 6


def test_prompts_are_kept_until_the_last_of_their_groups_up_to_what_the_slots_hold() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    prompts, lengths = groups(12, 8, seed=3, longest=30)
    once = sum(len(prompt) for prompt in prompts[::8])
    hold = 8 * (max(map(len, prompts)) + max(lengths))
    assert hold // 4 < once <= hold
    computed = []
    for most in (None, hold, hold + once):
        engine = LLM(model, ByteTokenizer(), slots=8, kv_tokens=most)
        answers(engine, prompts, lengths, expected_tokens=lengths)
        assert engine._ran is not None
        computed.append(sum(stage.tokens for stage in engine._ran.trace.stages if stage.kind == "prefill"))
    assert computed == 3 * [once + 12 * 7], "rows that share a prompt leave room for it"


def test_completions_of_one_prompt_are_drawn_each_on_its_own_as_without_sharing() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    asked: dict[str, Any] = {"n": 6, "temperature": 1.0, "seed": 4, "log_probabilities": True}
    drawn = []
    for share in (True, False):
        engine = LLM(model, ByteTokenizer(), slots=4, share_prompts=share)
        done = engine.generate(["a prompt", "another"], max_tokens=12, repetition_penalty=1.2, **asked)
        drawn.append({(one.index, one.sample): one for one in done})
    assert {key: one.completion_ids for key, one in drawn[0].items()} == {
        key: one.completion_ids for key, one in drawn[1].items()
    }
    assert len({one.completion_ids for one in drawn[0].values()}) == 12
    for key, one in drawn[0].items():
        assert one.log_probabilities == pytest.approx(drawn[1][key].log_probabilities, abs=1e-9)


def test_prompts_beyond_the_room_and_requests_on_the_host_are_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model("tiny:gemma3", dtype="float64", device="cpu")
    prompts, lengths = groups(3, 5, seed=3)
    expected = answers_of_generate("gemma3", list(zip(prompts, lengths, strict=True)))
    tight = LLM(model, ByteTokenizer(), slots=6, kv_tokens=130)
    assert answers(tight, prompts, lengths, expected_tokens=lengths) == expected
    monkeypatch.setattr(KeptPrompts, "keep", lambda *_: None)
    window = LLM(model, ByteTokenizer(), slots=3, tier="window")
    assert answers(window, prompts, lengths) == expected


def test_weights_that_change_between_calls_leave_nothing_stale() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    engine = LLM(model, ByteTokenizer(), slots=3)
    prompts, lengths = groups(2, 4, seed=5)
    before = answers(engine, prompts, lengths)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = answers(engine, prompts, lengths)
    assert after == [generate_alone(model, *each) for each in zip(prompts, lengths, strict=True)]
    assert after != before


@pytest.mark.parametrize("capacity", [None, 130])
@pytest.mark.parametrize("room", mostly_slow([0, 40, 80, 10**6], fast=[40]))
def test_the_engine_computes_what_the_schedule_says(room: int, capacity: int | None, llama: Any) -> None:
    prompts, lengths = groups(5, 4, seed=7)
    tree = PrefixTree.of_prompts(prompts).worth_keeping()
    workload = Workload.from_lengths([len(prompt) for prompt in prompts], lengths).with_tree(tree)
    problem = Problem(
        workload,
        CostModel.paper(),
        3,
        kv_capacity=capacity,
        prefill_emits_first_token=True,
        prefix_cache=room,
    )
    # The longest first takes the groups in turn: scarce memory drops some, which are computed again.
    again = {(None, 0): 0, (None, 40): 0, (None, 80): 0, (130, 0): 38, (130, 40): 0, (130, 80): 0}
    engine = HuggingFaceEngine(problem, llama, prompts, np.array(lengths))
    trace = execute(problem, policy_named("lpt-ski", problem), engine)
    computed = [stage.tokens for stage in trace.stages if stage.kind == "prefill"]
    assert computed == schedule_of(trace).stage_tokens(problem).tolist()
    once = sum(len(prompt) + 3 for prompt in prompts[::4])
    assert sum(computed) == once + again.get((capacity, room), 0)
    assert engine.answers == answers_of_generate("llama", list(zip(prompts, lengths, strict=True)))


@pytest.mark.parametrize("seed", mostly_slow(range(30), fast=range(3)))
def test_the_engine_computes_what_the_simulator_says_of_trees(seed: int, llama: Any) -> None:
    rng = random.Random(seed)
    prompts, lengths = drawn_tree(seed, rng.randint(8, 30))
    tree = PrefixTree.of_prompts(prompts).worth_keeping()
    workload = Workload.from_lengths([len(prompt) for prompt in prompts], lengths).with_tree(tree)
    longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    capacity = rng.choice([None, longest + rng.randint(0, 30), 2 * longest])
    problem = Problem(
        workload,
        CostModel.paper(),
        rng.randint(1, 4),
        kv_capacity=capacity,
        prefill_emits_first_token=True,
        prefix_cache=rng.choice([0, rng.randint(1, 60)]),
    )
    for policy in ("fcfs", "lpt-ski"):
        engine = HuggingFaceEngine(problem, llama, prompts, np.array(lengths))
        ran = execute(problem, policy_named(policy, problem), engine)
        expected = simulate(problem, policy, swap=0.0)
        stages = [(stage.kind, stage.tokens, stage.active) for stage in expected.stages]
        assert [(stage.kind, stage.tokens, stage.active) for stage in ran.stages] == stages


def test_prompts_that_the_plan_shares_and_that_differ_are_refused(llama: Any) -> None:
    workload = Workload.from_lengths([3, 3], [2, 2])
    workload = replace(workload, group=np.zeros(2, dtype=np.int64)).with_shared_prompts()
    tree = workload.with_tree(PrefixTree.of_prompts([[1, 2, 3], [1, 2, 4]]))
    for shared in (workload, tree):
        problem = Problem(shared, CostModel.paper(), 2, prefill_emits_first_token=True)
        with pytest.raises(ValueError, match="of 'request-1' does not begin as that of 'request-0'"):
            HuggingFaceEngine(problem, llama, [[1, 2, 3], [1, 4, 3]], np.array([2, 2]))


@pytest.mark.parametrize("kind", [RaggedBatch, WindowBatch])
def test_a_beginning_is_held_until_it_is_forgotten(kind: type[RaggedBatch] | type[WindowBatch]) -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    batch = kind(model, 4, 40)
    path = ((7, 2),)
    first = batch.prefill([0, 1], [[1, 2, 3], [4, 5]], paths=[path, ()])
    assert batch.prefilled == 5
    assert batch.prefill([2], [[1, 2, 3]], paths=[path]) == first[:1]
    assert batch.prefilled == 1
    batch.decode(3)
    batch.forget([7])
    assert batch.prefill([3], [[1, 2, 3]], paths=[path]) == first[:1]
    assert batch.prefilled == 3, "it was forgotten, and is computed again"
    rows = [batch._store.read_row(batch._row_of_slot[slot])[0][0][:, :3] for slot in (0, 2, 3)]
    for row in rows:
        torch.testing.assert_close(row, rows[0])
    assert batch.decode(2).shape == (2, 4)


def test_columns_are_read_together_only_after_others_that_are() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    batch = RaggedBatch(model, 5, 40)
    path = ((7, 2), (8, 3))
    batch.prefill([0, 1], [[1, 2, 3, 4], [1, 2, 3, 5]], paths=[path] * 2)
    assert batch._store.shared_columns([0, 1]).numbers.tolist() == [0, 2, 2, 0, 1, 2, 3, 2, 0, 1]
    assert batch._store.shared_columns([1, 0], [3, 2]).numbers.tolist() == [0, 2, 2, 0, 1]
    # The first beginning is computed again, and the second is still there: rows 0 and 2 share none.
    batch.forget([7])
    batch.prefill([2], [[1, 2, 3, 6]], paths=[path])
    assert batch._store.shared_columns([0, 2]).groups == 0
    assert batch._store.shared_columns([0, 1, 2]).numbers.tolist() == [0, 2, 2, 0, 1, 2, 3, 2, 0, 1]


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_request_from_the_host_reads_beginnings_that_are_still_held(forgotten: bool) -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    prompts = [[*range(1, 21), own] for own in (50, 60)]
    batch = RaggedBatch(model, 2, 40)
    tokens = [batch.prefill([0, 1], prompts, paths=[((7, 12), (8, 20))] * 2)]
    tokens += batch.decode(2).tolist()
    pages = pages_in_use(batch._store)
    suspended = batch.take(1)
    if forgotten:
        batch.forget([8])
    batch.insert(1, suspended)
    assert pages_in_use(batch._store) == pages + (8 if forgotten else 0)
    tokens += batch.decode(5).tolist()
    for slot, prompt in enumerate(prompts):
        assert [row[slot] for row in tokens] == generate_alone(model, prompt, 8)


def test_pages_of_a_beginning_are_free_when_its_last_row_has_ended() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    batch = RaggedBatch(model, 3, 40)
    prompt, path = list(range(20)), ((0, 10), (1, 15))
    batch.prefill([0, 1], [prompt, [*prompt[:15], 30, 31]], paths=[path, path])
    # 15 pages are shared; the rows have 5 and 2 tokens of their own, and room for one more each.
    assert pages_in_use(batch._store) == 15 + 6 + 3
    batch.forget([0, 1])
    batch.release(0)
    assert pages_in_use(batch._store) == 15 + 3
    batch.release(1)
    assert pages_in_use(batch._store) == 0


def test_beginnings_that_no_row_reads_give_way_from_their_ends() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    batch = RaggedBatch(model, 2, 10, kv_tokens=28)
    prompt, path = list(range(21)), ((0, 10), (1, 20))
    batch.prefill([0], [prompt], paths=[path])
    batch.release(0)
    assert pages_in_use(batch._store) == 20, "kept for further prompts"
    batch.prefill([0], [[5] * 14])
    assert list(batch._store._beginnings) == [0], "15 of 30 pages: the end of the path gave way"
    batch.release(0)
    batch.prefill([0], [prompt], paths=[path])
    assert batch.prefilled == 11


def test_a_prefill_that_fails_leaves_no_beginning_that_was_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    batch = RaggedBatch(model, 2, 40)
    with monkeypatch.context() as patch:
        patch.setattr(batch._decoder, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.prefill([0], [[1, 2, 3]], paths=[((0, 2),)])
    assert pages_in_use(batch._store) == 0
    batch.prefill([0], [[1, 2, 3]], paths=[((0, 2),)])
    assert batch.prefilled == 3


@pytest.mark.parametrize("path", [(), ((0, 34),)])
def test_completions_of_one_prompt_go_on_each_by_itself(path: Any) -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    prompt, names = list(range(5, 40)), ["a", "b", "c"]

    def drawn(path: Any, **options: Any) -> list[list[int]]:
        batch = RaggedBatch(model, 3, 50, sampler=Sampler(temperature=0.9, seed=7), **options)
        first = batch.prefill([0, 1, 2], [prompt] * 3, request_ids=names, paths=[path] * 3)
        return [first, *batch.decode(9).tolist()]

    alone = drawn(())
    assert len(set(zip(*alone, strict=True))) == 3, "each draws tokens of its own"
    assert drawn(path, kv_tokens=200) == alone


def test_what_the_window_tier_keeps_is_a_copy_within_its_room() -> None:
    kept, states = KeptPrompts(4), [(torch.ones(1, 3, 2), torch.ones(1, 3, 2))]
    kept.keep((0, 3), states, torch.ones(1, 4))
    kept.keep((1, 3), states, torch.ones(1, 4))
    assert kept.tokens == 3
    assert kept.get((0, 3)) is None, "there is room for four tokens, and the oldest prompt goes"
    found = kept.get((1, 3))
    assert found is not None
    states[0][0].zero_()
    assert found.layers[0][0].eq(1).all(), "a copy: the row it came from goes on"
    kept.forget([1])
    assert kept.tokens == 0


def drawn_tree(seed: int, requests: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of a tree of depth three at most, in any order, and lengths of their completions."""
    rng = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randint(least, most))]

    nodes = [some(0, 30)]
    for _ in range(rng.randint(0, 6)):
        nodes.append(rng.choice(nodes[:4]) + some(1, 20))
    prompts = [rng.choice(nodes) + some(1, 8) for _ in range(requests)]
    # Some prompts are equal, and some continue another.
    for at in range(0, requests, 5):
        prompts[at] = rng.choice(prompts) + some(0, 1)
    return prompts, [rng.randint(1, 9) for _ in prompts]


TREES = [
    ("gemma3", 0),
    ("gpt2", 0),
    *((family, seed) for seed, family in enumerate([*RAGGED, *FAST], start=1)),
]


@pytest.mark.parametrize("tree", mostly_slow(TREES, fast=TREES[:2]))
def test_trees_of_prompts_have_the_tokens_of_generate(tree: tuple[str, int]) -> None:
    family, seed = tree
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    rng = random.Random(seed)
    prompts, lengths = drawn_tree(seed, rng.randint(2, 30))
    expected = answers_of_generate(family, list(zip(prompts, lengths, strict=True)))
    longest = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    for slots, room in ((3, None), (5, 2 * longest), (8, 3 * longest + 40)):
        engine = LLM(model, ByteTokenizer(), slots=slots, kv_tokens=room)
        assert answers(engine, prompts, lengths) == expected
    # A limit of memory evicts requests, which continue from the host or are computed again.
    most = np.array(lengths)
    planned = Workload.from_lengths([len(prompt) for prompt in prompts], np.maximum(1, most // 3))
    problem = Problem(planned, CostModel.paper(), 4, kv_capacity=longest + 9, prefill_emits_first_token=True)
    run = HuggingFaceEngine(problem, model, prompts, most)
    execute(problem, policy_named("lpt-ski", problem), run)
    assert run.answers == expected


def test_512_requests_under_one_system_prompt_hold_little_more_than_their_distinct_tokens(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    system = [rng.randrange(256) for _ in range(1000)]
    prompts = [system + [rng.randrange(256) for _ in range(20)] for _ in range(512)]
    workload = Workload.from_lengths([len(prompt) for prompt in prompts], [6] * 512)
    problem = Problem(workload, CostModel.paper(), 512, prefill_emits_first_token=True)
    engine = HuggingFaceEngine(problem, llama, prompts, workload.output_tokens)
    store: Any = engine._residence._batch._store
    peak, take = 0, store._take

    def taking(count: int) -> list[int]:
        nonlocal peak
        pages: list[int] = take(count)
        peak = max(peak, pages_in_use(store))
        return pages

    monkeypatch.setattr(store, "_take", taking)
    trace = execute(problem, policy_named("fcfs", problem), engine)
    assert sum(stage.tokens for stage in trace.stages if stage.kind == "prefill") == 1000 + 512 * 20
    assert peak <= 1.15 * (1000 + 512 * 25)


@pytest.mark.parametrize("seed", range(20))
def test_a_growing_tree_names_each_beginning_once_and_for_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    begin_of: dict[int, tuple[int, tuple[int, ...]]] = {}

    def split(name: int, tokens: int, head: int) -> None:
        begin, whole = begin_of[name]
        begin_of[head] = begin, whole[: begin + tokens]
        begin_of[name] = begin + tokens, whole

    tree = ReusedBeginnings(split)
    added = list[tuple[int, ...]]()
    for _ in range(40):
        tokens = tuple(rng.integers(2, size=rng.integers(1, 9)).tolist())
        added.append(tokens)
        end = 0
        for name, through in tree.add(tokens):
            begin_of.setdefault(name, (end, tokens[:through]))
            assert begin_of[name] == (end, tokens[:through])
            end = through
        assert end == len(tokens)
    prefixes = {tokens[:end] for tokens in added for end in range(1, len(tokens) + 1)}
    assert sum(len(whole) - begin for begin, whole in begin_of.values()) == len(prefixes)
