"""What is fastest here: chosen by the clock alone, and right whatever is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")

from tier_cases import answers_of_generate, draw_requests

from batchbound.executor.attention import decoder, packed_weights
from batchbound.executor.attention.functions import ATTENTION, attend_by_blocks
from batchbound.executor.attention.fused_layers import FusedLayers
from batchbound.executor.attention.host_kernels import built
from batchbound.executor.attention.products import Products, _tried, fastest_products
from batchbound.executor.kv import packed_prompts
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.models.sampling import likeliest
from batchbound.executor.models.source import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(eq=False)
class Clock:
    """A clock by which the ways take so many seconds, in the order in which they are tried."""

    seconds: list[float]
    time: float = 0.0
    calls: int = field(default=0, init=False)

    def __call__(self) -> float:
        # Two readings a call and three calls a way.
        if self.calls % 2:
            self.time += self.seconds[self.calls // 6]
        self.calls += 1
        return self.time


@pytest.mark.parametrize(
    ("seconds", "halves", "attention"),
    [
        ([1.0, 0.5, 1.0, 0.95, 1.0, 0.8, 0.5], math.inf, "blocks of products"),
        ([1.0, 0.5, 1.0, 0.5, 1.0, 0.8, 0.5], 64, "blocks of products"),
        ([1.0, 0.95, 1.0, 0.5, 0.8], 0, "torch's function in float32"),
        ([1.0, 2.0, 1.0, 0.95, 2.0], 0, "torch's function"),
    ],
)
def test_a_way_is_chosen_that_is_clearly_faster(seconds: list[float], halves: float, attention: str) -> None:
    if built() is None:
        pytest.skip("this machine has no C++ compiler")
    assert _tried(torch.bfloat16, 1, Clock(seconds)) == Products(halves, attention)
    assert _tried(torch.float32, 1, Clock(seconds)) == Products(halves)


def test_the_line_says_which_rows_are_whose() -> None:
    own = "products with float32 sums on packed bfloat16 weights"
    assert str(Products()).startswith("products by oneDNN;")
    assert str(Products(64)).startswith(f"{own} up to 64 rows, of more by torch;")
    assert str(Products(math.inf)).startswith(f"{own};")


def test_nothing_is_tried_for_other_number_formats_and_devices() -> None:
    assert fastest_products(torch.device("cpu"), torch.float64) == Products()
    assert fastest_products(torch.device("meta"), torch.bfloat16) == Products()


@pytest.mark.parametrize(
    "products", [Products(halves, name) for halves in (0, 64, math.inf) for name in ATTENTION]
)
def test_logits_in_bfloat16_are_near_those_in_float32(
    products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decoder, packed_weights):
        monkeypatch.setattr(module, "fastest_products", lambda *_: products)
    monkeypatch.setattr(packed_prompts, "_LONG", 1)
    model = load_model("tiny:llama", dtype="bfloat16", device="cpu")
    prompt = [7 * i % 200 for i in range(150)]
    batch = RaggedBatch(model, 1, 200)
    ((_, logits),) = batch.score([prompt], [()], [len(prompt)])
    assert logits.dtype == torch.bfloat16
    with torch.no_grad():
        exact = model.float()(torch.tensor([prompt])).logits[0]
    assert (logits.float() - exact).abs().max() < 0.03 * exact.abs().max()


def test_blocks_give_the_tokens_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_prompts, "_LONG", 1)
    requests = draw_requests(4, seed=3)
    model = load_model("tiny:mistral", dtype="float64", device="cpu")
    batch = RaggedBatch(model, len(requests), 64)
    batch._decoder.attend_long = attend_by_blocks
    slots = list(range(len(requests)))
    tokens = [batch.prefill(slots, [prompt for prompt, _ in requests])]
    tokens += batch.decode(max(most for _, most in requests)).tolist()
    drawn = [[step[slot] for step in tokens[:most]] for slot, (_, most) in enumerate(requests)]
    assert drawn == answers_of_generate("mistral", requests)


@pytest.mark.parametrize("vocabulary", [40, 512, 1000, 1025])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_is_the_first_of_the_largest(vocabulary: int, dtype: Any) -> None:
    # Few values, so that the largest comes several times.
    logits = torch.randint(5, (200, vocabulary), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, -1], logits[1, 7], logits[2] = 9, float("nan"), -torch.inf
    assert likeliest(logits).tolist() == [
        row.index(max(row)) if at != 1 else 7 for at, row in enumerate(logits.tolist())
    ]


@pytest.mark.parametrize(("family", "gates"), [("llama", 2), ("gemma3", 0), ("gpt2", 0)])
def test_silu_gates_are_computed_in_place(family: str, gates: int) -> None:
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    kernels = built()
    if kernels is None:
        pytest.skip("this machine has no C++ compiler")
    layers = FusedLayers(model, kernels)
    assert len(layers._gates) == gates
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        with layers.in_place():
            torch.testing.assert_close(model(ids).logits, expected)
