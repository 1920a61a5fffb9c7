"""Log-likelihoods of given tokens, with shared beginnings computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .engines.beginnings import SharedBeginnings
from .models.sampling import likeliest
from .models.wrapped import Evaluation, unwrapped

if TYPE_CHECKING:
    import torch

    from .kv.ragged import RaggedBatch

_LOGITS = 2**26
"""Logits of one forward call, at most; more take more memory."""

_LARGEST_ID = 2**24 - 1
"""Token id that no vocabulary reaches; see :class:`~batchbound.data.prefix_tree.PrefixTree`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens whose last ones are scored.

    tokens: Token ids; the last ``scored`` are given, each after all before it.
    """

    tokens: tuple[int, ...]
    scored: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens that the model reads."""
        return self.tokens[:-1]

    @property
    def shared(self) -> tuple[int, ...]:
        """Tokens whose logits nobody needs, which others may have computed."""
        return self.tokens[: len(self.tokens) - self.scored - 1]


class Scoring:
    """Log-likelihoods on the ragged tier, in the order of the tree of sequences.

    Each beginning is computed once and dropped after its last sequence.

    slots: Sequences of one call.
    dtype: Number format of the softmax; float32 by default.
    """

    def __init__(
        self, model: Any, sequences: Sequence[Scored], *, slots: int, dtype: torch.dtype | None = None
    ) -> None:
        self._model, self._sequences, self._slots, self._dtype = model, sequences, slots, dtype
        # A token of its own ends each: beginnings end before the tokens whose logits are wanted.
        self._beginnings = SharedBeginnings(
            [(*each.shared, _LARGEST_ID - index) for index, each in enumerate(sequences)]
        )
        self.computed = 0
        """Tokens that the model has read."""

    def run(self) -> Iterator[tuple[int, float, bool]]:
        """Yield each sequence's index, log-likelihood, and whether its tokens are the likeliest ones."""
        from .kv.ragged import RaggedBatch

        inner = unwrapped(self._model)
        vocabulary = inner.get_input_embeddings().weight.shape[0]
        longest = max(len(each.prompt) for each in self._sequences)
        evaluating = Evaluation(inner)
        with evaluating():
            batch = RaggedBatch(
                inner,
                self._slots,
                longest + 1,
                prefill_tokens=max(64, min(4096, _LOGITS // vocabulary)),
                shared_tokens=min(self._beginnings.tokens, self._slots * longest),
            )
        order = self._beginnings.order.tolist()
        for first in range(0, len(order), self._slots):
            some = order[first : first + self._slots]
            with evaluating():
                scores = self._scores(batch, some)
            batch.forget(self._beginnings.begin(some))
            for index, values in zip(some, scores, strict=True):
                yield index, self._sum([value for value, _ in values]), all(greedy for _, greedy in values)

    def _sum(self, values: Sequence[float]) -> float:
        """Add in the softmax's number format, as lm-eval does: over hundreds of tokens the rounding shows."""
        import torch

        return float(torch.tensor(values, dtype=self._dtype or torch.float32).sum())

    def _scores(self, batch: RaggedBatch, some: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """Return each scored token's log-probability, and whether it is the likeliest one."""
        import torch

        parts = [self._sequences[index] for index in some]
        scores: list[list[tuple[float, bool]]] = [[] for _ in some]
        calls = batch.score(
            [part.prompt for part in parts],
            [self._beginnings.path(index) for index in some],
            [part.scored for part in parts],
        )
        for places, logits in calls:
            given, left = [], [part.scored - len(values) for part, values in zip(parts, scores, strict=True)]
            for place in places:
                given.append(parts[place].tokens[-left[place]])
                left[place] -= 1
            tokens = torch.tensor(given, device=logits.device)[:, None]
            own = logits.log_softmax(-1, dtype=self._dtype or torch.float32).gather(-1, tokens)[:, 0]
            best = likeliest(logits) == tokens[:, 0]
            for place, value, greedy in zip(places, own.tolist(), best.tolist(), strict=True):
                scores[place].append((value, greedy))
        self.computed += batch.prefilled
        return scores
