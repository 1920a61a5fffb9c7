"""Tiny jobs whose prompts share beginnings, and the optimum of the most permissive engine."""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

import numpy as np

from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.iterations import EngineLimits, IterationBound, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.simulate import simulate
from batchbound.models.bounds.fleet import fleet_bound, work_bound
from batchbound.models.bounds.iterations import KINDS, iteration_bound
from batchbound.models.bounds.least_counts import least_counts
from batchbound.models.bounds.prove import evicting_bound, proven_bound
from batchbound.models.certificates.beginnings import Beginnings
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.fleet import verify_fleet_bound
from batchbound.models.certificates.iterations import verify_iterations
from batchbound.planning.plan import make_plan
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import Limits

Text = tuple[int, ...]


@dataclass(frozen=True)
class TinyJob:
    """Prompts and the completions that they draw, for an engine that reuses whole units."""

    prompts: tuple[Text, ...]
    completions: tuple[Text, ...]
    unit: int
    limits: EngineLimits

    def rows(self, unit: int | None = None) -> Sequences:
        """Return the job for a bound, with the engine's unit or another one."""
        tree = PrefixTree.of_prompts(self.prompts, unit=self.unit if unit is None else unit)
        return Sequences(tree.prompt_tokens, np.array([len(text) for text in self.completions]), tree=tree)


