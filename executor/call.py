"""Completions that a call asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Any, Literal

import numpy as np

from ..data.arrays import IntArray, numbered
from ..data.readers.sampling import Sampling
from .completion import Completion
from .models.recording import Recorder, TokenLogprob
from .partial import Partial


@dataclass(slots=True, eq=False)
class Call:
    """Completions of one call, an entry for each.

    prompts, asked, most, expected: Prompt, sampling, and the most and the expected tokens.
    position: Position of the prompt, of ``prompts_asked``.
    number: Number among the completions of its prompt.
    partial: Unfinished part of an earlier call, or None.
    version: Version of the weights.
    faults: Reason why a prompt is left out, by its position.
    drawn: Pairs (version, tokens so far) of each completion, at changes of weights during the call.
    """

    prompts: list[tuple[int, ...]]
    asked: list[Sampling]
    most: IntArray
    expected: IntArray
    position: IntArray
    number: IntArray
    partial: list[Partial | None]
    version: int
    faults: dict[int, str]
    prompts_asked: int
    drawn: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def begin_version(self, version: int, answers: Sequence[Sequence[int]]) -> None:
        """Draw further tokens by other weights."""
        for index, tokens in enumerate(answers):
            self.drawn.setdefault(index, []).append((self.version, len(tokens)))
        self.version = version

    def of_prompts(self, on_token: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return a completion's callback, from that of its prompt."""
        position = self.position.tolist()
        return lambda index, token: on_token(position[index], token)

    def groups(self) -> IntArray:
        """Return each completion's number, equal for equal prompts.

        A continued completion has its own.
        """
        group = numbered(self.prompts)
        begun = np.array([one is not None for one in self.partial])
        alone: IntArray = np.where(begun, len(group) + np.arange(len(group)), group)
        return alone

    def extend(self, other: Call) -> None:
        """Add the completions of a later call."""
        for name in ("most", "expected", "position", "number"):
            setattr(self, name, np.concatenate((getattr(self, name), getattr(other, name))))
        for name in ("prompts", "asked", "partial"):
            getattr(self, name).extend(getattr(other, name))

    def again(self, rows: Sequence[int]) -> Call:
        """Return a call of the same completions from their beginning, drawn by another seed."""
        seed = randbits(53)
        asked = [self.asked[row] for row in rows]
        return Call(
            prompts=[self.prompts[row] for row in rows],
            asked=[one if one.greedy else replace(one, seed=seed) for one in asked],
            most=self.most[list(rows)],
            expected=self.expected[list(rows)],
            position=self.position[list(rows)],
            number=self.number[list(rows)],
            partial=[None] * len(rows),
            version=self.version,
            faults={},
            prompts_asked=1,
        )

    def names(self, usual: Sequence[str]) -> np.ndarray[Any, np.dtype[np.object_]]:
        """Name each completion's random stream.

        A continued completion keeps its name.
        """
        kept = {one.name for one in self.partial if one}
        if len(kept) < sum(one is not None for one in self.partial):
            raise ValueError("the same unfinished completion is among the prompts twice: leave one out")
        found = []
        for one, name in zip(self.partial, usual, strict=True):
            while one is None and name in kept:
                name += "'"
            found.append(name if one is None else one.name)
        return np.array(found, dtype=np.object_)

    def sample(self, index: int) -> int:
        """Return a completion's number among its prompt's."""
        one = self.partial[index]
        return int(self.number[index]) if one is None else one.sample

    def completion(
        self,
        index: int,
        tokens: tuple[int, ...],
        text: str,
        reason: Literal["stop", "length"],
        told: tuple[TokenLogprob, ...] | None,
        given: tuple[range, ...],
    ) -> Completion:
        """Return a finished completion."""
        most = self.asked[index].logprobs
        return Completion(
            int(self.position[index]),
            self.prompts[index],
            tokens,
            text,
            reason,
            None if told is None else tuple(each.value for each in told),
            tuple(each.likeliest[:most] for each in told) if told and most else None,
            self.sample(index),
            self.versions(index, tokens),
            self._given(index, given),
            None if self.asked[index].greedy else self.asked[index].seed,
        )

    def _given(self, index: int, given: tuple[range, ...]) -> tuple[range, ...]:
        left = self.partial[index]
        return (*left.given, *given) if left else given

    def told(
        self,
        index: int,
        tokens: tuple[int, ...],
        recorder: Recorder | None,
        stream: int,
        given: Sequence[range] = (),
    ) -> tuple[TokenLogprob, ...] | None:
        """Return a completion's log-probabilities, earlier ones unchanged."""
        if recorder is None or self.asked[index].logprobs is None:
            return None
        one = self.partial[index]
        before = one.told or () if one else ()
        return before + recorder.read(stream, len(tokens), len(before), given)

    def versions(self, index: int, tokens: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return a completion's pairs (version, tokens drawn)."""
        one = self.partial[index]
        pairs = list(one.versions if one else ())
        for version, end in (*self.drawn.get(index, ()), (self.version, len(tokens))):
            new = end - sum(count for _, count in pairs)
            if new and pairs and pairs[-1][0] == version:
                pairs[-1] = version, pairs[-1][1] + new
            elif new:
                pairs.append((version, new))
        return tuple(pairs)

    def unfinished(
        self,
        index: int,
        tokens: tuple[int, ...],
        told: tuple[TokenLogprob, ...] | None,
        given: tuple[range, ...],
        name: str,
        waiting: bool,
    ) -> Partial:
        """Return an unfinished completion as a prompt of a later call."""
        return Partial(
            int(self.position[index]),
            self.sample(index),
            self.prompts[index],
            tokens,
            told,
            self.versions(index, tokens),
            replace(self.asked[index], n=1),
            int(self.most[index]),
            self._given(index, given),
            name,
            waiting,
        )
