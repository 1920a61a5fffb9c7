"""Least iterations of an engine that mixes prefill and decode."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ...data.iterations import EngineLimits, IterationBound, Sequences
from .packing.lower_bounds import lifted_bound
from .tree_area import drawn_blocks, tree_area

KINDS = ("slots", "longest", "packing", "tokens", "KV")
"""Kinds of certificates, one for each argument."""


def without(*kinds: str) -> tuple[str, ...]:
    """Return all kinds but some."""
    return tuple(kind for kind in KINDS if kind not in kinds)


def iteration_bound(
    sequences: Sequences,
    limits: EngineLimits,
    *,
    summed: bool = False,
    drafts: int = 0,
    kinds: Collection[str] = KINDS,
) -> IterationBound:
    """Return a lower bound on an engine's iterations, with a certificate.

    A sequence has ``p`` prompt tokens (``s`` of them shared with another) and ``a`` generated ones. An
    iteration computes at most ``B`` tokens of at most ``S`` sequences. In any order the sequence runs in at
    least ``r = a + ceil((p - s) / B) - 1`` iterations. Sort the prompts; each shares its first ``c`` tokens
    with the one before it. Then ``sum(p - c)`` tokens differ, and each is computed at least once. The bound
    is the strongest of:

    - *slots*: the sum of ``r`` over ``S``;
    - *longest*: the largest ``r``;
    - *packing*: if no sequence needs to be evicted, sequences take slots for intervals, and a packing of them
      is no shorter than any lifted sub-instance (:func:`~.packing.lower_bounds.lifted_bound`; its
      simplest case: of ``k S + 1`` sequences ``k + 1`` share a slot);
    - *tokens*: every prompt token not cached and every generated one but the last is computed once: their
      number over ``B``;
    - *KV*: in the iteration that draws its token ``j`` a sequence holds its prompt and ``j - 1`` tokens;
      beginnings that running sequences share are held once (:func:`~.tree_area.tree_area`).

    An engine that drafts at most ``k`` tokens draws ``k + 1`` of a sequence in an iteration, so that ``a`` is
    ``ceil(a / (k + 1))`` in all arguments but *tokens*: a draft that is kept was computed, too. Only
    ``kinds`` are tried; without any, the bound is zero.
    """
    whole, sequences = sequences, sequences.drafted(drafts)
    rows = sequences.rows(limits)
    claims: list[tuple[int, str, Mapping[str, object]]] = [
        (-(-int(rows.sum()) // limits.sequences), "slots", {"kind": "slots"}),
        (int(rows.max()), "longest request", {"kind": "longest"}),
    ]
    if sequences.exact and not summed and not whole.may_run_short(limits, drafts):
        packing = lifted_bound(rows, limits.sequences)
        claims.append((packing.value, "packing", {"kind": "packing", **_named(packing.witness)}))
    computed = int((whole.prompt - whole.cached).sum() + (whole.output - 1).sum())
    claims.append((-(-computed // limits.batched_tokens), "tokens", {"kind": "tokens"}))
    if limits.blocks is not None and sequences.exact:
        claims.append((_by_memory(sequences, limits, limits.blocks), "KV", {"kind": "KV"}))
    chosen = [one for one in claims if one[2]["kind"] in kinds]
    value, source, claim = max(chosen, key=lambda one: one[0], default=(0, "nothing", {"kind": "none"}))
    return IterationBound(value, source, {**claim, "drafts": drafts} if drafts else claim)


def _by_memory(sequences: Sequences, limits: EngineLimits, blocks: int) -> int:
    if sequences.tree is not None:
        return tree_area(sequences.tree, sequences.output, limits)
    return -(-held_blocks(sequences, limits) // blocks)


def held_blocks(sequences: Sequences, limits: EngineLimits) -> int:
    """Return the blocks that sequences hold, over all drawing iterations."""
    g = limits.block_tokens
    own = sequences.prompt - sequences.cached
    # If all but the last token are cached, another prompt may hold the last one, too. Prompts of one token
    # never count as cached, but equal ones share a block of one token.
    own = np.where((own == 1) & ((sequences.cached > 0) | (g == 1)), 0, own)
    return int(drawn_blocks(own, sequences.output, g).sum())


def _named(witness: Mapping[str, object]) -> dict[str, object]:
    return {name: witness[name] for name in ("heaviest", "machines")}
