"""Independent counts of a tree of shared beginnings, or of the prompts themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...data.iterations import EngineLimits
from ...data.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Tree of shared beginnings as lists, with what each prompt continues.

    parents, tokens: Parent and tokens of each node; parents come first.
    leaf, own: Last node and own tokens of each request.
    continues: Longest prompt that begins each request's, of equal ones the one before; -1 for none.
    """

    unit: int
    parents: list[int]
    tokens: list[int]
    leaf: list[int]
    own: list[int]
    continues: list[int]

    @classmethod
    def of_tree(cls, tree: PrefixTree) -> Beginnings:
        """Return the tree of a plan."""
        columns = (tree.parent, tree.tokens, tree.leaf, tree.own, tree.continues)
        return cls(tree.unit, *(column.tolist() for column in columns))

    @classmethod
    def of_prompts(
        cls, prompts: Sequence[Sequence[int]], identities: Sequence[Hashable] | None, unit: int
    ) -> Beginnings:
        """Return the tree of prompts, a node for each unit that two of them reuse.

        A node is named by the one before it and its token ids, so no two prompts are compared.
        """
        named: dict[Hashable, int] = {}
        paths = list[list[int]]()
        for request, prompt in enumerate(prompts):
            node, path = -1, list[int]()
            owner = None if identities is None else identities[request]
            # The last token is always computed.
            for begin in range(0, (len(prompt) - 1) // unit * unit, unit):
                name = (owner if node < 0 else node, node < 0, tuple(prompt[begin : begin + unit]))
                node = named.setdefault(name, len(named))
                path.append(node)
            paths.append(path)
        below = defaultdict[int, int](int)
        for path in paths:
            for node in path:
                below[node] += 1
        kept = {node: place for place, node in enumerate(node for node in named.values() if below[node] > 1)}
        parents, leaf, own = [-1] * len(kept), list[int](), list[int]()
        for prompt, path in zip(prompts, paths, strict=True):
            shared = [kept[node] for node in path if node in kept]
            for before, node in pairwise(shared):
                parents[node] = before
            leaf.append(shared[-1] if shared else -1)
            own.append(len(prompt) - unit * len(shared))
        return cls(unit, parents, [unit] * len(kept), leaf, own, _continued(prompts, identities))

    def through(self) -> list[int]:
        """Return the tokens from the root through each node."""
        totals = list[int]()
        for parent, tokens in zip(self.parents, self.tokens, strict=True):
            totals.append(tokens if parent < 0 else totals[parent] + tokens)
        return totals

    def lengths(self) -> list[int]:
        """Return the tokens of each prompt."""
        through = [*self.through(), 0]
        return [through[leaf] + own for leaf, own in zip(self.leaf, self.own, strict=True)]

    def reused(self, output: list[int]) -> tuple[list[int], list[int]]:
        """Return the prompt tokens that each request reuses in a good order, and at most."""
        lengths, through = self.lengths(), [*self.through(), 0]
        # A request at a node is counted before those below it, a shorter prompt before a longer one.
        order = sorted(range(len(lengths)), key=lambda i: (through[self.leaf[i]], lengths[i]))
        taken: set[int] = {-1}
        reused, most = [0] * len(lengths), [0] * len(lengths)
        for request in order:
            node = self.leaf[request]
            while node not in taken:
                taken.add(node)
                node = self.parents[node]
            reused[request], most[request] = through[node], through[self.leaf[request]]
        # Tokens that a prompt and those that begin it hold at their ends.
        held, shorter = [0] * len(lengths), [0] * len(lengths)
        for request in self._begun_first():
            before = self.continues[request]
            if before >= 0:
                same = lengths[before] == lengths[request]
                shorter[request] = shorter[before] if same else held[before]
                held[request] = held[before]
            held[request] = max(held[request], lengths[request] + output[request] - 1)
            generated = min(shorter[request], lengths[request] - 1) // self.unit * self.unit
            reused[request] = max(generated, reused[request])
            most[request] = max(generated, most[request])
        return reused, most

    def least_iterations(self, draws: list[int], limits: EngineLimits) -> int:
        """Return the iterations that the KV cache needs for some draws of each request."""
        if limits.blocks is None:
            return 0
        size, through = limits.block_tokens, [*self.through(), 0]
        above = [tokens // size for tokens in through]
        requests = defaultdict[int, list[int]](list)
        children = defaultdict[int, list[int]](list)
        for request, leaf in enumerate(self.leaf):
            requests[leaf].append(request)
        for node, parent in enumerate(self.parents):
            children[parent].append(node)
        held = self._held_alone(draws, size)
        needed, work, drawn = dict[int, int](), dict[int, int](), dict[int, int]()
        # Children have larger numbers than their parents; the root of all is last.
        for node in [*range(len(self.parents))[::-1], -1]:
            mine = requests[node]
            drawn[node] = sum(draws[i] for i in mine) + sum(drawn[child] for child in children[node])
            work[node] = sum(held[i] for i in mine)
            work[node] += sum(
                work[child] + (above[child] - above[node]) * needed[child] for child in children[node]
            )
            room = limits.blocks - above[node]
            needed[node] = max(
                [draws[i] for i in mine]
                + [needed[child] for child in children[node]]
                + [-(-drawn[node] // limits.sequences), -(-work[node] // room) if room > 0 else 0]
            )
        return needed[-1]

    def _held_alone(self, draws: list[int], size: int) -> list[int]:
        """Return the blocks of each request that no other can hold, over its draws."""
        lengths, through = self.lengths(), [*self.through(), 0]
        twin_of, continued, twins = dict[int, int](), set[int](), set[int]()
        for request in self._begun_first():
            before = self.continues[request]
            twin_of[request] = request
            if before >= 0 and lengths[before] == lengths[request]:
                twin_of[request] = twin_of[before]
                twins.add(twin_of[before])
            elif before >= 0:
                continued.add(twin_of[before])
        held = list[int]()
        for request, leaf in enumerate(self.leaf):
            if twin_of[request] in continued:
                held.append(0)
            elif twin_of[request] in twins:
                held.append(blocks_drawn(lengths[request] % size + 1, draws[request] - 1, size))
            else:
                whole = through[leaf] // size * size
                held.append(blocks_drawn(lengths[request] - whole, draws[request], size))
        return held

    def _begun_first(self) -> list[int]:
        """Return the requests, each after those whose prompts begin its own."""
        later = defaultdict[int, list[int]](list)
        for request, before in enumerate(self.continues):
            later[before].append(request)
        order = list(later[-1])
        for request in order:
            order.extend(later[request])
        return order


def _continued(prompts: Sequence[Sequence[int]], identities: Sequence[Hashable] | None) -> list[int]:
    """Return the longest prompt that begins each one, of equal ones the one before."""
    by_owner = defaultdict[Hashable, list[tuple[tuple[int, ...], int]]](list)
    for request, prompt in enumerate(prompts):
        by_owner[None if identities is None else identities[request]].append((tuple(prompt), request))
    continues = [-1] * len(prompts)
    for texts in by_owner.values():
        begun: list[tuple[tuple[int, ...], int]] = []
        for text, request in sorted(texts):
            # All that begin a text come before it, each begun by the one before.
            while begun and text[: len(begun[-1][0])] != begun[-1][0]:
                begun.pop()
            if begun:
                continues[request] = begun[-1][1]
            begun.append((text, request))
    return continues


def blocks_drawn(first: int, draws: int, size: int) -> int:
    """Return the blocks held over some draws, the first of them with ``first`` tokens."""
    return _blocks_below(first + draws, size) - _blocks_below(first, size)


def _blocks_below(tokens: int, size: int) -> int:
    """Return the sum of blocks for 0 to ``tokens`` - 1 tokens."""
    # k tokens take ceil(k / size) blocks: `size` numbers in a row take 1, as many take 2, and so on.
    full, rest = divmod(max(0, tokens - 1), size)
    return size * full * (full + 1) // 2 + rest * (full + 1)
