"""Keys and values that one process puts into shared memory and another one looks at."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from batchbound.executor.handover import Blocks, Layout, unpack  # noqa: E402
from batchbound.executor.store import Suspended  # noqa: E402


def request(tokens: int, first: float) -> Suspended:
    """Return a request of two layers: two heads with keys of three values, one with keys of one."""
    shapes = [(2, tokens, 3), (2, tokens, 2), (1, tokens, 1), (1, tokens, 1)]
    parts = [torch.full(shape, first + k, dtype=torch.float64) for k, shape in enumerate(shapes)]
    return Suspended(tuple(parts[::2]), tuple(parts[1::2]), torch.tensor([int(first), tokens, 0, 1]))


def test_what_is_packed_is_there_again() -> None:
    packed = [request(4, 10.0), request(1, 20.0)]
    number, block = Blocks().pack(packed)
    assert number == 0
    assert block is not None
    layout = Layout.of(packed[0])
    assert layout.layers == ((2, 3, 2), (1, 1, 1))
    found = unpack(layout, [4, 1], [each.state.tolist() for each in packed], block)
    for before, after in zip(packed, found, strict=True):
        for theirs, ours in ((before.keys, after.keys), (before.values, after.values)):
            assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
        assert torch.equal(before.state, after.state)
        assert after.tokens == before.tokens


def test_a_block_is_used_again_once_it_is_free_and_large_enough() -> None:
    blocks = Blocks()
    first, block = blocks.pack([request(4, 0.0)])
    second, other = blocks.pack([request(3, 0.0)])
    assert (first, second) == (0, 1)
    assert other is not None
    blocks.free([first])
    # The other process knows this block: it is not sent once more.
    assert blocks.pack([request(4, 5.0)]) == (first, None)
    assert block is not None
    assert block[0] == 5.0
    blocks.free([second])
    # Too small for as much: it is made anew under its number.
    number, larger = blocks.pack([request(40, 1.0)])
    assert number == second
    assert larger is not None
    assert len(larger) > len(other)
