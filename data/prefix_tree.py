"""Tree of the beginnings that prompts share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .arrays import IntArray, numbered
from .files.record import Positive

_TOKEN_BYTES = 3
"""Bytes of a token id in a sorting key; vocabularies have fewer than 2^24 tokens."""

_PIECE_BYTES = 128 * _TOKEN_BYTES
"""Bytes of a sorting key that are stored once; smaller ones share more and cost more each."""

LEAST_KEPT = 16
"""Tokens through a node, and tokens that it saves, from which an engine keeps it."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Tree of shared beginnings, with the prompts that end below them.

    A node is a run of tokens with which several prompts go on after the tokens of its parent. A prompt is the
    path from a root to its leaf, then tokens of its own. The engine reuses beginnings in whole units and
    always computes the last token of a prompt, so nodes hold whole units and each prompt has a token of its
    own at least. An engine with a smaller unit reuses more than the tree says.

    Parameters
    ----------
    parent
        Parent of each node, shape (nodes,); -1 for a root. Parents come before their children.
    tokens
        Tokens of each node, shape (nodes,); multiples of the unit.
    leaf
        Last node of each prompt, shape (requests,); -1 for none.
    own
        Tokens of each prompt after its last node, at least one, shape (requests,).
    unit
        Tokens by which the engine reuses a beginning; 1 is always safe.
    continues
        Request whose whole prompt begins this one's, shape (requests,): the longest such prompt, among equal
        prompts the one before; -1 for none. The default is none.

    Raises
    ------
    ValueError
        If a column is no such tree.
    """

    parent: IntArray
    tokens: IntArray
    leaf: IntArray
    own: IntArray
    unit: Positive = 1
    continues: IntArray = None  # type: ignore[assignment]  # filled with -1 below

    def __post_init__(self) -> None:
        if self.continues is None:
            object.__setattr__(self, "continues", np.full(len(self.leaf), -1))
        for name in ("parent", "tokens", "leaf", "own", "continues"):
            column = np.array(getattr(self, name), np.int64)
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        self._check_shapes()
        self._check_values()

    def _check_shapes(self) -> None:
        if self.parent.shape != self.tokens.shape or self.parent.ndim != 1:
            raise ValueError("a prefix tree needs a parent and tokens for each node")
        shapes = {self.leaf.shape, self.own.shape, self.continues.shape}
        if len(shapes) > 1 or self.leaf.ndim != 1 or not len(self.leaf):
            raise ValueError("a prefix tree needs a leaf and own tokens for each request, at least one")

    def _check_values(self) -> None:
        nodes, requests = len(self.parent), len(self.leaf)
        if self.unit < 1:
            raise ValueError(f"a beginning is reused by {self.unit} tokens; it must be at least one")
        for what, column, most in (
            ("the parent of node", self.parent, np.arange(nodes)),
            ("the leaf of request", self.leaf, nodes),
            ("the prompt continued by request", self.continues, requests),
        ):
            _refuse((column < -1) | (column >= most), what, column)
        _refuse((self.tokens < 1) | (self.tokens % self.unit != 0), "the tokens of node", self.tokens)
        _refuse(self.own < 1, "the own tokens of request", self.own)
        prompt, later = self.prompt_tokens, np.flatnonzero(self.continues >= 0)
        shorter = prompt[self.continues[later]] <= prompt[later]
        if not shorter.all() or _has_cycle(self.continues):
            raise ValueError("a prompt of the prefix tree continues one that it cannot begin with")

    @classmethod
    def of_prompts(
        cls,
        token_ids: Iterable[npt.ArrayLike],
        identities: Iterable[Hashable] | None = None,
        unit: int = 1,
    ) -> PrefixTree:
        """Return the tree of prompts given as token ids.

        The prompts are sorted, and each is compared with its neighbours: a million prompts of 430 tokens take
        about 30 CPU seconds, and 3 bytes a distinct token plus 300 a prompt. They are read once, so an
        iterator over arrays saves the memory of a list.

        Parameters
        ----------
        token_ids
            Token ids of each prompt.
        identities
            Anything that keeps prompts apart, such as adapter, tools, images and cache salt: prompts of
            different identities share nothing.
        unit
            Tokens by which the engine reuses a beginning.
        """
        pieces = dict[bytes, bytes]()
        keys = [_sorting_key(ids, request, pieces) for request, ids in enumerate(token_ids)]
        del pieces
        length = np.array([sum(map(len, key)) // _TOKEN_BYTES for key in keys], dtype=np.int64)
        order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
        number = np.zeros(len(keys), dtype=np.int64) if identities is None else numbered(identities)
        if len(number) != len(keys):
            raise ValueError(f"there are {len(number)} identities for {len(keys)} prompts")
        order = order[np.argsort(number[order], kind="stable")]
        common = np.zeros(len(keys), dtype=np.int64)
        for place, (before, after) in enumerate(pairwise(order.tolist()), start=1):
            if number[before] == number[after]:
                common[place] = _common_begin(keys[before], keys[after]) // _TOKEN_BYTES
        # Of a million prompts these are most of the memory, and the tree needs some of it.
        del keys
        return _of_sorted(order, length, common, unit)

    @classmethod
    def of_blocks(
        cls, blocks: Iterable[Sequence[int]], lengths: npt.ArrayLike, block_size: int
    ) -> PrefixTree:
        """Return the tree of prompts given as ids of their blocks.

        Prompts that begin with the same ids share these blocks; the unit is a block. A prompt that ends
        within a block is continued by none, as its ids do not tell.

        Parameters
        ----------
        blocks
            Ids of each prompt's blocks, with or without a last one that is not full.
        lengths
            Tokens of each prompt.
        block_size
            Tokens of a block.
        """
        length = np.array(lengths, dtype=np.int64)
        keys, tails = list[bytes](), list[int]()
        for request, (ids, tokens) in enumerate(zip(blocks, length.tolist(), strict=True)):
            whole, rest = divmod(tokens, block_size)
            if len(ids) not in (whole, whole + bool(rest)):
                raise ValueError(f"prompt {request} has {tokens} tokens in {len(ids)} blocks of {block_size}")
            keys.append(np.asarray(ids[:whole], dtype=">i8").tobytes())
            tails.append(ids[whole] if len(ids) > whole else -1)
        tail = np.array(tails, dtype=np.int64)
        order = np.lexsort((tail, length))
        order = np.array(sorted(order.tolist(), key=keys.__getitem__), dtype=np.int64)
        common = np.zeros(len(keys), dtype=np.int64)
        for place, (before, after) in enumerate(pairwise(order.tolist()), start=1):
            equal = keys[before] == keys[after] and length[before] == length[after]
            if equal and tail[before] == tail[after]:
                common[place] = length[after]
            else:
                common[place] = _common_bytes(keys[before], keys[after]) // 8 * block_size
        return _of_sorted(order, length, common, block_size)

    @classmethod
    def of_groups(
        cls, prompt_tokens: npt.ArrayLike, group: npt.ArrayLike, shared_tokens: npt.ArrayLike, unit: int = 1
    ) -> PrefixTree:
        """Return the tree of one level that a table's groups describe.

        The three columns have shape (requests,). A group's prompts share their first ``shared_tokens``, and
        are equal if these are all but one; a negative group is none.
        """
        prompt, groups, shared = (
            np.array(column, dtype=np.int64) for column in (prompt_tokens, group, shared_tokens)
        )
        equal = np.flatnonzero((groups >= 0) & (shared > 0) & (prompt == shared + 1))
        equal = equal[np.argsort(groups[equal], kind="stable")]
        same = np.flatnonzero(np.diff(groups[equal]) == 0)
        continues = np.full(len(prompt), -1, dtype=np.int64)
        continues[equal[same + 1]] = equal[same]
        shared = np.where(groups >= 0, np.minimum(shared, prompt - 1) // unit * unit, 0)
        members = np.flatnonzero(shared > 0)
        _, first, label = np.unique(groups[members], return_index=True, return_inverse=True)
        leaf = np.full(len(prompt), -1, dtype=np.int64)
        leaf[members] = np.argsort(np.argsort(first))[label]
        tokens = shared[members[np.sort(first)]]
        shared = np.where(leaf >= 0, shared, 0)
        if (shared[members] != tokens[leaf[members]]).any():
            raise ValueError("requests of a group share different numbers of tokens")
        return cls(np.full(len(tokens), -1), tokens, leaf, prompt - shared, unit, continues)

    def __len__(self) -> int:
        return len(self.leaf)

    @property
    def through(self) -> IntArray:
        """Tokens from the root through each node, shape (nodes,)."""
        through = list[int]()
        for parent, tokens in zip(self.parent.tolist(), self.tokens.tolist(), strict=True):
            through.append(tokens + (through[parent] if parent >= 0 else 0))
        return np.array(through, dtype=np.int64)

    @property
    def root(self) -> IntArray:
        """First node of each prompt, shape (requests,); -1 for none."""
        root = list[int]()
        for node, parent in enumerate(self.parent.tolist()):
            root.append(node if parent < 0 else root[parent])
        return np.array([*root, -1], dtype=np.int64)[self.leaf]

    @property
    def shared_tokens(self) -> IntArray:
        """Tokens of each prompt before its own, shape (requests,)."""
        return np.append(self.through, 0)[self.leaf]

    @property
    def prompt_tokens(self) -> IntArray:
        """Tokens of each prompt, shape (requests,)."""
        prompt: IntArray = self.own + self.shared_tokens
        return prompt

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all nodes and of all requests' own parts."""
        return int(self.tokens.sum() + self.own.sum())

    @property
    def requests_below(self) -> IntArray:
        """Requests below each node, shape (nodes,)."""
        return self.sums_below(np.ones(len(self), dtype=np.int64))

    def sums_below(self, values: IntArray) -> IntArray:
        """Return the sum below each node of a value for each request.

        The values have shape (requests,), the sums shape (nodes,).
        """
        sums = [0] * len(self.parent)
        for leaf, value in zip(self.leaf.tolist(), values.tolist(), strict=True):
            if leaf >= 0:
                sums[leaf] += value
        parents = self.parent.tolist()
        for node in reversed(range(len(parents))):
            if parents[node] >= 0:
                sums[parents[node]] += sums[node]
        return np.array(sums, dtype=np.int64)

    def depth_first(self, key: npt.ArrayLike | None = None) -> IntArray:
        """Return the place of each node in a depth-first order, shape (nodes,).

        A node comes before its children; children come by ``key``, shape (nodes,), the smallest first.
        """
        count = len(self.parent)
        keys = np.zeros(count) if key is None else np.asarray(key)
        parents = self.parent.tolist()
        size = [1] * count
        for node in reversed(range(count)):
            if parents[node] >= 0:
                size[parents[node]] += size[node]
        place, free = [0] * count, [0] * (count + 1)
        # Siblings in turn: each takes as many places as its subtree has nodes.
        order = np.lexsort((keys, self.parent)).tolist()
        for node in sorted(order, key=self._depths().__getitem__):
            parent = parents[node]
            place[node] = free[parent]
            free[parent] += size[node]
            free[node] = place[node] + 1
        return np.array(place, dtype=np.int64)

    def _depths(self) -> list[int]:
        depth = list[int]()
        for parent in self.parent.tolist():
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        return depth

    def depth_first_key(self, key: npt.ArrayLike | None = None) -> IntArray:
        """Return a sorting key of requests that keeps subtrees together.

        It is the place of each request's leaf, shape (requests,); requests without a leaf come first.
        """
        return np.append(self.depth_first(key) + 1, 0)[self.leaf]

    def reused(self, output: IntArray) -> tuple[IntArray, IntArray]:
        r"""Return the prompt tokens that a prefix cache may save.

        Sort the prompts. Prompt i has :math:`L_i` tokens, :math:`l_i` of them in common with the one before
        it. A prompt that continues others may also reuse what these generated:
        :math:`g_i = \max_j L_j + o_j - 1` tokens, where prompts j begin it and draw :math:`o_j` tokens. With
        units of B tokens, any engine with a cold cache computes at least the sum of
        :math:`L_i - B \lfloor \min(\max(l_i, g_i), L_i - 1) / B \rfloor` prompt tokens, with any order,
        chunks, evictions and recomputation.

        The proof: a unit that no request generated is first computed by a request, whole, as part of its
        prompt. Each of the requests that end in a unit computes it, since the last token is always computed.
        In sorted order a unit is new at the first prompt that holds it, which is one that ends in it if there
        is one. So the sum charges each unit as often as it is computed at least, and the rest of each prompt
        to its request.

        output: Tokens of each completion, shape (requests,).

        Returns the reused tokens of each prompt in that order, and the most that any order lets it reuse.
        """
        prompt, unit = self.prompt_tokens, self.unit
        generated = np.minimum(self._generated(prompt.tolist(), output.tolist()), prompt - 1) // unit * unit
        return np.maximum(self._before(prompt), generated), np.maximum(self.shared_tokens, generated)

    def _generated(self, prompt: list[int], output: list[int]) -> IntArray:
        """Return the most tokens of each prompt that another request may hold at its end."""
        chain = self.continues.tolist()
        reused, held = [0] * len(self), [0] * len(self)
        for request in self._shorter_first():
            before = chain[request]
            if before >= 0:
                equal = prompt[before] == prompt[request]
                reused[request] = reused[before] if equal else held[before]
            own = prompt[request] + output[request] - 1
            held[request] = max(own, held[before] if before >= 0 else 0)
        return np.array(reused, dtype=np.int64)

    def _shorter_first(self) -> list[int]:
        """Return the requests, each after those that it continues."""
        place, pointers = np.zeros(len(self) + 1, dtype=np.int64), np.append(self.continues, -1)
        place[:-1] = self.continues >= 0
        # Pointer doubling: the length of each chain of equal prompts and shorter ones.
        while (pointers >= 0).any():
            place, pointers = place + place[pointers], pointers[pointers]
        order: list[int] = np.argsort(place[:-1], kind="stable").tolist()
        return order

    def _before(self, prompt: IntArray) -> IntArray:
        """Return the tokens of each prompt in nodes that an earlier prompt of the sorted ones has."""
        parents, through, leaves = self.parent.tolist(), self.through.tolist(), self.leaf.tolist()
        seen, before = [False] * len(parents), np.zeros(len(self), dtype=np.int64)
        for request in np.lexsort((prompt, self.depth_first_key())).tolist():
            node = leaves[request]
            while node >= 0 and not seen[node]:
                seen[node] = True
                node = parents[node]
            before[request] = through[node] if node >= 0 else 0
        return before

    def worth_keeping(self, least: int = LEAST_KEPT) -> PrefixTree:
        """Return the tree of the nodes that an engine keeps.

        Fewer tokens cost more than they save, unless several prompts differ by their last token at most. A
        node that is left out adds its tokens to those below it.
        """
        through = self.through
        worth = (self.tokens * (self.requests_below - 1) >= least) & (through >= least)
        alike = self.leaf[(self.own == 1) & (self.leaf >= 0)]
        worth |= np.bincount(alike, minlength=len(worth)) > 1
        nearest = list[int]()
        for node, (parent, kept) in enumerate(zip(self.parent.tolist(), worth.tolist(), strict=True)):
            nearest.append(node if kept else nearest[parent] if parent >= 0 else -1)
        above = np.array([*nearest, -1], dtype=np.int64)
        number, depth = np.append(np.cumsum(worth) - 1, -1), np.append(through, 0)
        parent, leaf = above[self.parent[worth]], above[self.leaf]
        return replace(
            self,
            parent=number[parent],
            tokens=through[worth] - depth[parent],
            leaf=number[leaf],
            own=self.prompt_tokens - depth[leaf],
        )

    def select(self, requests: npt.ArrayLike) -> PrefixTree:
        """Return the tree of some requests, each at most once."""
        chosen = np.asarray(requests, dtype=np.int64)
        place = np.full(len(self) + 1, -1, dtype=np.int64)
        place[chosen] = np.arange(len(chosen))
        place[-1] = -1
        counts = np.bincount(chosen, minlength=len(self))
        if (counts > 1).any():
            raise ValueError(f"request {int(np.argmax(counts))} is selected more than once")
        kept = self.sums_below((counts > 0).astype(np.int64)) > 0
        renumbered = np.append(np.cumsum(kept) - 1, -1)
        parent, leaf = renumbered[self.parent[kept]], renumbered[self.leaf[chosen]]
        continues = self.continues
        # A prompt that continues one left out continues what this one continues.
        while (left_out := (continues >= 0) & (place[continues] < 0)).any():
            continues = np.where(left_out, self.continues[continues], continues)
        return replace(
            self,
            parent=parent,
            tokens=self.tokens[kept],
            leaf=leaf,
            own=self.own[chosen],
            continues=place[continues[chosen]],
        )


