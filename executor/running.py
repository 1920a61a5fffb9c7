"""Completions that run on a model, to which others can be added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from queue import Empty, SimpleQueue
from typing import cast

import numpy as np

from ..data.arrays import IntArray
from ..data.problem import Problem
from ..heuristics.loop import Execution
from ..heuristics.policy import UNTIL_CHANGE
from ..heuristics.queues.queue_policy import QueuedPolicy
from .completion import Completion
from .draft import Draft
from .engines.huggingface import NO_EOS, DecodeOptions, HuggingFaceEngine
from .models.endings import Ending
from .models.mixed_sampling import MixedSampler
from .models.recording import TokenLogprob
from .models.request_rules import rules_of
from .models.sampling import Sampler, TokenRule
from .models.tokenizers import end_tokens
from .models.wrapped import contents_of
from .partial import Partial
from .setup import Setup, name_streams
from .turns import NextTurn, Served, Turn, served_turns


class Running:
    """Completions of a call, and of those added, until all have ended.

    drafts: Completions at first; at least one.
    version: Version of the weights.
    grows: True if others will be added.
    stated: True if the longest expected are served first.
    on_token: Called with the position of the prompt and each token.
    next_turn: Function that continues a completion; None if there are no tools.
    """

    def __init__(
        self,
        setup: Setup,
        drafts: Sequence[Draft],
        version: int,
        *,
        grows: bool = False,
        stated: bool = False,
        on_token: Callable[[int, int], None] | None = None,
        next_turn: NextTurn | None = None,
    ) -> None:
        self.drafts, self.version = list(drafts), version
        self._setup, self._grows, self._stated, self._next_turn = setup, grows, stated, next_turn
        self._eos = end_tokens(setup.model, setup.tokenizer)
        self._prompts = [draft.prompt for draft in drafts]
        name_streams(drafts, 0)
        slots = setup.slots if grows else min(setup.slots, len(drafts))
        self._problem: Problem = setup.problem(drafts, slots)
        begun = {at: draft.begun for at, draft in enumerate(drafts) if draft.begun}
        self._rule = self._rules(range(len(drafts)), begun)
        self._engine = HuggingFaceEngine(
            self._problem,
            setup.model,
            self._prompts,
            self._most,
            decoding=DecodeOptions(
                NO_EOS if self._rule.ends else self._eos,
                self._rule,
                setup.kv_tokens,
                begun,
                setup.share_prompts,
                reuse=grows or next_turn is not None,
            ),
            tier=setup.tier,
            on_token=None if on_token is None else lambda at, token: on_token(drafts[at].position, token),
        )
        self._run = Execution(self._problem, self._queue(), self._engine)
        self._weights = contents_of(setup.model)
        self._left = len(drafts)
        self._tools: dict[int, tuple[Future[Sequence[int]], float]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._turns: list[Turn] = []
        self._over: list[int] = []
        self._begin(range(len(drafts)), 0.0)

    @property
    def time(self) -> float:
        """Seconds since the first completion was added."""
        return self._engine.time

    @property
    def idle(self) -> bool:
        """True if every completion has ended."""
        return not self._left

    @property
    def outdated(self) -> bool:
        """True if the model's weights are not those that tokens were drawn by."""
        return contents_of(self._setup.model) != self._weights

    def step(self, most: int | None = None) -> Iterator[tuple[int, Completion]]:
        """Run some decode steps; yield finished completions.

        Weights that change while the caller has one begin a version.

        most: Most decode steps; None for as many as until a completion ends.
        """
        # A tool may finish at any moment; its completion should then get a free slot.
        steps = 1 if self._tools else most or UNTIL_CHANGE
        for at in chain(self._continued(wait=self._run.idle), self._decoded(steps)):
            self._left -= not self.drafts[at].done
            self.drafts[at].done = True
            yield at, self._completion(at)
            if self.outdated:
                self.weights_changed(self._setup.new_version())

    def add(self, drafts: Sequence[Draft]) -> None:
        """Add completions, which arrive now."""
        run, first, answers = self._run, len(self.drafts), self._engine.answers
        if self.idle and np.isfinite(run.finished).any():
            self._engine.leave_out(float(np.nanmax(run.finished)))
        run.admit()
        started = [at for at in range(first) if answers[at] or not run.state.waiting[at]]
        name_streams(drafts, first)
        self.drafts += drafts
        self._prompts += [draft.prompt for draft in drafts]
        self._left += len(drafts)
        workload = self._setup.problem(self.drafts, self._problem.slots, started).workload
        self._problem = replace(self._problem, workload=workload)
        begun = {first + at: draft.begun for at, draft in enumerate(drafts) if draft.begun}
        live = [at for at, draft in enumerate(self.drafts) if not draft.done]
        written = {at: tuple(answers[at]) for at in live if at < first}
        rule = self._rules(live, {**written, **begun})
        assert isinstance(rule, MixedSampler)
        assert isinstance(self._rule, MixedSampler)
        self._rule.become(rule)
        self._engine.extend(self._problem, self._most, begun)
        run.extend(self._problem)
        run.policy = queue = self._queue()
        queue.queue.take(np.flatnonzero(~run.state.waiting).tolist())
        self._begin(range(first, len(self.drafts)), self._engine.time)

    def weights_changed(self, version: int) -> None:
        """Draw further tokens by the present weights, with a new KV cache."""
        self._weights = contents_of(self._setup.model)
        for draft, tokens in zip(self.drafts, self._engine.answers, strict=True):
            draft.drawn.append((self.version, len(tokens)))
        self.version = version
        running = self._run.stop(self._run.state.running.tolist())
        self._engine.reload_weights()
        self._engine.recompute()
        for at in running:
            self._end_turn(at)
            self._resume(at, [])

    def of_prompt(self, position: int) -> list[int]:
        """Return the numbers of a prompt's completions that were not cancelled."""
        drafts = enumerate(self.drafts)
        return [at for at, draft in drafts if draft.position == position and not draft.cancelled]

    def first_version(self, at: int) -> int | None:
        """Return the version of a completion's first token, or None."""
        pairs = self.drafts[at].versions(self.version, len(self._engine.answers[at]))
        return pairs[0][0] if pairs else None

    def stop(self, numbers: Sequence[int]) -> tuple[Partial, ...]:
        """End unfinished completions; return them as they are."""
        left = [at for at in numbers if not self.drafts[at].done]
        partials = tuple(self._unfinished(at) for at in left)
        for at in self._run.stop(left):
            self._end_turn(at)
            self._engine.drop(at)
        for at in numbers:
            self.drafts[at].done = self.drafts[at].cancelled = True
            self._tools.pop(at, None)
        self._left -= len(left)
        return partials

    def end(self) -> tuple[Served | None, tuple[Partial, ...]]:
        """Return what has run, and the unfinished completions; running turns count as ended now."""
        run = self._run
        for at in run.state.running.tolist():
            if np.isfinite(run.prefilled[at]):
                run.finished[at] = self._engine.time
                self._end_turn(at)
        served = served_turns(self._turns, self._problem, run, self._prompts, self._engine.answers)
        return served, tuple(self._unfinished(at) for at, draft in enumerate(self.drafts) if not draft.done)

    @property
    def _most(self) -> IntArray:
        return np.array([draft.most for draft in self.drafts])

    def _queue(self) -> QueuedPolicy:
        return self._setup.queue(self.drafts, self._problem, stated=self._stated)

    def _rules(self, numbers: Sequence[int], begun: dict[int, tuple[int, ...]]) -> TokenRule:
        drafts, tokenizer = self.drafts, self._setup.tokenizer
        rule = rules_of(
            {drafts[at].name: drafts[at].sampling for at in numbers},
            [drafts[at].prompt for at in numbers],
            [drafts[at].most for at in numbers],
            tokenizer,
            self._eos,
            begun={drafts[at].name: tokens for at, tokens in begun.items()},
        )
        if not self._grows or isinstance(rule, MixedSampler):
            return rule
        assert isinstance(rule, Sampler)
        endings = {drafts[at].name: Ending(frozenset(self._eos)) for at in numbers}
        return MixedSampler(dict.fromkeys(endings, rule), endings=endings, decode=tokenizer.decode)

    def _completion(self, at: int) -> Completion:
        draft, tokens = self.drafts[at], tuple(self._engine.answers[at])
        text, reason = Ending.of(draft.sampling, self._eos).text(tokens, self._setup.tokenizer.decode)
        return draft.completion(tokens, text, reason, self._told(at), self.version)

    def _unfinished(self, at: int) -> Partial:
        tokens, waiting = tuple(self._engine.answers[at]), at in self._tools
        return self.drafts[at].unfinished(tokens, self._told(at), self.version, waiting=waiting)

    def _told(self, at: int) -> tuple[TokenLogprob, ...] | None:
        """Return a completion's log-probabilities, earlier ones unchanged."""
        recorder = self._rule.recorder if isinstance(self._rule, MixedSampler) else None
        draft = self.drafts[at]
        if recorder is None or draft.sampling.logprobs is None:
            return None
        before = (draft.partial.told if draft.partial else None) or ()
        stream, tokens = self._rule.stream(draft.name), len(self._engine.answers[at])
        return before + recorder.read(stream, tokens, len(before), draft.given)

    def _begin(self, numbers: range, time: float) -> None:
        """Begin the turns of completions; call the tools of those that wait for one."""
        run = self._run
        for at in numbers:
            draft = self.drafts[at]
            draft.turn = time, len(draft.begun)
            if draft.partial is None or not draft.partial.waiting:
                continue
            run.admit()
            run.state.waiting[at] = False
            cast("QueuedPolicy", run.policy).queue.take([at])
            if not self._calls_tool(at, self._engine.time):
                run.end(at, self._engine.time)
                self._over.append(at)

    def _decoded(self, most: int) -> Iterator[int]:
        """Run some decode steps; yield finished completions."""
        if self._run.idle:
            return
        for at in self._run.step(most):
            self._end_turn(at)
            if self._next_turn is None:
                yield at
            elif self._calls_tool(at, float(self._run.finished[at])):
                self._run.pause(at)
            else:
                self._engine.end_turns(at)
                yield at

    def _continued(self, *, wait: bool) -> list[int]:
        """Continue completions with finished tool calls; return ended ones."""
        over, self._over = self._over, []
        while self._tools:
            try:
                at = self._answered.get(block=wait)
            except Empty:
                break
            wait = False
            if at not in self._tools:
                continue
            future, since = self._tools.pop(at)
            tokens, draft, written = list(future.result()), self.drafts[at], len(self._engine.answers[at])
            left = draft.most - written - len(tokens)
            if left < 0:
                raise ValueError(
                    f"completion {at} has {written} of {draft.most} tokens, and a tool returned"
                    f" {len(tokens)} more: return at most {draft.most - written}"
                )
            if tokens:
                draft.given = (*draft.given, range(written, written + len(tokens)))
            if tokens and left:
                self._resume(at, tokens)
                continue
            if tokens:
                self._engine.give(at, tokens)
            over.append(at)
            self._run.end(at, since)
            self._engine.end_turns(at)
        return over

    def _calls_tool(self, at: int, since: float) -> bool:
        """Call the tool of an ended turn; return False if there is none."""
        if self._next_turn is None:
            raise ValueError("an unfinished completion waits for its tool: continue it with next_turn")
        future = self._next_turn(self.drafts[at].position, tuple(self._engine.answers[at]))
        if future is None:
            return False
        self._tools[at] = future, since
        future.add_done_callback(lambda _: self._answered.put(at))
        return True

    def _resume(self, at: int, tokens: list[int]) -> None:
        """Let a completion continue after some more tokens."""
        self.drafts[at].turn = self._engine.time, len(self._engine.answers[at]) + len(tokens)
        self._engine.give(at, tokens)
        cast("QueuedPolicy", self._run.policy).queue.put_back([at])
        # The turn before drew its last token without a decode step.
        before = self._run.stage_of[at] >= 0
        self._run.resume(at, len(tokens) + int(before))

    def _end_turn(self, at: int) -> None:
        """Record the turn that has just ended."""
        run, (queued, before) = self._run, self.drafts[at].turn
        columns = run.stage_of, run.slot_of, run.prefilled, run.first_token, run.finished
        times = [column[at].item() for column in columns]
        self._turns.append(Turn(at, before, len(self._engine.answers[at]) - before, queued, *times))
