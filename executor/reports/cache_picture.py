"""Picture of the shared beginnings in a server's KV cache over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ...data.iterations import EngineLimits
from ...data.prefix_tree import PrefixTree
from ...heuristics.prefixes.residence import Residence, residence, shown_nodes

_WIDTH, _LEFT, _TOP = 900.0, 190.0, 2.0

_ROW, _LABELLED = 9.0, 30
"""Height of a node, and the most nodes with labels on each."""

_MOST_REQUESTS = 20_000
"""Most requests to draw; more take seconds to simulate."""


SentOrder = tuple[str, Sequence[int], Sequence[int] | None]
"""Name of an order, its requests, and the completions after which each is sent; None if all wait."""


@dataclass(frozen=True, slots=True, eq=False)
class CachePicture:
    """Nodes of a tree of prompts, and when each was in the cache.

    labels: Tokens of each node and requests below it.
    depth: Nodes above each node, shape (nodes,).
    runs: Simulated runs, on one clock.
    """

    labels: tuple[str, ...]
    depth: tuple[int, ...]
    runs: tuple[Residence, ...]

    @classmethod
    def of(
        cls,
        tree: PrefixTree,
        output: Sequence[int],
        limits: EngineLimits,
        orders: Sequence[SentOrder],
    ) -> CachePicture | None:
        """Simulate orders; return None for a job without nodes, or one too large."""
        nodes = shown_nodes(tree, limits.block_tokens).tolist()
        if not nodes or len(tree) > _MOST_REQUESTS:
            return None
        below, depth, parents = tree.requests_below.tolist(), list[int](), tree.parent.tolist()
        for parent in parents:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        labels = tuple(f"{int(tree.tokens[node]):,} tokens, {below[node]:,} requests" for node in nodes)
        lengths = np.asarray(output, dtype=np.int64)
        runs = tuple(residence(name, tree, lengths, limits, order, after) for name, order, after in orders)
        return cls(labels, tuple(depth[node] for node in nodes), runs)

    def drawn(self) -> Iterator[tuple[str, float, list[str]]]:
        """Yield each run's title, height and SVG elements."""
        end = max(int(run.at[-1]) for run in self.runs)
        for run in self.runs:
            title = (
                f"{run.name}: {int(run.at[-1]):,} iterations, {run.prompt_tokens:,} prompt tokens computed"
            )
            height = _TOP + _ROW * len(self.labels) + 6
            yield title, height, [*self._named(), *self._bars(run, (_WIDTH - _LEFT - 20) / max(1, end))]

    def _named(self) -> Iterator[str]:
        if len(self.labels) > _LABELLED:
            return
        for row, (label, depth) in enumerate(zip(self.labels, self.depth, strict=True)):
            y = _TOP + _ROW * row + 7
            yield f'<text x="{8 + 8 * depth}" y="{y:.0f}" style="font-size:8px">{escape(label)}</text>'

    def _bars(self, run: Residence, scale: float) -> Iterator[str]:
        """Yield a bar for each stretch in which a node is held, kept, or kept in part."""
        # Held nodes are dark, kept ones paler, those evicted in part paler still.
        shade = np.where(run.held, 1.0, np.where(run.kept >= 1, 0.45, np.where(run.kept > 0, 0.2, 0.0)))
        for row in range(len(self.labels)):
            column, y = shade[1:, row], _TOP + _ROW * row
            changes = np.flatnonzero(np.diff(column)) + 1
            for begin, until in zip([0, *changes], [*changes, len(column)], strict=True):
                if not column[begin]:
                    continue
                x, width = _LEFT + scale * run.at[begin], scale * (run.at[until] - run.at[begin])
                yield (
                    f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(0.4, width):.1f}" height="{_ROW - 2:.0f}"'
                    f' fill="var(--c0)" fill-opacity="{column[begin]:g}"/>'
                )
