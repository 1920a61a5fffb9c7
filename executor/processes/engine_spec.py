"""Specification of an engine for another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..models.sampling import Sampler, TokenRule


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Specification of an engine.

    model, load_format, dtype, device, seed: As for :func:`~batchbound.executor.models.source.load_model`;
    ``seed`` also seeds sampling.
    tier: Layout of KV cache.
    eos_ids: Tokens that end a completion.
    sampler: Choice of tokens.
    threads: CPU threads of torch in each replica, or None for torch's own.
    """

    model: str
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    tier: str = "auto"
    eos_ids: tuple[int, ...] = ()
    sampler: TokenRule = field(default_factory=Sampler)
    threads: int | None = 1

    def load(self) -> Any:
        """Load the model, and set torch's threads for this process."""
        import torch

        from ..models.source import load_model

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return load_model(
            self.model,
            load_format=self.load_format,  # type: ignore[arg-type]
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
        )
