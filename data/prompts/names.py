"""Names of requests, in little memory."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np


class Names(Sequence[str]):
    """Different names in one buffer, found by their hashes.

    unsorted: Newest names that a dictionary finds; more take more memory and fewer sorts.
    """

    def __init__(self, names: Iterable[str] = (), unsorted: int = 2**16) -> None:
        self._unsorted = unsorted
        self._text, self._ends = bytearray(), array.array("q", [0])
        self._recent: dict[str, int] = {}
        self._hashes = self._places = np.zeros(0, dtype=np.int64)
        for name in names:
            self.add(name)

    def add(self, name: str) -> int:
        """Return a name's position; a new one comes last."""
        known_at = self.find(name)
        if known_at is not None:
            return known_at
        self._recent[name] = place = len(self)
        self._text += name.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))
        if len(self._recent) >= self._unsorted:
            self._sort()
        return place

    def find(self, name: object) -> int | None:
        """Return a name's position, or None."""
        if not isinstance(name, str) or name in self._recent:
            return self._recent.get(name)  # type: ignore[call-overload, no-any-return]
        key = hash(name)
        for at in range(int(self._hashes.searchsorted(key)), len(self._hashes)):
            if self._hashes[at] != key:
                break
            if self[place := int(self._places[at])] == name:
                return place
        return None

    def __contains__(self, name: object) -> bool:
        return self.find(name) is not None

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[k] for k in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        return self._text[self._ends[at] : self._ends[at + 1]].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        for begin, end in pairwise(self._ends):
            yield self._text[begin:end].decode("utf-8", "surrogatepass")

    def _sort(self) -> None:
        hashes = np.fromiter(map(hash, self._recent), np.int64, len(self._recent))
        hashes = np.concatenate([self._hashes, hashes])
        places = np.concatenate([self._places, np.arange(len(self) - len(self._recent), len(self))])
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._places = hashes[order], places[order]
        self._recent = {}
