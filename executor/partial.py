"""Early ends of calls, and unfinished completions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real

from ..data.problem import limit_of
from ..data.readers.sampling import Sampling
from .completion import Completion
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
        Prompts with all completions of this call finished; a call with fewer prompts waits for all.
    when
        Function of a prompt's finished completions, true for example if their rewards differ. ``groups``
        counts prompts for which it is true; by default one is enough.
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
    when: Callable[[Sequence[Completion]], bool] | None = None

    def __post_init__(self) -> None:
        if (self.finished, self.share, self.groups, self.seconds, self.when) == (None,) * 5:
            raise ValueError(
                "no condition for the end is given: set finished, share, groups, seconds or when"
            )
        if self.when is not None and not callable(self.when):
            raise ValueError(f"when must be a function of a prompt's completions, got {self.when!r}")
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


class Ends:
    """Completions of a call that have ended, against its condition for an early end.

    group: Number of each completion, equal for completions of one prompt.
    """

    def __init__(self, until: Until | None, group: Sequence[int]) -> None:
        self._until, self._group = until, group
        self._left, self._ended, self._groups = Counter(group), 0, 0
        self._members: defaultdict[int, list[Completion]] = defaultdict(list)

    def note(self, index: int, completion: Completion) -> None:
        """Note a finished completion."""
        group = self._group[index]
        self._ended += 1
        self._left[group] -= 1
        if self._until is None:
            return
        self._members[group].append(completion)
        if not self._left[group]:
            members = self._members.pop(group)
            self._groups += self._until.when is None or bool(self._until.when(members))

    def reached(self, seconds: float) -> bool:
        """Return whether the call ends now."""
        until, every = self._until, len(self._group)
        if until is None or self._ended == every:
            return self._ended == every
        enough = (
            (seconds, until.seconds),
            (self._ended, until.finished),
            (self._ended, None if until.share is None else until.share * every),
            (self._groups, until.groups or (None if until.when is None else 1)),
        )
        return any(most is not None and value >= most for value, most in enough)


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
        Pairs (version of the weights, tokens drawn by it), in order.
    sampling, max_tokens
        Sampling, and the most tokens in all.
    given
        Index ranges of tokens that a tool returned.
    name
        Name of its random stream.
    waiting
        True if its tool has not answered; ``next_turn`` is then called again.
    """

    index: int
    sample: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    told: tuple[TokenLogprob, ...] | None
    versions: tuple[tuple[int, int], ...]
    sampling: Sampling
    max_tokens: int
    given: tuple[range, ...]
    name: str = field(repr=False)
    waiting: bool = False
