"""Seconds per unit of an iteration's work, fitted to a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from ..files.disk import read_json_object, write_json
from ..files.record import plain, record
from .cost import LONGEST_TIME

Rate = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_TIME)]


@dataclass(frozen=True, slots=True)
class IterationRates:
    """Fixed seconds of an iteration, and seconds per unit of work.

    iterations: Fixed seconds of an iteration.
    decodes: Seconds per decoding sequence.
    prompt_tokens: Seconds per token of a chunk.
    drawn: Seconds per drawn token.
    kv_tokens: Seconds per KV token of the decoding sequences, new ones included.
    pairs: Seconds per pair of a chunk's token and an earlier token, with half of the chunk's own tokens.
    source: Origin of the fit.
    error: Relative error on seconds outside the fit; None if unknown.
    """

    JSON_HEADER: ClassVar = ("batchbound_iteration_cost", 1)
    JSON_HINT: ClassVar = "Write it again: batchbound audit RUN --save-cost FILE."

    iterations: Rate
    decodes: Rate = 0.0
    prompt_tokens: Rate = 0.0
    drawn: Rate = 0.0
    kv_tokens: Rate = 0.0
    pairs: Rate = 0.0
    source: str = ""
    error: float | None = None

    def __post_init__(self) -> None:
        if not any((self.iterations, self.decodes, self.prompt_tokens, self.drawn, self.kv_tokens)):
            raise ValueError("no iteration takes any time")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rates to ``path`` atomically."""
        write_json(path, plain(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> IterationRates:
        """Return the rates that :meth:`save` wrote."""
        return record(cls, read_json_object(path), file=path)
