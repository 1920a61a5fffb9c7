"""The functions of our own for decode steps on a CPU: what they compute, and that torch's do without them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from builders import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tier_cases import FAST, RAGGED, answers_of_generate, cut_short, draw_requests, run_at_random

from batchbound.executor.attention import decoder as decoder_module
from batchbound.executor.attention import host_kernels
from batchbound.executor.attention.fused_layers import FusedLayers
from batchbound.executor.attention.host_kernels import HostKernels, Rows, SharedColumns, built, compiler
from batchbound.executor.attention.kernels import agree
from batchbound.executor.kv.ragged import RaggedBatch
from batchbound.executor.models.source import load_model

# GPT-BigCode in transformers 5.17 scripts a function, which newer torch deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def functions_here() -> HostKernels:
    """Return the built functions: where there is a compiler, that they do not build is a failure."""
    if compiler() is None:
        pytest.skip("this machine has no C++ compiler")
    found = built()
    assert found is not None
    return found


@pytest.fixture
def kernels() -> HostKernels:
    return functions_here()


def by_hand(query: Any, keys: Any, values: Any, window: int | None, scale: float) -> Any:
    """Attend from one row's token, (heads, size), to the columns (columns, heads, size) it holds."""
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    group = len(query) // keys.shape[1]
    heads = []
    for head in range(len(query)):
        scores = scale * keys[:, head // group].double() @ query[head].double()
        heads.append(scores.softmax(0) @ values[:, head // group].double())
    return torch.stack(heads).to(query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    sizes=st.sampled_from([(8, 8), (32, 32), (64, 64), (48, 20), (128, 128)]),
    window=st.sampled_from([None, 1, 7, 64, 200]),
    block=st.sampled_from([None, 1, 16]),
)
def test_each_row_attends_to_the_columns_that_it_holds(
    dtype: Any,
    seed: int,
    lengths: list[int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    window: int | None,
    block: int | None,
) -> None:
    functions = functions_here()
    draw = torch.Generator().manual_seed(seed)
    tokens = block or 16
    rows, blocks = len(lengths), -(-max(lengths) // tokens)
    query = torch.randn(rows, heads[0], sizes[0], generator=draw).to(dtype)
    positions = torch.tensor(lengths) - 1
    table = torch.randperm(rows * blocks, generator=draw).view(rows, blocks)
    # NaN wherever a row holds nothing: what is read too much cannot hide.
    buffers = [
        torch.full((rows * blocks * tokens, heads[1], size), float("nan"), dtype=dtype) for size in sizes
    ]
    states = [[torch.randn(n, heads[1], size, generator=draw).to(dtype) for n in lengths] for size in sizes]
    for buffer, of_rows in zip(buffers, states, strict=True):
        for row, held in enumerate(of_rows):
            columns = torch.arange(len(held))
            buffer[table[row, columns // tokens] * tokens + columns % tokens] = held
    where = Rows(positions, table, tokens)
    if block is None:
        every = (table[:, :, None] * tokens + torch.arange(tokens)).view(rows, -1)
        buffers = [buffer[every].transpose(1, 2).contiguous() for buffer in buffers]
        where = Rows(positions)
    got = functions.attend(query, buffers[0], buffers[1], where, window=window, scale=0.4)
    for row in range(rows):
        expected = by_hand(query[row], states[0][row], states[1][row], window, 0.4)
        assert agree(got[row], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (40, 1)])
@pytest.mark.parametrize("size", [20, 64])
def test_columns_that_rows_share_are_attended_to_like_their_own(
    kernels: HostKernels, dtype: Any, heads: tuple[int, int], size: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    # All rows share 70 columns, rows 1 to 8 the next 9, rows 2 and 3 one more: too few to be read together.
    own = torch.arange(1, 11)
    groups = [(0, 70, range(10)), (70, 79, range(1, 9)), (79, 80, range(2, 4))]
    table = torch.randperm(1000, generator=draw).view(10, 100)
    for first, end, members in groups:
        table[list(members), first:end] = table[members[0], first:end].clone()
    positions = 79 + own
    query = torch.randn(10, heads[0], size, generator=draw).to(dtype)
    keys, values = torch.randn(2, 1000, heads[1], size, generator=draw).to(dtype)
    numbers = [number for first, end, members in groups for number in (first, end, len(members), *members)]
    shared = SharedColumns(len(groups), torch.tensor(numbers))
    for window in (None, 30):
        apart, together = (
            kernels.attend(query, keys, values, Rows(positions, table, 1, rows), window=window, scale=0.3)
            for rows in (None, shared)
        )
        assert agree(together, apart)
        assert window is None or torch.equal(together, apart)
    rows = Rows(positions, table, 1, shared)
    torch.set_num_threads(2)
    try:
        by_two = kernels.attend(query, keys, values, rows, window=None, scale=0.3)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(by_two, kernels.attend(query, keys, values, rows, window=None, scale=0.3))
    keys[table[0, 3]] = float("nan")
    assert kernels.attend(query, keys, values, rows, window=None, scale=None).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_not_lost(kernels: HostKernels, dtype: Any) -> None:
    keys, values = torch.randn(2, 2, 1, 9, 16).to(dtype)
    keys[1, 0, 3] = float("nan")
    got = kernels.attend(
        torch.ones(2, 1, 16, dtype=dtype), keys, values, Rows(torch.tensor([8, 8])), window=None, scale=1
    )
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_tensors_of_several_number_formats_are_refused(kernels: HostKernels) -> None:
    # Under autocast some of a layer's are.
    (keys, values), rows = torch.randn(2, 2, 1, 9, 16), Rows(torch.tensor([8, 8]))
    with pytest.raises(TypeError, match="one number format"):
        kernels.attend(torch.ones(2, 1, 16), keys, values.bfloat16(), rows, window=None, scale=1)
    with pytest.raises(TypeError, match="one number format"):
        kernels.keep(torch.ones(2, 1, 1, 16, dtype=torch.float64), keys, rows)


def test_several_threads_give_what_one_gives(kernels: HostKernels) -> None:
    query, (keys, values) = torch.randn(9, 8, 64), torch.randn(2, 9, 4, 130, 64)
    rows = Rows(torch.arange(9) * 16)
    alone = kernels.attend(query, keys, values, rows, window=None, scale=None)
    torch.set_num_threads(2)
    try:
        together = kernels.attend(query, keys, values, rows, window=None, scale=None)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("family", mostly_slow(RAGGED, FAST))
def test_torchs_own_operations_give_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "built", lambda: None)
    model = load_model(f"tiny:{family}", dtype="float64", device="cpu")
    requests = draw_requests(5, seed=1)
    batch = RaggedBatch(model, slots=3, capacity=1)
    assert batch._host is None
    ends, expected = cut_short(answers_of_generate(family, requests))
    assert run_at_random(batch, requests, seed=2, until=ends) == expected


@pytest.mark.parametrize(("family", "turns"), [("llama", True), ("gemma3", True), ("gpt2", False)])
def test_norms_and_rotary_embeddings_are_computed_in_one_call(
    kernels: HostKernels, family: str, turns: bool
) -> None:
    model = load_model(f"tiny:{family}", dtype="float32", device="cpu")
    layers = FusedLayers(model, kernels)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(layers._norms) == len(norms)
    assert (layers._rotary is not None) is turns
    for norm in norms:
        inputs = torch.randn(3, 1, len(norm.weight), dtype=torch.float32)
        with torch.inference_mode():
            norm.weight.normal_()
            expected = norm(inputs)
            with layers.in_place():
                assert "forward" in vars(norm)
                assert torch.allclose(norm(inputs), expected, rtol=1e-5)
        assert "forward" not in vars(norm)


def test_double_precision_keeps_the_norms_that_transformers_rounds(kernels: HostKernels) -> None:
    assert not FusedLayers(load_model("tiny:llama", dtype="float64", device="cpu"), kernels)._norms


def test_a_norm_that_computes_something_else_is_left_alone(kernels: HostKernels) -> None:
    class OtherRMSNorm(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, inputs: Any) -> Any:
            return self.weight * inputs / inputs.abs().mean(-1, keepdim=True)

    model = load_model("tiny:llama", dtype="float32", device="cpu")
    own = len(FusedLayers(model, kernels)._norms)
    model.other = OtherRMSNorm()
    assert len(FusedLayers(model, kernels)._norms) == own


def test_without_a_compiler_the_log_says_what_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/no/such/folder")
    with caplog.at_level(logging.INFO):
        assert host_kernels.built.__wrapped__() is None
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "decode steps on this CPU use torch's own operations: there is no C++ compiler")
    ]


def test_a_compiler_that_is_named_and_not_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert host_kernels.built.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "/no/such/compiler" in caplog.text


def test_functions_that_are_wrong_are_not_used(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = HostKernels.attend
    monkeypatch.setattr(HostKernels, "attend", lambda *given, **named: right(*given, **named) * 1.1)
    with caplog.at_level(logging.INFO):
        assert host_kernels.built.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "attention in torch.float32 is wrong" in caplog.text