def _refuse(wrong: npt.NDArray[np.bool_], what: str, column: IntArray) -> None:
    if wrong.any():
        place = int(np.argmax(wrong))
        raise ValueError(f"{what} {place} of a prefix tree is {int(column[place])}")


def _has_cycle(pointers: IntArray) -> bool:
    """Return whether following the pointers never ends."""
    pointers = np.append(pointers, -1)
    for _ in range(len(pointers).bit_length() + 1):
        pointers = pointers[pointers]
    return bool((pointers >= 0).any())


def _sorting_key(token_ids: npt.ArrayLike, request: int, known: dict[bytes, bytes]) -> tuple[bytes, ...]:
    """Return pieces that sort as the token ids do; whole pieces are stored once, in ``known``."""
    text = _token_bytes(token_ids, request)
    if len(text) <= _PIECE_BYTES:
        return (text,)
    pieces = [text[begin : begin + _PIECE_BYTES] for begin in range(0, len(text), _PIECE_BYTES)]
    return (*(known.setdefault(piece, piece) for piece in pieces[:-1]), pieces[-1])


def _token_bytes(token_ids: npt.ArrayLike, request: int) -> bytes:
    """Return bytes that sort as the token ids do."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(f"prompt {request} is no list of token ids, or an empty one")
    if ids.min() < 0 or ids.max() >= 256**_TOKEN_BYTES:
        wrong = ids[(ids < 0) | (ids >= 256**_TOKEN_BYTES)]
        raise ValueError(f"prompt {request} has the token id {int(wrong[0])}, which no vocabulary has")
    # The most significant byte first.
    return ids.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - _TOKEN_BYTES :].tobytes()


def _common_begin(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """Return the number of first bytes that are equal in two sorting keys."""
    for place, (piece, another) in enumerate(zip(one, other, strict=False)):
        if piece is not another and piece != another:
            return place * _PIECE_BYTES + _common_bytes(piece, another)
    return min(sum(map(len, one)), sum(map(len, other)))


def _common_bytes(one: bytes, other: bytes) -> int:
    """Return the number of first bytes that are equal."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    differ = np.frombuffer(one, np.uint8, least) != np.frombuffer(other, np.uint8, least)
    return int(np.argmax(differ))


