"""The ragged tier against per-request generate, and what each tier refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers = pytest.importorskip("transformers", reason="the engine extra is not installed")

from builders import mostly_slow
from tier_cases import (
    FAST,
    NOT_RAGGED,
    RAGGED,
    answers_of_generate,
    cut_short,
    draw_requests,
    generate_alone,
    run_at_random,
)

from batchbound.executor.engines.tiers import choose_tier
from batchbound.executor.kv.batch import RunningBatch
from batchbound.executor.kv.packed_prompts import pack
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.models.families import UnsupportedModelError
from batchbound.executor.models.faults import NotFiniteError
from batchbound.executor.models.sampling import Sampler
from batchbound.executor.models.source import load_model
from batchbound.executor.models.tiny import tiny_config

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

TIERS: tuple[type[RunningBatch], ...] = (WindowBatch, RaggedBatch)


@pytest.mark.parametrize("family", mostly_slow(RAGGED, FAST))
def test_the_ragged_tier_gives_the_answers_of_generate_alone(family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    requests = draw_requests(7, seed=1)
    # So few tokens a call that most prompts are prefilled in chunks.
    batch = RaggedBatch(model, slots=3, capacity=1, prefill_tokens=13)
    ends, expected = cut_short(answers_of_generate(family, requests))
    assert run_at_random(batch, requests, seed=2, until=ends) == expected


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma3", "mistral"], fast=["gemma3"]))
def test_requests_move_to_the_host_and_back_unharmed(tier: type[RunningBatch], family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    requests = draw_requests(9, seed=6)
    assert run_at_random(tier(model, 4, 64), requests, seed=7) == answers_of_generate(family, requests)


def test_answers_are_the_same_where_there_is_no_compiler(llama: Any) -> None:
    requests = draw_requests(8, seed=3)
    batch = RaggedBatch(llama, 5, 64)
    batch._host = batch._store.kernels = None
    assert run_at_random(batch, requests, seed=4) == answers_of_generate("llama", requests)


@pytest.mark.parametrize("family", sorted(NOT_RAGGED))
def test_the_ragged_tier_refuses_by_name_what_it_would_get_wrong(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=NOT_RAGGED[family]):
        RaggedBatch.check(tiny_config(family))


@pytest.mark.parametrize("tier", TIERS)
def test_chunked_attention_is_refused_by_every_tier(tier: type[RunningBatch]) -> None:
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        tier.check(transformers.AutoConfig.for_model("llama4_text"))


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_a_layer_that_asks_for_more_than_products_is_refused_though_no_rule_knows_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RaggedBatch, "check", lambda *_: None)
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    with pytest.raises(UnsupportedModelError, match="its layers ask the ragged tier for"):
        RaggedBatch(model, 1, 8).prefill([0], [[1, 2, 3]])


@pytest.mark.parametrize("family", ["gpt-neo", "bloom", "falcon"])
def test_the_self_check_catches_what_no_rule_knows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    monkeypatch.setattr(RaggedBatch, "check", lambda *_: None)
    tier = choose_tier(model, self_check=True)
    assert tier.name == "window"
    assert "ragged was refused" in tier.reason
    assert tier.check == "completions compared with the model's own at load"


def test_the_choice_says_why(llama: Any) -> None:
    tier = choose_tier(llama)
    assert (tier.name, tier.check) == ("ragged", "a tested family")
    assert choose_tier(llama, "window").reason == "asked for"
    gemma = load_model("tiny:gemma2", device="cpu")
    assert choose_tier(gemma).name == "window"
    assert "capped" in choose_tier(gemma).reason
    with pytest.raises(UnsupportedModelError, match="capped"):
        choose_tier(gemma, "ragged")
    with pytest.raises(ValueError, match="tier must be one of"):
        choose_tier(llama, "paged")


def test_a_family_without_tests_is_checked_at_load() -> None:
    from batchbound.executor.models.source import build_random

    config = transformers.AutoConfig.for_model(
        "seed_oss",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    tier = choose_tier(build_random(config, seed=0).eval())
    assert tier.name == "ragged"
    assert tier.check == "completions compared with the model's own at load"


@pytest.mark.parametrize("tier", TIERS)
def test_nan_is_told_and_does_not_outlive_its_request(
    tier: type[RunningBatch], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = tier(llama, 2, 64)
    batch.prefill([0, 1], [[1] * 20, [2] * 7])
    broken = [True]

    def spoil(_: Any, arguments: Any, output: Any) -> Any:
        return output * float("nan") if broken[0] else output

    handle = llama.model.embed_tokens.register_forward_hook(spoil)
    try:
        with pytest.raises(NotFiniteError, match="not finite after 0 decode steps"):
            batch.decode(3)
    finally:
        broken[0] = False
        handle.remove()
    batch.release(0)
    batch.release(1)
    prompts = [[5, 6, 7], [8] * 30]
    first = batch.prefill([0, 1], prompts)
    tokens = batch.decode(9)
    for slot, prompt in enumerate(prompts):
        assert [first[slot], *tokens[:, slot].tolist()] == generate_alone(llama, prompt, 10)


@pytest.mark.parametrize("filling", [float("-inf"), float("nan")])
def test_baton_s_padding_with_infinity_spoils_attention_and_zeros_do_not(filling: float) -> None:
    # BATON, Section 4.2, fills the padding of keys and values with -inf.
    query = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    mask = torch.tensor([[[[torch.finfo(torch.float64).min, 0.0, 0.0]]]], dtype=torch.float64)
    attend = torch.nn.functional.scaled_dot_product_attention

    def padded(value: float) -> Any:
        states = torch.ones(1, 1, 3, 4, dtype=torch.float64)
        states[:, :, 0] = value
        return attend(query, states, states, attn_mask=mask)

    assert not torch.equal(padded(filling), torch.ones(1, 1, 1, 4, dtype=torch.float64))
    assert torch.equal(padded(0.0), torch.ones(1, 1, 1, 4, dtype=torch.float64))


@pytest.mark.parametrize("tier", TIERS)
def test_sampled_answers_do_not_depend_on_the_schedule(tier: type[RunningBatch], llama: Any) -> None:
    requests = draw_requests(6, seed=5)
    sampler = Sampler(temperature=0.9, top_p=0.95, seed=11)
    few = run_at_random(tier(llama, 2, 64, sampler=sampler), requests, seed=1)
    assert few == run_at_random(WindowBatch(llama, 5, 64, sampler=sampler), requests, seed=2)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_prompts_are_packed_whole_and_in_order(lengths: list[int], most_tokens: int) -> None:
    begins = [length // 2 for length in lengths]
    calls = list(pack(lengths, most_tokens, begins))
    assert all(0 < sum(tokens for *_, tokens in call) <= most_tokens for call in calls)
    seen = begins
    for index, offset, tokens in itertools.chain(*calls):
        assert seen[index] == offset
        seen[index] += tokens
    assert seen == lengths
