"""Assumptions of bounds on a server's iterations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..iterations import UNLIMITED, EngineLimits
from ..prefix_tree import PrefixTree

ONE_TOKEN = "one token a sequence and iteration"
WHOLE_CONTEXT = "whole context held in KV"
SLOTS = "no more sequences at a time than slots"
ONE_ENGINE = "one engine behind each address"
COLD_CACHE = "cold prefix cache"
TOKEN_BUDGET = "token budget an iteration"
NO_EVICTION = "no request is evicted"
DISTINCT = "prompts share the stated beginnings alone"
TEXTS_DIFFER = "completions of equal prompts differ"
REUSE_UNIT = "no shorter beginning is reused"
AT_CAP = "each completion is as long as its cap"
AS_EXPECTED = "completions are as long as expected"

Basis = Literal["checked", "stated", "assumed", "broken"]


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption of a bound, and its basis.

    name: One of this module's names.
    basis: ``checked`` with the server's facts, ``stated`` by the user, ``assumed``, or ``broken``.
    detail: Evidence, in words.
    """

    name: str
    basis: Basis
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


COUNTS_ONE = Assumption(COLD_CACHE, "checked", "the bound counts one token of each prompt")
"""Assumption of a bound that no prefix cache can beat."""

_CHUNKS = (ONE_TOKEN, TOKEN_BUDGET, COLD_CACHE, DISTINCT, REUSE_UNIT)
"""Assumptions behind the least chunks of a prompt and draws of a completion."""

RELIES_ON: Mapping[str, tuple[str, ...]] = {
    "longest": _CHUNKS,
    "slots": (*_CHUNKS, SLOTS, ONE_ENGINE),
    "packing": (*_CHUNKS, SLOTS, ONE_ENGINE, NO_EVICTION),
    "tokens": (COLD_CACHE, DISTINCT, REUSE_UNIT, TOKEN_BUDGET, ONE_ENGINE),
    "KV": (ONE_TOKEN, WHOLE_CONTEXT, ONE_ENGINE, SLOTS, DISTINCT, REUSE_UNIT, TEXTS_DIFFER),
    "seconds": (ONE_TOKEN, WHOLE_CONTEXT, COLD_CACHE, DISTINCT, REUSE_UNIT, ONE_ENGINE),
}
"""Assumptions behind each kind of certificate and bound."""


def assumed_of(tree: PrefixTree) -> tuple[Assumption, ...]:
    """Return the assumptions of bounds about a tree of known prompts."""
    prompt, later = tree.prompt_tokens, tree.continues >= 0
    equal = (prompt[later] == prompt[tree.continues[later]]).any()
    # No prompt tells a larger unit.
    unit = Assumption(REUSE_UNIT, "stated", f"than {tree.unit} tokens")
    return (*([Assumption(TEXTS_DIFFER, "assumed")] if equal else []), *([unit] if tree.unit > 1 else []))


def relied_on(assumptions: Iterable[Assumption], *kinds: object) -> tuple[Assumption, ...]:
    """Return the assumptions that some kinds of certificates rely on."""
    names = {name for kind in kinds for name in RELIES_ON.get(str(kind), ())} | {AT_CAP, AS_EXPECTED}
    return tuple(assumption for assumption in assumptions if assumption.name in names)


def least_label(assumptions: Iterable[Assumption], *kinds: object) -> str:
    """Return ``proven`` if all assumptions are checked or stated."""
    assumed = any(assumption.basis == "assumed" for assumption in relied_on(assumptions, *kinds))
    # The bound allows for a broken assumption.
    return "least, if assumptions hold" if assumed else "proven least"


def stated_limits(limits: EngineLimits, *known: Assumption) -> tuple[Assumption, ...]:
    """Return the assumptions about an unseen engine with stated limits."""
    short: Basis = "assumed" if limits.kv_tokens is None else "checked"
    usual = (
        Assumption(ONE_TOKEN, "assumed"),
        Assumption(WHOLE_CONTEXT, "assumed" if limits.kv_tokens is None else "stated"),
        Assumption(SLOTS, "stated"),
        Assumption(ONE_ENGINE, "stated"),
        Assumption(COLD_CACHE, "assumed"),
        *(() if limits.batched_tokens >= UNLIMITED else (Assumption(TOKEN_BUDGET, "stated"),)),
        # An argument that needs it is used only if the KV capacity suffices.
        Assumption(NO_EVICTION, short, "" if limits.kv_tokens is None else "the KV capacity suffices"),
    )
    by_name = {assumption.name: assumption for assumption in (*usual, *known)}
    return tuple(by_name.values())


def assumed_line(assumptions: Iterable[Assumption]) -> str | None:
    """Return the assumptions without a basis in one line."""
    names = [assumption.name for assumption in assumptions if assumption.basis == "assumed"]
    return f"assuming: {', '.join(names)}" if names else None


def broken_line(assumptions: Iterable[Assumption]) -> str | None:
    """Return the broken assumptions with their evidence in one line."""
    broken = [assumption for assumption in assumptions if assumption.basis == "broken"]
    names = [str(assumption) for assumption in broken if assumption.name != COLD_CACHE]
    parts = [f"broken: {'; '.join(names)}"] if names else []
    # A warm cache is usual, as after an earlier run.
    parts += [f"the prefix cache was warm: {one.detail}" for one in broken if one.name == COLD_CACHE]
    return "; ".join(parts) or None


def blame(assumptions: Iterable[Assumption]) -> tuple[str, bool]:
    """Explain a beaten bound by its weakest assumptions.

    They are the broken, else the assumed, else the stated ones. The second value is True if all were checked:
    then the bound itself is wrong.
    """
    known = list(assumptions)
    for basis in ("broken", "assumed", "stated"):
        names = [str(assumption) for assumption in known if assumption.basis == basis]
        if len(names) == 1:
            return f"broken assumption: {names[0]}", False
        if names:
            how = "broken assumptions" if basis == "broken" else "at least one assumption is broken"
            return f"{how}: {'; '.join(names)}", False
    return "every assumption was checked, so the bound itself is wrong: please report this defect", True
