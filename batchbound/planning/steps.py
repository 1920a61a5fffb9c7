"""Plans over several steps of rollouts: the way of least expected time that the user permits."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..data.costs.cost import IntArray
from ..data.files.disk import InputError
from ..data.files.jsonl import file_digest
from ..data.fleet import Fleet
from ..data.lengths.steps_plan import BARRIER, Interval, StepsExpectation, StepsPlan, Way
from ..data.plan import Provenance
from ..data.problem import Problem
from ..heuristics.queues.queue_policy import QueuedPolicy
from ..heuristics.unknown_lengths.lengths import Known
from ..heuristics.unknown_lengths.oracles import told_lengths, told_tendencies
from ..heuristics.unknown_lengths.queues import group_numbers
from ..heuristics.unknown_lengths.registry import CHOSEN, hidden_policy, without_lengths, without_sharing
from ..heuristics.unknown_lengths.steps import StepsRun, reached_tokens, simulate_steps
from ..models.bounds.fleet import work_bound
from ..models.bounds.makespan import best_bound
from ..solvers.result import Limits
from .hidden import MANY, SAMPLES, SAMPLES_OF_MANY
from .history import History, read_history
from .predictive import Seen

UNLIMITED = Limits()

LOOKS = 7
"""Sampled sets of lengths over which ways are compared."""

FEWEST_SAMPLES = 19
"""Sets of lengths gone through whatever the time limit; of so many the first from either end is the limit."""

LOOKING = 0.4
"""Share of the time limit after which ways are compared no more."""

WORTH_MORE_AHEAD = 3e-3
"""Relative mean time by which a way must beat one that begins fewer completions ahead."""

FIRST_COME = "fcfs"
POLICIES = (CHOSEN, "fcfs-ski", FIRST_COME)
"""Compared where the user names none."""


def make_steps_plan(
    problem: Problem,
    step: IntArray,
    history: History,
    permitted: Way = BARRIER,
    *,
    policy: str | None = None,
    longest: int | None = None,
    limits: Limits = UNLIMITED,
    provenance: Provenance | None = None,
) -> StepsPlan:
    """
    Return a plan of several steps of rollouts whose lengths nobody knows.

    What becomes of unfinished completions changes the data that is trained on, so that it is the user's: of
    the share permitted ahead the plan takes all, half or nothing, by mean time over the same sampled lengths,
    and never more. ``keep`` is kept to.

    Parameters
    ----------
    problem
        The requests of all steps, step by step; their lengths are not read.
    step
        The step of each, shape (requests,).
    history
        At least one earlier workload.
    permitted
        What may become of completions that are not complete at a step's end.
    policy
        A key of :data:`~batchbound.heuristics.unknown_lengths.registry.WITHOUT_LENGTHS`; by default the best
        of :data:`POLICIES`.
    longest
        Tokens after which every completion is cut; None for no limit.
    limits
        Seconds after which no more sets of lengths are gone through than there must be, and the seed that
        draws them; without seconds the same seed gives the same plan.
    provenance
        Where costs and prompts come from, which the plan records.

    Raises
    ------
    ValueError
        If the steps are not those of whole groups in their order, or an option has no effect.
    """
    blind, clock = without_lengths(problem), _Clock(limits.seconds)
    ended = np.zeros(len(problem), dtype=np.int64)
    lengths = _Lengths(blind, step, history, longest, ended, None, limits.seed)
    shares = dict.fromkeys((0.0, permitted.ahead / 2, permitted.ahead))
    ways = [
        replace(permitted, ahead=share)
        if share
        else replace(permitted, ahead=0.0, restart=False, keep_kv=False)
        for share in shares
    ]
    candidates = [(way, name) for way in ways for name in ([policy] if policy else POLICIES)]
    compared = lengths.compared(candidates, clock) if len(candidates) > 1 else {}
    way, name = _least(compared) if compared else candidates[0]
    expected = lengths.expected(way, name, clock)
    # All were compared over the same few sets, whose totals differ more than the ways do.
    named = {
        f"{other}, {text_of(one)}": seconds / compared[way, name] * expected.total.mean
        for (one, other), seconds in compared.items()
    }
    return StepsPlan(
        fleet=Fleet.of(blind, 1),
        step=np.asarray(step, dtype=np.int64),
        permitted=permitted,
        way=way,
        policy=name,
        longest=longest,
        ended=ended,
        expected=replace(expected, compared=named),
        seed=limits.seed,
        history=dict(history.files),
        provenance=provenance or Provenance(),
    )


def update_steps_plan(
    plan: StepsPlan, history: History, ended: Mapping[str, int], *, seconds: float | None = None
) -> StepsPlan:
    """
    Return a plan under way with what is to be expected now that completions have ended.

    What has ended has the length it has; what runs then, by the plan's policy replayed to the last end, is
    longer than it has reached; both say how long their groups' and steps' others are, and whole steps that
    have ended are history. Way and policy are settled.

    Parameters
    ----------
    plan
        As it was made or updated before.
    history
        The earlier workloads.
    ended
        Tokens of each completion that has ended, by name: of all that have, as the others count as under
        way or waiting.
    seconds
        After which no more sets of lengths are gone through than there must be; None for no limit.

    Raises
    ------
    ValueError
        If a name is none of the plan's, or a length is not one that a completion can have.
    """
    clock = _Clock(seconds)
    place = {name: at for at, name in enumerate(plan.fleet.workload.ids.tolist())}
    tokens = plan.ended.copy()
    for name, length in ended.items():
        if name not in place:
            raise ValueError(f"{name!r} is no request of the plan")
        if not 1 <= length <= (plan.longest or length):
            raise ValueError(f"{name!r} has {length} tokens; a completion has 1 to {plan.longest or 'any'}")
        tokens[place[name]] = length
    lengths = _Lengths(
        plan.problem, plan.step, history, plan.longest, tokens, (plan.way, plan.policy), plan.seed
    )
    return replace(plan, ended=tokens, expected=lengths.expected(plan.way, plan.policy, clock))


def history_of(plan: StepsPlan) -> History:
    """
    Return the earlier completions that a plan was made with.

    Raises
    ------
    InputError
        If a file is not there, or not as it was then.
    """
    for path, digest in plan.history.items():
        if not os.path.exists(path):
            what = "has the earlier completions that the plan was made with, and is not there"
            raise InputError(what, file=path, hint="Put it back there, or plan again.")
        if file_digest(path) != digest:
            raise InputError("is not as it was when the plan was made", file=path, hint="Plan again.")
    return read_history(plan.history, plan.column)


def known_lengths(plan: StepsPlan) -> Known:
    """
    Return what a plan's policy goes by beside what it sees, as it did when the plan was made.

    Raises
    ------
    InputError
        As :func:`history_of`.
    """
    return history_of(plan).known(plan.problem, _most_steps(plan.problem, plan.longest))


def _most_steps(problem: Problem, longest: int | None) -> int | None:
    """Return the decode steps after which every completion is cut."""
    return None if longest is None else max(1, longest - int(problem.prefill_emits_first_token))


class _Clock:
    """What share of a time limit is spent; nothing of none."""

    def __init__(self, seconds: float | None) -> None:
        self._begun, self._seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        """The share, above 1 once it is over."""
        return 0.0 if self._seconds is None else (time.monotonic() - self._begun) / self._seconds


class _Lengths:
    """
    Sets of lengths that may come out, and what ways come to over them.

    Parameters
    ----------
    problem, step
        The requests of all steps, without lengths, and the step of each.
    history
        The earlier workloads.
    longest
        Tokens after which every completion is cut; None for no limit.
    ended
        Tokens of each completion that has ended, 0 for the others.
    served
        The way and the policy by which they were served, None where nothing was.
    seed
        Draws.
    """

    def __init__(
        self,
        problem: Problem,
        step: IntArray,
        history: History,
        longest: int | None,
        ended: IntArray,
        served: tuple[Way, str] | None,
        seed: int,
    ) -> None:
        self._problem, self._step = problem, np.asarray(step, dtype=np.int64)
        self._seen_by_policies = without_sharing(problem)
        over = ended > 0
        rounds = _most_steps(problem, longest)
        self._known = history.known(problem, rounds)
        seen = Seen(ended, over)
        if served is not None and over.any():
            beyond = longest or 2 * max(int(each.output_tokens.max()) for each in history.workloads)
            lengths = np.where(over, ended, max(beyond, int(ended.max())))
            made = hidden_policy(served[1], self._seen_by_policies, self._known)
            reached = reached_tokens(problem, self._step, served[0], made, lengths, over)
            seen = Seen(np.where(over, ended, reached), over)
        grown = self._grown(history, ended)
        count = SAMPLES if len(problem) <= MANY else SAMPLES_OF_MANY
        predictive, rng = grown.predictive(problem, rounds), np.random.default_rng(seed)
        self._sets = [predictive.draw(self._step, seen, rng) for _ in range(count)]
        self._under_way = served is not None
        self._ran: dict[tuple[Way, str, int], StepsRun] = {}

    def run(self, way: Way, policy: str, at: int) -> StepsRun:
        """Return what a way comes to over one set of lengths."""
        key = way, policy, at
        if key not in self._ran:
            made = hidden_policy(policy, self._seen_by_policies, self._known)
            self._ran[key] = self._simulated(way, made, at)
        return self._ran[key]

    def _simulated(self, way: Way, policy: QueuedPolicy, at: int) -> StepsRun:
        return simulate_steps(self._problem, self._step, way, policy, self._sets[at].lengths)

    def _told(self, way: Way, at: int) -> tuple[float, float]:
        """Return the seconds of policies told each group's tendency, and its lengths but not whose."""
        seen, drawn = self._seen_by_policies, self._sets[at]
        made = told_tendencies(seen, drawn.tendency), told_lengths(seen, drawn.lengths)
        first, second = (self._simulated(way, each, at).makespan for each in made)
        return first, second

    def compared(self, candidates: Sequence[tuple[Way, str]], clock: _Clock) -> dict[tuple[Way, str], float]:
        """Return the mean seconds of ways by policies over the same sets of lengths, at least one."""
        seconds: list[list[float]] = []
        for at in range(min(LOOKS, len(self._sets))):
            if at and clock.spent > LOOKING:
                break
            seconds.append([self.run(*each, at).makespan for each in candidates])
        return dict(zip(candidates, np.mean(seconds, axis=0).tolist(), strict=True))

    def expected(self, way: Way, policy: str, clock: _Clock) -> StepsExpectation:
        """Return what to expect of a way."""
        runs, first_come, bounds = list[StepsRun](), list[float](), list[float]()
        told: list[tuple[float, float]] = []
        for at, drawn in enumerate(self._sets):
            if at >= FEWEST_SAMPLES and clock.spent > 1:
                break
            runs.append(self.run(way, policy, at))
            first_come.append(self.run(BARRIER, FIRST_COME, at).makespan)
            bounds.append(self._bound(way, drawn.lengths))
            if not self._under_way:
                told.append(self._told(way, at))
        pairs = [(run, drawn.lengths) for run, drawn in zip(runs, self._sets, strict=False)]
        tendencies, lengths = zip(*told, strict=True) if told else ((), ())
        # Rounds of groups that start again are no steps, and as many as it takes.
        seconds = () if way.restart else np.array([run.seconds for run in runs]).T
        return StepsExpectation(
            total=Interval.of([run.makespan for run in runs]),
            seconds=tuple(Interval.of(each) for each in seconds),
            first_come=Interval.of(first_come),
            bound=Interval.of(bounds),
            stale_share=float(np.mean([run.stale_share for run in runs])),
            staleness=float(np.mean([run.staleness for run in runs])),
            kept_bias=float(np.mean([run.kept_bias(truth) for run, truth in pairs])),
            early_bias=float(np.mean([run.early_bias(truth) for run, truth in pairs])),
            samples=len(runs),
            told_tendencies=Interval.of(tendencies) if told else None,
            told_lengths=Interval.of(lengths) if told else None,
        )

    def _grown(self, history: History, ended: IntArray) -> History:
        """Return the history with the job's own steps of which all has ended."""
        if history.names(self._problem):
            return history
        whole = [each for each in np.unique(self._step).tolist() if (ended[self._step == each] > 0).all()]
        workload = self._problem.workload.with_output_tokens(np.maximum(1, ended))
        return History(
            (*history.workloads, *(workload.select(np.flatnonzero(self._step == each)) for each in whole))
        )

    def _bound(self, way: Way, truth: IntArray) -> float:
        """Return seconds that no schedule of these lengths beats, by the way's barriers and what it keeps."""
        problem = replace(self._problem, workload=self._problem.workload.with_output_tokens(truth))
        needed = np.ones(len(truth), dtype=np.bool_)
        if way.keep is not None:
            problem, needed = _shortest(problem, way.keep)
        if way.ahead and not (way.restart or way.keep_kv):
            # What goes on gives its slot up between two steps, as nothing does under the other bounds.
            return work_bound(Fleet.of(_only(problem, needed), 1)).seconds
        steps = [needed] if way.ahead else [needed & (self._step == each) for each in np.unique(self._step)]
        return sum(best_bound(_only(problem, mine)).seconds for mine in steps)


