"""Requests that come one by one are served together, and nothing goes on under new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from batchbound.data.files.disk import InputError

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.completion import Completion
from batchbound.executor.gathering import Gathering
from batchbound.executor.llm import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [(5, 6, 7), (8, 9), (5, 6, 7), (10, 11, 12, 13), (8, 9)]


class Watched(LLM):
    """Notes the prompts of each call."""

    calls: list[list[tuple[int, ...]]]

    def generate(self, prompts: Any, *given: Any, **named: Any) -> Iterator[Completion]:
        self.calls = [*getattr(self, "calls", []), list(prompts)]
        return super().generate(prompts, *given, **named)


def engine() -> Watched:
    return Watched.from_pretrained("tiny:llama", dtype="float64", device="cpu", slots=3)


def together(*asked: Awaitable[Any]) -> list[Any]:
    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*asked))

    return asyncio.run(gathered())


def test_requests_that_come_together_are_one_call_with_samples_of_a_prompt_side_by_side() -> None:
    watched = engine()
    gathering = Gathering(watched)
    answers = together(*(gathering.complete(prompt, 9) for prompt in PROMPTS))
    assert watched.calls == [[PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[4], PROMPTS[3]]]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        (alone,) = watched.generate([prompt], max_tokens=9)
        assert (answer.prompt_ids, answer.completion_ids) == (prompt, alone.completion_ids)
    assert gathering.unfinished == 0


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


def test_all_who_wait_are_told_what_a_call_failed_of() -> None:
    gathering = Gathering(engine())

    async def failing() -> list[Any]:
        asked = [gathering.complete(prompt, 9) for prompt in (PROMPTS[0], (10**6,))]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    failed = asyncio.run(failing())
    assert all(isinstance(one, InputError) for one in failed)
    assert gathering.unfinished == 0
    assert together(gathering.complete(PROMPTS[1], 4))[0].prompt_ids == PROMPTS[1]


def test_what_came_during_a_pause_is_drawn_from_the_weights_loaded_meanwhile() -> None:
    watched = engine()
    gathering = Gathering(watched, quiet_seconds=0.0)
    (before,) = watched.generate([PROMPTS[0]], max_tokens=9)
    weights = [(name, -2 * weight) for name, weight in watched.model.state_dict().items()]

    async def updated() -> tuple[Completion, int]:
        await gathering.pause()
        asked = asyncio.ensure_future(gathering.complete(PROMPTS[0], 9))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asked.done()
        assert len(watched.calls) == 1
        await gathering.load(weights)
        gathering.resume()
        return await asked, gathering.unfinished

    after, left = asyncio.run(updated())
    (alone,) = watched.generate([PROMPTS[0]], max_tokens=9)
    assert after.completion_ids == alone.completion_ids != before.completion_ids
    assert left == 0


@pytest.mark.parametrize(
    ("name", "shape"), [("model.norm.weight", (1,)), ("model.norm.bias", (32,))], ids=["shape", "name"]
)
def test_a_weight_that_the_model_has_not_is_named(name: str, shape: tuple[int, ...]) -> None:
    gathering = Gathering(engine())
    with pytest.raises(ValueError, match=rf"no weight '{name}' of the shape \({shape[0]},\)"):
        asyncio.run(gathering.load([(name, torch.zeros(shape))]))
