"""Process that encodes prompts for a decoding one (ExeGPT's WAA)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, Any

import torch

from ..kv.store import Suspended
from ..models.faults import RunStoppedError
from .engine_spec import EngineSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a token's KV cache.

    layers: Heads, head size of keys and head size of values of each layer.
    """

    layers: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, request: Suspended) -> Layout:
        """Return the layout of a request's KV cache."""
        layers = zip(request.keys, request.values, strict=True)
        return cls(tuple((keys.shape[0], keys.shape[2], values.shape[2]) for keys, values in layers))


class Blocks:
    """Memory shared with another process, in reusable blocks.

    A fresh block takes longer to share than to fill.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._free: list[int] = []

    def pack(self, requests: Sequence[Suspended]) -> tuple[int, torch.Tensor | None]:
        """Copy the KV cache of requests into a free block."""
        pairs = (zip(request.keys, request.values, strict=True) for request in requests)
        parts = [part.reshape(-1) for request in pairs for pair in request for part in pair]
        size = sum(map(len, parts))
        number = next((free for free in self._free if len(self._blocks[free]) >= size), None)
        known = number is not None
        if number is None:
            number = self._make(size, parts[0].dtype)
        else:
            self._free.remove(number)
        block = self._blocks[number]
        torch.cat(parts, out=block[:size])
        return number, None if known else block

    def free(self, numbers: Sequence[int]) -> None:
        """Mark blocks as free."""
        self._free += numbers

    def _make(self, size: int, dtype: torch.dtype) -> int:
        # Sizes are powers of two: blocks reused in turn soon fit every batch.
        block = torch.empty(1 << (size - 1).bit_length(), dtype=dtype)
        block.share_memory_()  # type: ignore[no-untyped-call]
        if not self._free:
            self._blocks.append(block)
            return len(self._blocks) - 1
        number = self._free.pop()
        self._blocks[number] = block
        return number


def unpack(
    layout: Layout, tokens: Sequence[int], states: Sequence[Sequence[int]], block: torch.Tensor
) -> list[Suspended]:
    """Return requests as views of their block."""
    shapes = [
        (heads, count, size)
        for count in tokens
        for heads, keys, values in layout.layers
        for size in (keys, values)
    ]
    sizes = [heads * count * size for heads, count, size in shapes]
    parts = torch.split(block[: sum(sizes)], sizes)
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    per_request = 2 * len(layout.layers)
    return [
        Suspended(
            tuple(views[first : first + per_request : 2]),
            tuple(views[first + 1 : first + per_request : 2]),
            state,
        )
        for first, state in zip(range(0, len(views), per_request), torch.tensor(states), strict=True)
    ]


if TYPE_CHECKING:
    import torch

    from ..kv.store import Suspended

_PATIENCE = 5.0
"""Seconds for a worker to end by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Encoded batch.

    requests: Positions in the workload.
    suspended: KV cache: views of shared memory, valid until the batch is released.
    begun, ended: Start of its encoding and end of its packing, on the system's monotonic clock, seconds.
    cpu_seconds: CPU time of the worker's process.
    block: Its block of shared memory.
    """

    requests: tuple[int, ...]
    suspended: tuple[Suspended, ...]
    begun: float
    ended: float
    cpu_seconds: float
    block: int


class EncodeWorker:
    """Process with a copy of the model that encodes batches."""

    def __init__(self, spec: EngineSpec, most_prompts: int, most_tokens: int) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, spec, most_prompts, most_tokens),
            daemon=True,
            name="batchbound-encode",
        )
        self._process.start()
        theirs.close()
        # Kept permanently: the connection's own `poll` makes one a call.
        self._selector = DefaultSelector()
        self._selector.register(self._connection, EVENT_READ)
        self._under_way: deque[tuple[int, ...]] = deque()
        self._blocks: dict[int, torch.Tensor] = {}
        self._given_back: list[int] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            self._layout: Layout = self._receive()
            undo.pop_all()

    @property
    def under_way(self) -> int:
        """Batches sent and not received."""
        return len(self._under_way)

    def send(self, requests: Sequence[int], names: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
        """Send a batch to encode."""
        try:
            self._connection.send((names, prompts, self._given_back))
        except OSError as error:
            raise self._gone() from error
        self._given_back = []
        self._under_way.append(tuple(requests))

    def receive(self, *, wait: bool) -> list[Encoded]:
        """Return the finished batches; with ``wait`` at least one."""
        ready: list[Encoded] = []
        while self._under_way and ((wait and not ready) or self._selector.select(0)):
            number, block, tokens, states, begun, ended, cpu_seconds = self._receive()
            if block is not None:
                self._blocks[number] = block
            suspended = tuple(unpack(self._layout, tokens, states, self._blocks[number]))
            requests = self._under_way.popleft()
            ready.append(Encoded(requests, suspended, begun, ended, cpu_seconds, number))
        return ready

    def give_back(self, batch: Encoded) -> None:
        """Release a batch's memory to the worker."""
        self._given_back.append(batch.block)

    def close(self) -> None:
        """End the worker."""
        try:
            self._connection.send(None)
        except OSError:
            # It is gone already, and needs no message.
            self._under_way.clear()
        self._selector.close()
        self._connection.close()
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(answer, str):
            raise RunStoppedError(f"the encoding worker failed: {answer}")
        return answer

    def _gone(self) -> RunStoppedError:
        self._process.join(_PATIENCE)
        return RunStoppedError(f"the encoding worker is gone (exit status {self._process.exitcode})")


def _serve(connection: Connection, spec: EngineSpec, most_prompts: int, most_tokens: int) -> None:
    from ..engines.tiers import choose_tier

    try:
        model = spec.load()
        batch = choose_tier(model, spec.tier).batch(model, most_prompts, most_tokens, sampler=spec.sampler)
        blocks = Blocks()
        # The first call allocates, and chooses kernels.
        batch.prefill([0], [[0] * most_tokens], request_ids=[""])
        connection.send(Layout.of(batch.take(0)))
        while (task := connection.recv()) is not None:
            names, prompts, given_back = task
            begun, cpu = time.perf_counter(), time.process_time()
            blocks.free(given_back)
            slots = range(len(prompts))
            batch.prefill(slots, prompts, request_ids=names)
            requests = [batch.take(slot) for slot in slots]
            tokens, states = (
                [request.tokens for request in requests],
                [request.state.tolist() for request in requests],
            )
            number, block = blocks.pack(requests)
            spent = time.process_time() - cpu
            connection.send((number, block, tokens, states, begun, time.perf_counter(), spent))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        # The decoding process is gone or no longer listens: no process would take the result.
        connection.close()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
