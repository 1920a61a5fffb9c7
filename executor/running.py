"""Requests that run on a model, to which others can be added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from ..data.arrays import numbered
from ..data.problem import Problem
from ..data.workload import COLUMNS, Workload
from ..heuristics.loop import Execution
from ..heuristics.policy import UNTIL_CHANGE
from ..heuristics.queues.queue_policy import QueuedPolicy
from .call import Call
from .completion import Completion
from .engines.huggingface import NO_EOS, DecodeOptions, HuggingFaceEngine
from .engines.tiers import Tier
from .models.endings import Ending
from .models.mixed_sampling import MixedSampler
from .models.request_rules import rules_of
from .models.sampling import STREAM, Sampler, TokenRule
from .models.tokenizers import Tokenizer, end_tokens
from .models.wrapped import contents_of
from .partial import Partial
from .turns import Conversations, NextTurn, Served


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """Model and scheduling of running requests.

    problem_of, policy_of: Return the problem of a call, and a fresh policy for it.
    new_version: Returns the number of a new version of the weights.
    """

    model: Any
    tokenizer: Tokenizer
    tier: Tier
    kv_tokens: int | None
    share_prompts: bool
    problem_of: Callable[[Call], Problem]
    policy_of: Callable[[Call, Problem], QueuedPolicy]
    new_version: Callable[[], int]


class Running:
    """Requests of a call, and of those added, until all have ended.

    call: Requests at first; at least one.
    grows: True if others will be added.
    on_token: Called with the position of the prompt and each token.
    next_turn: Function that continues a completion; None if there are no tools.
    """

    def __init__(
        self,
        setup: Setup,
        call: Call,
        *,
        grows: bool = False,
        on_token: Callable[[int, int], None] | None = None,
        next_turn: NextTurn | None = None,
    ) -> None:
        self.call, self._setup, self._grows = call, setup, grows
        self._problem = setup.problem_of(call)
        self._eos = end_tokens(setup.model, setup.tokenizer)
        begun = {i: tokens for i, one in enumerate(call.partial) if one and (tokens := one.completion_ids)}
        self._rule = self._rules(range(len(call.prompts)), begun)
        self._engine = HuggingFaceEngine(
            self._problem,
            setup.model,
            call.prompts,
            call.most,
            decoding=DecodeOptions(
                NO_EOS if self._rule.ends else self._eos,
                self._rule,
                setup.kv_tokens,
                begun,
                setup.share_prompts,
                reuse=grows or next_turn is not None,
            ),
            tier=setup.tier,
            on_token=None if on_token is None else call.of_prompts(on_token),
        )
        self._execution = Execution(self._problem, setup.policy_of(call, self._problem), self._engine)
        self._turns = Conversations(self._execution, self._engine, next_turn, call)
        self._done = np.zeros(len(call.prompts), dtype=np.bool_)
        self._cancelled = self._done.copy()
        self._weights = contents_of(setup.model)

    @property
    def time(self) -> float:
        """Seconds since the first request was added."""
        return self._engine.time

    @property
    def idle(self) -> bool:
        """True if every request has ended."""
        return bool(self._done.all())

    def step(self, most: int | None = None) -> Iterator[tuple[int, Completion]]:
        """Run some decode steps; yield finished completions.

        Weights that change while the caller has one begin a version.

        most: Most decode steps; None for as many as until a completion ends.
        """
        turns, run = self._turns, self._execution
        # A tool may finish at any moment; its completion should then get a free slot.
        steps = 1 if turns.pending else most or UNTIL_CHANGE
        for index in chain(turns.answered(wait=run.idle), turns.ended(steps)):
            self._done[index] = True
            yield index, self._completion(index)
            if self.outdated:
                self.weights_changed(self._setup.new_version())

    @property
    def rows_held(self) -> int:
        """Completions that have run, run or wait."""
        return len(self.call.prompts)

    @property
    def outdated(self) -> bool:
        """True if the model's weights are not those that tokens were drawn by."""
        return contents_of(self._setup.model) != self._weights

    def weights_changed(self, version: int) -> None:
        """Draw further tokens by the present weights, with a new KV cache."""
        self._weights = contents_of(self._setup.model)
        self.call.begin_version(version, self._engine.answers)
        self._turns.restart()

    def rows(self, group: int) -> list[int]:
        """Return the numbers of a prompt's completions."""
        rows: list[int] = np.flatnonzero((self.call.position == group) & ~self._cancelled).tolist()
        return rows

    def first_version(self, index: int) -> int | None:
        """Return the version of a completion's first token, or None."""
        pairs = self.call.versions(index, tuple(self._engine.answers[index]))
        return pairs[0][0] if pairs else None

    def add(self, call: Call) -> None:
        """Add the requests of a call."""
        own, run = self.call, self._execution
        if self.idle and np.isfinite(run.finished).any():
            self._engine.leave_out(float(np.nanmax(run.finished)))
        first, answers = len(own.prompts), self._engine.answers
        run.admit()
        self._problem = self._with_more(self._setup.problem_of(call).workload, call)
        own.extend(call)
        for name in ("_done", "_cancelled"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(len(call.prompts), dtype=np.bool_)))
        live = np.flatnonzero(~self._done).tolist()
        begun = {first + at: one.completion_ids for at, one in enumerate(call.partial) if one}
        begun = {index: tokens for index, tokens in begun.items() if tokens}
        rule = self._rules(
            live, {**{index: tuple(answers[index]) for index in live if index < first}, **begun}
        )
        assert isinstance(rule, MixedSampler)
        assert isinstance(self._rule, MixedSampler)
        self._rule.become(rule)
        self._engine.extend(self._problem, own.most, begun)
        run.extend(self._problem)
        run.policy = policy = self._setup.policy_of(own, self._problem)
        policy.queue.take(np.flatnonzero(~run.state.waiting).tolist())
        self._turns.extend()

    def stop(self, requests: Sequence[int]) -> tuple[Partial, ...]:
        """End unfinished requests; return them as they are."""
        left = [index for index in requests if not self._done[index]]
        partials = tuple(self._unfinished(index) for index in left)
        self._turns.stop(left)
        self._done[left] = self._cancelled[requests] = True
        return partials

    def end(self) -> tuple[Served | None, tuple[Partial, ...]]:
        """Return what has run, and the unfinished completions."""
        served = self._turns.served(self._problem, self.call.prompts)
        return served, tuple(self._unfinished(index) for index in np.flatnonzero(~self._done).tolist())

    def _rules(self, requests: Sequence[int], begun: dict[int, tuple[int, ...]]) -> TokenRule:
        call, names = self.call, self._problem.workload.ids.tolist()
        rule = rules_of(
            {names[index]: call.asked[index] for index in requests},
            [call.prompts[index] for index in requests],
            call.most[list(requests)].tolist(),
            self._setup.tokenizer,
            self._eos,
            begun={names[index]: tokens for index, tokens in begun.items()},
        )
        if not self._grows or isinstance(rule, MixedSampler):
            return rule
        assert isinstance(rule, Sampler)
        endings = {names[index]: Ending(frozenset(self._eos)) for index in requests}
        return MixedSampler(
            dict.fromkeys(endings, rule), endings=endings, decode=self._setup.tokenizer.decode
        )

    def _completion(self, index: int) -> Completion:
        tokens = tuple(self._engine.answers[index])
        text, reason = Ending.of(self.call.asked[index], self._eos).text(tokens, self._setup.tokenizer.decode)
        given = self._turns.given.get(index, ())
        return self.call.completion(index, tokens, text, reason, self._told(index, given), given)

    def _unfinished(self, index: int) -> Partial:
        given = self._turns.given.get(index, ())
        name = str(self._problem.workload.ids[index]).rpartition(STREAM)[2]
        tokens = tuple(self._engine.answers[index])
        told, waiting = self._told(index, given), self._turns.waits(index)
        return self.call.unfinished(index, tokens, told, given, name, waiting)

    def _told(self, index: int, given: tuple[range, ...]) -> Any:
        recorder = self._rule.recorder if isinstance(self._rule, MixedSampler) else None
        stream = self._rule.stream(str(self._problem.workload.ids[index]))
        return self.call.told(index, tuple(self._engine.answers[index]), recorder, stream, given)

    def _with_more(self, more: Workload, call: Call) -> Problem:
        """Return the problem with further requests; those that wait share equal prompts."""
        own, first = self._problem.workload, len(self._problem)
        columns: dict[str, Any] = {
            name: np.append(getattr(own, name), getattr(more, name)) for name in COLUMNS
        }
        columns["ids"][first:] = [f"{first}{STREAM}{name}" for name in more.ids]
        fresh = [
            at
            for at in np.flatnonzero(self._execution.state.waiting).tolist()
            if not self._engine.answers[at]
        ]
        prompts = [self.call.prompts[at] for at in fresh]
        new = [at for at, one in enumerate(call.partial) if one is None or not one.completion_ids]
        group = np.full(first + len(more), -1)
        group[[*fresh, *(first + at for at in new)]] = numbered([*prompts, *(call.prompts[at] for at in new)])
        columns |= {"group": group, "shared_tokens": np.zeros(len(group), dtype=np.int64)}
        return replace(self._problem, workload=Workload(**columns).with_shared_prompts())
