"""Seconds of an engine's iteration per unit of work, fitted to a run, and their file."""

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
    """
    Seconds of an iteration, and per unit of what it computes.

    iterations: Of an iteration, whatever is in it.
    decodes: Per sequence that computes the one token drawn last.
    prompt_tokens: Per token computed in a chunk.
    drawn: Per token drawn.
    kv_tokens: Per token that the decoding sequences hold, the new one included.
    pairs: Per new token of a chunk and token held before it, half of the new ones counted.
    source: What they were fitted to.
    error: Share by which seconds are missed that the fit has not seen; None if unknown.
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
