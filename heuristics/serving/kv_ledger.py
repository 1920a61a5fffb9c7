"""Ledger of KV memory: own blocks and borrowed parts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...data.arrays import IntArray


class KvLedgerError(RuntimeError):
    """Error of memory that is promised or lent twice."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Part of a request's region that another one uses (EconoServe, section 3.2).

    host: Owner of the region.
    start: The host's token that would be written to the loan's first place.
    tokens: Places lent.
    """

    host: int
    start: int
    tokens: int


class KvLedger:
    """KV memory of one device, promised to requests.

    A request may hold ``room[request]`` tokens: those of its own blocks and those it has borrowed, up to the
    first it has lent. The policy decides how much to promise: the longest possible sequence (max-allocation),
    a block at a time (block-allocation), or the predicted need (exact allocation).

    capacity: Tokens in all.
    reuse: True if a preempted request can take its blocks again unless they were reused (vLLM's prefix
        cache). Then nothing can be lent.

    Raises ValueError if there is not a single block.
    """

    def __init__(self, capacity: int, requests: int, block_tokens: int = 32, *, reuse: bool = False) -> None:
        if block_tokens < 1 or capacity < block_tokens:
            raise ValueError(f"{capacity} tokens make no block of {block_tokens}")
        self.block_tokens = block_tokens
        self.blocks = capacity // block_tokens
        self.free = self.blocks
        self.room: IntArray = np.zeros(requests, dtype=np.int64)
        self.failures = 0
        self.lent_tokens = 0
        self.own: dict[int, int] = {}
        self.loans: dict[int, list[Loan]] = {}
        self.guests: dict[int, dict[int, list[Loan]]] = {}
        self._gone: set[int] = set()
        self._freed = FreedBlocks(self.blocks) if reuse else None

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold ``tokens``."""
        return -(-tokens // self.block_tokens)

    def lacking(self, request: int, tokens: int) -> int:
        """Return how many own blocks a request lacks for some tokens."""
        return max(0, self.blocks_for(tokens) - self.own.get(request, 0))

    def grow(self, request: int, tokens: int) -> bool:
        """Promise a request blocks for some tokens; return success.

        The request borrows nothing. Without enough blocks only the count of ``failures`` changes.
        """
        if request in self.loans:
            raise KvLedgerError(f"request {request} lives in another's region; move it out before it grows")
        lacking = self.lacking(request, tokens)
        if lacking > self.free:
            self.failures += 1
            return False
        if self._freed is not None:
            self._freed.take(lacking)
        self.free -= lacking
        self.own[request] = self.own.get(request, 0) + lacking
        self._measure(request)
        return True

    def cached_tokens(self, request: int, tokens: int) -> int:
        """Return how many tokens a resuming request need not recompute.

        At least one token is always computed: its output is needed. A request that has blocks has nothing to
        take.
        """
        if self._freed is None or request in self.own:
            return 0
        return min(self._freed.standing(request), (tokens - 1) // self.block_tokens) * self.block_tokens

    def resume(self, request: int, tokens: int) -> int:
        """Give a request its cached blocks; return :meth:`cached_tokens`."""
        cached = self.cached_tokens(request, tokens)
        blocks = self.blocks_for(cached)
        if self._freed is not None and request not in self.own:
            self._freed.claim(request, blocks)
        if blocks:
            self.free -= blocks
            self.own[request] = blocks
            self._measure(request)
        return cached

    def lend(self, host: int, guest: int, start: int, tokens: int) -> None:
        """Let a guest write into a part of its host's region.

        host: Holds at most ``start`` tokens, and must not write further while the guest is there.
        guest: Lends nothing. It fills its own blocks first, then its loans in order.
        start, tokens: The part, as for :class:`Loan`.

        Raises KvLedgerError if the host cannot lend the part.
        """
        full = self.promised(host)
        mine = self.guests.setdefault(host, {})
        overlaps = any(
            start < loan.start + loan.tokens and loan.start < start + tokens for loan in self.lent(host)
        )
        barred = overlaps or self._freed is not None
        if self.guests.get(guest) or start + tokens > full or barred or tokens < 1:
            raise KvLedgerError(
                f"tokens {start} to {start + tokens} of request {host} cannot be lent to {guest}"
            )
        loan = Loan(host, start, tokens)
        mine.setdefault(guest, []).append(loan)
        self.loans.setdefault(guest, []).append(loan)
        self.lent_tokens += tokens
        self._measure(host)
        self._measure(guest)

    def release(self, request: int, *, tokens: int = 0) -> None:
        """Release everything a request has.

        Blocks that its guests still write to are freed when they leave. Guests in its borrowed parts become
        guests of the lender.

        tokens: KV tokens in its blocks, if it may resume; 0 if it is done.
        """
        self.room[request] = 0
        if request in self.loans:
            self._hand_on(request)
            self._give_back(request)
        if self.guests.get(request):
            self._gone.add(request)
            return
        self._gone.discard(request)
        blocks = self.own.pop(request, 0)
        self.free += blocks
        if self._freed is not None:
            self._freed.put(request, blocks, min(blocks, tokens // self.block_tokens))

    def _hand_on(self, request: int) -> None:
        """Pass loans of borrowed parts on to their lenders."""
        mine = self.guests.get(request, {})
        for guest in list(mine):
            loans: list[Loan] = []
            for loan in self.loans[guest]:
                loans += self._origin(loan) if loan.host == request else (loan,)
            self.loans[guest] = loans
            del mine[guest]
            for loan in loans:
                theirs = self.guests[loan.host].setdefault(guest, [])
                if loan not in theirs:
                    theirs.append(loan)

    def _origin(self, loan: Loan) -> list[Loan]:
        """Split a loan by the origins of its places, in order."""
        loans: list[Loan] = []
        begin, first, last = 0, loan.start, loan.start + loan.tokens
        allocation = Loan(loan.host, 0, self.own.get(loan.host, 0) * self.block_tokens)
        for part in (allocation, *self.loans[loan.host]):
            here, there = max(first - begin, 0), min(last - begin, part.tokens)
            if here < there:
                loans.append(Loan(part.host, part.start + here, there - here))
            begin += part.tokens
        return loans

    def _give_back(self, guest: int) -> None:
        hosts = dict.fromkeys(loan.host for loan in self.loans.pop(guest))
        for host in hosts:
            del self.guests[host][guest]
            if host in self._gone:
                self.release(host)
            else:
                self._measure(host)

    def guests_of(self, request: int) -> list[int]:
        """Return all guests in a request's region, the deepest first."""
        guests: dict[int, None] = {}
        for guest in self.guests.get(request, ()):
            guests |= dict.fromkeys((*self.guests_of(guest), guest))
        return list(guests)

    def first_guests(self, request: int) -> list[int]:
        """Return the guests that must leave before a request's next token."""
        mine = self.guests.get(request)
        if not mine:
            return []
        guest = min(mine, key=lambda g: min(loan.start for loan in mine[g]))
        return [*self.guests_of(guest), guest]

    def check(self, resident: IntArray, held: IntArray) -> None:
        """Check the state after an iteration.

        Raises KvLedgerError if blocks appeared or vanished, or a request holds more than it may.

        resident: Requests with KV cache on the device.
        held: Tokens each request holds there, shape (requests,).
        """
        if self.free < 0 or self.free + sum(self.own.values()) != self.blocks:
            raise KvLedgerError(
                f"{self.free} blocks free and {sum(self.own.values())} given of {self.blocks}"
            )
        over = resident[held[resident] > self.room[resident]]
        if over.size:
            request = int(over[0])
            raise KvLedgerError(
                f"request {request} holds {held[request]} tokens and may hold {self.room[request]}"
            )

    def lent(self, request: int) -> list[Loan]:
        """Return a request's loans to others."""
        return [loan for loans in self.guests.get(request, {}).values() for loan in loans]

    def promised(self, request: int) -> int:
        """Return a request's own and borrowed tokens, lent or not."""
        tokens = self.own.get(request, 0) * self.block_tokens
        return tokens + sum(loan.tokens for loan in self.loans[request]) if request in self.loans else tokens

    def _measure(self, request: int) -> None:
        if request in self._gone:
            return
        lent = self.lent(request)
        self.room[request] = min(loan.start for loan in lent) if lent else self.promised(request)


_NOBODY = -1


class FreedBlocks:
    """Free blocks of a device, in vLLM's order of reuse.

    The one freed longest ago comes first. A preempted request frees its blocks, the last one first. Until a
    block is reused its content is intact, and the request can take it again when it resumes (vLLM's prefix
    cache).

    blocks: Free at first, without content.
    """

    def __init__(self, blocks: int) -> None:
        # In order of reuse: the request with content in them, and how many blocks, last one first.
        self._queue: deque[list[int]] = deque([[_NOBODY, blocks]])
        self._entry: dict[int, list[int]] = {}

    def standing(self, request: int) -> int:
        """Return the free blocks that still hold a request's content."""
        entry = self._entry.get(request)
        return 0 if entry is None else entry[1]

    def claim(self, request: int, blocks: int) -> None:
        """Take some free blocks with a request's content; drop the rest."""
        entry = self._entry.pop(request, None)
        if entry is not None:
            entry[0] = _NOBODY
            entry[1] -= blocks

    def take(self, blocks: int) -> None:
        """Take ``blocks`` free blocks in order."""
        while blocks:
            entry = self._queue[0]
            taken = min(blocks, entry[1])
            blocks -= taken
            entry[1] -= taken
            if not entry[1]:
                self._queue.popleft()
                self._entry.pop(entry[0], None)

    def put(self, request: int, blocks: int, filled: int) -> None:
        """Free a request's blocks; the first ``filled`` keep their content."""
        # A partly filled block can never be taken again, so it is reused before the others.
        if blocks > filled:
            self._queue.append([_NOBODY, blocks - filled])
        if filled:
            self._entry[request] = [request, filled]
            self._queue.append(self._entry[request])
