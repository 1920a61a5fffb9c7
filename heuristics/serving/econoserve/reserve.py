"""The memory kept for prompts until their completions begin, and for those longer than predicted."""

from __future__ import annotations

from ..kv_ledger import KvLedger


class PromptReserve:
    """Blocks kept for prompts and longer completions than predicted, and how many each request has."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._blocks: dict[int, int] = {}
        self._taken = 0

    def holds(self, ledger: KvLedger, blocks: int) -> bool:
        """Return whether so many more blocks are within the reserve."""
        return self._taken + blocks <= int(self._share * ledger.blocks)

    def enter(self, request: int, blocks: int) -> None:
        """Count so many blocks more as a request's."""
        self._blocks[request] = self._blocks.get(request, 0) + blocks
        self._taken += blocks

    def leave(self, request: int) -> None:
        """Count a request's blocks no more, if they were."""
        self._taken -= self._blocks.pop(request, 0)

    def free_beyond(self, ledger: KvLedger, leaving: int | None = None) -> int:
        """
        Return the free blocks, less what of the reserve is not in use.

        leaving: A request whose blocks count no more.
        """
        kept = int(self._share * ledger.blocks) - self._taken
        kept += 0 if leaving is None else self._blocks.get(leaving, 0)
        return ledger.free - max(0, kept)
