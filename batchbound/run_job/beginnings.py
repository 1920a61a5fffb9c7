"""Shared beginnings of prompts for servers: their tree, and the order that computes each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..cost_cache import CostCache
from ..data.arrays import IntArray
from ..data.claims.assumptions import DISTINCT, Assumption
from ..data.costs.iteration_rates import IterationRates
from ..data.iterations import EngineLimits, Predicted, Sequences
from ..data.prefix_tree import PrefixTree
from ..data.readers.server_batch import ServerBatch, ServerRequest, encoded, repeated
from ..data.readers.server_run import ServerRun
from ..heuristics.iterations.iteration_fit import TimedJob, fit_cached
from ..heuristics.prefixes.choice import Scenario, possible_rates
from ..heuristics.prefixes.orders import FILE_ORDER
from ..heuristics.prefixes.replicas import share_subtrees
from ..heuristics.serving.release import Release
from ..solvers.prefix_search import SearchedOrder, search_tree_order
from ..solvers.result import Limits

if TYPE_CHECKING:
    from ..executor.server.probe import ServerFacts
    from ..executor.server.server_job import ServerJob
    from ..executor.server.tokenizing import PromptTokens
    from .batch_to_send import Batch, ServerOptions

_CACHING = ("vllm", "sglang")
"""Engines that reuse beginnings unless they are told not to."""

_BYTES_PER_TOKEN, _PIECE = 4, 12
"""Bytes of a token in estimates, and of the pieces that are compared."""

_NUMBERS, _FACTORS = 2**24 - 3, np.array([1, 7_368_787, 104_395_301], dtype=np.uint64)
"""Numbers of pieces, and factors that mix their words."""

_GUESSES = (32, 128, 512)
"""Tokens of completions of unknown length to plan for."""

_MOST_GUESSED = 200_000
"""Most requests to plan for several lengths; more simulate too slowly."""

LEAST_OUTAGE = 0.01
"""Share of a run's seconds from which an outage is told, and no costs are fitted."""

_SEARCH = Limits(seconds=1.0)
"""Search time of an order, beyond the simple ones."""

