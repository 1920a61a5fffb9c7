"""Rollouts that go the planned way over several steps, for a training loop of one's own and for TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.files.disk import shown
from ..data.lengths.steps_plan import StepsPlan
from ..data.readers.sampling import LogprobsMode, Sampling
from ..heuristics.unknown_lengths.lengths import NOTHING, Known
from ..heuristics.unknown_lengths.queues import group_numbers, place_in_group
from ..heuristics.unknown_lengths.steps import StepsRun
from .engines.huggingface import vocabulary_of
from .llm import LLM, Completion, Prompt, each_asked
from .models.endings import Ending
from .models.faults import RunStoppedError
from .models.request_rules import ended_by_tokens
from .models.tokenizers import end_tokens
from .rollout import Rollout, RolloutSettings, refuse_other_model
from .runs.steps_job import Ended, LiveSteps, StepsJob


@dataclass(frozen=True, slots=True, eq=False)
class ServedStep:
    """
    What a step came to.

    Parameters
    ----------
    step
        Counted from zero.
    completions
        Those kept of the groups that are complete now and were not before, group by group in the order in
        which these were; ``index`` is the request's position in the plan, ``versions`` says in which steps,
        counted from zero, how many of its tokens were drawn.
    unfinished
        Completions that go on in the next step.
    seconds
        By the plan's cost model.
    """

    step: int
    completions: tuple[Completion, ...]
    unfinished: int
    seconds: float

    @property
    def staleness(self) -> float:
        """Steps between the draw of a kept token and now, on average."""
        ages = [(self.step - at) * count for one in self.completions for at, count in one.versions]
        return sum(ages) / max(1, sum(len(one.completion_ids) for one in self.completions))


class PlannedSteps:
    """
    The steps of a plan, each served as the caller asks for it: weights may change in place between two.

    An iterator of :class:`ServedStep`. A step that breaks off (Ctrl-C, a failure of the model or of
    ``on_completion``) is served again by the next call, its completions drawn from the same random streams;
    ``on_completion`` is told of them again. Only a plan that keeps KV caches cannot go on after its first.

    Parameters
    ----------
    engine
        Holds the model that is trained, and has the plan's number of slots.
    plan
        What to serve, as ``batchbound plan --steps`` makes it.
    prompts
        Of each request, in the plan's order: text, token ids or messages.
    sampling
        How tokens are chosen: one for all, or one for each; each completion has a random stream of its own.
    known
        What is known of lengths beforehand, :func:`~batchbound.planning.steps.known_lengths` of the plan.
    max_tokens
        Tokens after which a completion ends; the plan's longest completion by default.
    log_probabilities
        Whether completions carry those of their tokens, as drawn.
    on_completion
        Called with each completion that is kept, as it ends.

    Raises
    ------
    InputError
        If plan, prompts and model do not belong together.
    ValueError
        If a parameter contradicts the plan.
    """

    def __init__(
        self,
        engine: LLM,
        plan: StepsPlan,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = Sampling(temperature=1.0),  # noqa: B008
        *,
        known: Known = NOTHING,
        max_tokens: int | None = None,
        log_probabilities: bool | LogprobsMode = False,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> None:
        if not isinstance(plan, StepsPlan):
            raise TypeError(f"plan is {shown(plan)}: give StepsPlan.load of its file")
        asked = each_asked(sampling, {}, {}, len(prompts), log_probabilities)
        if any(one.n != 1 for one in asked):
            raise ValueError("n has no effect here: the plan has each completion as a request of its own")
        asked = ended_by_tokens(asked, engine.tokenizer, vocabulary_of(engine.model))
        slots = plan.problem.slots
        if slots != engine.slots:
            raise ValueError(f"the plan is for {slots} slots, the engine has {engine.slots}: give it as many")
        most = plan.longest if max_tokens is None else max_tokens
        if most is None:
            raise ValueError("say max_tokens: the plan has no longest completion")
        if plan.longest is not None and most != plan.longest:
            raise ValueError(
                f"max_tokens is {most}, and the plan's longest completion has {plan.longest} tokens"
            )
        self._prompts = engine.encoded(prompts, {})
        self._tier = engine.tier
        job = StepsJob(
            plan,
            self._prompts,
            asked,
            np.full(len(prompts), most, dtype=np.int64),
            engine.model,
            engine.tokenizer,
            known,
            self._tier,
            engine.kv_tokens,
        )
        self._steps, self._asked, self._engine = LiveSteps(job), asked, engine
        self._eos, self._on_completion = end_tokens(engine.model, engine.tokenizer), on_completion
        self._groups = _WholeGroups(plan)
        self._sample = place_in_group(group_numbers(plan.problem)[0])

    def __iter__(self) -> Iterator[ServedStep]:
        return self

    def __next__(self) -> ServedStep:
        """
        Serve the next step to its end.

        Raises
        ------
        RunStoppedError
            If the model fails, memory does not hold one request, or the KV cache of what goes on was lost
            with a step that was broken off.
        ValueError
            If the model's forward is not the one of before.
        Exception
            Whatever ``on_completion`` raises.
        """
        if self._engine.tier is not self._tier:
            raise ValueError("the model's forward has changed since: make PlannedSteps after it is wrapped")
        done: list[Completion] = []
        raised: list[Exception] = []

        def ended(one: Ended) -> None:
            if one.kept:
                done.append(self._completion(one))
                if self._on_completion is not None:
                    try:
                        self._on_completion(done[-1])
                    except Exception as error:
                        raised.append(error)
                        raise

        try:
            if not self._steps.advance(ended):
                raise StopIteration
        except RunStoppedError:
            # What the caller's own code raises is no failure of the model.
            if raised:
                raise raised[0] from None
            raise
        run = self.run
        # A group that was not complete as a round ended begins again, and none of it is kept.
        self._groups.take(one for one in done if run.ended[one.index] >= 0)
        whole = tuple(self._groups.give(self._groups.ready))
        return ServedStep(len(run.seconds) - 1, whole, len(self._steps.unfinished), float(run.seconds[-1]))

    @property
    def run(self) -> StepsRun:
        """What the steps so far came to, by the plan's cost model."""
        return self._steps.run

    @property
    def kept(self) -> dict[str, int]:
        """Tokens of each completion kept so far, by name."""
        return self._steps.kept

    @property
    def ended(self) -> dict[str, int]:
        """These, and what ended beside the last that is kept, for ``update_steps_plan``, by name."""
        return self._steps.ended

    def _completion(self, one: Ended) -> Completion:
        asked, told = self._asked[one.request], one.told
        text, reason = Ending.of(asked, self._eos).text(one.tokens, self._engine.tokenizer.decode)
        return Completion(
            one.request,
            self._prompts[one.request],
            one.tokens,
            text,
            reason,
            None if told is None else tuple(each.value for each in told),
            tuple(each.likeliest[: asked.logprobs] for each in told) if told and asked.logprobs else None,
            int(self._sample[one.request]),
            one.versions,
        )