def _only(problem: Problem, requests: npt.NDArray[np.bool_]) -> Problem:
    return replace(problem, workload=problem.workload.select(np.flatnonzero(requests)))


def _shortest(problem: Problem, keep: int) -> tuple[Problem, npt.NDArray[np.bool_]]:
    """Return which requests are the shortest of their groups, each with its group's shortest prompt."""
    numbers, groups = group_numbers(problem)
    workload = problem.workload
    order = np.lexsort((workload.output_tokens, numbers))
    place = np.arange(len(order)) - np.searchsorted(numbers[order], numbers[order], side="left")
    shortest = np.zeros(len(order), dtype=np.bool_)
    shortest[order] = place < keep
    prompt = np.full(groups, workload.input_tokens.max())
    np.minimum.at(prompt, numbers, workload.input_tokens)
    return replace(problem, workload=replace(workload, input_tokens=prompt[numbers])), shortest


def _least(compared: Mapping[tuple[Way, str], float]) -> tuple[Way, str]:
    """Return the way and policy of least mean time; one that is further ahead must be worth it."""
    best: tuple[Way, str] | None = None
    for each, seconds in compared.items():
        more = best is not None and each[0].ahead > best[0].ahead
        if best is None or seconds < compared[best] * (1 - WORTH_MORE_AHEAD * more):
            best = each
    assert best is not None
    return best


def text_of(way: Way) -> str:
    """Return a way in words."""
    kept = "" if way.keep is None else f", {way.keep} of a group kept"
    if not way.ahead:
        return f"barrier{kept}"
    rest = "starts again" if way.restart else f"goes on, KV {'kept' if way.keep_kv else 'computed anew'}"
    return f"{way.ahead:.3g} ahead, {rest}{kept}"


def steps_of(problem: Problem, count: int) -> IntArray:
    """
    Return the step of each request where groups, as they come, are shared out evenly, shape (requests,).

    Raises
    ------
    ValueError
        If there is no step, there are more than groups, or a group's requests do not stand together.
    """
    numbers, groups = group_numbers(problem)
    if not 1 <= count <= groups:
        raise ValueError(f"{count} steps of {groups} groups: there is at least one, and each step needs one")
    changes = np.append(True, np.diff(numbers) != 0)
    if int(changes.sum()) != groups:
        raise ValueError("the requests of a group do not stand together")
    found: IntArray = (np.cumsum(changes) - 1) * count // groups
    return found