def _of_sorted(order: IntArray, length: IntArray, common: IntArray, unit: int) -> PrefixTree:
    """Return the tree of sorted prompts.

    order: Requests in the order of their texts, shorter ones before those that continue them.
    length: Tokens of each prompt.
    common: Tokens that each prompt in the order shares with the one before it; zero for the first.
    """
    if not len(order):
        raise ValueError("a prefix tree needs at least one prompt")
    if unit < 1:
        raise ValueError(f"a beginning is reused by {unit} tokens; it must be at least one")
    # The last token is always computed.
    reusable = (length[order] - 1) // unit * unit
    shared = common // unit * unit
    shared[1:] = np.minimum(shared[1:], np.minimum(reusable[:-1], reusable[1:]))
    deepest = np.maximum(shared, np.append(shared[1:], 0))
    parent, through, first, leaf = _nested(shared.tolist(), deepest.tolist())
    # By the first prompt below and by depth: depth first.
    nodes = np.lexsort((through, first))
    number = np.append(np.argsort(nodes), -1)
    parents = number[parent[nodes]]
    tokens = through[nodes] - np.append(through[nodes], 0)[parents]
    leaves, continues = np.empty(len(order), np.int64), np.full(len(order), -1)
    leaves[order] = number[leaf]
    _continued(order, length, common, continues)
    own = length.copy()
    own[order] -= deepest
    return PrefixTree(parents, tokens, leaves, own, unit, continues)


