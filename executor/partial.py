"""Early ends of calls, and unfinished completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from ..data.problem import limit_of
from ..data.readers.sampling import Sampling
from .models.recording import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """Condition for an early end of a call.

    Parameters
    ----------
    finished
        Finished completions of this call.
    share
        Finished share of this call's completions, above 0 and at most 1.
    groups
        Prompts with all completions of this call finished.
    seconds
        Seconds since the call began to decode, checked at least every 16 decode steps.

    Raises
    ------
    ValueError
        If no limit is given, or one is out of range.
    """

    finished: int | None = None
    share: float | None = None
    groups: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.finished, self.share, self.groups, self.seconds) == (None, None, None, None):
            raise ValueError("no condition for the end is given: set finished, share, groups or seconds")
        for name in ("finished", "groups"):
            value = getattr(self, name)
            if value is not None:
                limit_of(name, value, 1)
        for name in ("share", "seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")

    @property
    def most_steps(self) -> int | None:
        """Decode steps between two looks at the clock, or None."""
        return None if self.seconds is None else 16

    def reached(self, done: Sequence[bool], group: Sequence[int], seconds: float) -> bool:
        """Return whether the call ends now."""
        count = sum(done)
        if self.seconds is not None and seconds >= self.seconds:
            return True
        if self.finished is not None and count >= self.finished:
            return True
        if self.share is not None and count >= self.share * len(done):
            return True
        if self.groups is None:
            return False
        whole = set(group) - {one for one, over in zip(group, done, strict=True) if not over}
        return len(whole) >= self.groups


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Unfinished completion, which continues as a prompt of a later call.

    Its KV cache is computed again by the current weights. With unchanged weights its tokens are the same as
    without the break.

    Parameters
    ----------
    index
        Position of its prompt in the last call.
    sample
        Number among its prompt's completions, from 0.
    prompt_ids, completion_ids
        Tokens of the prompt and of the completion so far.
    told
        Log-probabilities of the tokens so far; None unless requested by ``sampling``.
    versions
        Pairs (number of the call, tokens drawn in it), in order.
    sampling, max_tokens
        Sampling, and the most tokens in all.
    name
        Name of its random stream.
    """

    index: int
    sample: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    told: tuple[TokenLogprob, ...] | None
    versions: tuple[tuple[int, int], ...]
    sampling: Sampling
    max_tokens: int
    name: str = field(repr=False)
