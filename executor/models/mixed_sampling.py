"""Tokens chosen for each request as it asks, whatever the others of its batch ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .sampling import Sampler, drawn, likely_mass

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class MixedSampler:
    """
    A sampler for each request; its tokens are those that this sampler alone would choose.

    A row is known by its random stream, so that no batch has to hold more of a request than it does for
    any other sampler.

    Parameters
    ----------
    samplers
        Of each request, by its id; at least one.
    """

    samplers: Mapping[str, Sampler]
    _on_device: dict[torch.device, _Rules] = field(default_factory=dict, init=False, repr=False)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, by every request."""
        return all(sampler.greedy for sampler in self.samplers.values())

    def stream(self, request_id: str) -> int:
        """
        Name the random stream of one request, as its own sampler does.

        A request without one, such as an engine's first to warm up, has a stream too; what it asks is left
        open.
        """
        return self.samplers.get(request_id, Sampler()).stream(request_id)

    def choose(self, logits: torch.Tensor, streams: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Choose one token per row, as :meth:`~.sampling.Sampler.choose` does for one sampler."""
        import torch

        rules = self._on_device.get(logits.device)
        if rules is None:
            rules = self._on_device[logits.device] = _Rules.of(self, logits)
        # Rows that no request holds have some other stream; what is chosen for them is never read.
        row = torch.searchsorted(rules.streams, streams).clamp_(max=len(rules.streams) - 1)
        temperature = rules.temperature[row, None]
        scaled = logits.to(torch.float64) / temperature.where(temperature > 0, 1.0)
        if rules.most_kept:
            best = scaled.topk(rules.most_kept, dim=-1).values
            kept = rules.top_k[row, None]
            least = best.gather(-1, (kept - 1).clamp_(min=0)).where(kept > 0, -torch.inf)
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        weights = scaled.softmax(dim=-1)
        if rules.cut_mass:
            weights = likely_mass(weights, rules.top_p[row, None])
        return drawn(weights, streams, indices).where(temperature[:, 0] > 0, logits.argmax(dim=-1))


@dataclass(frozen=True, slots=True, eq=False)
class _Rules:
    """
    What the requests ask, on a device, in the order of their streams.

    Parameters
    ----------
    streams, temperature, top_k, top_p
        Of each request; 0 of ``top_k`` and infinity of ``top_p`` keep all tokens.
    most_kept
        The largest ``top_k`` that leaves something out; 0 if none does.
    cut_mass
        Whether a ``top_p`` may leave something out.
    """

    streams: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    most_kept: int
    cut_mass: bool

    @classmethod
    def of(cls, mixed: MixedSampler, logits: torch.Tensor) -> _Rules:
        import torch

        vocabulary, device = logits.shape[-1], logits.device
        rows = sorted(
            (
                sampler.stream(name),
                sampler.temperature,
                sampler.top_k if sampler.top_k < vocabulary else 0,
                sampler.top_p if sampler.top_p < 1.0 else torch.inf,
            )
            for name, sampler in mixed.samplers.items()
        )
        streams, temperature, top_k, top_p = zip(*rows, strict=True)
        return cls(
            torch.tensor(streams, device=device),
            torch.tensor(temperature, dtype=torch.float64, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            max(top_k),
            min(top_p) < torch.inf,
        )
