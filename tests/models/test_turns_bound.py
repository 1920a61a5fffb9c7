"""Conversations: turns arrive when tools have answered, and no bound lies above the least makespan.

The least makespan is that of an engine that keeps the KV cache of all that it has computed or drawn.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Turns, Workload
from batchbound.executor.reports.report import report
from batchbound.heuristics.loop import execute
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulator import Simulator
from batchbound.models.bounds.conversations import longest_conversation, turns_bound

UNIT = CostModel(prefill_base=1.0, prefill_per_token=0.0, decode_base=1.0, decode_per_slot=0.0)
TOKENS = CostModel(prefill_base=0.0, prefill_per_token=1.0, decode_base=0.0, decode_per_slot=0.0)


def unlike(problem: Problem, turns: Turns) -> list[list[int]]:
    """Return paths that share nothing but the beginning of their own conversation."""
    paths: list[list[int]] = []
    for turn, before in enumerate(turns.after.tolist()):
        known = [] if before < 0 else paths[before]
        length = int(problem.prompt_tokens[turn] + problem.decode_steps[turn])
        paths.append([*known, *range(100 * turn, 100 * turn + length - len(known))])
    return paths


def job(
    inputs: list[int], outputs: list[int], after: list[int], pause: list[float], *, slots: int = 1
) -> tuple[Problem, Turns]:
    turns = Turns(np.array(after), np.array(pause))
    return Problem(Workload.from_lengths(inputs, outputs), UNIT, slots), turns


def test_a_turn_arrives_when_its_tool_has_answered() -> None:
    # One conversation of two turns, two decode steps each, and a tool of 5 s.
    problem, turns = job([1, 5], [2, 2], [-1, 0], [0.0, 5.0])
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem), turns=turns)
    assert trace.queued.tolist() == [0.0, 8.0]
    assert trace.finished.tolist() == [3.0, 11.0]


def test_a_slot_serves_others_while_a_tool_works() -> None:
    # The tool of the first conversation takes as long as the second one: 1 stage and 4 steps.
    problem, turns = job([1, 5, 1], [2, 2, 4], [-1, 0, -1], [0.0, 5.0, 0.0])
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem), turns=turns)
    assert trace.finished.tolist() == [3.0, 11.0, 8.0]
    assert turns_bound(problem, unlike(problem, turns), turns).seconds == pytest.approx(11.0)


def test_the_report_says_how_long_slots_waited_for_tools() -> None:
    problem, turns = job([1, 5], [2, 2], [-1, 0], [0.0, 5.0])
    trace = execute(problem, policy_named("fcfs", problem), Simulator(problem), turns=turns)
    bound = turns_bound(problem, unlike(problem, turns), turns)
    found = report(problem, trace, None, None, run_bound=bound, turns=turns)
    assert found.slot_seconds["waiting for tools"] == pytest.approx(5.0)
    assert found.slot_seconds["nothing has arrived"] == 0.0
    assert sum(found.slot_seconds.values()) == pytest.approx(11.0)
    assert found.run_gap == pytest.approx(0.0)


def test_the_longest_conversation_alone_is_a_bound() -> None:
    problem, turns = job([1, 5, 7], [3, 1, 2], [-1, 0, 1], [0.0, 2.0, 3.0], slots=4)
    bound = longest_conversation(problem, turns, problem.own_tokens)
    # Three stages, six steps, two pauses.
    assert bound.seconds == pytest.approx(3 + 6 + 5)
    assert bound.terms == {"turns": pytest.approx(9.0), "tools": pytest.approx(5.0)}


@pytest.mark.parametrize(
    ("after", "pause", "says"),
    [
        ([0], [0.0], "no earlier request"),
        ([-1, 2], [0.0, 0.0], "no earlier"),
        ([-1], [-1.0], "must be seconds"),
    ],
)
def test_impossible_turns_are_refused(after: list[int], pause: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Turns(np.array(after), np.array(pause))


Prefixes = set[tuple[int, ...]]


def kept(paths: list[tuple[int, ...]], state: tuple[tuple[int, float], ...]) -> Prefixes:
    """Return the beginnings that turns which run or are done have computed or drawn."""
    left = {i: int(left) for i, (kind, left) in enumerate(state) if kind in (3, 4)}
    return {paths[i][: end + 1] for i, k in left.items() for end in range(len(paths[i]) - k)}


def computed(paths: list[tuple[int, ...]], problem: Problem, chosen: tuple[int, ...], known: Prefixes) -> int:
    """Return the tokens of a stage."""
    lengths = problem.prompt_tokens.tolist()
    new = {paths[i][: end + 1] for i in chosen for end in range(lengths[i])} - known
    return len(new) + len(chosen) - len(new & {paths[i][: lengths[i]] for i in chosen})


def least_makespan(problem: Problem, paths: list[tuple[int, ...]], turns: Turns) -> float:
    """Return the optimum by Dijkstra over all states: of each turn, what it waits for or has left.

    A stage computes each beginning that was neither computed nor drawn before, and a token for each turn
    whose prompt is no new beginning.
    """
    steps, held = problem.decode_steps.tolist(), problem.kv_at_start.tolist()
    cost, followers = problem.cost, turns.followers()
    # (0, 0) waits for another, (1, t) arrives at t, (2, 0) waits, (3, k) has k steps left, (4, 0) is done.
    start = tuple((2, 0.0) if first else (0, 0.0) for first in turns.first.tolist())
    queue, seen = [(0.0, start)], set()

    def finished(state: list[tuple[int, float]], time: float) -> tuple[tuple[int, float], ...]:
        for i, (kind, left) in enumerate(state):
            if kind == 3 and left == 0:
                state[i] = (4, 0.0)
                for j in followers.get(i, ()):
                    state[j] = (1, time + float(turns.pause[j]))
        return tuple((2, 0.0) if kind == 1 and at <= time else (kind, at) for kind, at in state)

    while queue:
        time, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        running = [i for i, (kind, _) in enumerate(state) if kind == 3]
        waiting = [i for i, (kind, _) in enumerate(state) if kind == 2]
        coming = [at for kind, at in state if kind == 1]
        if all(kind == 4 for kind, _ in state):
            return time
        known = kept(paths, state)
        for count in range(1, min(len(waiting), problem.slots - len(running)) + 1):
            for chosen in combinations(waiting, count):
                end = time + cost.prefill_seconds(computed(paths, problem, chosen, known))
                after = [(3, steps[i]) if i in chosen else each for i, each in enumerate(state)]
                heapq.heappush(queue, (end, finished(after, end)))
        if running:
            kv = sum(held[i] + steps[i] - int(state[i][1]) for i in running)
            end = time + cost.decode_seconds(len(running), kv)
            after = [(3, left - 1) if i in running else (kind, left) for i, (kind, left) in enumerate(state)]
            heapq.heappush(queue, (end, finished(after, end)))
        if coming:
            heapq.heappush(queue, (min(coming), finished(list(state), min(coming))))
    raise AssertionError("a job has an end")


def drawn(rng: np.random.Generator) -> tuple[Problem, list[tuple[int, ...]], Turns]:
    """Return a tiny job: conversations, samples of equal prompts and continued completions, four in all.

    Tokens are 1 and 2, so that prompts, turns and completions of different conversations are often equal.
    """
    after, lengths, paths = list[int](), list[int](), list[tuple[int, ...]]()
    prompts = [tuple(rng.integers(1, 3, rng.integers(1, 5)).tolist()) for _ in range(2)]
    replies = [tuple(rng.integers(1, 3, rng.integers(1, 4)).tolist()) for _ in range(2)]
    while len(after) < 4:
        text = prompts[rng.integers(2)]
        if rng.random() < 0.3:
            text += replies[rng.integers(2)]
        for turn in range(min(int(rng.integers(1, 4)), 4 - len(after))):
            reply = replies[rng.integers(2)]
            after.append(len(after) - 1 if turn else -1)
            lengths.append(len(text))
            paths.append(text + reply[:-1])
            text += (*reply, int(rng.integers(1, 3)))
    cost = CostModel(
        prefill_base=float(rng.uniform(0, 2)),
        prefill_per_token=float(rng.uniform(0, 0.3)),
        decode_base=float(rng.uniform(0.1, 1)),
        decode_per_slot=float(rng.uniform(0, 0.5)),
        decode_per_kv_token=float(rng.choice([0.0, 0.05])),
        prefill_per_token_beyond=float(rng.choice([0.0, 0.4])),
        prefill_bend=2.0,
    )
    outputs = [len(path) - length + 1 for path, length in zip(paths, lengths, strict=True)]
    work = Workload.from_lengths(lengths, outputs)
    problem = Problem(work, cost, int(rng.integers(1, 4)), prefill_emits_first_token=True)
    return problem, paths, Turns(np.array(after), np.where(np.array(after) < 0, 0.0, rng.uniform(0, 3, 4)))


@pytest.mark.parametrize("seed", [52, *(pytest.param(k, marks=pytest.mark.slow) for k in range(29))])
def test_no_bound_lies_above_the_optimum_of_100_tiny_jobs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tight = equal = 0
    for _ in range(100):
        problem, paths, turns = drawn(rng)
        optimum, bound = least_makespan(problem, paths, turns), turns_bound(problem, paths, turns).seconds
        assert bound <= optimum * (1 + 1e-9)
        assert turns_bound(problem, paths).seconds <= optimum * (1 + 1e-9)
        tight += bound >= optimum * (1 - 1e-9)
        prompts = [path[:length] for path, length in zip(paths, problem.prompt_tokens, strict=True)]
        equal += len(set(prompts)) < len(prompts)
        for policy in ("fcfs", "fcfs-ski"):
            trace = execute(problem, policy_named(policy, problem), Simulator(problem), turns=turns)
            assert trace.makespan >= optimum * (1 - 1e-9)
            told = report(problem, trace, None, None, turns=turns)
            assert told.model_makespan == pytest.approx(trace.makespan)
    # The bound is no trivial one: on some jobs it is the optimum.
    assert tight >= 5
    assert equal >= 20


def test_the_least_tokens_are_those_that_some_order_computes() -> None:
    # Prompts of 3, 6, 6, 8 and 6 tokens; the last begins with the first and a token that the first draws.
    ones = (1, 1, 1, 1, 1, 1)
    paths = [(1, 1, 1, 5), (*ones, 9, 8), (*ones, 7), (*ones, 4, 4), (1, 1, 1, 5, 5, 6)]
    work = Workload.from_lengths([3, 6, 6, 8, 6], [2, 3, 2, 1, 1])
    problem = Problem(work, TOKENS, 5, prefill_emits_first_token=True)
    # In this order they compute 3, 3, 1, 2 and 2 tokens.
    assert turns_bound(problem, paths).seconds == 3 + 3 + 1 + 2 + 2


def served(seed: int) -> Any:
    """Return an engine that served 24 tiny conversations, many equal, or continued completions."""
    from batchbound.data.readers.sampling import Sampling
    from batchbound.executor.llm import LLM
    from batchbound.executor.partial import Until

    rng = np.random.default_rng(seed)
    llm = LLM.from_pretrained("tiny:speller", slots=16)
    texts = [[83, *rng.integers(48, 50, int(rng.integers(0, 3))).tolist()] for _ in range(4)]
    prompts = [texts[k] for k in rng.integers(0, 4, 24)]
    if seed % 3 == 2:
        caps = rng.integers(1, 5, 12).tolist()
        how: dict[str, Any] = {"temperature": 5.0, "ignore_eos": True}
        list(llm.generate(prompts[:12], max_tokens=caps, n=2, until=Until(finished=3), **how))
        continued = list(llm.unfinished)
        list(llm.generate([*continued, *prompts[12:]], max_tokens=[4] * (len(continued) + 12)))
        return llm
    # Each turn draws one to three tokens, and a tool returns one.
    drawn_tokens = [rng.integers(1, 4, rng.integers(1, 4)) for _ in prompts]
    ends = [np.cumsum(tokens) + np.arange(len(tokens)) for tokens in drawn_tokens]

    def next_turn(at: int, tokens: tuple[int, ...]) -> Future[Sequence[int]] | None:
        if len(tokens) >= ends[at][-1]:
            return None
        tool = Future[Sequence[int]]()
        tool.set_result([32])
        return tool

    def asked(own: set[int], heat: float) -> Sampling:
        return Sampling(temperature=heat, ignore_eos=True, stop_when=lambda tokens: len(tokens) in own)

    sampling = [asked(set(own.tolist()), float(rng.choice([0.0, 5.0]))) for own in ends]
    list(llm.converse(next_turn, prompts, sampling, max_tokens=20))
    return llm


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_bound_lies_above_the_optimum_of_what_the_engine_served(seed: int) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    llm, rng = served(seed), np.random.default_rng(seed)
    assert llm.report().run_gap >= -1e-9
    ran = llm._ran
    after = np.full(len(ran.trace), -1) if ran.turns is None else ran.turns.after
    assert (after >= 0).any() == (seed % 3 != 2)
    chains: dict[int, list[int]] = {}
    first = np.arange(len(after))
    for turn, before in enumerate(after.tolist()):
        first[turn] = turn if before < 0 else first[before]
        chains.setdefault(int(first[turn]), []).append(turn)
    equal = 0
    for _ in range(60):
        turns: list[int] = []
        for chain in rng.permutation(list(chains)).tolist():
            turns += chains[chain] if len(turns) + len(chains[chain]) <= 4 else []
        place = {turn: at for at, turn in enumerate(turns)}
        own = np.array([place.get(int(after[turn]), -1) for turn in turns])
        paths = [tuple(map(int, ran.paths[turn])) for turn in turns]
        lengths = ran.problem.prompt_tokens[turns].tolist()
        base, token, step, slot = rng.uniform(0.05, 1.0, 4).tolist()
        cost = CostModel(base, token, step, slot, decode_per_kv_token=float(rng.choice([0.0, 0.05])))
        work = Workload.from_lengths(lengths, ran.trace.tokens[turns].tolist())
        problem = Problem(work, cost, int(rng.integers(1, 4)), prefill_emits_first_token=True)
        order = Turns(own, np.where(own < 0, 0.0, rng.uniform(0, 3, len(own))))
        bound = turns_bound(problem, paths, order if (own >= 0).any() else None)
        assert bound.seconds <= least_makespan(problem, paths, order) * (1 + 1e-9)
        equal += len({path[:length] for path, length in zip(paths, lengths, strict=True)}) < len(paths)
    assert equal >= 10
