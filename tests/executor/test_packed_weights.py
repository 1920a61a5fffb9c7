"""Linear layers on packed weights: the same answers, and never those of weights that have changed."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from batchbound.executor.attention import packed_weights
from batchbound.executor.attention.host_kernels import built
from batchbound.executor.attention.packed_weights import PackedWeights, packed_bytes
from batchbound.executor.attention.products import Products, packs

pytestmark = pytest.mark.usefixtures("one_thread")


def two_layers(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 160), torch.nn.Linear(160, 128, bias=False))
    return model.to(dtype).eval()


@pytest.mark.parametrize("rows", [1, 3, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", [0.0, 64.0, math.inf])
@pytest.mark.parametrize("of_bfloat16", [False, True])
def test_packed_layers_give_what_the_layers_give(
    rows: int, dtype: Any, halves: float, of_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "fastest_products", lambda *_: Products(halves))
    model = two_layers(torch.bfloat16).to(dtype) if of_bfloat16 else two_layers(dtype)
    inputs = torch.randn(2, rows, 128, dtype=dtype)
    packed = PackedWeights(model)
    with torch.inference_mode():
        expected = model(inputs)
        with packed.in_place():
            got = model(inputs)
    # With AVX2 alone oneDNN has no bfloat16.
    assert len(packed._packed) == (2 if packs(dtype) or halves > 0 else 0)
    assert torch.allclose(got.double(), expected.double(), atol=torch.finfo(dtype).eps * 10)


@pytest.mark.parametrize("rows", [1, 5, 12, 13, 33, 300])
@pytest.mark.parametrize(("size", "count"), [(1_037, 101), (1_056, 101), (64, 32), (1, 1)])
def test_products_on_halves_are_those_of_their_weights(rows: int, size: int, count: int) -> None:
    kernels = built()
    if kernels is None:
        pytest.skip("this machine has no C++ compiler")
    draw = torch.Generator().manual_seed(0)
    inputs, bias = torch.randn(rows, size, generator=draw), torch.randn(count, generator=draw)
    weight = torch.randn(count, size, generator=draw).bfloat16()
    halves = kernels.pack(weight)
    assert halves is not None
    same = kernels.pack(weight.float())
    assert same is not None
    assert torch.equal(halves, same)
    expected = inputs.double() @ weight.double().T + bias
    got = kernels.times_halves(inputs, halves, bias, count)
    # As sums of float32 products: in bfloat16 an activation alone would be off by 4e-3.
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=0)
    rounded = kernels.times_halves(inputs.bfloat16(), halves, bias.bfloat16(), count)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


def test_weights_that_halves_would_change_are_not_packed_as_halves() -> None:
    kernels = built()
    if kernels is None:
        pytest.skip("this machine has no C++ compiler")
    weight = torch.ones(3, 7)
    weight[2, 6] += 2**-8
    assert kernels.pack(weight) is None
    weight[2, 6] = float("nan")
    assert kernels.pack(weight) is not None


def test_an_interrupt_while_layers_are_put_back_leaves_none_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, pending = two_layers(), PackedWeights._restore, ["an interrupt"]

    def interrupted(packed: PackedWeights) -> None:
        if pending:
            pending.pop()
            raise KeyboardInterrupt
        own(packed)

    packed = PackedWeights(model)
    monkeypatch.setattr(PackedWeights, "_restore", interrupted)
    with pytest.raises(KeyboardInterrupt), packed.in_place():
        model(torch.zeros(1, 128))
    assert not any("forward" in vars(module) for module in model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_packed_layers_compute_in_its_number_format(dtype: Any) -> None:
    model, inputs = two_layers(), torch.randn(5, 128)
    packed = PackedWeights(model)

    def both(enabled: bool) -> tuple[Any, Any]:
        with torch.inference_mode(), torch.autocast("cpu", dtype, enabled=enabled):
            expected = model(inputs)
            with packed.in_place():
                return model(inputs), expected

    for enabled in (True, False, True):
        got, expected = both(enabled)
        assert got.dtype == expected.dtype == (dtype if enabled else torch.float32)
        assert torch.allclose(got.double(), expected.double(), atol=torch.finfo(expected.dtype).eps * 10)
        change_in_place(model)


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def step_an_optimizer(model: Any) -> None:
    model(torch.randn(4, 128)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def load_others(model: Any) -> None:
    model.load_state_dict({name: 3 * weight for name, weight in model.state_dict().items()})


def replace_the_data(model: Any) -> None:
    model[0].weight.data = torch.randn(160, 128)


def replace_the_parameter(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(torch.randn(160, 128))


def step_a_fused_optimizer(model: Any) -> None:
    model(torch.randn(4, 128)).square().sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def write_to_the_data(model: Any) -> None:
    model[0].weight.data.mul_(2)


@pytest.mark.parametrize("change", [step_a_fused_optimizer, write_to_the_data])
def test_changes_that_torch_does_not_count_are_seen_when_weights_are_packed_anew(change: Any) -> None:
    model, inputs = two_layers(), torch.randn(5, 128)
    packed = PackedWeights(model)
    change(model)
    packed.repack()
    with torch.inference_mode(), packed.in_place():
        got = model(inputs)
    with torch.inference_mode():
        assert torch.allclose(got, model(inputs), atol=1e-4)


@pytest.mark.parametrize(
    "change", [change_in_place, step_an_optimizer, load_others, replace_the_data, replace_the_parameter]
)
def test_weights_that_change_are_packed_anew(change: Any) -> None:
    model, inputs = two_layers(), torch.randn(5, 128)
    packed = PackedWeights(model)
    with torch.inference_mode(), packed.in_place():
        before = model(inputs)
    change(model)
    with torch.inference_mode():
        expected = model(inputs)
        with packed.in_place():
            got = model(inputs)
    assert not torch.allclose(before, expected, atol=1e-4)
    assert torch.allclose(got, expected, atol=1e-4)


def test_without_memory_for_a_second_copy_the_own_weights_are_read() -> None:
    model = two_layers()
    size = 4 * 2 * 128 * 160
    assert packed_bytes(model, available=lambda: 4 * size) == size
    assert packed_bytes(model, available=lambda: 4 * size - 4) == 0
    assert not PackedWeights(model, available=lambda: 4 * size - 4)._packed


def test_copies_in_halves_take_no_more_memory_than_the_weights() -> None:
    kernels = built()
    if kernels is None:
        pytest.skip("this machine has no C++ compiler")
    model = two_layers(torch.bfloat16)
    halves = [kernels.pack(layer.weight.detach()) for layer in model]
    assert sum(packed.nbytes for packed in halves if packed is not None) == 2 * 2 * 128 * 160
    assert packed_bytes(model, available=lambda: 10**9) == 2 * 2 * 128 * 160


def test_layers_that_cannot_be_packed_are_left_alone() -> None:
    assert not PackedWeights(two_layers(torch.float64))._packed, "oneDNN has no double precision"
    hooked = two_layers()
    hooked[0].forward = lambda inputs: inputs[..., :1].expand(*inputs.shape[:-1], 160)
    packed = PackedWeights(hooked)
    assert len(packed._packed) == 1
    with torch.inference_mode(), packed.in_place():
        hooked(torch.randn(2, 128))
    assert "forward" in vars(hooked[0]), "what somebody put in a layer's place is there afterwards"
    with torch.inference_mode():
        uncounted = two_layers().to(torch.bfloat16).to(torch.float32)
    assert not PackedWeights(uncounted)._packed, "nobody could tell when they change"


def test_the_model_is_as_before_even_when_it_fails() -> None:
    model = two_layers()
    packed = PackedWeights(model)
    with pytest.raises(RuntimeError), torch.inference_mode(), packed.in_place():
        model(torch.randn(2, 7))
    assert "forward" not in vars(model[0])
    assert "forward" not in vars(model[1])