def tiny_job(seed: int) -> TinyJob:
    """Draw up to five requests; some prompts are equal, or go on from what another request generated."""
    rng = np.random.default_rng(seed)
    prompts, completions = list[Text](), list[Text]()
    for request in range(int(rng.integers(2, 6))):
        kind = rng.random()
        begin: Text = ()
        if request and kind < 0.7:
            other = int(rng.integers(request))
            whole = prompts[other] + (completions[other] if kind < 0.3 else ())
            begin = whole if kind < 0.2 or kind > 0.6 else whole[: int(rng.integers(len(whole) + 1))]
        own = int(rng.integers(0 if begin else 1, 4))
        prompts.append((*begin, *rng.integers(0, 2, own).tolist())[:9])
        # Generated tokens are no two the same but where a later prompt repeats them.
        completions.append(tuple(100 * request + 10 + k for k in range(int(rng.integers(1, 5)))))
    unit, size = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    largest = max(
        -(-(len(prompt) + len(text) - 1) // size) for prompt, text in zip(prompts, completions, strict=True)
    )
    room = size * (largest + int(rng.integers(0, 4)))
    limits = EngineLimits(int(rng.integers(1, 4)), int(rng.integers(1, 9)), room, size)
    return TinyJob(tuple(prompts), tuple(completions), unit, limits)


def least_computed(job: TinyJob, warm: tuple[Text, ...] = ()) -> int:
    """Return the fewest prompt tokens that any order computes, with a cache that forgets nothing."""
    return min(_computed(job, order, warm) for order in permutations(range(len(job.prompts))))


def _computed(job: TinyJob, order: tuple[int, ...], warm: tuple[Text, ...]) -> int:
    kept, computed = list(warm), 0
    for request in order:
        prompt = job.prompts[request]
        common = max([0, *(_common(prompt, text) for text in kept)])
        computed += len(prompt) - min(common, len(prompt) - 1) // job.unit * job.unit
        # The last drawn token is never computed.
        kept.append(prompt + job.completions[request][:-1])
    return computed


def _common(one: Text, other: Text) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def least_iterations(job: TinyJob) -> int:
    """
    Return the least iterations of an engine that draws a token of any requests that fit together.

    Prompts take no time, evictions and what is put back cost nothing. Requests hold each block of equal
    beginnings once, whoever filled it.
    """
    goal = tuple(len(text) for text in job.completions)
    level, seen, count = {(0,) * len(goal)}, {(0,) * len(goal)}, 0
    while goal not in level:
        level = {after for state in level for after in draws_together(job, state, goal)} - seen
        assert level, "no schedule exists"
        seen |= level
        count += 1
    return count


def draws_together(job: TinyJob, state: tuple[int, ...], goal: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    left = [request for request, drawn in enumerate(state) if drawn < goal[request]]
    for count in range(min(len(left), job.limits.sequences), 0, -1):
        for chosen in combinations(left, count):
            if held_together(job, state, chosen) <= (job.limits.blocks or sys.maxsize):
                yield tuple(drawn + (request in chosen) for request, drawn in enumerate(state))


def held_together(job: TinyJob, state: tuple[int, ...], chosen: tuple[int, ...]) -> int:
    """Return the blocks that some requests hold while each draws its next token."""
    size, unit = job.limits.block_tokens, job.unit
    texts = [job.prompts[request] + job.completions[request][: state[request]] for request in chosen]
    blocks = set[Text]()
    alone = 0
    for place, text in enumerate(texts):
        # What lies in whole units is held once with all who have the same units.
        shared = len(text) // unit * unit // size
        blocks |= {(*text[: -(-size * (k + 1) // unit) * unit], -k) for k in range(shared)}
        # The rest is held once with a text that goes on from it, or an equal one.
        others = texts[:place] + [other for other in texts[place + 1 :] if other != text]
        if not any(other[: len(text)] == text for other in others):
            alone += -(-len(text) // size) - shared
    return len(blocks) + alone


def wrong_claims(seed: int) -> list[str]:
    """Return what bounds and checkers say falsely of one job."""
    job = tiny_job(seed)
    rows, wrong = job.rows(), list[str]()
    computed = int((rows.prompt - rows.cached).sum())
    least = least_computed(job)
    if computed > least:
        wrong.append(f"{computed} prompt tokens of {least}")
    finer = [unit for unit in range(1, job.unit) if job.unit % unit == 0]
    for unit in finer:
        fewer = job.rows(unit)
        if int((fewer.prompt - fewer.cached).sum()) > least:
            wrong.append(f"unit {unit} in place of {job.unit}")
    # The whole cache may hold anything of the tree at the start.
    rng = np.random.default_rng(seed)
    warm = tuple(prompt[: int(rng.integers(len(prompt) + 1))] for prompt in job.prompts if rng.random() < 0.5)
    # The cache holds whole units.
    units = {text[:end] for text in warm for end in range(job.unit, len(text) + 1, job.unit)}
    held = job.unit * len(units)
    if computed - held > least_computed(job, warm):
        wrong.append("a warm cache")
    optimum = least_iterations(job)
    for kind in KINDS:
        bound = iteration_bound(rows, job.limits, kinds=(kind,))
        if kind in ("slots", "longest", "KV") and _rows_alone(rows, job.limits, kind) > optimum:
            wrong.append(f"{kind}: {bound.iterations} of {optimum} iterations")
        wrong += _checked(job, rows, bound)
    return wrong


def _rows_alone(rows: Sequences, limits: EngineLimits, kind: str) -> int:
    """Return a bound without the chunks of prompts, which take no time here."""
    return iteration_bound(rows, replace(limits, batched_tokens=1000), kinds=(kind,)).iterations


def _checked(job: TinyJob, rows: Sequences, bound: IterationBound) -> list[str]:
    kind = bound.certificate["kind"]
    wrong = []
    if verify_iterations(rows, job.limits, bound) is not None:
        wrong.append(f"{kind} is refused")
    if (
        kind != "none"
        and verify_iterations(rows, job.limits, replace(bound, iterations=bound.iterations + 1)) is None
    ):
        wrong.append(f"{kind} is not refused above what it proves")
    again = Beginnings.of_prompts(job.prompts, None, job.unit)
    reused, most = again.reused(rows.output.tolist())
    if (
        reused != rows.cached.tolist() and sum(reused) != int(rows.cached.sum())
    ) or most != rows.shared.tolist():
        wrong.append("the checker's tree of the prompts reuses other tokens")
    if kind == "KV" and again.least_iterations(rows.output.tolist(), job.limits) != bound.iterations:
        wrong.append("the checker's tree of the prompts has another area")
    return wrong


def stage_job(seed: int) -> Problem:
    """Draw up to four requests for an engine of stages that holds shared beginnings once."""
    rng = np.random.default_rng(seed)
    prompts = list[Text]()
    if rng.random() < 0.3:
        # Documents in turn, each longer than what is asked of it.
        stems = [tuple([name, *rng.integers(0, 2, int(rng.integers(1, 6))).tolist()]) for name in (7, 8)]
        prompts = [(*stems[k % 2], *rng.integers(0, 2, 1).tolist()) for k in range(int(rng.integers(3, 6)))]
    for request in range(0 if prompts else int(rng.integers(2, 5))):
        begin = prompts[int(rng.integers(request))] if request and rng.random() < 0.7 else ()
        begin = begin[: int(rng.integers(len(begin) + 1))]
        prompts.append((*begin, *rng.integers(0, 2, int(rng.integers(1, 4))).tolist()))
    tree = PrefixTree.of_prompts(prompts, unit=int(rng.integers(1, 3)))
    emits = bool(rng.random() < 0.5)
    output = rng.integers(1, 4, len(prompts))
    work = replace(Workload.from_lengths(tree.prompt_tokens, output), tree=tree)
    steps = output - int(emits)
    peak = int(np.maximum(tree.prompt_tokens, tree.prompt_tokens + int(emits) + steps - 1).max())
    bend = rng.random() < 0.4
    cost = CostModel(
        float(rng.integers(0, 3)),
        float(rng.integers(0, 3)) / 4,
        1.0,
        0.125,
        decode_per_kv_token=float(rng.integers(0, 2)) / 64,
        prefill_floor=float(rng.integers(0, 3)),
        prefill_bend=3.0 if bend else 0.0,
        prefill_per_token_beyond=0.5 if bend else 0.0,
    )
    return Problem(
        work,
        cost,
        int(rng.integers(1, 4)),
        kv_capacity=peak + int(rng.integers(0, 6)) if rng.random() < 0.8 else None,
        prefill_token_cap=int(tree.prompt_tokens.max() + rng.integers(0, 4)) if rng.random() < 0.4 else None,
        prefill_emits_first_token=emits,
        prefix_cache=int(rng.integers(0, 9)) if rng.random() < 0.6 else 0,
    )


def least_seconds(problem: Problem, *, evictions: bool) -> float:
    """
    Return the fewest seconds of any schedule, by a search over all states.

    A node is computed once for good, and takes memory only while a request below it runs.
    """
    nodes = [frozenset(_path(problem, request)) for request in range(len(problem))]
    steps = tuple(problem.decode_steps.tolist())
    # Steps drawn, whether it runs, and the nodes computed so far.
    start = ((0,) * len(steps), frozenset[int](), frozenset[int](), frozenset(range(len(steps))))
    queue: list[tuple[float, int, StageState]] = [(0.0, 0, start)]
    best, count = {start: 0.0}, 0
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if not state[1] and not state[3]:
            return seconds
        if seconds > best[state]:
            continue
        for taken, after in _after(problem, nodes, steps, state, evictions=evictions):
            if seconds + taken < best.get(after, math.inf):
                best[after] = seconds + taken
                count += 1
                heapq.heappush(queue, (seconds + taken, count, after))
    raise AssertionError("no schedule exists")


StageState = tuple[tuple[int, ...], frozenset[int], frozenset[int], frozenset[int]]
"""Decode steps of each request, those that run, nodes computed, and requests that wait."""


def _after(
    problem: Problem,
    nodes: list[frozenset[int]],
    steps: tuple[int, ...],
    state: StageState,
    *,
    evictions: bool,
) -> Iterator[tuple[float, StageState]]:
    """Yield the seconds of each stage, step or eviction, and the state after it."""
    drawn, running, computed, waiting = state
    tree, first = problem.tree, int(problem.prefill_emits_first_token)
    assert tree is not None
    own = [
        int(tree.own[request]) + (drawn[request] + first if drawn[request] else 0)
        for request in range(len(steps))
    ]
    capacity, cap = problem.kv_capacity or math.inf, problem.prefill_token_cap or math.inf

    def held(requests: frozenset[int], more: int) -> int:
        shared = sum(int(tree.tokens[node]) for node in frozenset[int]().union(*(nodes[i] for i in requests)))
        return shared + sum(int(tree.own[i]) + more + drawn[i] for i in requests)

    for count in range(1, min(len(waiting), problem.slots - len(running)) + 1):
        for chosen in map(frozenset, combinations(sorted(waiting), count)):
            missing = frozenset[int]().union(*(nodes[request] for request in chosen)) - computed
            shared = sum(int(tree.tokens[node]) for node in missing)
            tokens = shared + sum(own[request] for request in chosen)
            # The cap is of first prefills: what was evicted may need more than it.
            fresh = shared + sum(own[request] for request in chosen if not drawn[request])
            if fresh > cap or held(running | chosen, 0) > capacity:
                continue
            going = running | {request for request in chosen if drawn[request] < steps[request]}
            yield (
                float(problem.cost.prefill_seconds(tokens)),
                (drawn, going, computed | missing, waiting - chosen),
            )
    if running and held(running, first) <= capacity:
        read = sum(int(problem.prompt_tokens[i]) + first + drawn[i] for i in running)
        after = tuple(count + (i in running) for i, count in enumerate(drawn))
        going = frozenset(request for request in running if after[request] < steps[request])
        yield float(problem.cost.decode_seconds(len(running), read)), (after, going, computed, waiting)
    if evictions:
        for request in running:
            yield 0.0, (drawn, running - {request}, computed, waiting | {request})


EngineState = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], frozenset[int]]
"""Steps of each request, -1 before it begins; running ones; nodes, the least recently used first; waiting."""


def least_engine_seconds(problem: Problem) -> float:
    """
    Return the fewest seconds of any schedule on our own engine, by a search over all states.

    The engine evicts no request. It computes what it does not have, holds a node once while a request below
    it runs, and drops the least recently used of the others where it lacks pages.
    """
    steps = tuple(problem.decode_steps.tolist())
    start: EngineState = ((-1,) * len(steps), (), (), frozenset(range(len(steps))))
    queue: list[tuple[float, int, EngineState]] = [(0.0, 0, start)]
    best, count = {start: 0.0}, 0
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if not state[1] and not state[3]:
            return seconds
        if seconds > best[state]:
            continue
        for taken, after in _on_engine(problem, steps, state):
            if seconds + taken < best.get(after, math.inf):
                best[after] = seconds + taken
                count += 1
                heapq.heappush(queue, (seconds + taken, count, after))
    raise AssertionError("no schedule exists")


def _on_engine(
    problem: Problem, steps: tuple[int, ...], state: EngineState
) -> Iterator[tuple[float, EngineState]]:
    """Yield the seconds of each stage or step of our own engine, and the state after it."""
    drawn, running, cache, waiting = state
    for count in range(1, min(len(waiting), problem.slots - len(running)) + 1):
        for chosen in combinations(sorted(waiting), count):
            if _held(problem, drawn, {*running, *chosen}, 0) > (problem.kv_capacity or math.inf):
                continue
            tokens, after = _begun(problem, drawn, running, cache, chosen)
            if tokens > (problem.prefill_token_cap or math.inf):
                continue
            begun = tuple(0 if i in chosen else done for i, done in enumerate(drawn))
            going = tuple(i for i in (*running, *chosen) if begun[i] < steps[i])
            left = waiting - {*chosen}
            needed = _needed(problem, {*going, *left}, going, after)
            yield float(problem.cost.prefill_seconds(tokens)), (begun, going, needed, left)
    first = int(problem.prefill_emits_first_token)
    if running and _held(problem, drawn, {*running}, first) <= (problem.kv_capacity or math.inf):
        read = sum(int(problem.prompt_tokens[i]) + first + drawn[i] for i in running)
        after = tuple(done + (i in running) for i, done in enumerate(drawn))
        kept = _dropped(problem, after, running, cache, 0)
        going = tuple(i for i in running if after[i] < steps[i])
        needed = _needed(problem, {*going, *waiting}, going, kept)
        yield float(problem.cost.decode_seconds(len(running), read)), (after, going, needed, waiting)


def _begun(
    problem: Problem,
    drawn: tuple[int, ...],
    running: tuple[int, ...],
    cache: tuple[int, ...],
    chosen: tuple[int, ...],
) -> tuple[int, tuple[int, ...]]:
    """Return the tokens that a stage computes, and the nodes in the cache after it."""
    assert problem.tree is not None
    tokens, there = 0, running
    for request in chosen:
        path = [*_path(problem, request)][::-1]
        missing = next((k for k, node in enumerate(path) if node not in cache), len(path))
        for k, node in enumerate(path):
            if node not in cache:
                # The nodes before it on this path are read from here on.
                cache = _dropped(problem, drawn, there, cache, int(problem.tree.tokens[node]), path[:k])
                cache = (*cache, node)
        cache = (*(node for node in cache if node not in path), *path[::-1])
        tokens += int(problem.tree.own[request]) + sum(int(problem.tree.tokens[v]) for v in path[missing:])
        there = (*there, request)
    # Their own tokens are taken at once, when all nodes of the stage are read.
    begun = tuple(0 if i in chosen else done for i, done in enumerate(drawn))
    return tokens, _dropped(problem, begun, there, cache, 0)


def _dropped(
    problem: Problem,
    drawn: tuple[int, ...],
    running: tuple[int, ...],
    cache: tuple[int, ...],
    more: int,
    read_too: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the nodes that stay when running requests and ``more`` tokens take their pages."""
    assert problem.tree is not None
    work = problem.workload
    longest = max((work.input_tokens + work.output_tokens).tolist())
    pages = min(problem.slots * longest, problem.kv_capacity or problem.slots * longest)
    pages += problem.slots + problem.prefix_cache
    rows = sum(int(problem.tree.own[i]) + max(1, drawn[i]) for i in running if drawn[i] >= 0)
    read = {node for request in running for node in _path(problem, request)} | set(read_too)
    kept = list(cache)
    while rows + more + sum(int(problem.tree.tokens[node]) for node in kept) > pages:
        kept.remove(next(node for node in kept if node not in read))
    return tuple(kept)


def _needed(
    problem: Problem, requests: set[int], going: Sequence[int], cache: Sequence[int]
) -> tuple[int, ...]:
    """Return the nodes of the cache that some request reads or waits for."""
    needed = {node for request in requests for node in _path(problem, request)}
    return tuple(node for node in cache if node in needed)


def _held(problem: Problem, drawn: Sequence[int], requests: set[int], more: int) -> int:
    """Return the tokens that requests hold, each node once."""
    assert problem.tree is not None
    nodes = {node for request in requests for node in _path(problem, request)}
    own = sum(int(problem.tree.own[i]) + max(0, drawn[i]) + more for i in requests)
    return own + sum(int(problem.tree.tokens[node]) for node in nodes)


def wrong_plans(seed: int) -> list[str]:
    """Return what a plan, its referee and its bound say falsely of one job in stages."""
    problem, wrong = stage_job(seed), list[str]()
    least = least_engine_seconds(problem)
    plan = make_plan(problem, limits=Limits(work=1), evicting=False)
    bound = plan.bound
    assert bound is not None
    if bound.seconds > least * (1 + 1e-9):
        wrong.append(f"no schedule takes less than {bound.seconds}, and one takes {least}")
    if plan.makespan < least * (1 - 1e-9):
        wrong.append(f"the plan takes {plan.makespan}, and no schedule less than {least}")
    if (violation := verify_bound(problem, bound)) is not None:
        wrong.append(str(violation))
    for policy in ("fcfs", "lpt-ski"):
        trace = simulate(problem, policy)
        stages = [stage for stage in trace.stages if stage.kind == "prefill"]
        if not trace.evictions:
            again = schedule_of(trace).stage_tokens(problem).tolist()
            if again != [stage.tokens for stage in stages]:
                wrong.append(
                    f"{policy}: stages compute {[s.tokens for s in stages]}, the referee says {again}"
                )
            if schedule_of(trace).check(problem) is None and trace.makespan < least * (1 - 1e-9):
                wrong.append(f"{policy} takes {trace.makespan}, and no schedule less than {least}")
    return wrong


def _path(problem: Problem, request: int) -> Iterator[int]:
    assert problem.tree is not None
    node = int(problem.tree.leaf[request])
    while node >= 0:
        yield node
        node = int(problem.tree.parent[node])


def wrong_stage_claims(seed: int) -> list[str]:
    """Return what the bounds of one job in stages and their checkers say falsely."""
    problem, wrong = stage_job(seed), list[str]()
    for name, bound, evictions in (
        ("no schedule", proven_bound(problem, repeatable=True), False),
        ("no schedule with evictions", evicting_bound(problem), True),
    ):
        least = least_seconds(problem, evictions=evictions)
        if bound.seconds > least * (1 + 1e-9):
            wrong.append(f"{name} takes less than {bound.seconds}, and one takes {least}")
        if (violation := verify_bound(problem, bound)) is not None:
            wrong.append(f"{name}: {violation}")
        terms = {**bound.terms, "decode steps": bound.terms["decode steps"] + 1}
        dearer = replace(bound, seconds=bound.seconds + 1, terms=terms)
        if verify_bound(problem, dearer) is None:
            wrong.append(f"{name}: a second more is not refused")
    whole = least_counts(replace(problem, workload=replace(problem.workload, tree=None)))
    for part, claim in (("decode_steps", {"kind": "KV tokens over capacity"}), ("growth", {"growth": {}})):
        forged = evicting_bound(problem)
        certificate = {
            **forged.certificate,
            "kind": "trivial",
            part: {"at_least": whole.decode_steps, **claim},
        }
        certificate.pop("evictions")
        if problem.kv_capacity and verify_bound(problem, replace(forged, certificate=certificate)) is None:
            wrong.append(f"{part} of whole prompts is not refused")
    return wrong


def fleet_job(seed: int) -> Fleet:
    """Draw two or three replicas, alike or not, for the requests of a job in stages."""
    problem, rng = stage_job(seed), np.random.default_rng((seed, 1))
    one = Fleet.of(problem, 1).replicas[0]
    other = replace(
        one,
        cost=replace(one.cost, decode_base=float(rng.choice([0.5, 1.0])), prefill_per_token=0.25),
        slots=int(rng.integers(1, 4)),
        busy=float(rng.choice([0.0, 0.5, 2.0])),
    )
    replicas = (one, other if rng.random() < 0.6 else one, *([one] if rng.random() < 0.2 else []))
    return Fleet(problem.workload, replicas, problem.prefill_emits_first_token)


def least_fleet_seconds(fleet: Fleet, of_one: Callable[[Problem], float]) -> float:
    """Return the fewest seconds of all ways to share the requests out."""
    met, best = dict[tuple[Replica, tuple[int, ...]], float](), math.inf
    for way in product(range(len(fleet.replicas)), repeat=len(fleet)):
        ends = [replica.busy for replica in fleet.replicas]
        for k in set(way):
            mine = [request for request, of in enumerate(way) if of == k]
            key = fleet.replicas[k], tuple(mine)
            if key not in met:
                met[key] = of_one(fleet.problem_of(k, mine))
            ends[k] += met[key]
        best = min(best, max(ends))
    return best


def wrong_fleet_claims(seed: int) -> list[str]:
    """Return what the plan of a fleet, its referee and its bounds say falsely."""
    fleet, wrong = fleet_job(seed), list[str]()
    least = least_fleet_seconds(fleet, lambda problem: least_seconds(problem, evictions=False))
    evicted = least_fleet_seconds(fleet, lambda problem: least_seconds(problem, evictions=True))
    for name, bound, of in (
        ("no schedule", fleet_bound(fleet, 0.1), least),
        ("no schedule with evictions", work_bound(fleet), evicted),
    ):
        if bound.seconds > of * (1 + 1e-9):
            wrong.append(f"{name} takes less than {bound.seconds} by {bound.source}, and one takes {of}")
        if (violation := verify_fleet_bound(fleet, bound)) is not None:
            wrong.append(f"{name}: {violation}")
        dearer = replace(bound, seconds=bound.seconds + 1, terms={**bound.terms, "requests": 1.0 + of})
        if verify_fleet_bound(fleet, dearer) is None:
            wrong.append(f"{name}: a second more is not refused")
    planned = plan_fleet(fleet, limits=Limits(work=1))
    if (broken := planned.schedule.check(fleet)) is not None:
        wrong.append(f"the plan: {broken}")
    if planned.makespan < least_fleet_seconds(fleet, least_engine_seconds) * (1 - 1e-9):
        wrong.append(f"the plan takes {planned.makespan}, less than any schedule")
    return wrong


CHECKS = (wrong_claims, wrong_stage_claims, wrong_plans, wrong_fleet_claims)
"""Checks of one seed; each returns what is false."""


def main() -> None:
    """Print the false claims about some jobs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    wrong, shares = {}, []
    for seed in range(options.first, options.first + options.jobs):
        claims = [claim for check in CHECKS for claim in check(seed)]
        if claims:
            wrong[seed] = claims
            print(f"job {seed}: {claims}", file=sys.stderr, flush=True)
        if (done := seed + 1 - options.first) % 100 == 0:
            print(
                f"{done} of {options.jobs} jobs, {len(wrong)} with false claims", file=sys.stderr, flush=True
            )
        job = tiny_job(seed)
        rows = job.rows()
        area = _rows_alone(rows, job.limits, "KV")
        shares.append(
            (int((rows.prompt - rows.cached).sum()) / least_computed(job), area / least_iterations(job))
        )
    tokens, area = np.array(shares).T
    print(
        json.dumps(
            {
                "jobs": options.jobs,
                "false": wrong,
                "prompt tokens of the optimum": round(float(tokens.mean()), 4),
                "iterations of the optimum": round(float(area.mean()), 4),
                "optimal": int((tokens == 1).sum()),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
