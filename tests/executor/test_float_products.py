"""Float32 arithmetic on 16-bit weights: chosen by a trial, right on every layout, and with nothing copied."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import mostly_slow

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tier_cases import FAST, RAGGED, generate_alone

from batchbound.executor.attention import float_products
from batchbound.executor.attention.decoder import Decoder
from batchbound.executor.attention.float_products import (
    FloatProducts,
    Trial,
    arithmetic_of,
    choose_arithmetic,
    settled_arithmetic,
)
from batchbound.executor.attention.host_kernels import HostKernels, built, compiler
from batchbound.executor.attention.products import Products
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.models.source import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    """Return the C++ functions, on a machine whose memory holds no packed copy."""
    monkeypatch.setattr(float_products, "packed_bytes", lambda _: 0)
    if compiler() is None:
        pytest.skip("this machine has no C++ compiler")
    found = built()
    assert found is not None
    return found


@dataclass
class Clock:
    """A clock by which products in bfloat16 take so many times as long as those in float32."""

    ratio: float
    time: float = 0.0
    calls: int = field(default=0, init=False)

    def __call__(self) -> float:
        # Two readings a call and three calls a format, bfloat16 first.
        if self.calls % 2:
            self.time += self.ratio if self.calls % 12 < 6 else 1.0
        self.calls += 1
        return self.time


def chosen(family: str, kernels: HostKernels, ratio: float = 8.0, dtype: str = "bfloat16") -> Any:
    """Return a model for which float32 was so many times as fast as its own number format."""
    model = load_model(f"tiny:{family}", dtype=dtype, device="cpu")
    return choose_arithmetic(model, kernels, Trial(clock=Clock(ratio)))


def logits_after(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> Any:
    """Return the logits after prompts and further tokens, of a ragged batch: (steps, rows, vocabulary)."""
    batch = RaggedBatch(model, len(prompts), 64)
    found: list[Any] = []
    own = Decoder.forward

    def kept(decoder: Decoder, *arguments: Any, **options: Any) -> Any:
        logits = own(decoder, *arguments, **options)
        found.append(logits.float().clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", kept)
        batch.prefill(range(len(prompts)), prompts)
        for step in tokens:
            batch._state[0, : len(step)] = torch.tensor(step)
            batch.decode(1)
    return torch.stack(found)


@pytest.mark.parametrize("rows", [1, 3, 7, 8, 20, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, torch.arange(101.0)])
def test_products_are_those_of_widened_weights(
    kernels: HostKernels, rows: int, dtype: Any, bias: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 1_037, generator=generator)
    weight = torch.randn(101, 1_037, generator=generator).to(dtype)
    expected = inputs.double() @ weight.double().T + (0 if bias is None else bias)
    got = kernels.product(inputs, weight, bias)
    torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=0)


def test_products_in_several_threads_are_equal_to_the_bit(kernels: HostKernels) -> None:
    inputs, weight = torch.randn(2, 40, 64), torch.randn(100, 64).bfloat16()
    alone = kernels.product(inputs, weight, None)
    torch.set_num_threads(2)
    try:
        assert torch.equal(kernels.product(inputs, weight, None), alone)
    finally:
        torch.set_num_threads(1)


def test_inputs_of_another_type_or_size_are_refused(kernels: HostKernels) -> None:
    for inputs in (torch.ones(2, 8).bfloat16(), torch.ones(2, 9)):
        with pytest.raises(TypeError, match="not float32 of 8"):
            kernels.product(inputs, torch.ones(3, 8), None)


@pytest.mark.parametrize("family", mostly_slow(RAGGED, FAST))
def test_logits_are_nearer_to_float32_than_those_in_bfloat16(family: str, kernels: HostKernels) -> None:
    model = chosen(family, kernels)
    arithmetic = arithmetic_of(model)
    assert arithmetic is not None
    prompts, tokens = [[5, 9, 2, 7], [3], [8, 1, 1, 4, 6, 2]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    got = logits_after(model, prompts, tokens)
    assert model.dtype == (torch.bfloat16 if arithmetic.widened else torch.float32)
    plain = load_model(f"tiny:{family}", dtype="bfloat16", device="cpu")
    rounded = logits_after(plain, prompts, tokens)
    exact = logits_after(plain.float(), prompts, tokens)
    off, off_rounded = ((one - exact).square().mean().sqrt() for one in (got, rounded))
    assert off <= off_rounded
    assert off <= 0.02 * exact.square().mean().sqrt()


def test_products_of_many_rows_are_those_of_few(kernels: HostKernels) -> None:
    layer = torch.nn.Linear(64, 48).bfloat16()
    inputs = torch.randn(20, 64)
    outputs = []
    for widened_from in (20, 21):
        with torch.inference_mode(), FloatProducts(layer, kernels, widened_from).in_place():
            outputs.append(layer(inputs))
    assert outputs[0].dtype == torch.float32
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=0)


def test_the_format_of_the_checkpoint_stays_where_it_is_as_fast(kernels: HostKernels) -> None:
    model = chosen("llama", kernels, ratio=1.0)
    arithmetic = arithmetic_of(model)
    assert arithmetic is not None
    assert not arithmetic.widened
    assert Decoder(model).dtype == torch.bfloat16
    assert str(arithmetic).startswith("bfloat16 (measured ")


def test_the_format_of_the_checkpoint_stays_where_packed_weights_are_multiplied_in_float32(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float_products, "packed_bytes", lambda _: 1)
    for halves in (True, False):
        monkeypatch.setattr(float_products, "fastest_products", lambda *_, own=halves: Products(own))
        arithmetic = arithmetic_of(chosen("llama", kernels))
        assert (arithmetic is None) == halves


def test_widened_weights_are_neither_copied_nor_converted(kernels: HostKernels) -> None:
    model = chosen("llama", kernels)
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    batch = RaggedBatch(model, 2, 16)
    batch.prefill([0, 1], [[1, 2], [3]])
    keys, values = batch._store.attending.buffers
    assert keys.dtype == values.dtype == torch.bfloat16
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == places
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    assert "products in float32, weights and KV cache in bfloat16" in str(arithmetic_of(model))


def test_weights_that_change_in_place_are_seen(kernels: HostKernels) -> None:
    model = chosen("llama", kernels)
    batch = RaggedBatch(model, 1, 16)
    batch.prefill([0], [[1, 2]])
    before = batch.scores.copy()
    batch.release(0)
    with torch.no_grad():
        model.get_output_embeddings().weight.data.mul_(2)
    batch.prefill([0], [[1, 2]])
    assert batch.scores == pytest.approx(2 * before)


def test_float16_is_converted_as_a_whole(kernels: HostKernels) -> None:
    model = load_model("tiny:llama", dtype="float16", device="cpu")
    assert choose_arithmetic(model, kernels, Trial(clock=Clock(8.0))).dtype == torch.float32


def test_a_stated_number_format_is_kept(tmp_path: Path) -> None:
    load_model("tiny:llama", dtype="bfloat16", device="cpu").save_pretrained(tmp_path)
    stated = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert settled_arithmetic(stated) is None
    assert Decoder(stated).dtype == torch.bfloat16
    assert load_model(str(tmp_path), dtype="float32", device="cpu").dtype == torch.float32


def test_without_a_stated_format_the_trial_is_made_once(tmp_path: Path, kernels: HostKernels) -> None:
    load_model("tiny:llama", dtype="bfloat16", device="cpu").save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    assert arithmetic_of(model) is None
    settled = settled_arithmetic(model)
    assert settled is not None
    assert settled.rates.keys() == {"bfloat16", "float32"}
    assert settled_arithmetic(model) is settled


@pytest.mark.slow
def test_a_pool_grows_with_rows_that_outgrow_it_and_keeps_what_they_hold(llama: Any) -> None:
    batch = RaggedBatch(llama, 2, 2)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    first = batch.prefill([0, 1], prompts)
    tokens = [first, *batch.decode(150).tolist()]
    for row, prompt in enumerate(prompts):
        assert [step[row] for step in tokens] == generate_alone(llama, prompt, 151)
