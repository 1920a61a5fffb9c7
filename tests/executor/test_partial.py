"""Calls that end early, and completions that a later call goes on with."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from builders import mostly_slow

from batchbound.executor.llm import LLM, Completion
from batchbound.executor.partial import Partial, Until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a", "bb bb", "some longer prompt", "dd", "and one more", "a"]
LENGTHS = [3, 30, 9, 17, 24, 12]

WAYS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"temperature": 0.9, "top_k": 60, "seed": 4, "n": 2},
    {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 6},
    {"temperature": 1.1, "seed": 2, "stop": ("e", "q"), "bad_words": ("the",), "frequency_penalty": 0.3},
]


def engine(family: str = "llama", **options: Any) -> LLM:
    return LLM.from_pretrained(f"tiny:{family}", dtype="float64", device="cpu", slots=3, **options)


def together(*parts: list[Completion]) -> dict[tuple[tuple[int, ...], int, int], Completion]:
    """Return completions by prompt, place among the prompts and sample, whatever call finished them."""
    return {(one.prompt_ids, one.index, one.sample): one for part in parts for one in part}


@pytest.mark.parametrize("family", mostly_slow(["llama", "gpt2", "qwen3", "gemma3"], fast=["gemma3"]))
@pytest.mark.parametrize("tier", ["window", "ragged"])
@pytest.mark.parametrize("way", mostly_slow([1, 3], fast=[3]))
def test_what_a_later_call_goes_on_with_has_the_tokens_it_would_have_had_without_a_break(
    family: str, tier: str, way: int
) -> None:
    llm = engine(family, tier=tier)
    _break_and_go_on(llm, way)


@pytest.mark.parametrize("way", [0, 2])
def test_penalties_and_least_lengths_count_what_was_written_before_the_break(way: int) -> None:
    _break_and_go_on(engine(), way)


def _break_and_go_on(llm: LLM, way: int) -> None:
    asked: dict[str, Any] = {"max_tokens": LENGTHS, "log_probabilities": "processed", **WAYS[way]}
    whole = together(list(llm.generate(PROMPTS, **asked)))
    assert llm.unfinished == ()
    finished = list(llm.generate(PROMPTS, **asked, until=Until(finished=2)))
    left: tuple[Partial, ...] = llm.unfinished
    assert len(finished) >= 2
    assert len(finished) + len(left) == len(whole)
    assert any(one.completion_ids for one in left)
    position = [one.index for one in left]
    again = list(llm.generate(left, until=Until(finished=2)))
    rest: tuple[Partial, ...] = llm.unfinished
    last = list(llm.generate(rest))
    assert llm.unfinished == ()
    # A call's positions are those of its own prompts: back to those of the first.
    second = [position[one.index] for one in rest]
    broken: list[tuple[int, Completion]] = [(position[one.index], one) for one in again] + [
        (second[one.index], one) for one in last
    ]
    found = {(one.index, one.sample): one for one in finished} | {(at, one.sample): one for at, one in broken}
    assert len(found) == len(whole)
    for (_, index, sample), expected in whole.items():
        other = found[index, sample]
        assert (other.completion_ids, other.text) == (expected.completion_ids, expected.text)
        assert other.finish_reason == expected.finish_reason
        assert other.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-9)
        assert sum(count for _, count in other.versions) == len(expected.completion_ids)
    assert {number for one in last for number, _ in one.versions} <= {2, 3, 4}


def test_tokens_drawn_before_the_weights_changed_stay_and_the_others_are_of_the_new_ones() -> None:
    llm = engine()
    llm.model.generation_config.eos_token_id = None
    list(llm.generate(PROMPTS, max_tokens=LENGTHS, ignore_eos=True, until=Until(share=0.5)))
    left = [one for one in llm.unfinished if one.completion_ids]
    assert left
    with torch.no_grad():
        for weight in llm.model.parameters():
            weight.add_(
                0.05
                * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
            )
    for one in llm.generate(left):
        before = left[one.index].completion_ids
        assert one.completion_ids[: len(before)] == before
        ids = torch.tensor([one.prompt_ids + before])
        new = len(one.completion_ids) - len(before)
        out = llm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        assert one.completion_ids[len(before) :] == tuple(out[0, ids.shape[1] :].tolist())
        assert one.versions == ((1, len(before)), (2, new))


def test_new_prompts_go_beside_unfinished_ones_and_share_no_random_stream_with_them() -> None:
    llm = engine()
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    whole = together(list(llm.generate(["a", "a"], **asked)))
    list(llm.generate(["a", "a"], **asked, until=Until(seconds=1e-9)))
    left = llm.unfinished
    assert len(left) == 2
    mixed = list(llm.generate([*left, "a", "a"], **asked))
    ids = {one.index: one.completion_ids for one in mixed}
    assert [ids[0], ids[1]] == [whole[one.prompt_ids, one.index, 0].completion_ids for one in left]
    assert len(set(ids.values())) == 4
    with pytest.raises(ValueError, match="among the prompts twice"):
        list(llm.generate([left[0], left[0]]))


@pytest.mark.parametrize(
    ("until", "done", "seconds", "reached"),
    [
        (Until(finished=2), [1, 1, 0, 0], 0, True),
        (Until(finished=3), [1, 1, 0, 0], 0, False),
        (Until(share=0.5), [1, 1, 0, 0], 0, True),
        (Until(share=0.51), [1, 1, 0, 0], 0, False),
        (Until(groups=1), [1, 0, 1, 0], 0, False),
        (Until(groups=1), [1, 1, 0, 0], 0, True),
        (Until(seconds=5), [0, 0, 0, 0], 5, True),
        (Until(seconds=5, finished=1), [1, 0, 0, 0], 1, True),
    ],
)
def test_a_call_ends_as_soon_as_one_of_its_ends_is_reached(
    until: Until, done: list[int], seconds: float, reached: bool
) -> None:
    assert until.reached([bool(one) for one in done], [0, 0, 1, 1], seconds) is reached


def test_an_end_that_says_nothing_or_what_cannot_be_is_refused() -> None:
    kinds: list[dict[str, Any]] = [{"finished": 2.5}, {"groups": "a"}, {"share": True}, {"seconds": "5"}]
    ranges: list[dict[str, Any]] = [
        {"finished": 0},
        {"groups": 0},
        {"share": 0.0},
        {"share": 1.1},
        {"seconds": 0.0},
    ]
    for wrong in [{}, *ranges, *kinds]:
        with pytest.raises(ValueError, match=r"no condition|must be"):
            Until(**wrong)


def test_groups_are_handed_back_whole() -> None:
    llm = engine()
    prompts = [prompt for prompt in ("x y z", "long prompt", "other") for _ in range(3)]
    asked: dict[str, Any] = {"max_tokens": 25, "temperature": 1.0, "min_tokens": 3}
    finished = list(llm.generate(prompts, **asked, until=Until(groups=1)))
    ended = {one.index for one in finished}
    assert any(ended >= set(range(3 * k, 3 * k + 3)) for k in range(3))
    assert ended.isdisjoint(one.index for one in llm.unfinished)
    assert len(ended) + len(llm.unfinished) == 9
