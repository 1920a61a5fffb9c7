"""Expected lengths that adapt to a job's completions."""

from __future__ import annotations

import numpy as np

from ..arrays import FloatArray, IntArray

LEAST_SEEN = 8
"""Groups with a completion before anything is learnt."""


class GroupLengths:
    """Expected lengths of requests that share prompts.

    The logarithm of actual over planned length is the sum of three effects: a common shift, the group's and
    the request's own. The weight of a group's mean comes from the spread between and within groups (one-way
    analysis of variance). It is zero if groups do not differ.

    group: Group of each request, counted from zero, shape (requests,).
    planned: Planned tokens of each, shape (requests,).
    """

    def __init__(self, group: IntArray, planned: IntArray) -> None:
        self._group, self._planned = group, np.maximum(1.0, planned.astype(np.float64))
        groups = int(group.max(initial=-1)) + 1
        self._count = np.zeros(groups)
        self._sum = np.zeros(groups)
        self._squares = 0.0

    @property
    def useful(self) -> bool:
        """True if several requests share a prompt, so some predict others."""
        return len(self._count) < len(self._group)

    def seen(self, request: int, tokens: float) -> None:
        """Note the length of a request's completion."""
        miss = float(np.log(max(1.0, tokens) / self._planned[request]))
        self._count[self._group[request]] += 1
        self._sum[self._group[request]] += miss
        self._squares += miss * miss

    def expected(self) -> FloatArray:
        """Return each request's expected tokens by now, shape (requests,)."""
        known = self._count > 0
        if int(known.sum()) < LEAST_SEEN:
            return self._planned
        count, total = self._count[known], self._sum[known]
        shift = total.sum() / count.sum()
        effects = np.zeros(len(self._count))
        weight = self._weight(count, total, shift)
        effects[known] = weight * (total / count - shift)
        lengths: FloatArray = self._planned * np.exp(shift + effects[self._group])
        return lengths

    def _weight(self, count: FloatArray, total: FloatArray, shift: float) -> FloatArray:
        within = self._squares - float((total**2 / count).sum())
        between = float((count * (total / count - shift) ** 2).sum())
        # One completion a group tells nothing of the spread within: then all of it is taken to be between.
        spare = count.sum() - len(count)
        error = within / spare if spare > 0 else 0.0
        size = (count.sum() - float((count**2).sum()) / count.sum()) / (len(count) - 1)
        effect = max(0.0, (between / (len(count) - 1) - error) / size)
        if effect == 0.0:
            return np.zeros(len(count))
        weight: FloatArray = effect / (effect + error / count)
        return weight
