"""Groups of completions that end together (time-synced batching)."""

from __future__ import annotations


class SyncedGroups:
    """Groups of requests, with their members and ends."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._members: dict[int, int] = {}
        self._next = 0

    def new(self) -> int:
        """Return an empty group."""
        self._next += 1
        return self._next

    def join(self, request: int, group: int) -> None:
        """Add a request that is in no group."""
        self._of[request] = group
        self._members[group] = self._members.get(group, 0) + 1

    def leave(self, request: int) -> bool:
        """Remove a request; return whether its group is done."""
        group = self._of.pop(request, None)
        if group is None:
            return False
        self._members[group] -= 1
        if self._members[group]:
            return False
        del self._members[group]
        return True
