"""Options of ``batchbound profile``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from .model import ModelOptions
from .option import everyday, option
from .values import File, Positive, SlotCount, TokenCount

DEFAULT_PROMPT = 512
"""Longest prompt to measure by default, in tokens."""


@dataclass(frozen=True)
class ProfileOptions(ModelOptions):
    """A model, the grid of its profile, and the file of the profile."""

    TITLE = ""

    _: KW_ONLY
    slots: SlotCount = everyday(32, "maximum number of slots to measure (default %(default)s)")
    prompt_tokens: TokenCount | None = everyday(
        None,
        f"longest prompt to measure (default {DEFAULT_PROMPT}, or as many as the model's positions allow)",
    )
    points: Positive = option(5, "points along each axis of the grid (default %(default)s)")
    repeats: Positive = option(3, "measurements of each point (default %(default)s)")
    layers: bool = everyday(
        False, "measure each layer, attention separately, for `batchbound search --profile`"
    )
    pinned: bool = option(False, "with --layers: measure for runs with `run --pinned`", needs=("layers",))
    encode_device: str | None = option(
        None,
        "with --layers: device of a second worker, which encodes while the first decodes (WAA), or none"
        " (default: the same CPU, or the next GPU)",
        metavar="DEVICE",
        needs=("layers",),
    )
    output: File | None = everyday(
        None, "file of the costs (default: cost.json, with --layers profile.json)", short="-o", writes=True
    )
    overwrite: bool = everyday(False, "replace the output if it exists")
    extend: bool = option(
        False,
        "with --layers: keep the points of an existing profile, and measure only the missing ones",
        needs=("layers",),
        excludes=("overwrite",),
    )

    @property
    def path(self) -> Path:
        """File of the costs or of the profile."""
        return Path(self.output or ("profile.json" if self.layers else "cost.json"))

    @property
    def points_path(self) -> Path:
        """File of each measurement of a layer."""
        return self.path.with_name(self.path.name + ".points")
