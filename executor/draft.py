"""Completions that are being drawn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Literal

from ..data.readers.sampling import Sampling
from .completion import Completion
from .models.recording import TokenLogprob
from .models.sampling import STREAM
from .partial import Partial


@dataclass(slots=True, eq=False)
class Draft:
    """Completion that is being drawn.

    prompt, sampling, most, expected: Prompt, sampling, and the most and the expected tokens.
    position: Position of the prompt.
    sample: Number among the completions of its prompt.
    partial: Unfinished part of an earlier call, or None.
    given: Index ranges of tokens that a tool returned.
    name: Name of its random stream.
    drawn: Pairs (version of the weights, tokens so far), at changes of weights.
    turn: Time and tokens at the begin of its turn.
    done, cancelled: True if it ended, and if it was ended before its end.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    most: int
    expected: int
    position: int
    sample: int
    partial: Partial | None = None
    given: tuple[range, ...] = ()
    name: str = ""
    drawn: list[tuple[int, int]] = field(default_factory=list)
    turn: tuple[float, int] = (0.0, 0)
    done: bool = False
    cancelled: bool = False

    @property
    def begun(self) -> tuple[int, ...]:
        """Tokens of an earlier call."""
        return () if self.partial is None else self.partial.completion_ids

    def again(self) -> Draft:
        """Return the same completion from its beginning, drawn by another seed."""
        own = self.sampling
        sampling = own if own.greedy else replace(own, seed=randbits(53))
        return Draft(self.prompt, sampling, self.most, self.expected, self.position, self.sample)

    def versions(self, version: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """Return pairs (version, tokens drawn) of so many tokens, the last of this version."""
        pairs = list(self.partial.versions if self.partial else ())
        for number, end in (*self.drawn, (version, tokens)):
            new = end - sum(count for _, count in pairs)
            if new and pairs and pairs[-1][0] == number:
                pairs[-1] = number, pairs[-1][1] + new
            elif new:
                pairs.append((number, new))
        return tuple(pairs)

    def completion(
        self,
        tokens: tuple[int, ...],
        text: str,
        reason: Literal["stop", "length"],
        told: tuple[TokenLogprob, ...] | None,
        version: int,
    ) -> Completion:
        """Return the finished completion."""
        most = self.sampling.logprobs
        return Completion(
            self.position,
            self.prompt,
            tokens,
            text,
            reason,
            None if told is None else tuple(each.value for each in told),
            tuple(each.likeliest[:most] for each in told) if told and most else None,
            self.sample,
            self.versions(version, len(tokens)),
            self.given,
            None if self.sampling.greedy else self.sampling.seed,
        )

    def unfinished(
        self, tokens: tuple[int, ...], told: tuple[TokenLogprob, ...] | None, version: int, *, waiting: bool
    ) -> Partial:
        """Return the unfinished completion as a prompt of a later call."""
        return Partial(
            self.position,
            self.sample,
            self.prompt,
            tokens,
            told,
            self.versions(version, len(tokens)),
            replace(self.sampling, n=1),
            self.most,
            self.given,
            self.name.rpartition(STREAM)[2],
            waiting,
        )
