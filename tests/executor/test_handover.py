"""Keys and values that one process puts into shared memory and another one looks at."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from batchbound.executor.engines.offloading import OffloadingBatch
from batchbound.executor.engines.tiers import choose_tier
from batchbound.executor.kv.store import Suspended
from batchbound.executor.models.source import load_model
from batchbound.executor.processes.encode_worker import Blocks, Layout, unpack


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


def test_what_the_device_has_no_room_for_is_copied_before_its_block_is_used_again() -> None:
    model = load_model("tiny:llama", dtype="float64", device="cpu")
    tier = choose_tier(model)
    batch = tier.batch(model, 2, 20)
    batch.prefill([0, 1], [[1, 2, 3], [4, 5]])
    taken = [batch.take(0), batch.take(1)]
    for slot in (0, 1):
        batch.insert(slot, taken[slot])
    expected = batch.decode(3)

    residence = OffloadingBatch(lambda slots: tier.batch(model, slots, 20), 1, ["a", "b"], host_tokens=40)
    for name in (0, 1):
        residence.receive(name, taken[name])
        assert residence.resume(name)
    residence.keep([0, 1])
    with torch.inference_mode():
        for part in (*taken[1].keys, *taken[1].values):
            part.zero_()
    assert residence.decode(3, lambda _: 1) == {name: expected[:, name].tolist() for name in (0, 1)}
