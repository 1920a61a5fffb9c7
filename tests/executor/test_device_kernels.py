"""Norms and rotary embeddings in Triton: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="the engine extra is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Read when triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: torch brings it on CUDA machines")

from batchbound.executor.attention.device_kernels import DeviceKernels
from batchbound.executor.attention.fused_layers import FusedLayers
from batchbound.executor.models.source import load_model

# Triton 3.9 announces another default of 3.10's; both are right here.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("family", "turns"), [("llama", True), ("qwen3", True), ("gemma3", True), ("phi", True), ("gpt2", False)]
)
def test_a_model_computes_the_same_with_them(family: str, turns: bool, dtype: str) -> None:
    model = load_model(f"tiny:{family}", dtype=dtype, device=DEVICE)
    layers = FusedLayers(model, DeviceKernels())
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(layers._norms) == len(norms)
    assert (layers._rotary is not None) is turns
    tokens = torch.tensor([[3], [200], [77]], device=DEVICE)
    positions = torch.tensor([[0], [5], [90]], device=DEVICE)
    with torch.inference_mode():
        for norm in norms:
            norm.weight.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
        expected = model(tokens, position_ids=positions).logits
        with layers.in_place():
            assert_near(model(tokens, position_ids=positions).logits, expected)


def test_rows_that_do_not_lie_next_to_each_other_are_turned() -> None:
    heads, size = 3, 24
    packed = torch.randn(5, 1, (heads + 2) * size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    states = packed[..., : heads * size].view(5, 1, heads, size).transpose(1, 2)
    angles = torch.arange(5.0, device=DEVICE)[:, None, None] * torch.ones(size, device=DEVICE)
    cosines, sines = angles.cos(), angles.sin()
    first, second = states.chunk(2, dim=-1)
    expected = states * cosines[:, None] + torch.cat((-second, first), dim=-1) * sines[:, None]
    assert_near(DeviceKernels().rotate(states, cosines, sines), expected)


def assert_near(output: Any, expected: Any) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2}[output.dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
