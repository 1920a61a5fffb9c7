"""The engine as a library: an iterator of answers, a call per token, log-probabilities, rollouts."""

from __future__ import annotations

import runpy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.data.files.disk import InputError

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.completion import Completion
from batchbound.executor.llm import LLM
from batchbound.executor.rollout import rollout_function

PROMPTS = ["a", "bb bb", "some longer prompt", "dd", "and one more"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=3)
    torch.set_num_threads(threads)


def in_order(completions: Iterator[Completion]) -> list[Completion]:
    return sorted(completions, key=lambda completion: completion.index)


def test_greedy_answers_are_those_of_generate(engine: LLM) -> None:
    completions = in_order(engine.generate(PROMPTS, max_tokens=9, ignore_eos=True))
    assert [completion.index for completion in completions] == list(range(len(PROMPTS)))
    engine.model.generation_config.eos_token_id = None
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids])
        out = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0
        )
        assert completion.completion_ids == tuple(out[0, ids.shape[1] :].tolist())
        assert completion.finish_reason == "length"
        assert completion.log_probabilities is None


def test_log_probabilities_are_those_of_the_whole_text_read_at_once(engine: LLM) -> None:
    completions = list(
        engine.generate(PROMPTS, max_tokens=12, temperature=0.7, top_k=50, seed=3, log_probabilities=True)
    )
    assert len(completions) == len(PROMPTS)
    for completion in completions:
        prompt, answer = completion.prompt_ids, completion.completion_ids
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert completion.log_probabilities == pytest.approx(expected.tolist(), abs=1e-9)


def test_log_probabilities_survive_requests_taking_turns(engine: LLM) -> None:
    tight = LLM(engine.model, engine.tokenizer, slots=3, kv_tokens=70)
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "log_probabilities": True}
    wanted = in_order(engine.generate(PROMPTS, **asked))
    got = in_order(tight.generate(PROMPTS, **asked))
    for one, other in zip(got, wanted, strict=True):
        assert one.completion_ids == other.completion_ids
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-9)


def test_a_short_answer_is_there_while_long_ones_decode_and_each_token_is_told(engine: LLM) -> None:
    told: dict[int, list[int]] = defaultdict(list)
    answers = engine.generate(
        PROMPTS[:3],
        max_tokens=[20, 3, 20],
        ignore_eos=True,
        on_token=lambda index, token: told[index].append(token),
    )
    assert not told
    first = next(answers)
    assert first.index == 1
    assert len(told[0]) == len(told[2]) == 3
    completions = {completion.index: completion for completion in (first, *answers)}
    assert {index: tuple(tokens) for index, tokens in told.items()} == {
        index: completion.completion_ids for index, completion in completions.items()
    }


def test_a_token_is_told_with_the_position_of_its_prompt(engine: LLM) -> None:
    told: dict[int, int] = defaultdict(int)

    def count(index: int, token: int) -> None:
        told[index] += 1

    done = list(engine.generate(PROMPTS, n=3, max_tokens=4, ignore_eos=True, on_token=count))
    assert told == {index: 12 for index in range(len(PROMPTS))}
    assert len(done) == 3 * len(PROMPTS)


def test_expected_lengths_put_the_longest_first(engine: LLM) -> None:
    lengths = [2, 2, 2, 30, 30]
    told: list[int] = []
    list(
        engine.generate(
            PROMPTS,
            max_tokens=lengths,
            expected_tokens=lengths,
            ignore_eos=True,
            on_token=lambda index, _: told.append(index),
        )
    )
    assert set(told[:3]) == {3, 4, 0}
    report = engine.report()
    assert report.requests == len(PROMPTS)
    assert report.run_gap is not None
    assert report.run_gap >= 0.0


def test_the_next_call_uses_the_weights_as_they_are_then() -> None:
    engine = LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=2)
    before = [completion.completion_ids for completion in in_order(engine.generate(PROMPTS, max_tokens=8))]
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(-1.0)
    after = [completion.completion_ids for completion in in_order(engine.generate(PROMPTS, max_tokens=8))]
    assert before != after


