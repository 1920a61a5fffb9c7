"""A running engine: prompts join while it decodes, and every token is that of a call of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.completion import Completion
from batchbound.executor.llm import LLM
from batchbound.executor.partial import Partial

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["Spell 4096.", "Reverse walnut.", "Spell 7.", "Spell 12.", "Count to five."]


def later(tokens: tuple[int, ...], logits: Any) -> Any:
    """Make large tokens likelier, the more of them there are."""
    return logits + 0.01 * sum(tokens) * torch.arange(len(logits)) / len(logits)


WAYS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.2},
    {"temperature": 1.2, "stop": ("e",), "min_tokens": 3},
    {"temperature": 1.0, "logits_processor": later, "stop_when": lambda tokens: sum(tokens) % 9 == 0},
]

Key = tuple[int, int]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_pretrained("tiny:speller", dtype="float32", device="cpu", slots=3)


@pytest.mark.parametrize("policy", ["fcfs", "fcfs-ski"])
def test_every_policy_serves_prompts_that_are_added(llm: LLM, policy: str) -> None:
    engine = LLM(llm.model, llm.tokenizer, slots=3, policy=policy).start()
    for prompt in PROMPTS:
        engine.submit([prompt], n=2, temperature=1.0, max_tokens=20)
    engine.step()
    engine.submit(PROMPTS, max_tokens=5)
    assert len(list(engine.completions())) == 15


def tool() -> Callable[[int, tuple[int, ...]], Future[Any] | None]:
    """Return what appends three tokens to a first turn of an even length."""
    begun = set[tuple[int, ...]]()

    def next_turn(position: int, tokens: tuple[int, ...]) -> Future[Any] | None:
        first = any(tokens[: len(old)] == old for old in begun)
        if first or len(tokens) % 2 or len(tokens) > 20:
            return None
        begun.add(tokens)
        future: Future[Any] = Future()
        future.set_result([97, 98, 99])
        return future

    return next_turn


def sequence(llm: LLM, seed: int) -> int:
    """Draw submits, cancels and continued completions; compare all tokens; return how many were compared."""
    rng = np.random.default_rng(seed)
    engine = llm.start(log_probabilities="raw")
    asked: dict[int, tuple[list[Any], dict[str, Any]]] = {}
    found: dict[Key, Completion] = {}
    cancelled = set[int]()

    def drawn_prompt() -> Any:
        if found and rng.random() < 0.5:
            # A conversation that goes on as a prompt of its own, or branches off within its completion.
            one = list(found.values())[rng.integers(len(found))]
            cut = int(rng.integers(len(one.completion_ids) + 1))
            return [*one.prompt_ids, *one.completion_ids[:cut], *rng.integers(97, 99, 2).tolist()]
        return PROMPTS[rng.integers(len(PROMPTS))]

    def submit() -> None:
        prompts = [drawn_prompt() for _ in range(rng.integers(1, 4))]
        how = {"n": int(rng.integers(1, 4)), **WAYS[rng.integers(len(WAYS))]}
        how |= {"seed": len(asked) + 1} if "temperature" in how else {}
        how["max_tokens"] = rng.integers(1, 30, len(prompts)).tolist()
        numbers = engine.submit(prompts, **how)
        asked[numbers.start] = prompts, how

    for _ in range(int(rng.integers(3, 9))):
        if rng.random() < 0.5 or not asked:
            submit()
        elif rng.random() < 0.3:
            first = list(asked)[rng.integers(len(asked))]
            cancelled.add(first)
            engine.cancel(first)
        for _ in range(int(rng.integers(4))):
            found |= {(one.index, one.sample): one for one in engine.step()}
    if rng.random() < 0.5:
        found |= {(one.index, one.sample): one for one in engine.completions()}
    engine.close()
    left: tuple[Partial, ...] = engine.unfinished
    compared = 0
    for first, (prompts, how) in asked.items():
        for one in llm.generate(prompts, log_probabilities="raw", **how):
            key = first + one.index, one.sample
            if key in found:
                assert found[key].completion_ids == one.completion_ids
                assert found[key].finish_reason == one.finish_reason
                assert found[key].log_probabilities == pytest.approx(one.log_probabilities, abs=1e-4)
            else:
                (half,) = [part for part in left if (part.index, part.sample) == key]
                assert one.completion_ids[: len(half.completion_ids)] == half.completion_ids
                (whole,) = llm.generate([half])
                assert whole.completion_ids == one.completion_ids
            compared += 1
    assert len(found) + len(left) == compared
    assert all(part.index in cancelled or part.index >= min(asked) for part in left)
    return compared


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))])
def test_tokens_of_drawn_sequences_are_those_of_calls_of_their_own(llm: LLM, part: int) -> None:
    assert sum(sequence(llm, 3 * part + seed) for seed in range(3)) > 5


def test_prompts_that_come_while_others_decode_take_free_slots(llm: LLM) -> None:
    engine = llm.start()
    engine.submit(PROMPTS[:2], max_tokens=[60, 3], ignore_eos=True)
    done = engine.step()
    while not done:
        done = engine.step()
    engine.submit(["Spell 7."], max_tokens=4, ignore_eos=True)
    order = [one.index for one in (*done, *engine.completions())]
    assert order == [1, 2, 0]
    report = llm.report()
    assert report.requests == 3
    assert report.run_gap is not None
    assert report.run_gap >= 0


def computed(llm: LLM) -> int:
    assert llm._ran is not None
    return sum(stage.tokens for stage in llm._ran.trace.stages if stage.kind == "prefill")


def test_prompts_that_come_later_share_beginnings_with_earlier_ones(llm: LLM) -> None:
    system = "You are asked for words, letters and numbers, and answer as shortly as you can. "
    engine = llm.start()
    engine.submit([system + "Reverse walnut."], max_tokens=60, ignore_eos=True)
    engine.step()
    engine.submit([system + "Spell 4096.", system + "Reverse apple."], max_tokens=[5, 30], ignore_eos=True)
    found: dict[int, Completion] = {}
    while 1 not in found:
        found |= {one.index: one for one in engine.step()}
    first = found[1]
    talk = [*first.prompt_ids, *first.completion_ids, *llm.tokenizer.encode(" And 7?")]
    engine.submit([talk, talk[:-1]], max_tokens=20)
    found |= {one.index: one for one in engine.completions()}
    assert len(found) == 5
    # Each node of the tree of all prompts and completions once, and the last token of each prompt.
    once = len(system + "Reverse walnut.") + len("Spell 4096.") + len("apple.") + len(" And 7?") + 1
    assert once <= computed(llm) <= once + 4
    gap = llm.report().run_gap
    assert gap is not None
    assert gap >= 0
    for index, prompt in ((3, talk), (4, talk[:-1])):
        assert next(llm.generate([prompt], max_tokens=20)).completion_ids == found[index].completion_ids


def test_a_conversation_of_single_requests_computes_each_token_once(llm: LLM) -> None:
    engine = llm.start()
    talk = [llm.tokenizer.encode("Spell 4096, and then reverse walnut."), llm.tokenizer.encode("Reverse 7.")]
    new, turns = sum(map(len, talk)), 4
    for _ in range(turns):
        # Both end in the same step, so the engine is idle between turns.
        numbers = [engine.submit([ids], max_tokens=12, ignore_eos=True)[0] for ids in talk]
        found = {one.index: one for one in engine.completions()}
        assert engine.idle
        talk = [[*ids, *found[at].completion_ids, 32, 49, 63] for ids, at in zip(talk, numbers, strict=True)]
        new += 3 * len(talk)
    # A turn computes what is new, and the last token of the turn before. Both begin with one token.
    assert computed(llm) == new - 3 * len(talk) + (turns - 1) * len(talk) - 1
    report = llm.report()
    assert report.requests == turns * len(talk)
    assert report.run_gap is not None
    assert report.run_gap >= 0
    with torch.no_grad():
        next(llm.model.parameters()).mul_(1.0)
    engine.submit([talk[0]], max_tokens=12)
    (again,) = engine.completions()
    assert computed(llm) == len(talk[0])
    assert again.completion_ids == next(llm.generate([talk[0]], max_tokens=12)).completion_ids


def test_groups_come_whole_and_k_of_them_are_enough(llm: LLM) -> None:
    engine = llm.start()
    engine.submit(PROMPTS, n=4, temperature=1.0, ignore_eos=True, max_tokens=[5, 40, 8, 60, 30])
    kept = []
    for group in engine.groups():
        kept.append(group)
        if len(kept) == 2:
            break
    engine.close()
    for group in kept:
        assert [(one.index, one.sample) for one in group] == [(group[0].index, k) for k in range(4)]
    assert len(engine.unfinished) + len(engine.parts) == 12
    assert llm.unfinished == engine.unfinished
    assert llm.report().requests >= 8


def test_conversations_go_on_beside_prompts_that_are_added(llm: LLM) -> None:
    expected = [next(llm.converse(tool(), [prompt], max_tokens=40)) for prompt in PROMPTS]
    engine = llm.start(tool())
    engine.submit(PROMPTS[:3], max_tokens=40)
    found = {one.index: one for one in engine.step()}
    engine.submit(PROMPTS[3:], max_tokens=40)
    found |= {one.index: one for one in engine.completions()}
    assert any(one.given for one in expected)
    for index, one in enumerate(expected):
        assert found[index].completion_ids == one.completion_ids
        assert found[index].given == one.given
    report = llm.report()
    assert (report.run_gap or 0) >= 0


def test_what_was_cancelled_is_left_when_all_others_have_ended(llm: LLM) -> None:
    engine = llm.start()
    engine.submit(PROMPTS[:2], max_tokens=[30, 5], ignore_eos=True)
    engine.step()
    engine.cancel(0)
    assert [one.index for one in engine.completions()] == [1]
    assert [part.index for part in llm.unfinished] == [0]
    engine.weights_changed()
    engine.close()
    assert [part.index for part in llm.unfinished] == [0]


def test_prompts_come_after_all_were_cancelled_before_they_began(llm: LLM) -> None:
    engine = llm.start()
    (first,) = engine.submit(PROMPTS[:1], max_tokens=5)
    engine.cancel(first)
    assert engine.step() == []
    (second,) = engine.submit(PROMPTS[1:2], max_tokens=5)
    assert [one.index for one in engine.completions()] == [second]
    assert llm.report().run_gap is not None
    assert [part.index for part in engine.unfinished] == [first]


def test_a_seed_that_was_submitted_before_is_refused(llm: LLM) -> None:
    engine = llm.start()
    engine.submit(["a"], temperature=1.0, seed=3)
    with pytest.raises(ValueError, match="seed 3 was submitted before"):
        engine.submit(["b"], temperature=1.0, seed=3)
    engine.submit(["a"], temperature=1.0)
    engine.submit(["a"], temperature=1.0)
    with pytest.raises(ValueError, match="leave them out"):
        LLM(llm.model, llm.tokenizer, kv_tokens=500).start()


def recomputed(llm: LLM, one: Completion, weights: list[dict[str, Any]], first: int) -> list[float]:
    """Return the log-probability of each token by the weights of its version."""
    found: list[float] = []
    for version, count in one.versions:
        llm.model.load_state_dict(weights[version - first])
        with torch.no_grad():
            logits = llm.model(torch.tensor([one.prompt_ids + one.completion_ids])).logits[0]
        part = range(len(found), len(found) + count)
        own = logits.log_softmax(-1)[len(one.prompt_ids) - 1 :][
            part, one.completion_ids[part.start : part.stop]
        ]
        found += own.tolist()
    return found


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("max_staleness", [None, 0, 1])
def test_each_token_has_the_version_that_drew_it_and_none_is_staler_than_asked(
    told: bool, max_staleness: int | None
) -> None:
    llm = LLM.from_pretrained("tiny:speller", dtype="float64", device="cpu", slots=3)
    engine = llm.start(log_probabilities="raw", max_staleness=max_staleness)
    weights: list[dict[str, Any]] = []
    how: dict[str, Any] = {"n": 2, "temperature": 1.0, "ignore_eos": True}
    engine.submit(PROMPTS, max_tokens=[8, 50, 14, 30, 20], **how)
    groups: list[tuple[Completion, ...]] = []
    ages: list[int] = []

    def train() -> None:
        with torch.no_grad():
            for weight in llm.model.parameters():
                weight.mul_(1.02)
        weights.append({name: weight.clone() for name, weight in llm.model.state_dict().items()})

    weights.append({name: weight.clone() for name, weight in llm.model.state_dict().items()})
    for group in engine.groups():
        ages.append(len(weights) - min(version for one in group for version, _ in one.versions))
        groups.append(group)
        train()
        if told:
            engine.weights_changed()
    assert sorted(group[0].index for group in groups) == list(range(5))
    assert max_staleness == 0 or any(len(one.versions) > 1 for group in groups for one in group)
    first = min(version for group in groups for one in group for version, _ in one.versions)
    assert first == 1
    if max_staleness is None:
        assert max(ages) > 1
    else:
        assert max(ages) <= max_staleness
    for one in (one for group in groups for one in group):
        assert one.log_probabilities == pytest.approx(recomputed(llm, one, weights, first), abs=1e-5)
    assert llm.report().run_gap is not None
    assert (llm.report().run_gap or 0) >= 0
