"""Keys and values in blocks of tokens: who holds how many, and whose freed blocks can be taken up again."""

from __future__ import annotations

from collections import deque

_NOBODY = -1


class BlockPool:
    """
    A pool of equal blocks, handed out from the one freed longest ago, as vLLM's.

    A request that is put back frees its blocks, last one first; until others are given them, their content is
    still there, and the request takes them up again when it resumes (vLLM's prefix cache).

    Parameters
    ----------
    capacity
        Tokens in all; None for as many as anyone asks for.
    block_tokens
        Tokens of a block.
    reuse
        Whether the content of freed blocks can be taken up again.

    Raises
    ------
    ValueError
        If there is not a single block.
    """

    def __init__(self, capacity: int | None, block_tokens: int = 16, *, reuse: bool = True) -> None:
        if block_tokens < 1 or (capacity is not None and capacity < block_tokens):
            raise ValueError(f"{capacity} tokens make no block of {block_tokens}")
        self.block_tokens = block_tokens
        self.blocks = 2**60 if capacity is None else capacity // block_tokens
        self.free = self.blocks
        self._reuse = reuse
        self._held: dict[int, int] = {}
        # Free blocks in the order they are handed out: [whose content they have, how many, last one first].
        self._freed: deque[list[int]] = deque([[_NOBODY, self.blocks]])
        self._entry: dict[int, list[int]] = {}

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold ``tokens``."""
        return -(-tokens // self.block_tokens)

    def held(self, request: int) -> int:
        """Return the blocks a request holds."""
        return self._held.get(request, 0)

    def lacking(self, request: int, tokens: int) -> int:
        """Return how many more blocks a request needs to hold ``tokens``."""
        return max(0, self.blocks_for(tokens) - self.held(request))

    def cached_tokens(self, request: int, tokens: int) -> int:
        """
        Return how many of a resuming request's ``tokens`` need not be computed again.

        At least one token is always computed: its output is needed.
        """
        if not self._reuse or request in self._held:
            return 0
        entry = self._entry.get(request)
        return 0 if entry is None else min(entry[1], (tokens - 1) // self.block_tokens) * self.block_tokens

    def resume(self, request: int, tokens: int) -> int:
        """
        Give a request its own freed blocks back, and return the tokens in them.

        Parameters
        ----------
        request
            A request that holds nothing.
        tokens
            It has, of which at least one is computed anyway.
        """
        cached = self.cached_tokens(request, tokens)
        blocks = cached // self.block_tokens
        entry = self._entry.pop(request, None)
        if entry is not None:
            # What is beyond the cached blocks has the wrong content for anyone: it stays free, as nobody's.
            entry[0] = _NOBODY
            entry[1] -= blocks
            self._held[request] = blocks
            self.free -= blocks
        return cached

    def grow(self, request: int, tokens: int) -> bool:
        """
        Let a request hold ``tokens``, and return whether there were blocks enough (if not, nothing changes).

        Parameters
        ----------
        request
            Any request.
        tokens
            It is to hold in all.
        """
        lacking = self.lacking(request, tokens)
        if lacking > self.free:
            return False
        self._held[request] = self.held(request) + lacking
        self.free -= lacking
        while lacking:
            entry = self._freed[0]
            taken = min(lacking, entry[1])
            lacking -= taken
            entry[1] -= taken
            if not entry[1]:
                self._freed.popleft()
                self._entry.pop(entry[0], None)
        return True

    def release(self, request: int, *, tokens: int = 0) -> None:
        """
        Free all blocks of a request.

        Parameters
        ----------
        request
            Any request.
        tokens
            Whose keys and values stand in its blocks, if it may resume; 0 if it is done.
        """
        blocks = self._held.pop(request, 0)
        self.free += blocks
        whole = min(blocks, tokens // self.block_tokens) if self._reuse else 0
        # The partly filled block can never be taken up again; it is handed out before the others.
        if blocks > whole:
            self._freed.append([_NOBODY, blocks - whole])
        if whole:
            self._entry[request] = [request, whole]
            self._freed.append(self._entry[request])
