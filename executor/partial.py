"""Calls that end early, and their unfinished completions for a later call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from ..data.problem import limit_of
from ..data.readers.sampling import Sampling
from .models.recording import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """
    End of a call before all completions are finished: as soon as one of these is reached.

    Parameters
    ----------
    finished
        Completions of this call.
    share
        Of this call's completions, above 0 and at most 1.
    groups
        Prompts of which every completion of this call is finished.
    seconds
        Since the call began to decode; what is looked at after at most 16 decode steps.

    Raises
    ------
    ValueError
        If nothing is given, or something is out of its range.
    """

    finished: int | None = None
    share: float | None = None
    groups: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.finished, self.share, self.groups, self.seconds) == (None, None, None, None):
            raise ValueError("say when to end: finished, share, groups or seconds")
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
        """Decode steps between two looks at the clock, None where it does not matter."""
        return None if self.seconds is None else 16

    def reached(self, done: Sequence[bool], group: Sequence[int], seconds: float) -> bool:
        """
        Return whether the call ends now.

        Parameters
        ----------
        done
            Whether each completion is finished.
        group
            The number of its prompt.
        seconds
            Since the call began.
        """
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
    """
    An unfinished completion; as a prompt of a later call it continues with the same sampling.

    Its KV cache is computed again by the current weights. If these have not changed, its tokens are those of
    a run without a break.

    Parameters
    ----------
    index
        Position of its prompt in the call that began it, or went on with it last.
    sample
        Which of its prompt's completions it is, from 0.
    prompt_ids, completion_ids
        Tokens read and written so far; of one that had not begun, none are written.
    told
        Log-probabilities of the tokens so far; None unless asked for.
    versions
        Of which weights how many of its tokens were drawn, in their order.
    sampling, max_tokens
        How it is drawn, and after how many tokens in all it ends.
    name
        Of its random stream.
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
