"""Completions of several turns: a slot serves others meanwhile, and tokens are those of one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.readers.sampling import Sampling
from batchbound.executor.llm import LLM
from batchbound.executor.partial import Until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["Spell 4096.", "Reverse walnut.", "Spell 7.", "Spell 12."]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_pretrained("tiny:speller", slots=2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def answered_once(llm: LLM, pool: ThreadPoolExecutor, *, of: int = 0, waits: bool = False) -> Any:
    """Return what has a tool answer a prompt's first turn, once another completion has ended if it waits."""
    answer = llm.tokenizer.encode(" and 12 ?")
    asked: list[int] = []
    other_ended = Event()

    def tool() -> list[int]:
        assert not waits or other_ended.wait(300)
        return answer

    def next_turn(position: int, tokens: tuple[int, ...]) -> Future[Any] | None:
        if asked:
            other_ended.set()
        if position != of or asked:
            return None
        asked.append(position)
        return pool.submit(tool)

    return next_turn


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2}])
def test_a_turn_goes_on_as_from_one_prompt(llm: LLM, pool: ThreadPoolExecutor, how: dict[str, Any]) -> None:
    asked = Sampling(**how)
    plain = {one.index: one for one in llm.generate(PROMPTS, asked, max_tokens=60)}
    found = {
        one.index: one
        for one in llm.converse(
            answered_once(llm, pool), PROMPTS, asked, max_tokens=60, log_probabilities=True
        )
    }
    for index in (1, 2, 3):
        assert found[index].completion_ids == plain[index].completion_ids
        assert not found[index].given
    one = found[0]
    (given,) = one.given
    assert one.completion_ids[: given.start] == plain[0].completion_ids
    assert list(one.completion_ids[given.start : given.stop]) == llm.tokenizer.encode(" and 12 ?")
    assert one.log_probabilities is not None
    assert one.log_probabilities[given.start : given.stop] == (0.0,) * len(given)
    if how:
        return
    (whole,) = llm.generate(
        [one.prompt_ids + one.completion_ids[: given.stop]],
        asked,
        max_tokens=60 - given.stop,
        log_probabilities=True,
    )
    assert whole.completion_ids == one.completion_ids[given.stop :]
    assert whole.log_probabilities == pytest.approx(one.log_probabilities[given.stop :], abs=1e-4)


def test_others_are_served_while_a_tool_works(llm: LLM, pool: ThreadPoolExecutor) -> None:
    # The first to end has a tool that answers only when another completion has ended.
    next_turn = answered_once(llm, pool, of=1, waits=True)
    order = [one.index for one in llm.converse(next_turn, PROMPTS, max_tokens=60)]
    assert order[0] != 1
    assert llm._ran is not None
    trace, turns = llm._ran.trace, llm._ran.turns
    assert turns is not None
    before = int(turns.after.max())
    begin, end = trace.finished[before], trace.finished[before] + turns.pause.max()
    assert any(begin <= stage.start < end for stage in trace.stages)
    report = llm.report()
    assert "waiting for tools" in report.slot_seconds
    assert report.run_gap is not None
    assert report.run_gap >= 0


@pytest.mark.parametrize("room", [None, 150])
def test_a_next_turn_computes_only_what_is_new(llm: LLM, pool: ThreadPoolExecutor, room: int | None) -> None:
    engine = LLM(llm.model, llm.tokenizer, slots=2, kv_tokens=room)
    tool = llm.tokenizer.encode(" and 12 ?")
    turns: dict[int, int] = {}

    def next_turn(position: int, tokens: tuple[int, ...]) -> Future[Any] | None:
        turns[position] = turns.get(position, 0) + 1
        return pool.submit(lambda: tool) if turns[position] <= 2 else None

    apart = LLM(llm.model, llm.tokenizer, slots=2, share_prompts=False)
    found, alone = (
        {one.index: one.completion_ids for one in each.converse(next_turn, PROMPTS, max_tokens=90)}
        for each in (engine, apart)
        if not turns.clear()  # type: ignore[func-returns-value]
    )
    assert found == alone
    assert engine._ran is not None
    computed = engine._ran.trace.prompt_tokens
    prompts = PrefixTree.of_prompts([llm.tokenizer.encode(prompt) for prompt in PROMPTS]).distinct_tokens
    # A turn reads the tool's tokens, and the last one before them.
    least = prompts + 2 * len(PROMPTS) * (len(tool) + 1)
    if room is None:
        assert computed <= least
        assert engine.report().prompt_tokens == computed
    else:
        assert least < computed, "memory held some conversations only"
    assert engine.report().run_gap is not None


