"""The Triton kernel against masked attention: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Read when triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: torch brings it on CUDA machines")

from batchbound.executor.attention.flash_decoding import attend, parts_for
from batchbound.executor.attention.kernels import KERNELS, Held, agree

# Triton 3.9 announces another default of 3.10's; both are right here.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
LENGTHS = [1, 63, 64, 65, 150]


def drawn(rows: int, heads: int, kv_heads: int, columns: int, size: int, dtype: Any) -> Any:
    generator = torch.Generator().manual_seed(rows * heads + columns + size)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    return (
        normal(rows, heads, size),
        normal(rows, kv_heads, columns, size),
        normal(rows, kv_heads, columns, size),
    )


def masked(
    query: Any, keys: Any, values: Any, lengths: Any, *, starts: Any = None, window: int = 10**9
) -> Any:
    """Attention in float64 by a mask over all columns."""
    columns = torch.arange(keys.shape[2], device=DEVICE)[None, :]
    first = lengths[:, None] - window
    if starts is not None:
        first = torch.maximum(first, starts[:, None])
    seen = (columns < lengths[:, None]) & (columns >= first)
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(group, dim=1) for states in (keys, values))
    scores = (query.double()[:, :, None] @ keys.transpose(2, 3)) * query.shape[-1] ** -0.5
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return (shares @ values)[:, :, 0]


def assert_near(output: Any, expected: Any) -> None:
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("size", [16, 32, 80])
def test_rows_attend_to_what_they_hold(heads: int, kv_heads: int, size: int, parts: int, dtype: Any) -> None:
    query, keys, values = drawn(len(LENGTHS), heads, kv_heads, 160, size, dtype)
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    output = attend(query, keys, values, lengths, parts=parts)
    assert_near(output, masked(query, keys, values, lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_window_hides_what_lies_before_it(window: int, parts: int, dtype: Any) -> None:
    query, keys, values = drawn(len(LENGTHS), 4, 2, 160, 32, dtype)
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    output = attend(query, keys, values, lengths, window=window, parts=parts)
    assert_near(output, masked(query, keys, values, lengths, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("window", [None, 40])
def test_rows_begin_where_they_are_said_to(window: int | None, parts: int, dtype: Any) -> None:
    query, keys, values = drawn(4, 4, 2, 130, 16, dtype)
    starts, lengths = torch.tensor([[0, 1, 63, 100], [130, 2, 129, 130]], device=DEVICE)
    output = attend(query, keys, values, lengths, starts=starts, window=window, parts=parts)
    assert_near(output, masked(query, keys, values, lengths, starts=starts, window=window or 10**9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block", [1, 16, 24])
def test_rows_in_blocks_are_read_where_they_lie(
    block: int, window: int | None, parts: int, dtype: Any
) -> None:
    query, keys, values = drawn(len(LENGTHS), 4, 2, 192, 32, dtype)
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    count = 192 // block * len(LENGTHS)
    # Twice as many as needed: what is nobody's is not read.
    table = torch.randperm(2 * count, generator=torch.Generator().manual_seed(block))[:count]
    table = table.view(len(LENGTHS), -1).to(DEVICE)
    places = (table[:, :, None] * block + torch.arange(block, device=DEVICE)).view(-1)
    pools = torch.full((2, 2 * count * block, 2, 32), float("nan"), dtype=dtype, device=DEVICE)
    for pool, states in zip(pools, (keys, values), strict=True):
        pool[places] = states.transpose(1, 2).reshape(-1, 2, 32)
    output = attend(query, pools[0], pools[1], lengths, blocks=(table, block), window=window, parts=parts)
    assert_near(output, masked(query, keys, values, lengths, window=window or 10**9))
    held = Held(pools[0], pools[1], lengths, window, None, table, block)
    assert agree(KERNELS["masked sdpa"](query, held), output)


def test_what_a_row_does_not_hold_is_not_even_read() -> None:
    query, keys, values = drawn(2, 2, 1, 100, 16, torch.float32)
    lengths = torch.tensor([7, 70], device=DEVICE)
    expected = attend(query, keys, values, lengths)
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = values[row, :, length:] = float("nan")
    assert torch.equal(attend(query, keys, values, lengths), expected)


def test_a_row_that_holds_nothing_gives_zeros() -> None:
    query, keys, values = drawn(2, 2, 1, 70, 16, torch.float32)
    output = attend(query, keys, values, torch.tensor([0, 3], device=DEVICE), parts=2)
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert output[1].isfinite().all()


def test_strides_are_followed() -> None:
    query, keys, values = drawn(3, 4, 2, 70, 32, torch.float32)
    lengths = torch.tensor([3, 70, 20], device=DEVICE)
    spread = torch.stack([keys, values]).transpose(2, 3).contiguous().transpose(2, 3)
    assert_near(attend(query, spread[0], spread[1], lengths), masked(query, keys, values, lengths))


def test_a_row_is_split_only_while_it_has_columns() -> None:
    assert parts_for(1, 1, 64, torch.device(DEVICE)) == 1
    assert 1 <= parts_for(1, 1, 1000, torch.device(DEVICE)) <= 16
