from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from builders import mostly_slow
from tier_cases import FAST, answers_of_generate, cut_short, draw_requests, generate_alone, run_at_random

from batchbound.executor.engines.self_check import check_tier, greedy_shortfall, near_tie
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch, length_groups
from batchbound.executor.models.sampling import Sampler
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tiny import FAMILIES

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


FAST_IN_A_WINDOW = (*FAST, "bloom", "deepseek-v3")


@pytest.mark.parametrize("family", mostly_slow(sorted(set(FAMILIES) - {"xglm"}), FAST_IN_A_WINDOW))
def test_answers_are_those_of_generate_alone_whatever_the_schedule(family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    requests = draw_requests(10, seed=1)
    expected = answers_of_generate(family, requests)
    # A capacity far below what is needed makes the window move and grow on the way.
    batch = WindowBatch(model, slots=4, capacity=1)
    ends, cut = cut_short(expected)
    assert run_at_random(batch, requests, seed=2, until=ends) == cut
    assert len({token for answer in expected for token in answer}) >= 5


@pytest.mark.parametrize("family", ["xglm", "llama", "gemma2"])
def test_in_single_precision_every_token_is_likeliest_up_to_a_near_tie(family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float32", device="cpu")
    requests = draw_requests(8, seed=3)
    answers = run_at_random(WindowBatch(model, slots=3, capacity=64), requests, seed=4)
    for (prompt, _), answer in zip(requests, answers, strict=True):
        assert greedy_shortfall(model, prompt, answer).max() <= near_tie(model)


def test_a_wrong_token_falls_far_short(llama: Any) -> None:
    prompt = [1, 2, 3]
    answer = generate_alone(llama, prompt, 4)
    wrong = [*answer[:2], (answer[2] + 1) % 256, *generate_alone(llama, [*prompt, *answer[:2]], 1)]
    assert greedy_shortfall(llama, prompt, answer).max() == 0.0
    assert greedy_shortfall(llama, prompt, wrong)[2] > near_tie(llama)


def test_the_self_check_accepts_a_model_that_the_window_runs_rightly(llama: Any) -> None:
    check_tier(llama, WindowBatch)


def test_the_self_check_refuses_a_model_that_ignores_padding(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llama.forward

    def without_mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama, "forward", without_mask)
    with pytest.raises(ValueError, match="its completions in a padded batch differ"):
        check_tier(llama, WindowBatch)


def test_prefill_gives_the_first_token_and_the_steps_the_rest(llama: Any) -> None:
    expected = generate_alone(llama, [5, 6, 7], 4)
    batch = WindowBatch(llama, slots=2, capacity=8)
    first = batch.prefill([1], [[5, 6, 7]])
    tokens = batch.decode(3)
    assert first == expected[:1]
    assert tokens[:, 1].tolist() == expected[1:]
    assert tokens[:, 0].tolist() == [-1, -1, -1]


def test_a_burst_gives_the_tokens_of_single_steps(llama: Any) -> None:
    prompts = [[3] * 9, [7, 1]]
    burst, single = (WindowBatch(llama, slots=2, capacity=64) for _ in range(2))
    assert burst.prefill([0, 1], prompts) == single.prefill([0, 1], prompts)
    decode_steps = np.concatenate([single.decode() for _ in range(6)])
    np.testing.assert_array_equal(burst.decode(6), decode_steps)


def test_the_front_padding_is_released_with_the_longest_row(llama: Any) -> None:
    batch = WindowBatch(llama, slots=3, capacity=64)
    batch.prefill([0, 1, 2], [[1] * 30, [2] * 10, [3] * 4])
    batch.decode(1)
    # Three rows of 31 columns, of which 31, 11 and 5 hold tokens.
    assert (batch.kv_tokens, batch.padding_read) == (47, 93 - 47)
    batch.release(0)
    batch.decode(2)
    # Two of 12, then 13 columns; rows that hold 12 and 6, then 13 and 7.
    assert (batch.kv_tokens, batch.padding_read) == (20, 46 + 6 + 6)


def test_an_empty_batch_holds_and_decodes_nothing(llama: Any) -> None:
    batch = WindowBatch(llama, slots=2, capacity=8)
    assert (batch.active, batch.kv_tokens, batch.padding_read) == (0, 0, 0)
    assert batch.prefill([], []) == []
    assert batch.decode(2).tolist() == [[-1, -1], [-1, -1]]


def test_only_occupied_slots_are_computed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = WindowBatch(llama, slots=4, capacity=32)
    batch.prefill([0, 1, 2, 3], [[1], [2, 2], [3], [4]])
    batch.release(0)
    batch.release(2)
    rows = []
    forward = llama.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["input_ids"].shape[0])
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama, "forward", counting)
    batch.decode(2)
    assert rows == [2, 2]
    assert batch.occupied == (1, 3)


