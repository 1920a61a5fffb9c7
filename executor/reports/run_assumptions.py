"""Assumptions of a bound on iterations, from servers' facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...data.claims.assumptions import (
    COLD_CACHE,
    COUNTS_ONE,
    DISTINCT,
    NO_EVICTION,
    ONE_ENGINE,
    ONE_TOKEN,
    REUSE_UNIT,
    SLOTS,
    TOKEN_BUDGET,
    WHOLE_CONTEXT,
    Assumption,
    assumed_of,
)
from ...data.iterations import EngineLimits, Sequences
from ...data.readers.server_run import ServerCount, ServerRun
from ...models.bounds.iterations import KINDS, without


@dataclass(frozen=True, slots=True)
class Claim:
    """Assumptions of a run, and the arguments that hold under them.

    assumptions: All assumptions, unused ones included.
    drafts: Most tokens that a server drafts of a sequence in an iteration; None if unknown.
    kinds: Kinds of certificates that may be claimed.
    """

    assumptions: tuple[Assumption, ...]
    drafts: int | None
    kinds: tuple[str, ...]


def claim_of(
    run: ServerRun, sequences: Sequences, limits: EngineLimits, *, budget_known: bool, kv_stated: bool
) -> Claim:
    """Return the claim that servers' facts allow."""
    token, drafts = _one_token(run.servers)
    whole = _whole_context(run, limits, kv_stated=kv_stated)
    evicts = _no_eviction(run.servers, sequences, limits, trusted=whole.basis in ("checked", "stated"))
    cold, of_prompts = _cold_cache(run, sequences), _of_prompts(run, sequences)
    kinds = [kind for kind in KINDS if drafts is not None or kind == "tokens"]
    if whole.basis not in ("checked", "stated"):
        kinds = [kind for kind in kinds if kind != "KV"]
        if limits.blocks is not None and evicts.basis == "assumed":
            kinds = [kind for kind in kinds if kind != "packing"]
    if evicts.basis == "broken":
        kinds = [kind for kind in kinds if kind != "packing"]
    if cold.basis == "broken" or any(assumption.basis == "broken" for assumption in of_prompts):
        kinds = [kind for kind in kinds if kind not in ("tokens", "KV")]
    budget = Assumption(TOKEN_BUDGET, "stated") if budget_known else None
    all_assumptions = (token, whole, _slots(run), _one_engine(run.servers), cold, *of_prompts, budget, evicts)
    return Claim(
        tuple(assumption for assumption in all_assumptions if assumption is not None), drafts, tuple(kinds)
    )


def kinds_under(assumptions: Iterable[Assumption], limits: EngineLimits) -> tuple[str, ...]:
    """Return the kinds of certificates for an unseen engine."""
    unsure = [
        assumption
        for assumption in assumptions
        if assumption.name == WHOLE_CONTEXT and assumption.basis == "assumed"
    ]
    return without("KV", "packing") if unsure and limits.blocks is not None else KINDS


def _one_token(servers: tuple[ServerCount, ...]) -> tuple[Assumption, int | None]:
    """Return the assumption of one token an iteration, and the drafts."""
    if any(server.speculates for server in servers):
        drafted = [server.drafts if server.speculates else 0 for server in servers]
        known = [drafts for drafts in drafted if drafts is not None]
        if len(known) < len(drafted):
            what = "the server drafts an unknown number of tokens: only the bound by tokens is left"
            return Assumption(ONE_TOKEN, "broken", what), None
        what = (
            f"the server drafts up to {max(known)} tokens: the bound allows for {max(known) + 1} an iteration"
        )
        return Assumption(ONE_TOKEN, "broken", what), max(known)
    without_drafts = all(server.speculates is False for server in servers)
    return Assumption(ONE_TOKEN, "checked" if without_drafts else "assumed"), 0


def _whole_context(run: ServerRun, limits: EngineLimits, *, kv_stated: bool) -> Assumption:
    """Return the assumption of whole contexts in KV.

    A metrics page shows no sliding window.
    """
    if kv_stated and limits.kv_tokens is not None:
        return Assumption(WHOLE_CONTEXT, "stated")
    known = next((assumption for assumption in run.assumptions if assumption.name == WHOLE_CONTEXT), None)
    return known or Assumption(WHOLE_CONTEXT, "assumed")


