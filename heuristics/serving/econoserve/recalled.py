"""EconoServe lending to whole requests, where guests that overstay give their place back."""

from __future__ import annotations

import numpy as np

from ....data.costs.cost import IntArray
from ..policy import ServingState
from .pipelined import PipelinedRequests
from .settings import EconoServeSettings


class RecalledLoans(PipelinedRequests):
    """
    EconoServe's decision for one iteration, with everything promised and unused lent, and called back.

    A guest is who began in memory that was promised to others. Section 3.2 lets it be no longer than l/2 - b
    beside a host of length l: predicted to take g iterations, it has its place for g / (1 - 2 buffer). Where
    memory beyond the reserve is lacking, a guest longer than predicted moves to the host's memory, of several
    whoever began last; an answer that is no guest takes the reserve (3.3.2). Who moved comes back before
    others, when what it holds and is then predicted to need (L_new) fits; until then others may begin.

    Parameters
    ----------
    settings
        Sizes.

    Raises
    ------
    ValueError
        If the buffer leaves nothing of a half, or as :class:`PipelinedRequests` says.
    """

    def __init__(self, settings: EconoServeSettings) -> None:
        super().__init__(settings)
        if settings.buffer >= 0.5:
            raise ValueError(f"buffer is {settings.buffer!r}; a guest has l/2 - b: it must be below 0.5")
        self._host_stays, self._guest_stays = 1.0, 1 / (1 - 2 * settings.buffer)
        # Guests longer than predicted.
        self._late: set[int] = set()

    def _make_room(self, state: ServingState) -> tuple[IntArray, list[int]]:
        ledger, going = state.ledger, self._under_way(state)
        late = self._extend(state, going)
        self._late.update(late[self._guest[late]].tolist())
        self._late.difference_update(state.finished)
        there, sent = going.tolist(), list[int]()
        kept = int(self._settings.reserved * ledger.blocks)
        for request in going[state.held[going] + 1 > ledger.room[going]].tolist():
            while request not in sent:
                recalled = next((guest for guest in reversed(there) if guest in self._late), None)
                if (ledger.free > kept or recalled is None) and ledger.grow(
                    request, int(state.held[request]) + 1
                ):
                    break
                leaving = there[-1] if recalled is None else recalled
                there.remove(leaving)
                self._late.discard(leaving)
                self._send(state, leaving)
                sent.append(leaving)
        return np.array(there, dtype=np.int64), sent

    def _held_up(self) -> bool:
        return False

    def _call_back(self, state: ServingState, going: IntArray) -> list[int]:
        back: list[int] = []
        ledger = state.ledger
        alone = not going.size and self._partial is None
        if not self._host or not (self._look or alone):
            return back
        begun = [] if self._partial is None else [self._partial]
        forecast = self._forecast(state, np.append(going, np.array(begun, dtype=np.int64)))
        kept = int(self._settings.reserved * ledger.blocks)
        for request, tokens in tuple(self._host.items()):
            held = tokens + ledger.block_tokens // 2
            rest = max(int(self._end[request] - state.generated[request]), 1)
            stay = self._stay(rest, bool(self._guest[request]))
            fits = ledger.lacking(request, tokens + 1) <= ledger.free - kept
            if (fits and forecast.fits(held, rest, stay)) or (alone and not back):
                ledger.grow(request, tokens + 1)
                forecast.add(held, rest, stay)
                del self._host[request]
                back.append(request)
        return back
