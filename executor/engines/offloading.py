"""Offload KV cache to the host when the device is full.

The caller sees one batch in which all requests decode in step. Under memory pressure the newest requests move
to the host and take turns with the others: slower, never wrong, and without recomputation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..models.faults import NotFiniteError, OutOfMemoryError, RequestFailedError, RunStoppedError

if TYPE_CHECKING:
    from ..kv.batch import RunningBatch
    from ..kv.store import Path, Suspended


CALM_STEPS = 256
"""Decode steps until more slots are tried; doubled after each failure."""


class OffloadingBatch:
    """Requests on a running batch and on the host."""

    def __init__(
        self,
        make_batch: Callable[[int], RunningBatch],
        slots: int,
        names: Sequence[str],
        *,
        host_tokens: int,
    ) -> None:
        self._make_batch = make_batch
        self._batch = self._warm_batch(slots)
        self._padding_before = -self._batch.padding_read
        self._names = names
        self._host_tokens = host_tokens
        self._slot_of: dict[int, int] = {}
        self._parked: dict[int, Suspended] = {}
        self._suspended: dict[int, Suspended] = {}
        self._prompts_at_once = self._most_slots = slots
        self._calm, self._patience = 0, CALM_STEPS
        self.ran_out = 0
        """Times that memory ran out."""
        try:
            self._batch.allocate()
        except OutOfMemoryError:
            # The first prefill also detects this, and continues with fewer slots.
            self.ran_out += 1
        self.prefilled = 0
        """Prompt tokens computed so far."""
        self.moved = 0
        """Times that a running request was moved to the host."""

    @property
    def slots(self) -> int:
        """Requests that fit on the device at once."""
        return self._batch.slots

    @property
    def kv_tokens(self) -> int:
        """Tokens held by all requests running."""
        return self._batch.kv_tokens + sum(suspended.tokens for suspended in self._parked.values())

    @property
    def padding_read(self) -> float:
        """Columns that attention read without need, averaged over the layers."""
        return self._padding_before + self._batch.padding_read

    def prefill(
        self,
        requests: Sequence[int],
        prompts: Sequence[Sequence[int]],
        emitted: Sequence[int],
        paths: Sequence[Path] | None = None,
        drawn: Sequence[int] | None = None,
    ) -> list[int]:
        """Prefill prompts and let them join."""
        tokens: list[int] = []
        while len(tokens) < len(requests):
            while self._batch.active >= self.slots:
                self._park(next(reversed(self._slot_of)))
            room = min(self.slots - self._batch.active, self._prompts_at_once)
            part = slice(len(tokens), len(tokens) + room)
            slots = self._free_slots()[: len(requests[part])]
            try:
                tokens += self._batch.prefill(
                    slots,
                    prompts[part],
                    request_ids=[self._names[request] for request in requests[part]],
                    emitted=emitted[part],
                    paths=None if paths is None else paths[part],
                    drawn=None if drawn is None else drawn[part],
                )
                self.prefilled += self._batch.prefilled
            except OutOfMemoryError as error:
                if len(slots) > 1:
                    self.ran_out += 1
                    self._prompts_at_once = len(slots) // 2
                else:
                    self._shrink(error)
                continue
            except NotFiniteError as error:
                request = requests[part][slots.index(error.slot)]
                raise self._not_finite(request, emitted[requests.index(request)]) from error
            self._slot_of.update(zip(requests[part], slots, strict=True))
        return tokens

    def decode(
        self, decode_steps: int, emitted: Callable[[int], int], *, until: frozenset[int] = frozenset()
    ) -> dict[int, list[int]]:
        """Decode all running requests in step; return their tokens."""
        if self.slots < self._most_slots and self._calm >= self._patience:
            self._calm = 0
            self._rebuild(min(self._most_slots, self.slots + max(1, self.slots // 3)))
        while self._parked and self.slots > self._batch.active:
            self._unpark(next(iter(self._parked)))
        answers: dict[int, list[int]] = {request: [] for request in (*self._slot_of, *self._parked)}
        if until and self._parked:
            # Requests that take turns must not run ahead of another's end.
            decode_steps = 1
        while True:
            left = {request: decode_steps - len(tokens) for request, tokens in answers.items()}
            if not any(left.values()):
                self._calm += decode_steps
                return answers
            self._take_turns(left)
            try:
                tokens = self._batch.decode(min(left[request] for request in self._slot_of), until=until)
            except OutOfMemoryError as error:
                self._note(answers, error.tokens)
                self._shrink(error)
            except NotFiniteError as error:
                request = next(name for name, slot in self._slot_of.items() if slot == error.slot)
                before = emitted(request) + len(answers[request]) + error.decode_step
                raise self._not_finite(request, before) from error
            else:
                self._note(answers, tokens)
            if until:
                decode_steps = max(1, *(len(tokens) for tokens in answers.values()))

    def _take_turns(self, left: dict[int, int]) -> None:
        for request in [request for request in self._slot_of if not left[request]]:
            # It has had its decode steps, so others take its slot, or wait until it is done.
            self._park(request)
        for request in [request for request in self._parked if left[request]]:
            # Memory may run out here, which rebuilds the batch with other requests.
            if request in self._parked and self.slots > self._batch.active:
                self._unpark(request)

    def finish(self, request: int, keep: tuple[int, int, int] | None = None) -> None:
        """Remove a running request; ``keep`` makes some of its tokens a beginning."""
        if self._parked.pop(request, None) is None:
            self._batch.release(self._slot_of.pop(request), keep)

    def suspend(self, request: int) -> None:
        """Remove a running request that will continue later."""
        suspended = self._parked.pop(request, None) or self._batch.take(self._slot_of.pop(request))
        held = sum(other.tokens for other in self._suspended.values())
        if held + suspended.tokens <= self._host_tokens:
            self._suspended[request] = suspended

    def reload_weights(self) -> None:
        """Compute with the model's present weights."""
        self._batch.reload_weights()

    def rebuild(self) -> None:
        """Continue on a new batch."""
        self._rebuild(self.slots)

    def let_go(self) -> None:
        """Drop the KV cache of all restored requests."""
        self._suspended.clear()

    def forget(self, names: Iterable[int] | None = None) -> None:
        """Drop shared beginnings that no further prompt begins with, by default all."""
        self._batch.forget(names)

    def split(self, name: int, tokens: int, head: int) -> None:
        """Give the first tokens of a beginning a name of their own."""
        self._batch.split(name, tokens, head)

    def drop(self, request: int) -> None:
        """Drop a restored request, which does not continue."""
        self._suspended.pop(request, None)

    def receive(self, request: int, suspended: Suspended) -> None:
        """Add a request that was prefilled elsewhere."""
        self._suspended[request] = suspended

    def keep(self, requests: Iterable[int]) -> None:
        """Copy the KV cache of requests to the host."""
        for request in requests:
            suspended = self._parked.get(request)
            if suspended is not None:
                keys, values = (
                    tuple(part.clone() for part in parts) for parts in (suspended.keys, suspended.values)
                )
                self._parked[request] = replace(suspended, keys=keys, values=values)

    def resume(self, request: int) -> bool:
        """Let a request join again; return whether its KV cache remained."""
        suspended = self._suspended.pop(request, None)
        if suspended is None:
            return False
        self._parked[request] = suspended
        if self.slots > self._batch.active:
            self._unpark(request)
        return True

    def _free_slots(self) -> list[int]:
        taken = set(self._slot_of.values())
        return [slot for slot in range(self.slots) if slot not in taken]

    def _park(self, request: int) -> None:
        self._parked[request] = self._batch.take(self._slot_of.pop(request))
        self.moved += 1

    def _unpark(self, request: int) -> None:
        slot = self._free_slots()[0]
        try:
            self._batch.insert(slot, self._parked[request])
        except OutOfMemoryError as error:
            self._shrink(error)
            return
        del self._parked[request]
        self._slot_of[request] = slot

    def _note(self, answers: dict[int, list[int]], tokens: NDArray[np.int64]) -> None:
        for request, slot in self._slot_of.items():
            answers[request] += tokens[:, slot].tolist()

    def _shrink(self, error: OutOfMemoryError) -> None:
        """Continue with fewer slots, with the newest requests on the host."""
        self.ran_out += 1
        slots = min(self.slots - 1, max(self._batch.active - 1, self.slots * 3 // 4))
        if slots < 1:
            raise RunStoppedError(
                f"memory ran out with a single request on the device ({_first_line(error)});"
                " use a smaller number format, or a device with more memory"
            ) from error
        self._calm, self._patience = 0, 2 * self._patience
        error.__traceback__ = error.__cause__ = None
        self._rebuild(slots)

    def _rebuild(self, slots: int) -> None:
        """Continue with another number of slots, oldest requests first."""
        import torch

        for request in reversed(list(self._slot_of)):
            self._park(request)
        padding = self.padding_read
        # The old buffers must be freed before the new ones are allocated.
        del self._batch
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._batch = self._warm_batch(slots)
        self._padding_before = padding - self._batch.padding_read
        for request in list(reversed(self._parked))[:slots]:
            if self._batch.slots != slots:
                # Memory ran out, and the batch was rebuilt with the requests that fit.
                return
            self._unpark(request)

    def _warm_batch(self, slots: int) -> RunningBatch:
        batch = self._make_batch(slots)
        batch.warm_up()
        return batch

    def _not_finite(self, request: int, before: int) -> RunStoppedError:
        return RequestFailedError(
            self._names[request],
            f"the model's logits for request {self._names[request]!r} are not finite after {before} tokens;"
            " check the weights, or use a wider number format (--dtype float32)",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
