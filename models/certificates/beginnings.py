"""Independent counts of a tree of shared beginnings, or of the prompts themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

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
        """Return the tree of prompts.

        Of sorted prompts, all between two have in common what these two have.
        """
        owners = [None] * len(prompts) if identities is None else identities
        by_owner = defaultdict[Hashable, list[tuple[tuple[int, ...], int]]](list)
        for request, prompt in enumerate(prompts):
            # The last token is always computed.
            reusable = tuple(prompt[: (len(prompt) - 1) // unit * unit])
            by_owner[owners[request]].append((reusable, request))
        parents, tokens, leaf = list[int](), list[int](), [-1] * len(prompts)
        ranges = [(sorted(texts), 0, -1) for texts in by_owner.values()]
        while ranges:
            texts, depth, node = ranges.pop()
            alike = _alike(texts[0][0], texts[-1][0]) // unit * unit if len(texts) > 1 else depth
            if alike > depth:
                parents.append(node)
                tokens.append(alike - depth)
                node = len(parents) - 1
            parts = defaultdict[tuple[int, ...], list[tuple[tuple[int, ...], int]]](list)
            for text, request in texts:
                leaf[request] = node
                if len(text) > alike and len(texts) > 1:
                    parts[text[alike : alike + unit]].append((text, request))
            ranges += [(part, alike, node) for part in parts.values()]
        own = [len(prompt) for prompt in prompts]
        found = cls(unit, parents, tokens, leaf, own, _continued(prompts, owners))
        through = [*found.through(), 0]
        return replace(found, own=[own[i] - through[leaf[i]] for i in range(len(own))])

    def tree(self) -> PrefixTree:
        """Return the tree as a plan holds it."""
        parents, tokens, leaf, own, continues = (
            np.array(column, dtype=np.int64)
            for column in (self.parents, self.tokens, self.leaf, self.own, self.continues)
        )
        return PrefixTree(parents, tokens, leaf, own, self.unit, continues)

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

    def least_iterations(self, draws: list[int], limits: EngineLimits, before: int = 0) -> int:
        """Return the iterations that the KV cache needs for some draws of each request.

        At its first draw, a request holds its prompt and ``before`` tokens.
        """
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
        held = self._held_alone(draws, size, before)
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

    def _held_alone(self, draws: list[int], size: int, before: int) -> list[int]:
        """Return the blocks of each request that no other can hold, over its draws."""
        held = list[int]()
        for (first, skipped), drawn in zip(self.held_from(size), draws, strict=True):
            if first is None:
                held.append(0)
            elif skipped:
                held.append(blocks_drawn(first, drawn - 1 + before, size))
            else:
                held.append(blocks_drawn(first + before, drawn, size))
        return held

    def held_from(self, size: int) -> list[tuple[int | None, int]]:
        """Return the tokens that each request alone holds at a draw, and the draws before that one.

        Tokens count from the last shared block on; None for a request that may hold nothing for itself.
        """
        lengths, through = self.lengths(), [*self.through(), 0]
        twin_of, continued, twins = dict[int, int](), set[int](), set[int]()
        for request in self._begun_first():
            begun = self.continues[request]
            twin_of[request] = request
            if begun >= 0 and lengths[begun] == lengths[request]:
                twin_of[request] = twin_of[begun]
                twins.add(twin_of[begun])
            elif begun >= 0:
                continued.add(twin_of[begun])
        held = list[tuple[int | None, int]]()
        for request, leaf in enumerate(self.leaf):
            if twin_of[request] in continued:
                held.append((None, 0))
            elif twin_of[request] in twins:
                # Equal prompts are one text until they hold a drawn token.
                held.append((lengths[request] % size + 1, 1))
            else:
                held.append((lengths[request] - through[leaf] // size * size, 0))
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


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of first tokens that are the same."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _continued(prompts: Sequence[Sequence[int]], owners: Sequence[Hashable]) -> list[int]:
    """Return the longest prompt that begins each one, of equal ones the one before."""
    by_owner = defaultdict[Hashable, list[tuple[tuple[int, ...], int]]](list)
    for request, prompt in enumerate(prompts):
        by_owner[owners[request]].append((tuple(prompt), request))
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
