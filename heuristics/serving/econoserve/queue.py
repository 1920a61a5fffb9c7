"""Task queue with logarithmic search for a fitting length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

_SCANNED = 16
"""Most ranges to search for a task that fits."""


class _Entry(NamedTuple):
    length: int
    turn: int
    window: int
    memory: int


class LengthIndex:
    """Tasks by length; distinct lengths are few."""

    def __init__(self) -> None:
        self._tasks: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        self._length: dict[int, int] = {}

    def shortest(self, count: int) -> list[int]:
        """Return the oldest task of each least length, shortest first."""
        return [next(iter(self._tasks[length])) for length in self._lengths[:count]]

    def push(self, task: int, length: int) -> None:
        """Add a task that is not in it."""
        self._length[task] = length
        if length not in self._tasks:
            insort(self._lengths, length)
            self._tasks[length] = {}
        self._tasks[length][task] = None

    def remove(self, task: int) -> None:
        """Remove a task."""
        length = self._length.pop(task)
        del self._tasks[length][task]
        if not self._tasks[length]:
            del self._tasks[length]
            del self._lengths[bisect_left(self._lengths, length)]

    def closest(self, most: int) -> tuple[int, int] | None:
        """Return the oldest longest task up to ``most``, and its length."""
        at = bisect_right(self._lengths, most) - 1
        if at < 0:
            return None
        length = self._lengths[at]
        return next(iter(self._tasks[length])), length


class TaskQueue:
    """Tasks in order of arrival, or in EconoServe's order (section 3.4).

    EconoServe orders by deadline range, then by range of KV tokens held (most first), then by length (longest
    first). Deadline ranges are fixed windows of time, so a waiting task never changes its range. (The paper's
    are relative to now: 0.2-0.5 s, 0.5-2 s, later.)
    """

    deadline_range, memory_range = 2.0, 128
    """Seconds of a deadline range, and tokens of a KV range."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._entries: dict[int, _Entry] = {}
        # By range: (window, memory range), and within it (length, turn, task).
        self._ranges: list[tuple[int, int]] = []
        self._tasks: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self._lengths = LengthIndex()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task: int) -> bool:
        return task in self._entries

    def push(self, task: int, length: int, deadline: float, memory: int, *, again: bool = False) -> None:
        """Add a task.

        length: Tokens of the prompt, or of the rest of the completion.
        deadline: Seconds after the start; infinite for none.
        memory: KV tokens it holds while it waits.
        again: True if it ran before: in order of arrival it moves to the front.
        """
        self._turn += 1
        if not self._ordered:
            entry = _Entry(length, self._turn, -self._turn if again else self._turn, 0)
        else:
            window = int(min(deadline / self.deadline_range, 2.0**60))
            entry = _Entry(length, self._turn, window, -(memory // self.memory_range))
        self._entries[task] = entry
        place = (entry.window, entry.memory)
        if place not in self._tasks:
            insort(self._ranges, place)
            self._tasks[place] = []
        # Among equal lengths the latest stands first: taken from the end, it comes out last.
        insort(self._tasks[place], (length, -entry.turn, task))
        self._lengths.push(task, length)

    def remove(self, task: int) -> None:
        """Remove a task."""
        entry = self._entries.pop(task)
        place, item = (entry.window, entry.memory), (entry.length, -entry.turn, task)
        tasks = self._tasks[place]
        del tasks[bisect_left(tasks, item)]
        if not tasks:
            del self._tasks[place]
            del self._ranges[bisect_left(self._ranges, place)]
        self._lengths.remove(task)

    def head(self) -> int | None:
        """Return the first task in order, or None."""
        return self._tasks[self._ranges[0]][-1][2] if self._ranges else None

    def fitting(self, most: int) -> int | None:
        """Return the first task no longer than ``most``, or None.

        In order of arrival only the first is checked. In EconoServe's order, binary search finds the longest
        that fits in each of the first ranges.
        """
        for place in self._ranges[: _SCANNED if self._ordered else 1]:
            tasks = self._tasks[place]
            at = bisect_right(tasks, (most, 1, 0)) - 1
            if at >= 0:
                return tasks[at][2]
        return None

    def shortest(self, count: int) -> list[int]:
        """Return the oldest task of each least length, shortest first."""
        return self._lengths.shortest(count)

    def closest(self, most: int) -> int | None:
        """Return the oldest of the longest tasks up to ``most``, or None."""
        request = self._lengths.closest(most)
        return None if request is None else request[0]

    def equal(self, length: int) -> int | None:
        """Return the oldest task of a length, or None."""
        task = self.closest(length)
        return task if task is not None and self._entries[task].length == length else None

    def tasks(self) -> list[int]:
        """Return all tasks, in no order."""
        return list(self._entries)