def _no_eviction(
    servers: tuple[ServerCount, ...], sequences: Sequences, limits: EngineLimits, *, trusted: bool
) -> Assumption:
    counts = [server.preemptions for server in servers]
    evicted = sum(count or 0 for count in counts)
    if evicted:
        return Assumption(NO_EVICTION, "broken", f"{evicted:,} preemptions were counted")
    if all(count == 0 for count in counts):
        return Assumption(NO_EVICTION, "checked", "no preemption was counted")
    roomy = trusted and limits.blocks is not None and not sequences.may_run_short(limits)
    return Assumption(NO_EVICTION, "checked" if roomy else "assumed")


def _slots(run: ServerRun) -> Assumption:
    filled_slots = all(server.plateau == run.slots == server.most_running for server in run.servers)
    return Assumption(SLOTS, "checked" if filled_slots else "stated")


def _one_engine(servers: tuple[ServerCount, ...]) -> Assumption:
    several = [server for server in servers if (server.engines or 1) > 1]
    if several:
        count = max(server.engines or 1 for server in several)
        what = f"{count} engines behind {several[0].url}: slots and KV cache count for each, no iterations do"
        return Assumption(ONE_ENGINE, "broken", what)
    return Assumption(ONE_ENGINE, "checked" if all(server.engines == 1 for server in servers) else "assumed")


def _of_prompts(run: ServerRun, sequences: Sequences) -> tuple[Assumption, ...]:
    """Return the assumptions about prompts of a known tree."""
    tree = sequences.tree
    if tree is None:
        return ()
    more = _more_hits(run.servers, sequences)
    if more and _began_empty(run.servers) and not _explained(run):
        return (Assumption(REUSE_UNIT, "broken", more),)
    checked = more is None and _hits(run.servers) is not None
    return tuple(
        replace(assumption, basis="checked") if checked and assumption.name == REUSE_UNIT else assumption
        for assumption in assumed_of(tree)
    )


def shares_nothing(run: ServerRun) -> bool:
    """Return whether no order of a run's requests takes prompt tokens from a prefix cache.

    A run without hits does not show it: its order may have lost every shared beginning before its reuse.
    """
    if all(server.prefix_caching is False for server in run.servers):
        return True
    shared = run.tree is not None and len(run.tree.parent)
    shared = shared or any(assumption.name == DISTINCT for assumption in run.assumptions)
    return not shared and _hits(run.servers) == 0


def _hits(servers: tuple[ServerCount, ...]) -> int | None:
    """Return the prompt tokens that came from prefix caches; None if unknown."""
    counts = [server.cached_tokens for server in servers if server.prefix_caching is not False]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _more_hits(servers: tuple[ServerCount, ...], sequences: Sequences) -> str | None:
    """Name the prompt tokens from caches, if a cold cache gives fewer; else None."""
    hits, sharable = _hits(servers), int(sequences.cached.sum())
    if hits is None or hits <= sharable:
        return None
    return f"{hits:,} prompt tokens came from the cache, and a cold cache gives {sharable:,} at most"


def _explained(run: ServerRun) -> bool:
    """Return whether repeated attempts, preemptions or other clients may explain hits of the cache."""
    preempted = any(server.preemptions != 0 for server in run.servers)
    return bool(run.retries or run.abandoned or run.failed.any() or run.tokens_of_others or preempted)


def _began_empty(servers: tuple[ServerCount, ...]) -> bool:
    return all(server.prefix_caching is False or server.looked_up_before == 0 for server in servers)


def _cold_cache(run: ServerRun, sequences: Sequences) -> Assumption:
    """Return the assumption that no prompt token came from the cache of earlier jobs.

    It is :data:`COUNTS_ONE` if that is likely, or if no tree tells what the prompts share.
    """
    if _hits(run.servers) == 0 and (sequences.tree is not None or shares_nothing(run)):
        return Assumption(COLD_CACHE, "checked", "no prompt token came from a prefix cache")
    if sequences.tree is None:
        return COUNTS_ONE
    if _began_empty(run.servers):
        return Assumption(COLD_CACHE, "checked")
    more = _more_hits(run.servers, sequences)
    if more and not _explained(run):
        return Assumption(COLD_CACHE, "broken", f"{more}: {COUNTS_ONE.detail}")
    likely = more or any(server.cached_before for server in run.servers)
    return COUNTS_ONE if likely else Assumption(COLD_CACHE, "assumed")
