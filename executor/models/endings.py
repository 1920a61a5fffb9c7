"""End of a completion, and its text without the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ...data.readers.sampling import Sampling, StopFunction

Decode = Callable[[Sequence[int]], str]
"""Function that decodes tokens without special ones."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Conditions that end a completion before its most tokens.

    tokens: Tokens that end it; they are part of its tokens but not of its text.
    stop: Texts that end it, in any tokens.
    include_stop: True if the text includes the stop.
    min_tokens: Least length in tokens.
    when: Function of all tokens that ends it, or None.
    """

    tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    when: StopFunction | None = None

    @classmethod
    def of(cls, sampling: Sampling, eos: Collection[int]) -> Ending:
        """Return a request's ending for a model with these end tokens."""
        end_tokens = frozenset() if sampling.ignore_eos else frozenset(eos)
        return cls(
            end_tokens | frozenset(sampling.stop_token_ids),
            sampling.stop,
            sampling.include_stop_str_in_output,
            sampling.min_tokens,
            sampling.stop_when,
        )

    def ended(self, tokens: Sequence[int], decode: Decode) -> bool:
        """Return whether the last token ends the completion."""
        if len(tokens) <= self.min_tokens and self.min_tokens:
            return False
        if tokens[-1] in self.tokens or (self.when is not None and self.when(tokens)):
            return True
        return bool(self.stop) and self._stop_at(tokens, decode) is not None

    def text(self, tokens: Sequence[int], decode: Decode) -> tuple[str, Literal["stop", "length"]]:
        """Return a completion's text, and the reason of its end."""
        if not self.ended(tokens, decode):
            return decode(tokens), "length"
        if tokens[-1] in self.tokens:
            return decode(tokens if self.include_stop else tokens[:-1]), "stop"
        cut = self._stop_at(tokens, decode) if self.stop else None
        if cut is None:
            return decode(tokens), "stop"
        return decode(tokens)[: cut[1] if self.include_stop else cut[0]], "stop"

    def _stop_at(self, tokens: Sequence[int], decode: Decode) -> tuple[int, int] | None:
        """Return begin and end of a newly completed stop text."""
        longest = max(len(text) for text in self.stop)
        count = longest + 8
        # Decoding the whole text for every token is slow; its end is enough to rule out a stop.
        while count < len(tokens) and len(decode(tokens[-count:])) < 2 * longest:
            count *= 2
        if count < len(tokens) and not any(text in decode(tokens[-count:]) for text in self.stop):
            return None
        # The last token may change the end of the text before it: half of a letter, or a space before "'s".
        whole, before = decode(tokens), decode(tokens[:-1])
        same = next((at for at, two in enumerate(zip(whole, before, strict=False)) if two[0] != two[1]), None)
        known = min(len(whole), len(before)) if same is None else same
        stops = [(at, at + len(text)) for text in self.stop if (at := self._find(whole, text, known)) >= 0]
        return min(stops, default=None)

    @staticmethod
    def _find(whole: str, text: str, known: int) -> int:
        # A stop within the earlier text would have ended the completion then.
        return whole.find(text, max(0, known - len(text) + 1))