def test_token_ids_and_chats_are_prompts_too(engine: LLM) -> None:
    ids = tuple(engine.tokenizer.encode("hello"))
    text, same, chat = in_order(
        engine.generate(["hello", ids, [{"role": "user", "content": "hello"}]], max_tokens=4)
    )
    assert text.prompt_ids == same.prompt_ids == ids
    assert text.completion_ids == same.completion_ids
    assert chat.prompt_ids == tuple(engine.tokenizer.encode_chat([{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "message"),
    [
        ([[]], {}, InputError, "prompt 0 is empty"),
        (["a", [10**6]], {}, InputError, "prompt 1 holds token 1000000"),
        (["a"], {"max_tokens": 10**6}, InputError, "positions"),
        (["a"], {"max_tokens": 0}, ValueError, "positive"),
        (["a"], {"max_tokens": 4, "expected_tokens": [5]}, ValueError, "expected 5 tokens of at most 4"),
        (["a"], {"expected_tokens": [5, 5]}, ValueError, "2 expected lengths were given for 1 prompts"),
        (["a"], {"temperature": -1.0}, ValueError, "temperature"),
        (["a"], {"top_p": 0.9}, ValueError, "top_p has no effect at temperature 0"),
        (["a"], {"top_k": 9, "temperature": 0}, ValueError, "top_k has no effect at temperature 0"),
        ("text", {}, InputError, "prompts is 'text'. Give a list"),
        ({"input_ids": [[1]]}, {}, InputError, "prompts is {'input_ids'"),
        (["a", None], {}, InputError, "prompt 1 is None"),
        ([7], {}, InputError, "prompt 0 is 7"),
        ([[7.0, 8.0]], {}, InputError, "prompt 0 is .*'float' object"),
        ([[True]], {}, InputError, "prompt 0 is .*not token ids"),
        ([b"ab"], {}, InputError, "prompt 0 is b'ab'"),
        ([{"role": "user", "content": "a"}], {}, InputError, "prompt 0 is {'role'"),
        ([[{"role": "user", "content": "a"}, 7]], {}, InputError, "prompt 0 is .*'dict' object"),
        ([[{"role": "user", "content": None}]], {}, InputError, "prompt 0 is .*must be texts"),
        (["a"], {"max_tokens": 2.7}, ValueError, "max_tokens is 2.7; it must be a whole number"),
        (["a"], {"max_tokens": float("inf")}, ValueError, "max_tokens is inf; it must be a whole number"),
        (["a", "b"], {"max_tokens": [2]}, ValueError, r"max_tokens is \[2\]; .* one for each of 2"),
        (["a"], {"expected_tokens": [float("nan")]}, ValueError, "expected nan tokens"),
        (["a"], {"sampling": {"temperature": 1.0}}, TypeError, "give Sampling, one for all or one for each"),
        (["a"], {"sampling": 5}, TypeError, "sampling is 5: give Sampling, one for all or one for each"),
        (5, {}, InputError, "prompts is 5. Give a list"),
        (["a"], {"until": 5}, TypeError, "until is 5: give Until"),
        (["a"], {"max_tokens": 2**63}, ValueError, f"max_tokens is {2**63}; it must be a whole number"),
        (["a"], {"max_tokens": 4, "expected_tokens": ["x"]}, ValueError, r"expected_tokens is \['x'\]"),
        (["a"], {"max_tokens": 4, "expected_tokens": [[3]]}, ValueError, r"expected_tokens is \[\[3\]\]"),
        (["a"], {"ignore_eos": "no"}, ValueError, "ignore_eos must be true or false, got 'no'"),
        (["a"], {"min_tokens": 2**70}, ValueError, "min_tokens must lie in"),
    ],
)
def test_a_mistake_is_told_before_anything_is_decoded(
    engine: LLM, prompts: Any, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        engine.generate(prompts, **options)


def test_prompts_may_come_as_an_iterator_and_tokens_as_arrays(engine: LLM) -> None:
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    listed = in_order(engine.generate(ids, max_tokens=4))
    most: Any = np.full(len(ids), 4.0)
    alike: list[Any] = [iter(ids), [np.array(each) for each in ids], (torch.tensor(each) for each in ids)]
    for given in alike:
        taken = in_order(engine.generate(given, max_tokens=most))
        assert [one.completion_ids for one in taken] == [one.completion_ids for one in listed]
        assert {type(token) for one in taken for token in one.prompt_ids} == {int}


def test_what_is_no_model_tokenizer_or_number_of_slots_is_refused_by_name(engine: LLM) -> None:
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        ("tiny:llama", engine.tokenizer, {}, "model is 'tiny:llama'.*from_pretrained"),
        (torch.nn.Linear(2, 2), engine.tokenizer, {}, r"model is Linear\(.*no model of transformers"),
        (engine.model, None, {}, "tokenizer is None"),
        (engine.model, engine.tokenizer, {"slots": 2.5}, "slots is 2.5; it must be a whole number"),
        (engine.model, engine.tokenizer, {"slots": True}, "slots is True; it must be a whole number"),
        (engine.model, engine.tokenizer, {"kv_tokens": 0}, "kv_tokens is 0; it must be at least 1"),
        (engine.model, engine.tokenizer, {"cost": 5}, "cost is 5: give a CostModel"),
    ]
    for model, tokenizer, options, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            LLM(model, tokenizer, **options)


def test_a_call_that_was_left_early_has_no_report_of_the_call_before(engine: LLM) -> None:
    list(engine.generate(PROMPTS, max_tokens=4))
    assert engine.report().requests == len(PROMPTS)
    left = engine.generate(["a", "b"], max_tokens=[1, 9])
    next(left)
    with pytest.raises(RuntimeError, match="the last call of generate has not been exhausted"):
        engine.report()
    list(left)
    assert engine.report().requests == 2


def test_no_prompts_have_no_answers(engine: LLM) -> None:
    assert list(engine.generate([])) == []


def test_a_rollout_has_the_prompts_order_and_new_answers_each_call(engine: LLM) -> None:
    seen: list[int] = []
    rollout = rollout_function(
        engine, max_tokens=6, seed=1, on_completion=lambda completion: seen.append(completion.index)
    )
    prompts = [prompt for prompt in PROMPTS[:2] for _ in range(3)]
    first, second = rollout(prompts, None), rollout(prompts, None)
    assert first["prompt_ids"] == [engine.tokenizer.encode(prompt) for prompt in prompts]
    assert [len(ids) for ids in first["completion_ids"]] == [len(values) for values in first["logprobs"]]
    assert len({tuple(ids) for ids in first["completion_ids"]}) == len(prompts)
    assert first["completion_ids"] != second["completion_ids"]
    assert sorted(seen) == sorted([*range(6), *range(6)])


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("12 answers" in line and "above the proven bound" in line for line in lines)


def test_calls_without_a_seed_draw_different_samples_and_name_their_seed(engine: LLM) -> None:
    def draw(**seed: Any) -> list[Completion]:
        return in_order(engine.generate(["a"], temperature=4.0, n=4, max_tokens=12, **seed))

    first, second = draw(), draw()
    assert {one.completion_ids for one in first}.isdisjoint(one.completion_ids for one in second)
    seed = first[0].seed
    assert seed is not None
    assert {one.seed for one in first} == {seed}
    ids = {(one.sample, one.completion_ids) for one in first}
    assert ids == {(one.sample, one.completion_ids) for one in draw(seed=seed)}
    assert [one.seed for one in engine.generate(["a"], max_tokens=2)] == [None]


def test_a_prompt_that_is_too_long_is_left_out_if_asked(engine: LLM) -> None:
    long = [7] * 100_000
    with pytest.raises(InputError, match="prompt 1 may take"):
        engine.generate(["a", long, "bb bb"], max_tokens=5)
    found = {
        one.index: one for one in engine.generate(["a", long, "bb bb", []], max_tokens=5, on_error="skip")
    }
    plain = {one.index: one for one in engine.generate(["a", "bb bb"], max_tokens=5)}
    assert found[0].completion_ids == plain[0].completion_ids
    assert found[2].completion_ids == plain[1].completion_ids
    assert [found[k].finish_reason for k in (1, 3)] == ["error", "error"]
    assert "100005 tokens" in str(found[1].error)
    assert "prompt 3 is empty" in str(found[3].error)
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        engine.generate(["a"], on_error="ignore")
