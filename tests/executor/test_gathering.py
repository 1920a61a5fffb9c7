"""Requests that come one by one join those that run; none waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from batchbound.data.files.disk import InputError

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.completion import Completion
from batchbound.executor.gathering import Gathering
from batchbound.executor.llm import LLM
from batchbound.executor.models.faults import RunStoppedError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [(5, 6, 7), (8, 9), (5, 6, 7), (10, 11, 12, 13), (8, 9)]


def engine() -> LLM:
    return LLM.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=3)


def together(*asked: Awaitable[Any]) -> list[Any]:
    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*asked))

    return asyncio.run(gathered())


def test_requests_that_come_together_run_together_and_share_their_prompts() -> None:
    llm = engine()
    gathering = Gathering(llm)
    answers = together(*(gathering.complete(prompt, 9) for prompt in PROMPTS))
    # The three that have a slot at first: two have the same prompt.
    assert llm._ran is not None
    assert llm._ran.trace.stages[0].tokens == len(PROMPTS[0]) + 1 + len(PROMPTS[1])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        (alone,) = llm.generate([prompt], max_tokens=9)
        assert (answer.prompt_ids, answer.completion_ids) == (prompt, alone.completion_ids)
    assert gathering.unfinished == 0


def test_a_request_waits_for_no_other() -> None:
    gathering, order = Gathering(engine()), list[str]()

    async def agent(name: str, lengths: list[int]) -> None:
        prompt: tuple[int, ...] = PROMPTS[0]
        for turn, length in enumerate(lengths):
            one = await gathering.complete(prompt, length, ignore_eos=True)
            order.append(f"{name}{turn}")
            prompt = one.prompt_ids + one.completion_ids

    together(agent("long", [150]), agent("a", [4, 4, 4]), agent("b", [4, 4, 4]))
    assert order[-1] == "long0"
    assert sorted(order[:-1]) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_cancelled_task_ends_its_request() -> None:
    gathering = Gathering(engine())

    async def cancelled() -> None:
        long = asyncio.ensure_future(gathering.complete(PROMPTS[0], 400, ignore_eos=True))
        await gathering.complete(PROMPTS[1], 3, ignore_eos=True)
        long.cancel()
        await gathering.complete(PROMPTS[1], 3, ignore_eos=True)
        assert long.cancelled()
        assert gathering._rollouts.idle

    asyncio.run(cancelled())
    (left,) = gathering._rollouts.unfinished
    assert 0 < len(left.completion_ids) < 100


def test_each_request_has_its_own_settings_and_each_call_draws_anew() -> None:
    gathering = Gathering(engine(), seed=7)

    def drawn() -> list[Completion]:
        asked = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "logprobs_mode": "processed"}
        return together(
            gathering.complete(PROMPTS[0], 9, **asked),
            gathering.complete(PROMPTS[0], 5, **asked),
            gathering.complete(PROMPTS[1], 4),
        )

    first, second = drawn(), drawn()
    assert [len(one.completion_ids) for one in first[:2]] == [9, 5]
    assert [one.log_probabilities is None for one in first] == [False, False, True]
    assert first[0].completion_ids != second[0].completion_ids
    assert first[0].completion_ids[:5] != first[1].completion_ids
    again = together(Gathering(gathering.engine, seed=7).complete(PROMPTS[1], 4))
    assert again[0].completion_ids == first[2].completion_ids
    with pytest.raises(ValueError, match="n is more than 1"):
        together(gathering.complete(PROMPTS[0], 9, n=2))
    with pytest.raises(TypeError, match="guided"):
        together(gathering.complete(PROMPTS[0], 9, guided="json"))


def test_an_impossible_request_fails_alone() -> None:
    gathering = Gathering(engine())

    async def failing() -> list[Any]:
        asked = [gathering.complete(prompt, 9) for prompt in (PROMPTS[0], (10**6,))]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    done, failed = asyncio.run(failing())
    assert isinstance(failed, InputError)
    assert done.prompt_ids == PROMPTS[0]
    assert gathering.unfinished == 0


def test_all_that_run_are_told_what_the_engine_failed_of() -> None:
    gathering = Gathering(engine())
    model = gathering.engine.model
    norm = model.model.norm.weight

    async def failing() -> list[Any]:
        asked = [gathering.complete(prompt, 9) for prompt in PROMPTS]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    with torch.no_grad():
        kept = norm.clone()
        norm.fill_(float("nan"))
    assert all(isinstance(one, RunStoppedError) for one in asyncio.run(failing()))
    with torch.no_grad():
        norm.copy_(kept)
    assert together(gathering.complete(PROMPTS[1], 4))[0].prompt_ids == PROMPTS[1]


def test_what_runs_during_a_pause_continues_by_the_weights_loaded_meanwhile() -> None:
    llm = engine()
    gathering = Gathering(llm)
    (before,) = llm.generate([PROMPTS[0]], max_tokens=9)
    weights = [(name, -2 * weight) for name, weight in llm.model.state_dict().items()]

    async def updated() -> tuple[Completion, Completion]:
        running = asyncio.ensure_future(gathering.complete(PROMPTS[1], 40, ignore_eos=True))
        await gathering.complete(PROMPTS[1], 3)
        await gathering.pause()
        asked = asyncio.ensure_future(gathering.complete(PROMPTS[0], 9))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asked.done()
        assert not running.done()
        await gathering.load(weights)
        gathering.resume()
        return await asked, await running

    after, running = asyncio.run(updated())
    (alone,) = llm.generate([PROMPTS[0]], max_tokens=9)
    assert after.completion_ids == alone.completion_ids != before.completion_ids
    assert len(running.versions) == 2
    assert len(running.completion_ids) == 40


@pytest.mark.parametrize(
    ("name", "shape"), [("model.norm.weight", (1,)), ("model.norm.bias", (32,))], ids=["shape", "name"]
)
def test_a_weight_that_the_model_has_not_is_named(name: str, shape: tuple[int, ...]) -> None:
    gathering = Gathering(engine())
    with pytest.raises(ValueError, match=rf"no weight '{name}' of the shape \({shape[0]},\)"):
        asyncio.run(gathering.load([(name, torch.zeros(shape))]))
