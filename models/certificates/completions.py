"""Independent check of a bound on completion times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...data.iterations import UNLIMITED, EngineLimits, Sequences
from ...data.objective import Aim, Goal, Objective
from ...data.schedule import Violation
from .beginnings import Beginnings

Use = tuple[float, float]
"""Part of a resource that a sequence uses, and that times the iterations from its mean use to the end."""


def verify_completions(sequences: Sequences, limits: EngineLimits, aim: Aim) -> Violation | None:
    """Return an error in a bound on an objective, or None if proven.

    Everything is counted again from the sequences, one by one, by code that shares nothing with the bound's.
    """
    claim = aim.bound.certificate
    try:
        proven = _proven(sequences, limits, aim, str(claim["kind"]), claim.get("weights"))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return Violation("a certificate is readable", f"{type(error).__name__}: {error}")
    if isinstance(proven, Violation):
        return proven
    if aim.bound.value > proven:
        what = f"it proves {proven}, the bound of the {aim.goal.objective.title} says {aim.bound.value}"
        return Violation("the certificate proves the bound", what)
    return None


def _proven(
    sequences: Sequences, limits: EngineLimits, aim: Aim, kind: str, weights: object
) -> int | Violation:
    objective, items = aim.goal.objective, _items(aim.goal, len(sequences))
    if objective.count is not None and objective.count > len(items):
        return Violation("the objective is reached", f"there are {len(items)} {objective.items}")
    shared = sequences.shared.tolist()
    if sequences.tree is not None:
        _, shared = Beginnings.of_tree(sequences.tree).reused(sequences.output.tolist())
    least: list[int] = [
        output - 1 + math.ceil((prompt - beginning) / limits.batched_tokens)
        for prompt, output, beginning in zip(
            sequences.prompt.tolist(), sequences.output.tolist(), shared, strict=True
        )
    ]
    if kind == "longest":
        longest: list[int] = sorted(max(least[i] for i in members) for members in items)
        return sum(longest) if objective.count is None else longest[objective.count - 1]
    if kind == "list":
        if objective.count is not None or len(items) < len(least):
            return Violation("a certificate is of its objective", "a list of requests bounds their sum alone")
        # In turn to the slots, shortest first: the k-th to the last of a slot delays k.
        return sum(
            length * (k // limits.sequences + 1) for k, length in enumerate(sorted(least, reverse=True))
        )
    if kind == "use":
        return _by_use(sequences, limits, (objective, items), (least, shared), weights)
    return Violation("a certificate is of a known kind", f"{kind!r} is not")


def _items(goal: Goal, count: int) -> list[list[int]]:
    if goal.item is None:
        return [[i] for i in range(count)]
    members = defaultdict[int, list[int]](list)
    for i, item in enumerate(goal.item.tolist()):
        members[item].append(i)
    if len(goal.item) != count or sorted(members) != list(range(len(members))):
        raise ValueError("the requests of the completions are not numbered from zero")
    return list(members.values())


def _by_use(
    sequences: Sequences,
    limits: EngineLimits,
    of: tuple[Objective, list[list[int]]],
    counted: tuple[list[int], list[int]],
    weights: object,
) -> int | Violation:
    (objective, items), (least, shared) = of, counted
    if not isinstance(weights, Mapping) or not all(
        isinstance(weight, int | float) and 0 <= weight <= 1 for weight in weights.values()
    ):
        raise TypeError("the weights of resources are no numbers from 0 to 1")
    if math.fsum(weights.values()) > 1 + 1e-12:
        return Violation("resources are mixed", f"their weights add up to {sum(weights.values())}")
    used, late = [0.0] * len(sequences), [0.0] * len(sequences)
    for name, weight in weights.items():
        uses = _uses(name, sequences, limits, least, shared)
        if isinstance(uses, Violation):
            return uses
        for i, (part, tail) in enumerate(uses):
            used[i] += weight * part
            late[i] += weight * tail
    whole = [math.fsum(used[i] for i in members) for members in items]
    if objective.count is not None:
        return _least_whole(math.fsum(sorted(whole)[: objective.count]))
    total, passed = [], 0.0
    for part, tail in sorted((whole[k], math.fsum(late[i] for i in items[k])) for k in range(len(items))):
        # Half of its own use is over at its mean time, and the rest of its life follows.
        total.append(passed + part / 2 + max(tail / part if part else 0.0, part / 2))
        passed += part
    return _least_whole(math.fsum(total))


def _least_whole(total: float) -> int:
    return math.ceil(total - 1e-9 * (total + 1))


def _uses(
    name: str, sequences: Sequences, limits: EngineLimits, least: list[int], shared: list[int]
) -> Sequence[Use] | Violation:
    if name == "slots":
        return [(length / limits.sequences, length / limits.sequences * length / 2) for length in least]
    prompts, outputs = sequences.prompt.tolist(), sequences.output.tolist()
    if name == "tokens":
        if limits.batched_tokens >= UNLIMITED:
            return Violation("iterations", "the tokens of an iteration have no limit")
        uses = list[Use]()
        for prompt, output, beginning, part in zip(
            prompts, outputs, shared, _beginning_tokens(sequences), strict=True
        ):
            first = prompt - beginning + part
            late = first * (output - 0.5) + math.fsum(output - s + 0.5 for s in range(2, output + 1))
            uses.append(((first + output - 1) / limits.batched_tokens, late / limits.batched_tokens))
        return uses
    if name != "KV":
        raise ValueError(f"{name!r} is no resource")
    if limits.blocks is None:
        return Violation("iterations", "the KV cache has no limit")
    if not sequences.exact:
        return Violation("iterations", "KV needs the length of each completion, not their sum")
    uses, parts = list[Use](), _beginning_blocks(sequences, limits)
    for (first, skipped), output, part in zip(
        _held_alone(sequences, shared, limits), outputs, parts, strict=True
    ):
        blocks, late = part * output, part * output * output / 2
        for begin, end, count in _steps(first, output - skipped, limits.block_tokens):
            # Draws begin .. end - 1 of the rest hold as many blocks.
            blocks += count * (end - begin)
            left = output - skipped
            late += count * ((left - begin) ** 2 - (left - end) ** 2) / 2
        uses.append((blocks / limits.blocks, late / limits.blocks))
    return uses


def _steps(first: int | None, draws: int, size: int) -> Sequence[tuple[int, int, int]]:
    """Return runs of draws that hold equally many blocks: first draw, next run's, blocks."""
    runs, begin = list[tuple[int, int, int]](), 0
    while first is not None and begin < draws:
        blocks = -(-(first + begin) // size)
        end = min(draws, max(begin + 1, blocks * size - first + 1))
        runs.append((begin, end, blocks))
        begin = end
    return runs


def _held_alone(
    sequences: Sequences, shared: list[int], limits: EngineLimits
) -> list[tuple[int | None, int]]:
    """Return the tokens after the last shared block at the first draw that counts, and the draws before it.

    None for a request that may hold nothing for itself.
    """
    size = limits.block_tokens
    if sequences.tree is None:
        return [
            (None if prompt - beginning == 1 and (beginning or size == 1) else prompt - beginning, 0)
            for prompt, beginning in zip(sequences.prompt.tolist(), shared, strict=True)
        ]
    return Beginnings.of_tree(sequences.tree).held_from(size)


def _above(tree: Beginnings, request: int) -> list[int]:
    nodes, node = list[int](), tree.leaf[request]
    while node >= 0:
        nodes.append(node)
        node = tree.parents[node]
    return nodes


def _beginning_tokens(sequences: Sequences) -> list[float]:
    """Return the tokens of shared beginnings that each request is charged."""
    if sequences.tree is None or any(begun >= 0 for begun in sequences.tree.continues.tolist()):
        return [0.0] * len(sequences)
    tree = Beginnings.of_tree(sequences.tree)
    below = defaultdict[int, int](int)
    for request in range(len(sequences)):
        for node in _above(tree, request):
            below[node] += 1
    return [
        math.fsum(tree.tokens[node] / below[node] for node in _above(tree, request))
        for request in range(len(sequences))
    ]


def _beginning_blocks(sequences: Sequences, limits: EngineLimits) -> list[float]:
    """Return the blocks of shared beginnings that each request is charged at each draw."""
    if sequences.tree is None or limits.blocks is None:
        return [0.0] * len(sequences)
    tree = Beginnings.of_tree(sequences.tree)
    size, through = limits.block_tokens, tree.through()
    alone = _held_alone(sequences, [], limits)
    below = defaultdict[int, list[int]](list)
    for request in range(len(sequences)):
        first, skipped = alone[request]
        least = 0 if first is None or skipped else math.ceil(first / size)
        for node in _above(tree, request):
            below[node].append(least)
    share = dict[int, float]()
    for node, least_blocks in below.items():
        room, together = limits.blocks - through[node] // size, 0
        for blocks in sorted(least_blocks)[: limits.sequences]:
            room -= blocks
            together += room >= 0
        parent = tree.parents[node]
        above = through[parent] // size if parent >= 0 else 0
        share[node] = (through[node] // size - above) / max(1, together)
    return [math.fsum(share[node] for node in _above(tree, request)) for request in range(len(sequences))]
