"""Whether requests that wait can be shared out among slots, each of which has so many steps for them."""

from __future__ import annotations

import math

import numpy as np

from ...data.arrays import IntArray
from .columns import BoolArray

MOST_PARTS = 600_000
"""Parts of sets that are listed: of up to twelve requests those of all sets, of more those of small sets."""
MOST_TRIED = 32
"""Parts that a slot may take beyond which they may fit: mostly one of so many does."""
SET_BITS, STEP_BITS = 14, 28
"""Bits of a set, and of the decode steps of one."""


class SlotLoads:
    """
    Loads of slots that serve requests one after the other, by their decode steps alone.

    decode_steps: Decode steps of each request, shape (requests,).
    """

    def __init__(self, decode_steps: IntArray) -> None:
        count = len(decode_steps)
        listed = [math.comb(count, size) << size for size in range(count + 1)]
        most = int(np.searchsorted(np.cumsum(listed), MOST_PARTS, side="right")) - 1
        members = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
        self._decode_steps, self._small = members @ decode_steps, members.sum(axis=1) <= most
        sets = parts = np.zeros(1, dtype=np.int64)
        for request in range(count):
            bit = 1 << request
            larger = self._small[sets | bit]
            sets = np.concatenate((sets, sets[larger] | bit, sets[larger] | bit))
            parts = np.concatenate((parts, parts[larger], parts[larger] | bit))
        # By set, then by decode steps: those of a set within some decode steps stand together.
        self._parts = np.sort(self._keys(sets, self._decode_steps[parts]) | parts)

    def fit(self, waiting: IntArray, rooms: IntArray) -> BoolArray:
        """
        Return whether requests may fit into slots; a no is certain.

        waiting: The requests, a bit each, shape (states,).
        rooms: Decode steps that each slot has for them, shape (slots, states).
        """
        fits: BoolArray = np.ones(len(waiting), dtype=np.bool_)
        rows = np.flatnonzero(self._small[waiting])
        fits[rows] = self._fit(waiting[rows], np.sort(np.maximum(rooms[:, rows], 0), axis=0))
        return fits

    def _fit(self, waiting: IntArray, rooms: IntArray) -> BoolArray:
        if len(rooms) == 1:
            within: BoolArray = self._decode_steps[waiting] <= rooms[0]
            return within
        # The first slot takes what the others leave, at least.
        left_over = np.maximum(0, self._decode_steps[waiting] - rooms[1:].sum(axis=0))
        first = np.searchsorted(self._parts, self._keys(waiting, left_over))
        last = np.searchsorted(
            self._parts, self._keys(waiting, np.minimum(rooms[0], self._decode_steps[waiting]) + 1)
        )
        number = np.maximum(0, last - first)
        fits: BoolArray = number > (0 if len(rooms) == 2 else MOST_TRIED)
        if len(rooms) == 2:
            return fits
        open_ = np.flatnonzero((number > 0) & ~fits)
        for by in range(1, MOST_TRIED + 1):
            if not len(open_):
                break
            part = self._parts[last[open_] - by] & ((1 << SET_BITS) - 1)
            found = self._fit(waiting[open_] ^ part, rooms[1:, open_])
            fits[open_[found]] = True
            open_ = open_[~found & (number[open_] > by)]
        return fits

    @staticmethod
    def _keys(sets: IntArray, decode_steps: IntArray) -> IntArray:
        keys: IntArray = (sets << STEP_BITS | decode_steps) << SET_BITS
        return keys
