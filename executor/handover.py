"""
Keys and values on their way from the process that encodes to the one that decodes, in the host's memory.

This module needs torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from statistics import median
from typing import Any, Self

import torch

from .store import Suspended
from .tiers import Tier

_HANDED_OVER = 4
"""Prompts handed over together when that is measured."""
_RUNNING = 60
"""Requests in the batch that those join."""
_MESSAGE_TOKENS = 4096
"""Of a prompt in the message that is timed, at most."""


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


class OtherWorker:
    """
    A process that packs requests as the worker that encodes does, to time what it takes to receive them.

    Shared memory that another process wrote has to be mapped, which costs more than memory of one's own.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.send(None)
            self._connection.close()
            self._process.join()

    def time_handover(
        self, model: Any, tier: Tier, length: int, repeats: int, clock: Callable[[], float]
    ) -> dict[str, float]:
        """
        Return the seconds in which a prompt's keys and values leave one worker, and join the other's batch.

        Parameters
        ----------
        model, tier
            Of both workers.
        length
            Tokens of the prompt.
        repeats
            Measurements, of which the median counts.
        clock
            Seconds from any origin.

        Returns
        -------
        dict
            ``send`` and ``receive``, with the messages between the workers.
        """
        slots, running = range(_HANDED_OVER), _HANDED_OVER + _RUNNING
        batch = tier.batch(model, running, length + repeats + 3)
        batch.prefill(range(running), [[0] * length] * running)
        # A longer message than the system's buffer holds would wait for its reader, and be timed with it.
        message = [[0] * min(length, _MESSAGE_TOKENS)] * len(slots)
        connection = self._connected()
        sent: list[float] = []
        received: list[float] = []
        for _ in range(repeats + 1):
            begun = clock()
            requests = [batch.take(slot) for slot in slots]
            discard(pack(requests))
            sent.append((clock() - begun) / len(slots))
            connection.send(requests)
            # A round comes between two receptions: nothing is where the last one left it.
            batch.decode()
            connection.poll(None)
            begun = clock()
            # The next batch's prompts go out where the last batch comes in.
            connection.send(message)
            connection.poll()
            for slot, request in zip(slots, unpack(connection.recv()), strict=True):
                batch.insert(slot, request)
            received.append((clock() - begun) / len(slots))
        return {"send": median(sent[1:]), "receive": median(received[1:])}

    def _connected(self) -> Connection:
        if self._connection is None:
            context = get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_pack_what_comes, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        return self._connection


def _pack_what_comes(connection: Connection) -> None:
    """Pack requests and read the message that follows them, until nothing comes."""
    while (requests := connection.recv()) is not None:
        connection.send(pack(requests))
        connection.recv()
