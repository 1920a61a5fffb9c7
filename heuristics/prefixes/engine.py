"""vLLM's iterations with its prefix cache, counted from event to event over a tree of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.arrays import IntArray
from ...data.costs.iteration_rates import IterationRates
from ...data.iterations import EngineLimits
from .holding import HoldingClient
from .leaps import EventEngine, blocks_of
from .vllm_cache import BlockTree, VllmCache


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Work of a simulated run.

    The fields are what seconds are priced by, as in :class:`~.iteration_minorant.Work`.

    iterations: Iterations until the last token.
    prompt_tokens: Tokens computed in chunks, with those computed again.
    decodes: Tokens computed one at a time.
    kv_tokens: Tokens held by the decoding sequences in each iteration, the new one included, summed.
    drawn: Tokens of all completions.
    preemptions: Preemptions for lack of KV cache.
    """

    iterations: int
    prompt_tokens: int
    decodes: int
    kv_tokens: int
    drawn: int
    preemptions: int

    def seconds(self, rates: IterationRates) -> float:
        """Return the seconds at some rates; pairs of tokens are left out, as no fit has them."""
        work = ("iterations", "prompt_tokens", "decodes", "kv_tokens", "drawn")
        return float(sum(getattr(rates, name) * getattr(self, name) for name in work))


class TreeEngine(EventEngine):
    """Fast engine with chunked prefill and vLLM's prefix cache.

    output: Tokens of each completion, at least one, shape (requests,).
    order: Positions of the requests in order of admission.
    after: Completions after which the client sends each of them; None if all wait at the start.
    """

    def __init__(
        self,
        tree: BlockTree,
        output: Sequence[int] | IntArray,
        limits: EngineLimits,
        order: Sequence[int],
        after: Sequence[int] | None = None,
    ) -> None:
        prompt, lengths = tree.prompt.tolist(), list(map(int, output))
        self.cache = VllmCache(tree, blocks_of(prompt, lengths, limits), limits.block_tokens)
        client = None if after is None else HoldingClient(order, after)
        super().__init__(prompt, lengths, limits, order if client is None else (), self.cache, client)

    def run(self) -> CachedRun:
        """Return the work of all requests; raise ValueError if one alone exceeds the memory."""
        for _ in self.events():
            pass
        return self.result

    @property
    def result(self) -> CachedRun:
        """The work so far."""
        return CachedRun(
            self._t,
            self._prompt_tokens,
            self._decodes,
            self._kv_tokens,
            sum(self._output),
            self.preemptions,
        )
