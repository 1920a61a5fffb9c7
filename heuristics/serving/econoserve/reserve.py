"""Memory reserved for prompts and for longer completions."""

from __future__ import annotations

from ..kv_ledger import KvLedger


class PromptReserve:
    """Reserved blocks, and how many each request uses."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._blocks: dict[int, int] = {}
        self._taken = 0

    def holds(self, ledger: KvLedger, blocks: int) -> bool:
        """Return whether ``blocks`` more blocks are within the reserve."""
        return self._taken + blocks <= int(self._share * ledger.blocks)

    def enter(self, request: int, blocks: int) -> None:
        """Count ``blocks`` more for a request."""
        self._blocks[request] = self._blocks.get(request, 0) + blocks
        self._taken += blocks

    def leave(self, request: int) -> None:
        """Forget a request's blocks."""
        self._taken -= self._blocks.pop(request, 0)

    def free_beyond(self, ledger: KvLedger, leaving: int | None = None) -> int:
        """Return the free blocks beyond the unused reserve.

        ``leaving`` counts as gone.
        """
        kept = int(self._share * ledger.blocks) - self._taken
        kept += 0 if leaving is None else self._blocks.get(leaving, 0)
        return ledger.free - max(0, kept)
