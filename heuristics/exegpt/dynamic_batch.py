"""Keeping the workload even: how many prompts to encode next (ExeGPT, section 5.2)."""

from __future__ import annotations

from ...data.arrays import IntArray

THRESHOLD = 0.1
"""Deviation from the plan that is let pass if nothing else is said, as a fraction."""


class DynamicBatch:
    """
    The size of the next encoding batch.

    It is the planned one, as long as its prompts' tokens and the decode batch stay within a threshold of what
    was planned; beyond, prompts are left out or added where that comes nearer to it, and made up for in the
    batches that follow.

    encode_batch: Prompts planned, on average; a fraction is carried over.
    input_tokens: Mean tokens of a prompt.
    decode_batch: Requests the decode batch is planned to have after the encoding; None to leave it as it
        comes.
    threshold: Deviation that is let pass, as a fraction; infinite for always the planned batch.
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

    @property
    def most(self) -> int:
        """Waiting prompts that :meth:`size` may look at."""
        return 3 * int(self.encode_batch + 2)

    def size(self, waiting: IntArray, active: int) -> int:
        """
        Return how many of the waiting prompts to encode, in order.

        waiting: Their tokens; :attr:`most` of them are enough.
        active: Requests decoding now.
        """
        wanted = self.encode_batch
        if self._decode_batch is not None:
            drift = active + wanted - self._decode_batch
            excess = abs(drift) - self._threshold * self._decode_batch
            if excess > 0:
                # Made up for over as many encodings as a request stays: at once, it would swing back.
                change = min(0.5 * wanted, excess * wanted / self._decode_batch)
                wanted -= change if drift > 0 else -change
        count = self._within_threshold(waiting, wanted)
        self._owed += wanted - count
        return count

    def _within_threshold(self, waiting: IntArray, wanted: float) -> int:
        # No prompts at all would be as far from the plan as can be, unless less than one is planned.
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
