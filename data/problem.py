"""Scheduling problem of a plan: requests, costs and limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from .arrays import IntArray
from .costs.cost import CostModel
from .files.errors import check_type
from .files.shown import Shown
from .prefix_tree import PrefixTree
from .workload import Workload

if TYPE_CHECKING:
    import pandas as pd

MOST_SLOTS = 1_000_000
"""Most slots of a problem; each one takes memory."""

MOST_STEPS = 100_000_000
"""Most decode steps of a schedule; each one takes memory."""

MOST_TOKENS = 2**53
"""Largest limit: a floating-point number holds each token up to it."""

LIMITS = ("slots", "kv_capacity", "prefill_token_cap", "max_position", "prefix_cache")


class ProblemError(ValueError):
    """Error for a request that alone exceeds the problem's limits.

    request: Position of the request in the workload.
    limit: Name of the exceeded field.
    allowed: Value of the field, tokens.
    """

    def __init__(self, what: str, *, request: int, limit: str, allowed: int) -> None:
        super().__init__(f"{what}. Raise {limit} or leave the request out.")
        self.what = what
        self.request = request
        self.limit = limit
        self.allowed = allowed


def settle_limits(limits: Any) -> None:
    """Convert limits to Python integers, or raise ValueError."""
    for name in LIMITS:
        value, minimum = getattr(limits, name), int(name != "prefix_cache")
        if value is not None:
            object.__setattr__(limits, name, limit_of(name, value, minimum))
    if limits.slots > MOST_SLOTS:
        raise ValueError(f"slots is {limits.slots}; it must be at most {MOST_SLOTS:,}")


def limit_of(name: str, value: SupportsIndex, least: int) -> int:
    """Return a limit as a Python integer."""
    number = None
    # True equals 1 in Python, but is not a limit.
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = index(value)
    if number is None:
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if number > MOST_TOKENS:
        raise ValueError(f"{name} is {number}; it must be at most {MOST_TOKENS:,}")
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Problem(Shown):
    r"""Requests to serve on slots, with costs and limits.

    Parameters
    ----------
    workload
        Requests; the hybrid paper's :math:`\mathcal{I}`, :math:`N^p_i` and :math:`N^d_i`.
    cost
        Seconds of a prefill stage and of a decode step.
    slots
        Most requests in progress at a time: the paper's clients :math:`J`, the engine's batch rows.
    kv_capacity
        Most tokens of KV cache of running requests, or None for no limit. Each request counts its whole
        prompt; where the workload has a tree of beginnings, running requests hold each of them once.
    prefill_token_cap
        Most prompt tokens of one prefill stage, or None for no limit.
    max_position
        Most tokens of prompt and completion together, or None for no limit.
    prefill_emits_first_token
        True if a prefill stage yields the first token, as in engines: ``n`` tokens take ``n - 1`` decode
        steps. False for the hybrid paper's ``n`` decode steps.
    prefix_cache
        Tokens of memory for beginnings that no running request reads, in addition to the KV capacity; see
        :attr:`pages` and :class:`~batchbound.data.kept_beginnings.KeptBeginnings`.

    Raises
    ------
    TypeError
        If the workload or the cost has another type.
    ValueError
        If a limit is not a whole number of at least one (``prefix_cache``: zero), or there are more slots
        than :data:`MOST_SLOTS`.
    ProblemError
        If one request alone exceeds a limit.
    """

    workload: Workload
    cost: CostModel
    slots: int
    kv_capacity: int | None = None
    prefill_token_cap: int | None = None
    max_position: int | None = None
    prefill_emits_first_token: bool = False
    prefix_cache: int = 0
    decode_steps: IntArray = field(init=False, repr=False)

    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield requests, slots and limits."""
        yield "Problem", f"{len(self):,} requests on {self.slots:,} slots"
        yield "KV capacity, tokens", self.kv_capacity
        yield "prefill token cap", self.prefill_token_cap
        yield "positions", self.max_position
        yield "prefill stage", f"{self.cost.prefill_base:.3g} s + {self.cost.prefill_per_token:.3g} s/token"
        yield "decode step", f"{self.cost.decode_base:.3g} s + {self.cost.decode_per_slot:.3g} s/slot"

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each request, with its decode steps."""
        return self.workload.to_frame().assign(decode_steps=self.decode_steps)

    def __post_init__(self) -> None:
        check_type("workload", self.workload, Workload)
        check_type("cost", self.cost, CostModel)
        settle_limits(self)
        decode_steps = self.workload.output_tokens - int(self.prefill_emits_first_token)
        decode_steps.flags.writeable = False
        object.__setattr__(self, "decode_steps", decode_steps)
        total = self.workload.input_tokens + self.workload.output_tokens
        self._refuse(total, "max_position", "prompt and completion take {} tokens")
        self._refuse(self.kv_peak, "kv_capacity", "its KV cache takes {} tokens at the end")
        self._refuse(self.prompt_tokens, "prefill_token_cap", "its prompt takes {} tokens")

    def _refuse(self, needed: IntArray, limit: str, what: str) -> None:
        allowed = getattr(self, limit)
        if allowed is None:
            return
        over = np.flatnonzero(needed > allowed)
        if over.size:
            request = int(over[0])
            name = str(self.workload.ids[request])
            # Users state both limits together.
            cached = self.prefix_cache if limit == "kv_capacity" else 0
            rest = f" without prefix_cache = {cached}" if cached else ""
            raise ProblemError(
                f"request {name!r}: {what.format(int(needed[request]))}, more than {limit} ="
                f" {allowed}{rest} ({over.size} of {len(self.workload)} requests do not fit)",
                request=request,
                limit=limit,
                allowed=allowed,
            )

    def __len__(self) -> int:
        return len(self.workload)

    def without_arrivals(self) -> Problem:
        """Return the problem with all requests there at the start."""
        workload = self.workload.without_arrivals()
        return self if workload is self.workload else replace(self, workload=workload)

    @property
    def tree(self) -> PrefixTree | None:
        """Beginnings that running requests hold once; None if each holds its whole prompt."""
        return self.workload.tree

    @property
    def pages(self) -> int:
        """Tokens of KV cache of an engine with a tree: running requests', and beginnings for later ones.

        It has what its slots can hold, at most ``kv_capacity``, a token to come for each slot, and
        ``prefix_cache``.
        """
        longest = int((self.workload.input_tokens + self.workload.output_tokens).max())
        held = self.slots * longest
        held = held if self.kv_capacity is None else min(held, max(self.kv_capacity, longest))
        return held + self.slots + self.prefix_cache

    @property
    def prompt_tokens(self) -> IntArray:
        """Tokens of each prompt, shape (requests,); the hybrid paper's :math:`N^p_i`."""
        return self.workload.input_tokens

    @property
    def own_tokens(self) -> IntArray:
        """Unshared tokens of each prompt, at least one, shape (requests,)."""
        return self.workload.own_tokens

    @property
    def prompt_pieces(self) -> IntArray:
        """Tokens of the pieces that stages compute, shape (requests + nodes,).

        Each piece is computed whole in one stage: a request's own tokens in its stage, a node of the tree in
        the stage of one of its requests.
        """
        return self.own_tokens if self.tree is None else np.append(self.own_tokens, self.tree.tokens)

    @property
    def holds_whole_prompts(self) -> bool:
        """True if each running request holds all tokens of its prompt.

        Arguments that count whole prompts against the KV capacity need it.
        """
        return self.tree is None

    @property
    def held_alone(self) -> IntArray:
        """Prompt tokens that each running request holds for itself, shape (requests,)."""
        return self.own_tokens

    @property
    def held_at_start(self) -> IntArray:
        """KV tokens that each request holds for itself in its first decode step, shape (requests,)."""
        return self.held_alone + int(self.prefill_emits_first_token)

    @property
    def shares_prompts(self) -> bool:
        """True if stages compute tokens that several requests share."""
        return self.tree is not None

    @property
    def keeps_every_prefix(self) -> bool:
        """True if all shared beginnings fit, so each is computed once."""
        return self.tree is None or int(self.tree.tokens.sum()) <= self.prefix_cache

    @property
    def kv_at_start(self) -> IntArray:
        """KV tokens of each request in its first decode step."""
        return self.prompt_tokens + int(self.prefill_emits_first_token)

    @property
    def kv_peak(self) -> IntArray:
        """Most KV tokens that each request ever holds."""
        peak: IntArray = np.maximum(self.prompt_tokens, self.kv_at_start + self.decode_steps - 1)
        return peak

    @property
    def reaches_bend(self) -> bool:
        """True if a prefill stage can exceed the bend of its cost.

        Then two consecutive stages may take less than one stage with all their prompts.
        """
        tokens, cap = int(self.prompt_tokens.sum()), self.prefill_token_cap
        reached = tokens if cap is None else min(tokens, cap)
        return self.cost.prefill_per_token_beyond > 0 and reached > self.cost.prefill_bend

    @property
    def bound_of(self) -> str:
        """The schedules that a bound without evictions holds for."""
        return "every schedule that evicts no request" if self.memory_can_run_out else "every schedule"

    @property
    def memory_can_run_out(self) -> bool:
        """True if full slots could hold more than the KV capacity."""
        if self.kv_capacity is None:
            return False
        return int(np.sort(self.kv_peak)[-self.slots :].sum()) > self.kv_capacity

    @property
    def kv_token_steps(self) -> int:
        r"""KV tokens read over the whole job, the same for every schedule.

        Decode step r of a request reads the prompt and the tokens generated so far. So the sum is
        :math:`\sum_i (n_i a_i + n_i (n_i - 1) / 2)` with :math:`n_i` decode steps and :math:`a_i` tokens
        held at first.
        """
        total = self.decode_steps * self.kv_at_start + self.decode_steps * (self.decode_steps - 1) // 2
        return int(total.sum())
