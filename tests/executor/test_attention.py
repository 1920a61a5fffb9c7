from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from batchbound.executor.attention.functions import attend_by_blocks, attend_from_latest
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.kv.window_batch import WindowBatch
from batchbound.executor.models.source import load_model


def repeated(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    """Attention written out, with every key head repeated for its query heads."""
    key, value = (states.repeat_interleave(3, dim=1) for states in (key, value))
    return ((query @ key.transpose(-1, -2) * scale + mask).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_each_of_the_latest_tokens_sees_itself_and_what_is_before_it(tokens: int, window: int | None) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 6, tokens, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64).unbind()
    mask = torch.full((tokens, 5), -torch.inf, dtype=torch.float64)
    for row, at in enumerate(range(5 - tokens, 5)):
        mask[row, max(0, at + 1 - (window or 5)) : at + 1] = 0
    for attend in (attend_from_latest, attend_by_blocks):
        output = attend(query, key, value, window=window, scale=0.3)
        torch.testing.assert_close(output, repeated(query, key, value, mask, 0.3))


@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize("tokens", [128, 300])
def test_blocks_of_products_attend_as_torchs_function_does(tokens: int, window: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, tokens, 8, generator=draw, dtype=torch.float64)
    key = torch.randn(1, 2, 310, 8, generator=draw, dtype=torch.float64)
    value = torch.randn(1, 2, 310, 12, generator=draw, dtype=torch.float64)
    own, blocks = (
        attend(query, key, value, window=window, scale=None)
        for attend in (attend_from_latest, attend_by_blocks)
    )
    torch.testing.assert_close(blocks, own)
    half = [states.bfloat16() for states in (query, key, value)]
    rounded = attend_by_blocks(*half, window=window, scale=None)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), own, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_tokens_are_the_same_and_the_model_is_left_as_it_was(family: str) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    plain, packed = WindowBatch(model, slots=2, capacity=64), RaggedBatch(model, slots=2, capacity=64)
    plain.prefill([0, 1], prompts)
    packed.prefill([0, 1], prompts)
    before = model.config._attn_implementation
    tokens = packed.decode(30)
    assert model.config._attn_implementation == before
    assert tokens.tolist() == plain.decode(30).tolist()
