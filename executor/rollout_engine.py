"""Engine that prompts can be added to while it decodes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from .completion import Completion
from .draft import Draft
from .partial import Partial
from .running import Running
from .setup import Setup
from .turns import NextTurn, Served

STEPS = 16
"""Most decode steps before added prompts are looked for; larger is slower to start them."""

MOST_ROWS = 4096
"""Completions that an idle engine has served, from which on it begins anew, without their KV cache."""


class RolloutEngine:
    """Engine that runs until it is closed; :meth:`LLM.start` makes one.

    Prompts may be submitted and cancelled from any thread, also while another one takes completions.

    drafts_of: Returns the completions of prompts with settings of :meth:`LLM.generate`.
    ended: Called with what has run and with the unfinished completions, when the engine is idle or closed.
    next_turn: As for :meth:`LLM.converse`; None without tools.
    max_staleness: Most versions between a token and the present weights, in groups that are not whole. An
        older group begins again. None for no limit.
    """

    def __init__(
        self,
        setup: Setup,
        drafts_of: Callable[..., list[Draft]],
        ended: Callable[[Served | None, tuple[Partial, ...]], None],
        *,
        next_turn: NextTurn | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self._setup, self._drafts_of, self._ended = setup, drafts_of, ended
        self._next_turn, self._staleness = next_turn, max_staleness
        self._inbox: deque[Callable[[], None]] = deque()
        self._running: Running | None = None
        self._version: int | None = None
        self._submitted = 0
        self._seeds: set[int | None] = set()
        self._whole: defaultdict[int, int] = defaultdict(int)
        self._members: defaultdict[int, list[Completion]] = defaultdict(list)
        self._cancelled: list[Partial] = []

    @property
    def idle(self) -> bool:
        """True if nothing was submitted that has not ended."""
        return not self._inbox and (self._running is None or self._running.idle)

    def submit(self, prompts: Iterable[Any], sampling: Any = None, **how: Any) -> range:
        """Add prompts; return their numbers, which completions have as ``index``.

        Arguments are those of :meth:`LLM.generate`: ``n``, ``max_tokens`` and fields of ``Sampling``.
        """
        drafts = self._drafts_of(prompts, sampling, **how)
        seeds = {draft.sampling.seed for draft in drafts if draft.partial is None}
        if repeated := (seeds & self._seeds) - {None}:
            raise ValueError(
                f"seed {repeated.pop()} was submitted before and would draw the same tokens: leave it out, or"
                " give another"
            )
        self._seeds |= seeds
        first = self._submitted
        for draft in drafts:
            draft.position += first
            self._whole[draft.position] += 1
            self._submitted = draft.position + 1
        self._inbox.append(partial(self._add, drafts))
        return range(first, self._submitted)

    def cancel(self, group: int) -> None:
        """End the unfinished completions of a prompt; :attr:`unfinished` holds them."""
        self._inbox.append(partial(self._cancel, group))

    @property
    def unfinished(self) -> tuple[Partial, ...]:
        """Cancelled completions, and after :meth:`close` all that have not ended."""
        return tuple(self._cancelled)

    @property
    def parts(self) -> tuple[Completion, ...]:
        """Completions that :meth:`groups` holds back, as others of their prompts have not ended."""
        return tuple(one for members in self._members.values() for one in members)

    def step(self) -> list[Completion]:
        """Run some decode steps; return the completions that ended."""
        while self._inbox:
            self._inbox.popleft()()
        self._notice()
        running = self._running
        if running is None or running.idle:
            return []
        done = [completion for _, completion in running.step(STEPS)]
        if running.idle:
            self._ended(running.end()[0], self.unfinished)
        return done

    def completions(self) -> Iterator[Completion]:
        """Yield completions as they end, until the engine is idle."""
        while not self.idle:
            yield from self.step()

    def groups(self) -> Iterator[tuple[Completion, ...]]:
        """Yield all completions of a prompt together, once they have ended, until the engine is idle."""
        while not self.idle:
            for completion in self.step():
                self._members[completion.index].append(completion)
            while (group := self._take_whole()) is not None:
                yield group
                self._notice()

    def weights_changed(self) -> None:
        """Draw further tokens by the present weights, with a new KV cache.

        The engine also notices weights that have changed in place, as optimizers do.
        """
        self._version = self._setup.new_version()
        if self._running is not None and self._running.idle:
            self._running = None
        elif self._running is not None:
            self._running.weights_changed(self._version)
            self._begin_stale_again()

    def close(self) -> None:
        """End all completions; :attr:`unfinished` holds them, and :meth:`LLM.report` tells what has run."""
        while self._inbox:
            self._inbox.popleft()()
        if self._running is not None:
            served, left = self._running.end()
            self._cancelled += left
            self._ended(served, self.unfinished)
            self._running = None

    def _take_whole(self) -> tuple[Completion, ...] | None:
        for group, members in self._members.items():
            if len(members) == self._whole.get(group):
                del self._members[group], self._whole[group]
                return tuple(sorted(members, key=lambda one: one.sample))
        return None

    def _notice(self) -> None:
        if self._running is not None and self._running.outdated:
            self.weights_changed()

    def _add(self, drafts: list[Draft]) -> None:
        if not drafts:
            return
        self._notice()
        running = self._running
        if running is not None and not (running.idle and len(running.drafts) >= MOST_ROWS):
            running.add(drafts)
        else:
            self._version = self._version or self._setup.new_version()
            self._running = Running(self._setup, drafts, self._version, grows=True, next_turn=self._next_turn)

    def _cancel(self, group: int) -> None:
        self._members.pop(group, None)
        self._whole.pop(group, None)
        if self._running is not None:
            self._cancelled += self._running.stop(self._running.of_prompt(group))

    def _begin_stale_again(self) -> None:
        running, oldest = self._running, (self._version or 0) - (self._staleness or 0)
        if running is None or self._staleness is None:
            return
        for group in list(self._whole):
            rows = running.of_prompt(group)
            begun = [running.first_version(row) for row in rows]
            if not any(version is not None and version < oldest for version in begun):
                continue
            again = [running.drafts[row].again() for row in rows]
            running.stop(rows)
            self._members.pop(group, None)
            self._inbox.append(partial(self._add, again))
