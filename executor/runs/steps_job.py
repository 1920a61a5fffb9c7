"""A plan of several steps served on a model, step after step, as the weights change between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.costs.cost import IntArray
from ...data.files.disk import InputError
from ...data.lengths.steps_plan import StepsPlan
from ...data.lengths.steps_progress import StepEnds, StepsProgress, Unfinished
from ...data.readers.sampling import Sampling
from ...data.trace import Stage
from ...heuristics.simulator import Progress, Simulator
from ...heuristics.unknown_lengths.lengths import NOTHING, Known
from ...heuristics.unknown_lengths.registry import hidden_policy, without_sharing
from ...heuristics.unknown_lengths.steps import StepsEngine, StepsRun, StepsServing
from ..engines.huggingface import NO_EOS, DecodeOptions, HuggingFaceEngine, vocabulary_of
from ..engines.tiers import Tier
from ..models.faults import RunStoppedError, device_failures
from ..models.mixed_sampling import MixedSampler
from ..models.recording import TokenLogprob
from ..models.request_rules import rules_of
from ..models.source import position_limit
from ..models.tokenizers import Tokenizer, end_tokens
from ..models.wrapped import unwrapped

if TYPE_CHECKING:
    from ..models.sampling import TokenRule

BEYOND = 2**40
"""Decode steps that no completion has: in a step that is gone through again, what did not end in it."""


@dataclass(frozen=True, eq=False)
class StepsJob:
    """
    A plan of several steps with everything needed to serve it.

    Parameters
    ----------
    prompts
        Token ids of each request's prompt, in the plan's order.
    asked
        How the tokens of each are chosen.
    most_tokens
        Tokens after which each completion ends, shape (requests,).
    model, tokenizer
        What completes them.
    known
        What was known of lengths when the plan was made.
    tier
        The layout of keys and values; chosen when the job begins if left out.
    kv_tokens
        The most tokens of keys and values on the device; None for as many as the slots need.

    Raises
    ------
    InputError
        If plan, prompts and model do not belong together.
    """

    plan: StepsPlan
    prompts: Sequence[tuple[int, ...]]
    asked: Sequence[Sampling]
    most_tokens: IntArray
    model: Any
    tokenizer: Tokenizer
    known: Known = NOTHING
    tier: Tier | None = None
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        problem, ids = self.plan.problem, self.plan.fleet.workload.ids
        if not problem.prefill_emits_first_token:
            raise InputError(
                "the plan counts a decode step for the first token, which an engine's prefill emits",
                where="field 'fleet.prefill_emits_first_token'",
                hint="Plan again with --first-token prefill.",
            )
        if len(self.prompts) != len(problem):
            what = f"{len(self.prompts)} prompts were given for the plan's {len(problem)} requests"
            raise InputError(what, hint="Give each request's, in the plan's order.")
        vocabulary, limit = vocabulary_of(self.model), position_limit(unwrapped(self.model).config)
        for index, prompt in enumerate(self.prompts):
            name, planned = str(ids[index]), int(problem.prompt_tokens[index])
            if len(prompt) != planned:
                what = f"the prompt of {name!r} has {len(prompt)} tokens, the plan counts {planned}"
                raise InputError(
                    what, hint="Give the planned prompts, or plan again with the model's tokenizer."
                )
            if not (min(prompt) >= 0 and max(prompt) < vocabulary):
                what = f"the prompt of {name!r} holds a token that the model, of {vocabulary}, does not know"
                raise InputError(what, hint="Encode the prompts with the model's own tokenizer.")
            needed = planned + int(self.most_tokens[index])
            if limit is not None and needed > limit:
                what = f"request {name!r} may take {needed} tokens, the model has {limit} positions"
                raise InputError(what, hint="Plan again with a smaller --longest-completion.")

    @property
    def names(self) -> list[str]:
        """The requests' names."""
        found: list[str] = self.plan.fleet.workload.ids.tolist()
        return found

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a completion."""
        return end_tokens(self.model, self.tokenizer)

    def serving(self, engine: StepsEngine) -> StepsServing:
        """Return the steps, to be served on a fresh engine by a fresh policy."""
        problem = self.plan.problem
        policy = hidden_policy(self.plan.policy, without_sharing(problem), self.known)
        return StepsServing(problem, self.plan.step, self.plan.way, policy, engine)

    def rule(self, begun: Mapping[int, tuple[int, ...]]) -> TokenRule:
        """Return how tokens are chosen, where requests have decoded some, by their position."""
        return rules_of(
            dict(zip(self.names, self.asked, strict=True)),
            self.prompts,
            self.most_tokens.tolist(),
            self.tokenizer,
            self.ends,
            begun={self.names[request]: tokens for request, tokens in begun.items()},
        )

    def engine(self, rule: TokenRule, begun: Mapping[int, tuple[int, ...]]) -> HuggingFaceEngine:
        """Return an engine that goes on from what requests have decoded, by their position."""
        problem = self.plan.problem
        if problem.kv_capacity is None:
            problem = replace(problem, workload=problem.workload.with_output_tokens(self.most_tokens))
        ends = NO_EOS if rule.ends else self.ends
        engine = HuggingFaceEngine(
            problem,
            self.model,
            self.prompts,
            self.most_tokens,
            decoding=DecodeOptions(ends, rule, self.kv_tokens),
            tier=self.tier,
        )
        if begun:
            engine.go_on_from(begun)
        return engine


@dataclass(frozen=True, slots=True)
class Ended:
    """
    A request that has all its tokens.

    Parameters
    ----------
    request
        Its position in the plan.
    tokens
        Of its completion.
    versions
        In which steps, counted from zero, how many of them were drawn, in their order.
    told
        Their log-probabilities; None unless asked for.
    kept
        Whether it counts: not where enough of its group had ended in the same decode step.
    """

    request: int
    tokens: tuple[int, ...]
    versions: tuple[tuple[int, int], ...]
    told: tuple[TokenLogprob, ...] | None
    kept: bool = True


class LiveSteps:
    """
    Steps under way on a model: each begins by the weights of then.

    A step that was broken off is served again by the next call, from where the step before had ended.

    Parameters
    ----------
    job
        What is served.
    progress
        What earlier processes did of it; nothing by default.

    Raises
    ------
    InputError
        If the progress is not of this plan.
    """

    def __init__(self, job: StepsJob, progress: StepsProgress | None = None) -> None:
        self._job, self._broken = job, False
        self._ends = [] if progress is None else list(progress.steps)
        self._unfinished = {} if progress is None else {one.request: one for one in progress.unfinished}
        self._set_out()

    def _set_out(self) -> None:
        """Begin with the first step, or after those that have ended."""
        job, ends, unfinished = self._job, self.ends, self.unfinished
        gone = _gone_through(job, ends, unfinished) if ends else None
        begun = {request: one.tokens for request, one in self._unfinished.items()}
        self._rule = job.rule(begun)
        self._engine = job.engine(self._rule, begun)
        if gone is None:
            self._serving = job.serving(self._engine)
        else:
            self._serving = gone
            gone.go_on_with(self._engine)

    @property
    def over(self) -> bool:
        """Whether all steps are served."""
        return self._serving.over

    @property
    def run(self) -> StepsRun:
        """What the steps so far came to, by the cost model."""
        return self._serving.run

    @property
    def kept(self) -> dict[str, int]:
        """Tokens of each completion that was kept so far, by name."""
        run = self.run
        return {self._job.names[at]: int(run.tokens[at]) for at in np.flatnonzero(run.kept).tolist()}

    @property
    def ended(self) -> dict[str, int]:
        """Tokens of each that was kept, or ended beside the last of its group that is, by name."""
        serving = self._serving
        ended, tokens = (serving.ended >= 0) | serving.beside, serving.tokens
        return {self._job.names[at]: int(tokens[at]) for at in np.flatnonzero(ended).tolist()}

    @property
    def ends(self) -> tuple[StepEnds, ...]:
        """What ended in each step."""
        return tuple(self._ends)

    @property
    def unfinished(self) -> tuple[Unfinished, ...]:
        """What goes on in the next step."""
        return tuple(self._unfinished.values())

    def advance(
        self,
        on_end: Callable[[Ended], None],
        there: Mapping[int, int] | None = None,
        on_stage: Callable[[Stage, int], None] | None = None,
    ) -> bool:
        """
        Serve the next step to its end, and return whether there was one.

        Parameters
        ----------
        on_end
            Called with each request as it ends, kept or not.
        there
            As :meth:`.StepsServing.advance` takes it: of these, nobody is told again.
        on_stage
            Called after each stage with its record and the number of requests finished so far.

        Raises
        ------
        RunStoppedError
            If the model fails, memory does not hold one request, or the KV cache of what goes on was lost
            with a step that was broken off.
        """
        if self._broken:
            if self._unfinished and self._job.plan.way.keep_kv:
                what = "a step was broken off, and the KV cache of what goes on in it is lost"
                raise RunStoppedError(f"{what}: begin anew, or plan without --keep-kv")
            # What the broken step holds of memory is let go of before.
            del self._serving, self._engine
            self._set_out()
        self._broken, there = True, there or {}
        tokens: dict[int, int] = {}

        def ended(request: int) -> None:
            tokens[request] = there.get(request) or len(self._engine.answers[request])
            if request not in there:
                on_end(self._so_far(request, self._serving.served))

        # Not every change of weights since the step before can be seen from here.
        self._engine.take_weights_anew()
        self._serving.watch(ended, on_stage)
        with device_failures():
            one_more = self._serving.advance(there)
        self._broken = False
        if not one_more:
            return False
        self._ends.append(StepEnds(tuple(tokens), tuple(tokens.values()), len(there)))
        self._unfinished = {
            request: Unfinished(request, one.tokens, one.versions, one.told)
            for request in self._serving.under_way.tolist()
            if (one := self._so_far(request, self._serving.served - 1))
        }
        return True

    def _so_far(self, request: int, step: int) -> Ended:
        """Return what a request has, in the step given."""
        rule, before = self._rule, self._unfinished.get(request)
        tokens = tuple(self._engine.answers[request])
        versions = () if before is None else before.versions
        new = len(tokens) - sum(count for _, count in versions)
        if new:
            versions = (*versions, (step, new))
        told: tuple[TokenLogprob, ...] | None = None
        if isinstance(rule, MixedSampler) and rule.recorder and self._job.asked[request].logprobs is not None:
            told = () if before is None else tuple(TokenLogprob(*one) for one in before.told or ())
            told += rule.recorder.read(rule.stream(self._job.names[request]), len(tokens), len(told))
        return Ended(request, tokens, versions, told, bool(self._serving.ended[request] >= 0))


def _gone_through(job: StepsJob, steps: Sequence[StepEnds], unfinished: Sequence[Unfinished]) -> StepsServing:
    """Return the steps as they are after those that have ended, which the simulator goes through again."""
    problem = job.plan.problem
    emitted, begun = int(problem.prefill_emits_first_token), Progress.none(problem)
    serving = job.serving(Simulator(problem, progress=begun))
    for ends in steps:
        requests, tokens = (np.array(each, dtype=np.int64) for each in (ends.requests, ends.tokens))
        if requests.size and not (requests < len(problem)).all():
            raise _another()
        begun.left[:] = BEYOND
        begun.left[requests] = tokens - emitted - begun.decoded[requests]
        there = dict(zip(ends.requests[: ends.before], ends.tokens[: ends.before], strict=True))
        if not serving.advance(there):
            raise _another()
    reached = np.zeros(len(problem), dtype=np.int64)
    for one in unfinished:
        if one.request >= len(problem):
            raise _another()
        reached[one.request] = len(one.tokens)
    here = np.zeros(len(problem), dtype=np.int64)
    here[serving.under_way] = serving.tokens[serving.under_way]
    if (here != reached).any():
        raise _another()
    return serving


def _another() -> InputError:
    what = "what it says of the steps before is not what this version's policy would have done"
    return InputError(what, hint=StepsProgress.JSON_HINT)
