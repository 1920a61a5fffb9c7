"""Options of ``batchbound profile``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from .model import ModelOptions
from .numbers import Positive, SlotCount
from .option import Option, PathText

DEFAULT_PROMPT = 512
"""Longest prompt to measure by default, in tokens."""


@dataclass(frozen=True)
class ProfileOptions(ModelOptions):
    """A model, the grid of its profile, and the file of the profile."""

    TITLE = ""

    _: KW_ONLY
    slots: Annotated[
        SlotCount, Option("maximum number of slots to measure (default %(default)s)", everyday=True)
    ] = 32
    prompt_tokens: Annotated[
        Positive | None,
        Option(
            f"longest prompt to measure (default {DEFAULT_PROMPT}, or as many as the model's positions"
            " allow)",
            everyday=True,
            metavar="TOKENS",
        ),
    ] = None
    points: Annotated[Positive, Option("points along each axis of the grid (default %(default)s)")] = 5
    repeats: Annotated[Positive, Option("measurements of each point (default %(default)s)")] = 3
    layers: Annotated[
        bool,
        Option("measure each layer, attention separately, for `batchbound search --profile`", everyday=True),
    ] = False
    pinned: Annotated[
        bool, Option("with --layers: measure for runs with `run --pinned`", needs=("layers",))
    ] = False
    encode_device: Annotated[
        str | None,
        Option(
            "with --layers: device of a second worker, which encodes while the first decodes (WAA), or none"
            " (default: the same CPU, or the next GPU)",
            metavar="DEVICE",
            needs=("layers",),
        ),
    ] = None
    output: Annotated[
        PathText | None,
        Option(
            "file of the costs (default: cost.json, with --layers profile.json)",
            everyday=True,
            metavar="FILE",
            short="-o",
            writes=True,
        ),
    ] = None
    overwrite: Annotated[bool, Option("replace the output if it exists", everyday=True)] = False
    extend: Annotated[
        bool,
        Option(
            "with --layers: keep the points of an existing profile, and measure only the missing ones",
            needs=("layers",),
            excludes=("overwrite",),
        ),
    ] = False

    @property
    def path(self) -> Path:
        """File of the costs or of the profile."""
        return Path(self.output or ("profile.json" if self.layers else "cost.json"))

    @property
    def points_path(self) -> Path:
        """File of each measurement of a layer."""
        return self.path.with_name(self.path.name + ".points")
