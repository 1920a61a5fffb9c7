"""
Keys and values on their way from the process that encodes to the one that decodes, in the host's memory.

This module needs torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch

from .store import Suspended


@dataclass(frozen=True, slots=True)
class Parcel:
    """
    Where in shared memory the keys and values of a batch lie, and what else its requests need.

    Parameters
    ----------
    memory
        Name of the block.
    layers
        Heads, head size of keys and head size of values of each layer.
    tokens
        Tokens each request holds.
    states
        Of each request, as :class:`~.store.Suspended` has it.
    dtype
        Number format, by its name in torch.
    """

    memory: str
    layers: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]
    dtype: str


def pack(requests: Sequence[Suspended]) -> Parcel:
    """Return requests (at least one) put into a fresh block of shared memory, which the receiver unlinks."""
    parts = [part for each in requests for pair in zip(each.keys, each.values, strict=True) for part in pair]
    first = requests[0]
    block = SharedMemory(create=True, size=sum(part.nbytes for part in parts))
    try:
        whole = torch.frombuffer(block.buf, dtype=parts[0].dtype, count=sum(part.numel() for part in parts))
        torch.cat([part.reshape(-1) for part in parts], out=whole)
        del whole
    except BaseException:
        block.unlink()
        raise
    finally:
        block.close()
    return Parcel(
        memory=block.name,
        layers=tuple(
            (keys.shape[0], keys.shape[2], values.shape[2])
            for keys, values in zip(first.keys, first.values, strict=True)
        ),
        tokens=tuple(each.tokens for each in requests),
        states=tuple(tuple(each.state.tolist()) for each in requests),
        dtype=str(parts[0].dtype).removeprefix("torch."),
    )


def unpack(parcel: Parcel) -> list[Suspended]:
    """Return the requests of a parcel, copied out of shared memory, which is given back."""
    dtype: torch.dtype = getattr(torch, parcel.dtype)
    block = SharedMemory(parcel.memory)
    try:
        sizes = [
            tokens * heads * size
            for tokens in parcel.tokens
            for heads, keys, values in parcel.layers
            for size in (keys, values)
        ]
        whole = torch.frombuffer(block.buf, dtype=dtype, count=sum(sizes)).clone()
    finally:
        block.close()
        block.unlink()
    parts = iter(torch.split(whole, sizes))
    requests = []
    for tokens, state in zip(parcel.tokens, parcel.states, strict=True):
        keys, values = [], []
        for heads, key_size, value_size in parcel.layers:
            keys.append(next(parts).view(heads, tokens, key_size))
            values.append(next(parts).view(heads, tokens, value_size))
        requests.append(Suspended(tuple(keys), tuple(values), torch.tensor(state)))
    return requests


def discard(parcel: Parcel) -> None:
    """Give a parcel's memory back without looking at it."""
    block = SharedMemory(parcel.memory)
    block.close()
    block.unlink()