_QUEUED, _LEAST_QUEUED = 2, 64
"""Slots' worth of requests that wait at a server, so that it admits them in order, and the fewest.

Iterations of a few milliseconds end several requests before the client sends the next ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Beginnings:
    """What the prompts of a job share, and one engine that serves them.

    tree: Tree of the prompts, with one for each completion of a request, shape (completions,).
    exact: True if it is of the server's own token ids; False if estimated from the messages' bytes.
    limits: Limits of one engine, with the KV cache that it states.
    rates: Costs that an earlier run on this server measured; None without one.
    request: Request of each completion, shape (completions,); None if each has one.
    """

    tree: PrefixTree
    exact: bool
    limits: EngineLimits
    rates: IterationRates | None = None
    request: IntArray | None = None

    def fits(self, output: IntArray) -> bool:
        """Return whether the KV cache holds all prompts and completions together.

        output: Tokens of each completion, shape (completions,).
        """
        room = self.limits.kv_tokens
        return room is None or self.tree.distinct_tokens + int(output.sum()) <= room


def queued(slots: int, servers: int) -> int:
    """Return how many requests wait at each server; of several servers, fewer, to leave some to share."""
    return max(_QUEUED * slots, _LEAST_QUEUED // servers)


def read_beginnings(
    job: ServerJob,
    batch: Batch,
    options: ServerOptions,
    facts: Sequence[ServerFacts],
    slots: int,
    remark: Callable[[str], None],
) -> Beginnings | None:
    """Return what a job's prompts share; None if nothing by their bytes, or if the engine reuses nothing.

    Token ids are those of the rows, of the server's ``/tokenize``, or of the tokenizer in the model's
    folder. Without them a tree of the messages' bytes orders the rows.
    """
    from ..executor.server.tokenizing import local_prompt_tokens, torn_apart

    requests, fact = batch.requests, facts[0]
    if len(requests) < 2 or requests.several.any() or fact.engine not in _CACHING:
        return None
    metrics = fact.metrics
    caching = None if metrics is None else metrics.prefix_caching
    guess = estimated_tree(requests)
    if not len(guess.parent):
        return None
    if caching is False:
        saved = int(guess.prompt_tokens.sum()) - guess.distinct_tokens
        remark(f"turn on prefix caching: about {saved:,} fewer prompt tokens (--enable-prefix-caching)")
        return None
    block = 1 if metrics is None or metrics.block_tokens is None else metrics.block_tokens
    unit = 1 if metrics is None or metrics.reuse_unit is None else metrics.reuse_unit
    tokens = job.prompt_tokens(fact)
    if tokens is None:
        named = options.model or next(iter(fact.models), None)
        tokens = None if named is None else local_prompt_tokens(requests, named)
    if tokens is not None:
        _name_torn(requests, torn_apart(guess, tokens), remark)
    tree, exact = _tree_of(requests, tokens, unit), tokens is not None
    if not exact and not len(tree.parent):
        return None
    request = None
    if (requests.choices > 1).any():
        request = np.repeat(np.arange(len(requests)), requests.choices)
        tree = _tree_of(requests, tokens, unit, requests.choices)
    if not exact:
        remark("the server does not tokenize these prompts: shared beginnings are estimated from their bytes")
    engines = 1 if metrics is None or metrics.engines is None else metrics.engines
    stated = options.kv_tokens or (
        None if metrics is None or metrics.kv_tokens is None else metrics.kv_tokens // engines
    )
    limits = EngineLimits(slots // engines, options.batched_tokens or 2048, stated, block)
    return Beginnings(tree, exact, limits, CostCache.of_user().find_server(fact.url, fact.models), request)


def _name_torn(
    requests: ServerBatch, torn: tuple[int, int, int] | None, remark: Callable[[str], None]
) -> None:
    """Tell of two requests whose messages begin alike and whose tokens do not."""
    if torn is not None:
        names = " and ".join(repr(requests[request].custom_id) for request in torn[:2])
        remark(
            f"{names} begin alike, but their prompts differ from token {torn[2]} on: if the chat template"
            " prints a date or an id there, nothing after it is reused"
        )


def _tree_of(
    requests: ServerBatch, tokens: PromptTokens | None, unit: int, times: IntArray | None = None
) -> PrefixTree:
    """Return the tree of the prompts, each as often as ``times`` says; estimated without tokens."""
    if tokens is None:
        return estimated_tree(requests, times)
    times = np.ones_like(requests.choices) if times is None else times
    return PrefixTree.of_prompts(repeated(tokens.ids, times), repeated(tokens.identities, times), unit)


def estimated_tree(requests: ServerBatch, times: IntArray | None = None) -> PrefixTree:
    """Return the tree of the messages' bytes, at a token per four bytes.

    times: How often each prompt is taken, shape (requests,); once by default.
    """
    times = np.ones_like(requests.choices) if times is None else times
    pieces = repeated(map(_pieces, requests), times)
    tree = PrefixTree.of_prompts(pieces, repeated(requests.kind.tolist(), times))
    size = _PIECE // _BYTES_PER_TOKEN
    return replace(tree, tokens=tree.tokens * size, own=tree.own * size)


def _pieces(request: ServerRequest) -> IntArray:
    """Return a number for each piece of a prompt's bytes; different pieces may rarely have the same."""
    says = request.says
    text = says.encode("utf-8", "replace") if isinstance(says, str) else encoded(says)
    words = np.frombuffer(text + b"\0" * (_PIECE - len(text) % _PIECE), "<u4").reshape(-1, _PIECE // 4)
    mixed: IntArray = (words.astype(np.uint64) * _FACTORS).sum(axis=1, dtype=np.uint64) % np.uint64(_NUMBERS)
    return mixed.astype(np.int64)


def tree_release(
    beginnings: Beginnings,
    batch: Batch,
    options: ServerOptions,
    servers: int,
    remark: Callable[[str], None],
) -> tuple[Release, IntArray | None] | None:
    """Return the order of fewest predicted seconds, and each request's server if there are several.

    It is None if the prompts share nothing, or if the cache holds all and lengths are unknown.
    """
    if not len(beginnings.tree.parent):
        return None
    known, output = batch.lengths_known(options), np.repeat(batch.output, batch.requests.choices)
    if not known and beginnings.fits(output):
        return None
    room, tree = beginnings.limits.kv_tokens, beginnings.tree
    guesses = _GUESSES if len(tree) <= _MOST_GUESSED else _GUESSES[1:2]
    lengths = [output] if known else [_guess(output, tokens) for tokens in guesses]
    if room is not None:
        longest = room // beginnings.limits.block_tokens * beginnings.limits.block_tokens
        lengths = [np.minimum(each, longest - tree.prompt_tokens) for each in lengths]
        if min(int(each.min()) for each in lengths) < 1:
            remark("a prompt exceeds the server's KV cache: shared beginnings are not planned")
            return None
    budget = replace(_SEARCH, seed=options.seed) if known else None
    rates = possible_rates(beginnings.rates)
    usual = lengths[len(lengths) // 2]
    home = None
    if servers > 1:
        home = share_subtrees(tree, usual, servers, beginnings.limits, rates[len(rates) // 2])
    request = beginnings.request
    if home is not None and request is not None:
        home = home[_firsts(request)][request]
    order, plans = np.zeros(0, dtype=np.int64), list[SearchedOrder]()
    for server in range(servers):
        mine = np.arange(len(tree)) if home is None else np.flatnonzero(home == server)
        if not mine.size:
            continue
        scenarios = [Scenario(each, one) for each in (output[mine] for output in lengths) for one in rates]
        part = tree if home is None else tree.select(mine)
        sent = None if request is None else request[mine]
        plans.append(
            search_tree_order(
                part,
                scenarios,
                beginnings.limits,
                budget,
                lengths_known=known,
                together=sent,
                may_hold=servers == 1 and request is None and options.in_flight is None,
            )
        )
        order = np.concatenate((order, mine[plans[-1].outlook.order]))
    predicted = _told(plans, beginnings, len(scenarios) // 2, remark, known=known)
    if request is not None:
        order = request[order][np.sort(_firsts(request[order]))]
        home = None if home is None else home[_firsts(request)]
    after = plans[0].outlook.after if servers == 1 else None
    return Release(plans[0].outlook.name, order, predicted, after), home


def _firsts(request: IntArray) -> IntArray:
    """Return the place of each request's first completion."""
    return np.unique(request, return_index=True)[1]


def _told(
    plans: Sequence[SearchedOrder],
    beginnings: Beginnings,
    usual: int,
    remark: Callable[[str], None],
    *,
    known: bool,
) -> Predicted | None:
    """Remark what the servers' orders are predicted to take; return it if lengths are known.

    usual: Scenario between the extremes.
    """
    runs = [plan.outlook.runs[usual] for plan in plans]
    first = [plan.baselines[FILE_ORDER].runs[usual] for plan in plans]
    computed, theirs = (sum(run.prompt_tokens for run in each) for each in (runs, first))
    iterations, before = (max(run.iterations for run in each) for each in (runs, first))
    about = "" if known and beginnings.exact else "about "
    line = f"order: {plans[0].outlook.name}, "
    line += f"{about}{iterations:,} iterations and " if known else about
    line += f"{computed:,} prompt tokens computed"
    # Servers that share one queue in file order are not simulated.
    if len(plans) == 1 and plans[0].outlook.name != FILE_ORDER:
        line += f" (file order: {f'{before:,} and ' if known else ''}{theirs:,})"
    remark(line)
    if not known:
        return None
    fitted = beginnings.rates is not None
    seconds = max(plan.outlook.seconds[usual] for plan in plans) if fitted else None
    decodes, preemptions = sum(run.decodes for run in runs), sum(run.preemptions for run in runs)
    return Predicted(iterations, preemptions, computed + decodes, seconds)


def _guess(caps: IntArray, tokens: int) -> IntArray:
    return np.where(caps > 0, np.minimum(caps, tokens), tokens)


def traced(
    run: ServerRun,
    beginnings: Beginnings | None,
    *,
    run_name: str | None,
    assumptions: tuple[Assumption, ...],
    remark: Callable[[str], None],
) -> ServerRun:
    """Return a run's record with its name, its assumptions and the tree of its prompts.

    A tree whose prompts have other lengths than the server counts is left out.
    """
    named = replace(run, run=run_name, assumptions=assumptions)
    if beginnings is None or not len(run):
        return named
    unknown = Assumption(DISTINCT, "broken", "the prompts share beginnings of unknown tokens")
    shared = replace(named, assumptions=(*assumptions, unknown)) if len(beginnings.tree.parent) else named
    if not beginnings.exact or beginnings.request is not None:
        return shared
    tree, done = beginnings.tree.select(run.position), (run.failed == 0) & (run.prompt_tokens > 0)
    other = np.flatnonzero(done & (tree.prompt_tokens != run.prompt_tokens))
    if other.size:
        if not len(tree.parent):
            return named
        remark(
            f"{run.ids[int(other[0])]!r} has {int(tree.prompt_tokens[other[0]]):,} prompt tokens here and"
            f" {int(run.prompt_tokens[other[0]]):,} on the server: no figures of shared beginnings"
        )
        return shared
    return replace(named, tree=tree)


def keep_rates(run: ServerRun, limits: EngineLimits, facts: Sequence[ServerFacts]) -> IterationRates | None:
    """Fit a run's seconds of an iteration on its prefix cache, and keep them for the next run."""
    rates = fitted_rates(run, limits)
    if rates is not None:
        CostCache.of_user().keep_server(facts[0].url, facts[0].models, rates)
    return rates


def fitted_rates(run: ServerRun, limits: EngineLimits) -> IterationRates | None:
    """Fit a run's seconds of an iteration on its prefix cache.

    Returns None without a shared beginning, for several engines, after an outage, or without a linear fit.
    """
    from ..executor.reports.prompt_audit import engine_limits

    engine = engine_limits(run, limits)
    if run.tree is None or not len(run.tree.parent) or engine is None:
        return None
    if run.abandoned or run.failed.any() or (run.completion_tokens < 1).any():
        return None
    if run.unreachable > LEAST_OUTAGE * run.makespan:
        return None
    sequences = Sequences(run.tree.prompt_tokens, run.completion_tokens)
    job = TimedJob(sequences, np.arange(len(run)), np.zeros(len(run)), run.finished)
    try:
        fit = fit_cached(job, run.tree, engine, run.sent_after)
    except ValueError:
        return None
    if fit.error is None or not fit.is_linear:
        return None
    if not fit.rates.iterations or not fit.rates.prompt_tokens:
        # The run did not tell the two apart, and an order weighs one against the other.
        return None
    return IterationRates(**fit.rates.rates, source="fitted to a run", error=fit.error)
