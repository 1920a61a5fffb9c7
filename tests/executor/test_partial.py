"""Calls that end early, and completions that a later call goes on with."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from builders import mostly_slow

from batchbound.executor.completion import Completion
from batchbound.executor.llm import LLM
from batchbound.executor.partial import Ends, Partial, Until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a", "bb bb", "some longer prompt", "dd", "and one more", "a"]
LENGTHS = [3, 30, 9, 17, 24, 12]

COMPLETION = Completion(0, (1,), (2,), "", "stop")

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


@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma3"], fast=["gemma3"]))
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
    ends = Ends(until, [0, 0, 1, 1])
    for index, over in enumerate(done):
        if over:
            ends.note(index, COMPLETION)
    assert ends.reached(seconds) is reached


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


def test_a_call_that_its_caller_ends_leaves_unfinished_completions_and_a_report() -> None:
    llm = engine()
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": LENGTHS, "ignore_eos": True}
    whole = together(list(llm.generate(PROMPTS, **asked)))
    for how in ("close", "break", "until"):
        calls = llm.generate(PROMPTS, **asked, until=Until(finished=1) if how == "until" else None)
        done: list[Completion] = []
        for one in calls:
            done.append(one)
            if how != "until":
                break
        if how == "close":
            calls.close()  # type: ignore[attr-defined]
        del calls
        left = llm.unfinished
        assert len(done) + len(left) == len(whole)
        report = llm.report()
        # Requests that have begun count, with the tokens drawn so far.
        begun = [one.completion_ids for one in left if one.completion_ids]
        assert report.requests == len(done) + len(begun) == 3
        drawn = sum(map(len, [*begun, *(one.completion_ids for one in done)]))
        assert report.output_tokens == drawn
        assert report.run_gap is not None
        assert report.run_gap >= 0
        for one in llm.generate(left):
            assert whole[one.prompt_ids, left[one.index].index, 0].completion_ids == one.completion_ids


def test_a_stated_cap_counts_for_completions_that_go_on() -> None:
    llm = engine()
    list(llm.generate(PROMPTS[:4], max_tokens=12, ignore_eos=True, until=Until(finished=1)))
    list(llm.generate(PROMPTS[:4], max_tokens=[2, 12, 12, 12], ignore_eos=True, until=Until(finished=1)))
    left = llm.unfinished
    assert {one.max_tokens for one in left} == {12}
    assert {len(one.completion_ids) for one in llm.generate(left, max_tokens=20)} == {20}
    assert {len(one.completion_ids) for one in llm.generate(left)} == {12}
    begun = [one for one in left if one.completion_ids]
    with pytest.raises(ValueError, match="prompt 0 has 2 of 2 tokens already"):
        llm.generate(begun, max_tokens=2)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_function_of_a_prompts_completions_ends_a_call(groups: int | None) -> None:
    llm = engine()
    seen: list[int] = []

    def differ(group: Any) -> bool:
        assert len(group) == 2
        seen.append(group[0].index)
        return bool(group[0].index != 1)

    most = [10, 3, 16, 22]
    until = Until(when=differ, groups=groups)
    done = list(llm.generate(PROMPTS[:4], max_tokens=most, n=2, ignore_eos=True, until=until))
    assert seen == [1, 0, 2][: 1 + (groups or 1)]
    assert {one.index for one in done} >= set(seen)
    assert llm.unfinished
    with pytest.raises(ValueError, match="when must be a function"):
        Until(when=3)  # type: ignore[arg-type]


def test_weights_that_change_between_two_completions_begin_a_version() -> None:
    llm = engine()
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "log_probabilities": True}
    weights = [{name: weight.clone() for name, weight in llm.model.state_dict().items()}]
    done = []
    for one in llm.generate(PROMPTS, max_tokens=[4, 30, 9, 17, 24, 12], **asked):
        done.append(one)
        if len(done) in (1, 2, 4):
            with torch.no_grad():
                for weight in llm.model.parameters():
                    weight.mul_(1.05)
            weights.append({name: weight.clone() for name, weight in llm.model.state_dict().items()})
    assert len(weights) == 4
    assert max(len(one.versions) for one in done) >= 3
    for one in done:
        assert sum(count for _, count in one.versions) == len(one.completion_ids)
        assert one.log_probabilities is not None
        at = 0
        for version, count in one.versions:
            llm.model.load_state_dict(weights[version - 1])
            with torch.no_grad():
                logits = llm.model(torch.tensor([one.prompt_ids + one.completion_ids])).logits[0]
            expected = logits.log_softmax(-1)[len(one.prompt_ids) - 1 :][
                range(len(one.completion_ids)), one.completion_ids
            ]
            part = slice(at, at + count)
            assert one.log_probabilities[part] == pytest.approx(expected[part].tolist(), abs=1e-9)
            at += count
    assert (llm.report().run_gap or 0) >= 0