def planned_rollout_function(
    engine: LLM,
    plan: StepsPlan,
    prompts: Sequence[Prompt],
    *,
    known: Known = NOTHING,
    columns: Mapping[str, Sequence[Any]] | None = None,
    logprobs: LogprobsMode = "processed",
    on_completion: Callable[[Completion], None] | None = None,
    **sampling: Any,
) -> Callable[[Sequence[Prompt], object], dict[str, Any]]:
    """
    Return a function for ``GRPOTrainer(rollout_func=...)`` that serves the steps of a plan.

    Each call serves the next step and returns the groups that are complete: the plan's own, in the order in
    which they were completed, and not those of the trainer's prompts, of which only the number counts. A
    completion's ``columns`` take the place of the trainer's row, so that rewards are told of its own prompt;
    the argument ``prompts`` of a reward function is still the trainer's. What a step completed beyond as many
    is of the next call.

    Parameters
    ----------
    engine, plan, prompts, known, on_completion
        As :class:`PlannedSteps` takes them.
    columns
        What reward functions are told of each request, by the names of the dataset's columns, in the plan's
        order. Each group of the plan has as many requests as the trainer has generations, or with ``keep``
        at least so many.
    logprobs
        ``processed``, after temperature and truncation, is what TRL compares with its own; ``raw`` are the
        model's.
    **sampling
        As :func:`~.rollout.rollout_function` takes them.

    Returns
    -------
    callable
        Raises ValueError where a setting given here contradicts the trainer's, the trainer has several
        processes, asks for another number of completions than whole groups, or for more steps than there are.
    """
    Sampling(**sampling)
    given = {} if columns is None else dict(columns)
    for name, values in given.items():
        if name in Rollout.__annotations__:
            raise ValueError(f"the column {name!r} has the name of what a rollout returns: rename it")
        if len(values) != len(prompts):
            raise ValueError(f"the column {name!r} has {len(values)} values for {len(prompts)} requests")
    groups, steps = _WholeGroups(plan), list[PlannedSteps]()

    def rollout(asked: Sequence[Prompt], trainer: object = None) -> dict[str, Any]:
        settings = RolloutSettings.of(trainer, plan.longest, sampling)
        refuse_other_model(trainer, engine)
        if int(getattr(getattr(trainer, "args", None), "world_size", 1)) > 1:
            raise ValueError("a plan of several steps is for one process, and the trainer has several")
        if not steps:
            made = PlannedSteps(
                engine,
                plan,
                engine.encoded(prompts, settings.chat_options),
                settings.sampling,
                known=known,
                max_tokens=settings.max_tokens,
                log_probabilities=logprobs,
                on_completion=on_completion,
            )
            steps.append(made)
        while groups.ready < len(asked):
            served = next(steps[0], None)
            if served is None:
                raise ValueError(f"all {len(steps[0].run.seconds)} steps of the plan are served")
            groups.take(served.completions)
        answers = groups.give(len(asked))
        found = Rollout(
            prompt_ids=[list(one.prompt_ids) for one in answers],
            completion_ids=[list(one.completion_ids) for one in answers],
            logprobs=[list(one.log_probabilities or ()) for one in answers],
        )
        return {**found, **{name: [values[one.index] for one in answers] for name, values in given.items()}}

    return rollout


class _WholeGroups:
    """The completions of groups that are complete, in the order in which these were."""

    def __init__(self, plan: StepsPlan) -> None:
        self._group, groups = group_numbers(plan.problem)
        size = np.bincount(self._group, minlength=groups)
        self._wanted = size if plan.way.keep is None else np.minimum(size, plan.way.keep)
        self._of: dict[int, list[Completion]] = {}
        self._whole: list[list[Completion]] = []

    @property
    def ready(self) -> int:
        """Completions of whole groups that nobody was given."""
        return sum(map(len, self._whole))

    def take(self, completions: Iterable[Completion]) -> None:
        """Take what a step kept."""
        for one in completions:
            number = int(self._group[one.index])
            members = self._of.setdefault(number, [])
            members.append(one)
            if len(members) == self._wanted[number]:
                self._whole.append(self._of.pop(number))

    def give(self, count: int) -> list[Completion]:
        """Return the completions of the first groups that are whole, so many."""
        ends = np.cumsum([len(group) for group in self._whole]).tolist()
        if count and count not in ends:
            raise ValueError(f"{count} completions are asked for, which are no whole groups of the plan's")
        given = 1 + ends.index(count) if count else 0
        found, self._whole = self._whole[:given], self._whole[given:]
        return [one for group in found for one in group]
