"""Device of a serving policy: a cost model or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...data.arrays import IntArray
from ...data.costs.iteration_cost import MixedCost


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """Next iteration of a device, checked by the referee.

    decodes: Requests that generate a token from their last one, shape (decodes,).
    prefill: Requests with the tokens to compute of their prompt (and of their completion, if recomputed).
    held: KV tokens of each request on the device after the iteration, shape (requests,).
    swap_out, swap_in: Requests that move to the host, or return, before the iteration.
    swapped: Tokens of both.
    drawn: Requests that sample a token at the end.
    """

    decodes: IntArray
    prefill: Sequence[tuple[int, int]]
    held: IntArray
    swap_out: Sequence[int] = ()
    swap_in: Sequence[int] = ()
    swapped: int = 0
    drawn: int = 0


class ServingDevice(Protocol):
    """Device that runs iterations."""

    def run(self, work: DeviceBatch) -> float:
        """Return the iteration's seconds."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """Device that takes the cost model's time."""

    cost: MixedCost

    def run(self, work: DeviceBatch) -> float:
        """Return the cost model's seconds."""
        prompt_tokens = sum(new for _, new in work.prefill)
        # new * (new + 2 * held before)
        pairs = sum(new * (2 * int(work.held[request]) - new) for request, new in work.prefill)
        kv_tokens = int(work.held[work.decodes].sum())
        seconds = self.cost.seconds(len(work.decodes), kv_tokens, prompt_tokens, pairs)
        return seconds + self.cost.swap_per_token * work.swapped
