"""Resumable job on disk, from prompts to completions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...data.arrays import IntArray
from ...data.files.disk import InputError
from ...data.plan import Plan
from ...data.problem import Problem
from ...data.readers.completions import (
    answer_line,
    cut_tokens,
    ending_of,
    error_line,
    joined_line,
    write_completions,
)
from ...data.readers.length_source import LengthSource, longest_planned
from ...data.readers.openai_batch import CHAT, PromptRecord
from ...data.trace import Stage, Trace
from ...heuristics.follow import plan_policy
from ...heuristics.loop import execute
from ...heuristics.policy import Policy, State, Step
from ...heuristics.registry import POLICIES, policy_named
from ...heuristics.simulate import remaining_schedule
from ...heuristics.unknown_lengths.kinds import by_kinds
from ..engines.adapters import Adapter
from ..engines.huggingface import NO_EOS, DecodeOptions, HuggingFaceEngine, vocabulary_of
from ..engines.tiers import Tier
from ..models.endings import Ending
from ..models.faults import MOST_FAILURES, RequestFailedError, device_failures
from ..models.mixed_sampling import MixedSampler
from ..models.prompts import Prompts
from ..models.recording import TokenLogprob
from ..models.source import position_limit
from ..models.tokenizers import Tokenizer, end_tokens
from .digests import DIGEST, completion_digest, digest_of
from .journal import Journal
from .kinds import kinds_of
from .plan_clock import Follower
from .run_costs import RunCosts

if TYPE_CHECKING:
    from ..models.sampling import TokenRule

_KEPT = "kept"
"""Key of a whole output line in the journal entry that keeps it."""

LEARNING_COSTS = ("fcfs-paced", "lpt-paced")
"""Policies with a prefill rule by the run's own costs."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Outcome of a run of a plan.

    traces: Traces of the served requests, one for each replica; empty if all were finished before.
    resumed: Number of requests without a trace: finished before, failed, or refused.
    """

    traces: tuple[Trace, ...]
    resumed: int


@dataclass(frozen=True, eq=False)
class Job:
    """A plan with everything needed to run it.

    prompts: Prompts of the plan's requests, in its order.
    pinned: True to decode every completion to its planned length; else it ends at an end-of-sequence token or
        at ``max_tokens``.
    tier: Layout of the KV cache; by default chosen when the job runs.
    kv_tokens: Tokens of KV cache to allocate on the device; None for as many as the slots need.
    policy: Key of :data:`~batchbound.heuristics.registry.POLICIES` to use instead of the plan's schedule.
    record_failures: True to write an error for a failed request and continue; else the run stops.
    refused: Error messages of refused requests, by position in the plan.
    costs_known: True if the plan's costs are of this model; else no prefill waits until costs are measured.
    repeatable: True to keep a digest of each completion's tokens and log-probabilities in its output line.
    adapters: Adapters of the model, by the name in a request's ``model``; served in sequence.
    cut_cap: Most tokens of a completion that is left, in place of its own cap and planned length.
    late_cap: Most tokens of a completion that is left and has no cap, of a plan without one.
    """

    plan: Plan
    prompts: Prompts
    model: Any
    tokenizer: Tokenizer
    sampler: TokenRule
    pinned: bool
    tier: Tier | None = None
    kv_tokens: int | None = None
    policy: str | None = None
    record_failures: bool = False
    refused: Mapping[int, str] = field(default_factory=dict)
    costs_known: bool = True
    repeatable: bool = False
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    cut_cap: int | None = None
    late_cap: int | None = None

    def __post_init__(self) -> None:
        workload = self.plan.workload
        if not self.plan.fleet.prefill_emits_first_token:
            raise InputError(
                "the plan counts a decode step for the first token, but prefill emits it",
                where="field 'fleet.prefill_emits_first_token'",
                hint="Plan again with --first-token prefill.",
            )
        names = [record.name for record in self.prompts.records]
        if names != workload.ids.tolist():
            raise InputError("the prompts are not those of the plan", hint="Plan again.")
        followed = self.plan.followed
        follows = followed is not None and self.policy in (None, followed.policy)
        if follows and followed is not None and followed.policy not in POLICIES:
            what = f"no policy is called {followed.policy!r}; there are {', '.join(POLICIES)}"
            raise InputError(what, where="field 'followed.policy'", hint="Plan again.")
        counted = self.prompts.lengths
        wrong = np.flatnonzero(counted != workload.input_tokens)
        if wrong.size:
            i = int(wrong[0])
            raise InputError(
                f"the prompt of {names[i]!r} has {counted[i]} tokens,"
                f" the plan counts {workload.input_tokens[i]}",
                hint="Plan again with --model or --tokenizer as this run has them.",
            )
        self._check_model()

    @property
    def most_tokens(self) -> IntArray:
        """Most tokens of each completion, shape (requests,)."""
        planned = self.plan.workload.output_tokens
        if self.pinned:
            return planned
        source = LengthSource("cap", longest=longest_planned(self.plan.provenance.lengths))
        caps = source.capped([record.max_tokens for record in self.prompts.records])
        room = self.room
        if self.cut_cap is not None:
            return np.minimum(room, self.cut_cap)
        if self.late_cap is not None:
            caps = [
                min(self.late_cap, int(left)) if cap is None else cap
                for cap, left in zip(caps, room, strict=True)
            ]
        most = [int(left) if cap is None else cap for cap, left in zip(caps, room, strict=True)]
        return np.array(most, dtype=np.int64)

    @property
    def room(self) -> IntArray:
        """Tokens that the model's positions leave to each completion, shape (requests,)."""
        return self._positions() - self.prompts.lengths

    @property
    def decoding(self) -> DecodeOptions:
        """Engine options: end of completions, sampling, KV cache on the device."""
        ends = NO_EOS if self.pinned else self._ends
        # Bits must not depend on which prompts are left.
        return DecodeOptions(ends, self.sampler, self.kv_tokens, share_prompts=not self.repeatable)

    def run(self, journal: Journal, *, on_stage: Callable[[Stage, int], None] | None = None) -> Outcome:
        """Serve every request without a completion in the journal."""
        resumed = len(journal.finished)
        self.answer_refused(journal)
        left, in_a_row = self.left(journal), 0
        served = len(self.plan.workload) - resumed - len(left)
        while left.size:
            before = len(journal.finished)
            try:
                return Outcome((self._serve_each(left, journal, on_stage, served),), resumed + served)
            except RequestFailedError as error:
                in_a_row = 1 if len(journal.finished) > before else in_a_row + 1
                if not self.record_failures or in_a_row == MOST_FAILURES:
                    # After that many failures in a row the model is at fault, not a request.
                    raise
                index = self.plan.workload.ids.tolist().index(error.name)
                self.fail(journal, index, "model_failed", str(error))
            left = self.left(journal)
            served = len(self.plan.workload) - resumed - len(left)
        return Outcome((), resumed + served)

    def _serve_each(
        self,
        left: IntArray,
        journal: Journal,
        on_stage: Callable[[Stage, int], None] | None,
        served: int,
    ) -> Trace:
        """Serve the model's own requests, then each adapter's."""
        records = self.prompts.records
        named = np.array([records[i].model if records[i].model in self.adapters else "" for i in left])
        traces: list[Trace] = []
        order: list[int] = []
        for name in dict.fromkeys(["", *self.adapters]):
            part = left[named == name]
            if part.size:
                adapter = self.adapters.get(name)
                with nullcontext() if adapter is None else adapter.merged(self.model):
                    traces.append(self._serve(part, journal, on_stage, served + len(order)))
                order += part.tolist()
        return traces[0] if len(traces) == 1 else Trace.joined(traces, np.argsort(order).tolist())

    def _serve(
        self,
        left: IntArray,
        journal: Journal,
        on_stage: Callable[[Stage, int], None] | None,
        served: int,
    ) -> Trace:
        """Serve requests on a new engine after earlier ones."""
        names = self.plan.workload.ids.tolist()
        if self.policy is None:
            problem, schedule = remaining_schedule(self._problem, self.plan.schedule, left)
            policy = plan_policy(self.plan, schedule, problem)
        else:
            workload = self._problem.workload.select(left)
            if self.cut_cap is not None or self.late_cap is not None:
                workload = workload.with_output_tokens(self.most_tokens[left])
            problem = replace(self._problem, workload=workload)
            policy = self._policy(self.policy, problem, left)
        engine = HuggingFaceEngine(
            problem,
            self.model,
            [self.prompts.tokens[i] for i in left],
            self.most_tokens[left],
            decoding=self.decoding,
            tier=self.tier,
        )

        ended = 0

        def keep(request: int) -> None:
            index = int(left[request])
            journal.append(names[index], self.answer(index, engine.answers[request]))

        if isinstance(on_stage, Follower):
            follower = on_stage
            engine.on_part = lambda part: follower.on_part(part, served + ended)

        costs = RunCosts(problem.cost if self.costs_known else None)
        learns = self.policy is None or self.policy in LEARNING_COSTS

        def staged(stage: Stage, done: int) -> None:
            nonlocal ended
            ended = done
            costs.ran(stage)
            if on_stage is not None:
                on_stage(stage, served + done)

        def followed(state: State) -> Step:
            if learns and costs.cost is not state.problem.cost:
                state.problem = replace(state.problem, cost=costs.cost)
            step = policy(state)
            if isinstance(on_stage, Follower) and len(step.prefill):
                on_stage.on_begin(left[list(step.prefill)])
            return step

        with device_failures():
            return execute(problem, followed, engine, on_finish=keep, on_stage=staged)

    @property
    def _problem(self) -> Problem:
        """Problem of the plan, as the engine shares beginnings."""
        problem = self.plan.problem
        if not self.repeatable:
            return problem
        return replace(problem, workload=replace(problem.workload, tree=None).with_shared_prompts())

    def _policy(self, name: str, problem: Problem, left: IntArray) -> Policy:
        """Return a fresh policy, which learns kinds as they complete."""
        kind = kinds_of([self.prompts.records[i] for i in left.tolist()])
        if name not in LEARNING_COSTS or np.ptp(kind) == 0:
            return policy_named(name, problem)
        return by_kinds(problem, kind, self.most_tokens[left], longest_cap_first=name == "lpt-paced")

    def fail(self, journal: Journal, index: int, code: str, why: str) -> None:
        """Record an error in place of a completion."""
        record = self.prompts.records[index]
        journal.append(record.name, error_line(record, code, why))

    def answer_refused(self, journal: Journal) -> None:
        """Record an error for each request that the model cannot serve."""
        refused = {**self._too_long(), **self.refused}
        for index in self.left(journal).tolist():
            if index in refused:
                self.fail(journal, index, "invalid_request", refused[index])

    def left(self, journal: Journal) -> IntArray:
        """Return the requests without a completion in the journal."""
        names = self.plan.workload.ids.tolist()
        return np.array([i for i, name in enumerate(names) if name not in journal.finished], dtype=np.int64)

    def write_answers(self, journal: Journal, path: str | os.PathLike[str]) -> None:
        """Write every completion atomically, and delete the journal."""
        write_completions(path, self.lines(journal))
        journal.remove()

    def lines(self, journal: Journal) -> Iterator[dict[str, object]]:
        """Yield each request's output line, in the plan's order."""
        for records in self._rows().values():
            lines = [journal.finished[record.name] for record in records]
            if (kept := lines[0].get(_KEPT)) is not None:
                yield cast("dict[str, object]", kept)
                continue
            line = lines[0] if len(lines) == 1 else joined_line(lines, records[0].samples)
            yield {**line, DIGEST: digest_of(lines)} if self.repeatable else line

    def cut_below_cap(
        self, lines: Iterable[Mapping[str, Any]], largest: int = 0
    ) -> tuple[frozenset[str], tuple[int, ...]]:
        """Return the rows that ``cut_cap`` lengthens, and the tokens of cut ones that a higher cap would.

        largest: Largest cap that cut a completion before.
        """
        by_name = {record.custom_id: place for place, record in enumerate(self.prompts.records)}
        own, most, room = replace(self, cut_cap=None).most_tokens, self.most_tokens, self.room
        again, long = set[str](), list[int]()
        for line in lines:
            if ending_of(line) != "cut":
                continue
            place = by_name[str(line["custom_id"])]
            tokens = cut_tokens(line, max(int(own[place]), largest))
            if tokens < most[place]:
                again.add(str(line["custom_id"]))
            elif tokens < room[place]:
                long.append(tokens)
        return frozenset(again), tuple(long)

    def kept(
        self, lines: Iterable[dict[str, Any]], again: Container[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield journal entries that keep output lines, all but some."""
        rows = self._rows()
        for line in lines:
            custom_id = str(line["custom_id"])
            if custom_id not in again:
                first, *others = rows[custom_id]
                yield first.name, {_KEPT: line}
                yield from ((record.name, {_KEPT: None}) for record in others)

    def _rows(self) -> dict[str, list[PromptRecord]]:
        """Return the records of each line of the output, in the plan's order."""
        grouped = groupby(self.prompts.records, key=lambda record: record.custom_id)
        return {custom_id: list(records) for custom_id, records in grouped}

    def answer(self, index: int, tokens: list[int]) -> dict[str, object]:
        """Return the output line of a finished request."""
        record, prompt_tokens = self.prompts.records[index], len(self.prompts.tokens[index])
        rule, told, digest = self.sampler, None, dict[str, object]()
        asked = "logprobs" in record.asked
        if isinstance(rule, MixedSampler) and rule.recorder is not None and (asked or self.repeatable):
            told = rule.recorder.read(rule.stream(record.name), len(tokens))
            if self.repeatable:
                digest = {DIGEST: completion_digest(tokens, [one.value for one in told])}
        ends, told = None if self.pinned else self._ends, told if asked else None
        name = record.model if record.model in self.adapters else None
        line = answer_of(
            record, prompt_tokens, tokens, self.model, self.tokenizer, ends=ends, told=told, name=name
        )
        return {**line, **digest}

    @cached_property
    def _ends(self) -> frozenset[int]:
        return end_tokens(self.model, self.tokenizer)

    def _positions(self) -> int:
        limit = position_limit(self.model.config)
        return 2**31 - 1 if limit is None else limit

    def _check_model(self) -> None:
        workload = self.plan.workload
        vocabulary = vocabulary_of(self.model)
        largest = [max(tokens) for tokens in self.prompts.tokens]
        if max(largest) >= vocabulary:
            i = int(np.argmax(largest))
            raise InputError(
                f"the prompt of {str(workload.ids[i])!r} holds token {largest[i]},"
                f" the model knows {vocabulary}",
                hint="Give the model its own tokenizer with --tokenizer, and plan again.",
            )
        too_long = self._too_long()
        if too_long and not (self.record_failures and len(too_long) < len(workload)):
            i, why = next(iter(too_long.items()))
            record = self.prompts.records[i]
            raise InputError(
                why,
                where=f"line {record.line}, field 'body.{record.max_tokens_field}'" if record.line else "",
                hint=f"Lower its {record.max_tokens_field}, shorten its prompt,"
                " or plan again with --longest-completion.",
            )

    def _too_long(self) -> dict[int, str]:
        # A prompt that fills all positions leaves no room for a first token.
        needed = self.prompts.lengths + np.maximum(self.most_tokens, 1)
        return {
            i: f"request {str(self.plan.workload.ids[i])!r} may take {needed[i]} tokens, the model has"
            f" {self._positions()} positions"
            for i in np.flatnonzero(needed > self._positions()).tolist()
        }


def answer_of(
    record: PromptRecord,
    prompt_tokens: int,
    tokens: Sequence[int],
    model: Any,
    tokenizer: Tokenizer,
    *,
    ends: frozenset[int] | None,
    told: Sequence[TokenLogprob] | None = None,
    name: str | None = None,
) -> dict[str, object]:
    """Return the output line of a finished request.

    name: Name of its adapter.
    """
    ending = Ending() if ends is None else Ending.of(record.sampling(), ends)
    text, reason = ending.text(tokens, tokenizer.decode)
    return answer_line(
        record,
        text,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(tokens),
        finish_reason=reason,
        model=name or str(model.config.name_or_path or model.config.model_type),
        created=_now(),
        logprobs=None if told is None else _logprobs(record, tokens, told, tokenizer),
    )


def _now() -> int:
    """Return seconds since 1970, or SOURCE_DATE_EPOCH.

    The latter makes outputs equal to the byte.
    """
    return int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())


def _logprobs(
    record: PromptRecord, tokens: Sequence[int], told: Sequence[TokenLogprob], tokenizer: Tokenizer
) -> dict[str, object]:
    most = record.sampling().logprobs or 0
    texts = [tokenizer.decode([token]) for token in tokens]
    likeliest = [
        [(tokenizer.decode([token]), value) for token, value in one.likeliest[:most]] for one in told
    ]

    def number(value: float) -> float:
        # JSON has no infinity; OpenAI's format has this value for impossible tokens.
        return max(value, -9999.0)

    def entry(text: str, value: float) -> dict[str, object]:
        return {"token": text, "logprob": number(value), "bytes": list(text.encode())}

    if record.url == CHAT:
        content = [
            {**entry(text, one.value), "top_logprobs": [entry(*other) for other in others]}
            for text, one, others in zip(texts, told, likeliest, strict=True)
        ]
        return {"content": content}
    offsets = np.cumsum([0, *(len(text) for text in texts[:-1])]).tolist()
    return {
        "tokens": texts,
        "token_logprobs": [number(one.value) for one in told],
        "top_logprobs": (
            [{text: number(value) for text, value in others} for others in likeliest] if most else None
        ),
        "text_offset": offsets,
    }
