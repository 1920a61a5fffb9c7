"""Size of the next encoding batch (ExeGPT, section 5.2)."""

from __future__ import annotations

from typing import Self

from ...data.arrays import IntArray
from ...data.configuration import PlannedConfiguration

THRESHOLD = 0.1
"""Default deviation from the plan; larger adjusts batches less."""


class DynamicBatch:
    """Size of the next encoding batch.

    The planned size is used while prompt tokens and decode batch are within a threshold of the plan. Beyond
    it, the size changes by as many prompts as bring them nearer, and later batches compensate.

    encode_batch: Prompts planned, on average; a fraction is carried over.
    input_tokens: Mean tokens of a prompt.
    decode_batch: Planned decode requests after the encoding; None does not control them.
    threshold: Tolerated deviation, as a fraction; infinite for always the planned batch.
    """

    def __init__(
        self,
        encode_batch: float,
        input_tokens: float,
        decode_batch: float | None,
        threshold: float = THRESHOLD,
    ) -> None:
        self.encode_batch, self._input_tokens, self._decode_batch = encode_batch, input_tokens, decode_batch
        self._threshold = threshold
        self._owed = 0.0

    @classmethod
    def of(cls, configuration: PlannedConfiguration) -> Self:
        """Return the rule that keeps batches near a plan."""
        return cls(
            configuration.encode_batch,
            configuration.input_tokens,
            configuration.decode_batch or None,
            # Batches change by whole prompts: a threshold below one would oscillate.
            max(THRESHOLD, 1 / configuration.encode_batch),
        )

    @property
    def most(self) -> int:
        """Waiting prompts that :meth:`size` may read."""
        return 3 * int(self.encode_batch + 2)

    def size(self, waiting: IntArray, active: int) -> int:
        """Return how many waiting prompts to encode, in order.

        waiting: Their tokens; the first :attr:`most` are enough.
        active: Requests decoding now.
        """
        wanted = self.encode_batch
        if self._decode_batch is not None:
            drift = active + wanted - self._decode_batch
            excess = abs(drift) - self._threshold * self._decode_batch
            if excess > 0:
                # Compensated over as many encodings as a request stays: at once, it would oscillate.
                change = min(0.5 * wanted, excess * wanted / self._decode_batch)
                wanted -= change if drift > 0 else -change
        count = self._within_threshold(waiting, wanted)
        self._owed += wanted - count
        return count

    def _within_threshold(self, waiting: IntArray, wanted: float) -> int:
        # Zero prompts would be the largest deviation, unless less than one is planned.
        count = min(len(waiting), max(int(wanted >= 1), int(wanted + self._owed)))
        if self._threshold == float("inf"):
            return count
        average = wanted * self._input_tokens
        over = int(waiting[:count].sum()) - average
        while count > 1 and over > self._threshold * average and abs(over - waiting[count - 1]) < over:
            count -= 1
            over -= int(waiting[count])
        while 0 < count < len(waiting) and over < -self._threshold * average:
            if abs(over + waiting[count]) >= -over:
                break
            over += int(waiting[count])
            count += 1
        return count