@pytest.mark.parametrize(
    ("slots", "prompts", "message"),
    [
        ([0], [[1]], "slot 0 is taken: release it first"),
        ([2], [[1]], "slot 2 does not exist: the batch has slots 0 to 1"),
        ([1, 1], [[1], [1]], "a slot is named twice"),
        ([1], [[]], "the prompt for slot 1 is empty"),
        ([1], [], "1 slots were given for 0 prompts"),
    ],
)
def test_a_prefill_that_cannot_be_is_refused(
    llama: Any, slots: list[int], prompts: list[list[int]], message: str
) -> None:
    batch = WindowBatch(llama, slots=2, capacity=8)
    batch.prefill([0], [[1, 2]])
    with pytest.raises(ValueError, match=message):
        batch.prefill(slots, prompts)
    assert batch.occupied == (0,)


def test_a_free_slot_cannot_be_released(llama: Any) -> None:
    with pytest.raises(ValueError, match="slot 0 is free already"):
        WindowBatch(llama, slots=1, capacity=8).release(0)


def test_sampled_answers_do_not_depend_on_the_schedule(llama: Any) -> None:
    requests = draw_requests(8, seed=5)
    sampler = Sampler(temperature=0.9, top_p=0.95, top_k=50, seed=11)
    answers = [
        run_at_random(WindowBatch(llama, slots, 64, sampler=sampler), requests, seed=slots)
        for slots in (1, 3, 5)
    ]
    assert answers[0] == answers[1] == answers[2]
    greedy = run_at_random(WindowBatch(llama, 3, 64), requests, seed=3)
    assert answers[0] != greedy


def test_sampling_needs_to_know_the_requests(llama: Any) -> None:
    batch = WindowBatch(llama, slots=1, capacity=8, sampler=Sampler(temperature=1.0))
    with pytest.raises(ValueError, match="request_ids"):
        batch.prefill([0], [[1]])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_prompts_are_grouped_at_least_cost(lengths: list[int], call_tokens: int) -> None:
    groups = length_groups(lengths, call_tokens)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))

    def cost(parts: Sequence[Sequence[int]]) -> int:
        return sum(max(part) * len(part) + call_tokens for part in parts)

    ordered = sorted(lengths)
    cuts = itertools.product((False, True), repeat=len(ordered) - 1)
    least = min(cost(split(ordered, cut)) for cut in cuts)
    assert cost([[lengths[i] for i in group] for group in groups]) == least


def split(values: Sequence[int], cuts: Sequence[bool]) -> list[list[int]]:
    parts = [[values[0]]]
    for value, cut in zip(values[1:], cuts, strict=True):
        if cut:
            parts.append([])
        parts[-1].append(value)
    return parts


def test_no_call_exceeds_the_token_limit_unless_a_prompt_does() -> None:
    lengths = [100, 90, 80, 10, 300]
    groups = length_groups(lengths, call_tokens=1000, most_tokens=200)
    assert groups == [[4], [0, 1], [2, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_gpu_reads_masks_wherever_they_begin(family: str, dtype: str) -> None:
    model = load_model(f"tiny:{family}", dtype=dtype, device="cuda")
    requests = draw_requests(12, seed=4)
    for tier in (WindowBatch, uncaptured) if family != "gemma2" else (WindowBatch,):
        answers = run_at_random(tier(model, slots=3, capacity=64), requests, seed=4)
        for (prompt, _), answer in zip(requests, answers, strict=True):
            assert greedy_shortfall(model, prompt, answer).max() <= near_tie(model)


def uncaptured(model: Any, slots: int, capacity: int) -> RaggedBatch:
    """Return a batch whose decode steps Python runs on a GPU, too."""
    batch = RaggedBatch(model, slots, capacity)
    batch._capture = None
    return batch
