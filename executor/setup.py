"""Model and scheduling of an engine's completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ..data.arrays import IntArray, numbered
from ..data.costs.cost import CostModel
from ..data.kept_beginnings import usual_prefix_cache
from ..data.prefix_tree import PrefixTree
from ..data.problem import Problem
from ..data.trace import Trace
from ..data.workload import Workload, numbered_ids
from ..heuristics.queues.queue_policy import QueuedPolicy
from ..heuristics.registry import policy_named
from ..heuristics.unknown_lengths.lengths import Known, Observed
from ..heuristics.unknown_lengths.registry import hidden_policy, without_lengths
from .draft import Draft
from .engines.tiers import Tier
from .models.sampling import STREAM
from .models.tokenizers import Tokenizer

MOST_REMEMBERED = 4096
"""Most lengths kept from earlier calls."""


@dataclass(slots=True, eq=False)
class Setup:
    """Model, limits and scheduling of an engine, of all its calls.

    policy: Policy for completions without expected lengths.
    versions: Versions of the weights so far.
    past: Most decode steps of earlier calls, and the lengths that came out.
    """

    model: Any
    tokenizer: Tokenizer
    tier: Tier
    slots: int
    kv_tokens: int | None
    share_prompts: bool
    cost: CostModel
    policy: str
    versions: int = 0
    past: tuple[int, Observed] | None = None

    def new_version(self) -> int:
        """Return the number of a new version of the weights."""
        self.versions += 1
        return self.versions

    def problem(self, drafts: Sequence[Draft], slots: int, alone: Collection[int] = ()) -> Problem:
        """Return the scheduling problem of named completions.

        Drawn tokens of continued completions count as prompt; ``alone`` share no beginning.
        """
        lengths = np.array([len(draft.prompt) for draft in drafts])
        begun = np.array([len(draft.begun) for draft in drafts])
        expected = np.array([draft.expected for draft in drafts])
        workload = Workload.from_lengths(lengths + begun, np.maximum(1, expected - begun))
        workload = replace(workload, ids=np.array([draft.name for draft in drafts], dtype=np.object_))
        if self.share_prompts:
            shared = np.setdiff1d(np.arange(len(drafts)), list(alone))
            workload = _sharing(workload, [drafts[at].prompt for at in shared], shared)
        longest = int((workload.input_tokens + workload.output_tokens).max())
        fitting = slots if self.kv_tokens is None else min(slots, self.kv_tokens // longest)
        # On the host memory is ample: kept prompts may take as much again as the slots.
        roomy = self.kv_tokens is None and self.model.device.type == "cpu"
        kept = usual_prefix_cache(workload, fitting, 1.0 if roomy else 0.25)
        if kept and self.kv_tokens is not None:
            kept = max(kept, self.kv_tokens - slots * longest)
        return Problem(workload, self.cost, slots, prefill_emits_first_token=True, prefix_cache=kept)

    def queue(self, drafts: Sequence[Draft], problem: Problem, *, stated: bool) -> QueuedPolicy:
        """Return a fresh policy; with ``stated`` the longest expected are served first."""
        if stated:
            return cast("QueuedPolicy", policy_named("lpt-ski", problem))
        longest = _most_steps(drafts)
        past = self.past[1] if self.past is not None and self.past[0] == longest else None
        workload = replace(problem.workload, group=_groups(drafts), tree=None)
        seen = without_lengths(replace(problem, workload=workload, prefix_cache=0))
        return hidden_policy(self.policy, seen, Known(longest, past=past))

    def remember(self, drafts: Sequence[Draft], trace: Trace | None) -> None:
        """Remember the lengths of a whole call."""
        if trace is None or any(draft.partial for draft in drafts) or len(trace) > len(drafts):
            return
        longest, group, steps = _most_steps(drafts), _groups(drafts), trace.tokens - 1
        if self.past is not None and self.past[0] == longest:
            before = self.past[1]
            group = np.concatenate((before.group, group + int(before.group.max()) + 1))
            steps = np.concatenate((before.tokens, steps))
        group, steps = group[-MOST_REMEMBERED:], steps[-MOST_REMEMBERED:]
        self.past = longest, Observed(group, steps, np.ones(len(group), dtype=np.bool_))


def name_streams(drafts: Sequence[Draft], first: int) -> None:
    """Name the random stream of each completion; a continued one keeps its name.

    first: Number of completions before, with names of their own.
    """
    partials = [draft.partial for draft in drafts if draft.partial]
    kept = {partial.name for partial in partials}
    if len(kept) < len(partials):
        raise ValueError("the same unfinished completion is among the prompts twice: leave one out")
    for name, draft in zip(numbered_ids(len(drafts)).tolist(), drafts, strict=True):
        while name in kept:
            name += "'"
        name = draft.partial.name if draft.partial else name
        draft.name = f"{first}{STREAM}{name}" if first else name


def _sharing(workload: Workload, prompts: Sequence[Sequence[int]], requests: IntArray) -> Workload:
    """Return the workload with the beginnings that the prompts of some requests share."""
    if not prompts:
        return workload
    tree = PrefixTree.of_prompts(prompts).worth_keeping()
    leaf, own = np.full(len(workload), -1), workload.input_tokens.copy()
    leaf[requests], own[requests] = tree.leaf, own[requests] - tree.shared_tokens
    return workload.with_tree(PrefixTree(tree.parent, tree.tokens, leaf, own))


def _most_steps(drafts: Sequence[Draft]) -> int:
    return max(1, max(draft.most for draft in drafts) - 1)


def _groups(drafts: Sequence[Draft]) -> IntArray:
    """Return each completion's number, equal for equal prompts; a continued one has its own."""
    return numbered(at if draft.partial else draft.prompt for at, draft in enumerate(drafts))
