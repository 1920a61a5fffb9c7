"""Free KV blocks in the order of reuse, with their content."""

from __future__ import annotations

from collections import deque

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
