"""Places of each request's KV cache on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...heuristics.serving.kv_ledger import KvLedger

Span = tuple[int, int]
"""First place, and the place after the last."""


class PlacedLedger(KvLedger):
    """Ledger that also places the promised tokens.

    A request's blocks are contiguous, so a row has a start and a length. A region grows in place if the
    blocks behind it are free; otherwise it moves to the smallest gap that holds it. If there is none, all
    regions are compacted. A guest lives in its host's region. With ``paged``, blocks lie anywhere and never
    move, as in vLLM.
    """

    def __init__(self, capacity: int, requests: int, block_tokens: int = 32, *, paged: bool = False) -> None:
        super().__init__(capacity, requests, block_tokens)
        self.paged = paged
        self.compactions = 0
        self._at: dict[int, Sequence[int]] = {}

    @property
    def places(self) -> int:
        """Places of the whole memory, tokens."""
        return self.blocks * self.block_tokens

    def grow(self, request: int, tokens: int) -> bool:
        """Promise blocks and place them."""
        if not super().grow(request, tokens):
            return False
        if len(self._at.get(request, ())) < self.own[request]:
            self._at[request] = self._pages(request) if self.paged else self._region(request)
        return True

    def release(self, request: int, *, tokens: int = 0) -> None:
        """Release and unplace everything a request has."""
        super().release(request, tokens=tokens)
        for gone in self._at.keys() - self.own.keys():
            del self._at[gone]

    def spans(self, request: int, first: int, last: int) -> tuple[Span, ...]:
        """Return the places of some of a request's tokens, in order."""
        pages, tokens = self._at.get(request, ()), self.block_tokens
        mine = len(pages) * tokens
        spans: list[Span] = []
        for at in range(first // tokens, -(-min(last, mine) // tokens)):
            begin = max(first - at * tokens, 0)
            _extend(spans, pages[at] * tokens + begin, pages[at] * tokens + min(last - at * tokens, tokens))
        for loan in self.loans.get(request, ()):
            inner = (max(first - mine, 0), min(last - mine, loan.tokens))
            if inner[0] < inner[1]:
                for begin, end in self.spans(loan.host, loan.start + inner[0], loan.start + inner[1]):
                    _extend(spans, begin, end)
            mine += loan.tokens
        return tuple(spans)

    def _pages(self, request: int) -> list[int]:
        pages = list(self._at.get(request, ()))
        taken = {block for blocks in self._at.values() for block in blocks}
        free = (block for block in range(self.blocks) if block not in taken)
        return pages + [next(free) for _ in range(self.own[request] - len(pages))]

    def _region(self, request: int) -> range:
        now, size = self._at.get(request, range(0)), self.own[request]
        others = {neighbour: blocks for neighbour, blocks in self._at.items() if neighbour != request}
        bounds = sorted((blocks[0], blocks[-1] + 1) for blocks in others.values())
        edges = [(0, 0), *bounds, (self.blocks, self.blocks)]
        gaps = [(begin, end) for (_, begin), (end, _) in pairwise(edges) if end - begin >= size]
        if now and any(begin <= now[0] and now[0] + size <= end for begin, end in gaps):
            return range(now[0], now[0] + size)
        if gaps:
            begin, _ = min(gaps, key=lambda gap: (gap[1] - gap[0], gap[0]))
            return range(begin, begin + size)
        self.compactions += 1
        at = 0
        for neighbour, blocks in sorted(others.items(), key=lambda item: item[1][0]):
            self._at[neighbour] = range(at, at + len(blocks))
            at += len(blocks)
        return range(at, at + size)


def _extend(spans: list[Span], begin: int, end: int) -> None:
    """Append a span, or extend the last one."""
    if spans and spans[-1][1] == begin:
        spans[-1] = (spans[-1][0], end)
    elif end > begin:
        spans.append((begin, end))