def _nested(shared: list[int], deepest: list[int]) -> list[IntArray]:
    """Return parent, depth and first prompt of nodes, and each prompt's node.

    shared: Tokens that each prompt shares with the one before it.
    deepest: Tokens that it shares with the one before or after it.
    """
    parent, through, first, leaf = list[int](), list[int](), list[int](), list[int]()
    path = list[int]()
    for place, (before, depth) in enumerate(zip(shared, deepest, strict=True)):
        below = -1
        while path and through[path[-1]] > before:
            below = path.pop()
        for tokens, begin in ((before, first[below] if below >= 0 else place), (depth, place)):
            if tokens > (through[path[-1]] if path else 0):
                parent.append(path[-1] if path else -1)
                through.append(tokens)
                first.append(begin)
                if below >= 0 and tokens == before:
                    # The node popped last branches off within what was one run of tokens.
                    parent[below] = len(parent) - 1
                path.append(len(parent) - 1)
        leaf.append(path[-1] if path else -1)
    return [np.array(column, dtype=np.int64) for column in (parent, through, first, leaf)]


def _continued(order: IntArray, length: IntArray, common: IntArray, continues: IntArray) -> None:
    """Write the prompt that each prompt continues."""
    lengths, path = length.tolist(), list[int]()
    for request, shared in zip(order.tolist(), common.tolist(), strict=True):
        while path and lengths[path[-1]] > shared:
            path.pop()
        if path:
            continues[request] = path[-1]
        path.append(request)