@pytest.mark.parametrize("continued", [False, True])
def test_equal_turns_and_continued_completions_end_at_no_less_than_the_bound(
    llm: LLM, continued: bool
) -> None:
    # The engine computes equal prompts of one stage once, also of next turns and continued completions.
    engine = LLM(llm.model, llm.tokenizer, slots=10)
    prompt = "Spell 4096, and mind that this text is long so that a second turn costs something."
    if continued:
        most = [3] + [30] * 7
        list(engine.generate([prompt] * 8, max_tokens=most, ignore_eos=True, until=Until(finished=1)))
        list(engine.generate([*engine.unfinished, prompt, prompt], max_tokens=30))
    else:
        begun = set[int]()

        def next_turn(position: int, tokens: tuple[int, ...]) -> Future[Any] | None:
            tool: Future[Any] = Future()
            tool.set_result([32, 32, 32] if position not in begun else [])
            begun.add(position)
            return tool

        list(engine.converse(next_turn, [prompt] * 8, max_tokens=60))
    assert engine._ran is not None
    stages = [stage for stage in engine._ran.trace.stages if stage.kind == "prefill"]
    contexts = sum(len(path) for path in engine._ran.paths)
    assert sum(stage.tokens for stage in stages) < contexts / 3
    gap = engine.report().run_gap
    assert gap is not None
    assert 0 <= gap < 0.1


def test_a_completion_is_over_if_its_tool_gives_nothing_or_all_that_was_left(
    llm: LLM, pool: ThreadPoolExecutor
) -> None:
    (plain,) = llm.generate(PROMPTS[:1], max_tokens=60)
    length = len(plain.completion_ids)
    (one,) = llm.converse(lambda *_: pool.submit(list), PROMPTS[:1], max_tokens=60)
    assert one.completion_ids == plain.completion_ids
    assert llm.report().run_gap is not None
    rest = [97] * (60 - length)
    (one,) = llm.converse(lambda *_: pool.submit(list, rest), PROMPTS[:1], max_tokens=60)
    assert one.completion_ids == (*plain.completion_ids, *rest)
    with pytest.raises(ValueError, match=f"return at most {60 - length}"):
        list(llm.converse(lambda *_: pool.submit(list, [*rest, 97]), PROMPTS[:1], max_tokens=60))


def test_what_a_tool_raises_reaches_the_caller(llm: LLM, pool: ThreadPoolExecutor) -> None:
    def broken() -> list[int]:
        raise OSError("no such table")

    with pytest.raises(OSError, match="no such table"):
        list(llm.converse(lambda *_: pool.submit(broken), PROMPTS, max_tokens=60))


@pytest.mark.parametrize("when", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
def test_conversations_go_on_in_a_later_call(llm: LLM, when: int, how: dict[str, Any]) -> None:
    # Each turn of up to nine tokens calls a tool, thrice at most; the last tool waits while the call ends.
    asked = Sampling(**how, stop_token_ids=tuple(range(97, 110)), logprobs=0)
    calls: list[tuple[int, ...]] = []
    stopped = False

    def next_turn(position: int, tokens: tuple[int, ...]) -> Future[Any] | None:
        if tokens.count(32) >= 9:
            return None
        calls.append(tokens)
        tool: Future[Any] = Future()
        if not stopped or len(calls) < when:
            tool.set_result([32, 32, 32 + len(tokens) % 5])
        return tool

    engine = LLM(llm.model, llm.tokenizer, slots=2)
    whole = {one.index: one for one in engine.converse(next_turn, PROMPTS, asked, max_tokens=40)}
    assert any(len(one.given) > 1 for one in whole.values())
    calls.clear()
    stopped, first = True, dict[int, Any]()
    engine = LLM(llm.model, llm.tokenizer, slots=2)
    rollouts = engine.start(next_turn)
    rollouts.submit(PROMPTS, asked, max_tokens=40)
    while len(calls) < when:
        first |= {one.index: one for one in rollouts.step()}
    rollouts.close()
    stopped = False
    left = engine.unfinished
    assert len(first) + len(left) == len(PROMPTS)
    assert any(part.waiting for part in left) == bool(when)
    later = {left[one.index].index: one for one in engine.converse(next_turn, left)}
    for index, one in whole.items():
        again = later.get(index, first.get(index))
        assert again is not None
        assert again.completion_ids == one.completion_ids
        assert again.given == one.given
        assert again.log_probabilities == pytest.approx(one.log_probabilities, abs=1e-4)
        assert again.finish_reason == one.finish_reason
    assert (engine.report().run_gap or 0) >= 0
    if when:
        with pytest.raises(ValueError, match="waits for its tool"):
            list(engine.generate(left))
