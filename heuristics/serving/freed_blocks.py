"""Free blocks of KV cache in the order they are handed out, and whose content still stands in them."""

from __future__ import annotations

from collections import deque

_NOBODY = -1


class FreedBlocks:
    """
    The free blocks of a device, the one freed longest ago first, as vLLM hands them out.

    A preempted request frees its blocks, last one first; until others are given them their content is still
    there, and the request takes them up again when it resumes (vLLM's prefix cache).

    blocks: Free at first; nobody's content is in them.
    """

    def __init__(self, blocks: int) -> None:
        # In the order they are handed out: whose content they have, how many, last one first.
        self._queue: deque[list[int]] = deque([[_NOBODY, blocks]])
        self._entry: dict[int, list[int]] = {}

    def standing(self, request: int) -> int:
        """Return the free blocks in which a request's content still stands."""
        entry = self._entry.get(request)
        return 0 if entry is None else entry[1]

    def claim(self, request: int, blocks: int) -> None:
        """Take out so many of the blocks in which a request's content stands; the others are nobody's."""
        entry = self._entry.pop(request, None)
        if entry is not None:
            entry[0] = _NOBODY
            entry[1] -= blocks

    def take(self, blocks: int) -> None:
        """Hand out so many blocks, of those that are there."""
        while blocks:
            entry = self._queue[0]
            taken = min(blocks, entry[1])
            blocks -= taken
            entry[1] -= taken
            if not entry[1]:
                self._queue.popleft()
                self._entry.pop(entry[0], None)

    def put(self, request: int, blocks: int, filled: int) -> None:
        """
        Free blocks of a request.

        request: Any request.
        filled: Of these, blocks that it may take up again, from its first one on.
        """
        # A partly filled block can never be taken up again; it is handed out before the others.
        if blocks > filled:
            self._queue.append([_NOBODY, blocks - filled])
        if filled:
            self._entry[request] = [request, filled]
            self._queue.append(self._entry[request])
