"""Options of ``bound`` and ``export``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ..models.formulations.named import MODELS
from .option import Option, PathText, Rule
from .problem import ProblemOptions


@dataclass(frozen=True)
class BoundOptions(ProblemOptions):
    """A problem to bound."""

    _: KW_ONLY
    json: Annotated[bool, Option("print JSON, certificates included", everyday=True)] = False


@dataclass(frozen=True)
class ExportOptions(ProblemOptions):
    """A problem, its formulation, and the file of the model."""

    RULES = (
        Rule(
            ("cost",),
            when=lambda options: options.formulation == "packing",
            where="on the formulation packing, which counts decode steps",
        ),
    )

    _: KW_ONLY
    formulation: Annotated[
        str,
        Option(
            "the hybrid paper's model as printed (literal) or completed (repaired), a slot-free one, or the"
            " bin packing of decode steps (default %(default)s)",
            everyday=True,
            choices=tuple(MODELS),
        ),
    ] = "slot-free"
    output: Annotated[
        PathText,
        Option(
            "file of the model (default %(default)s)",
            everyday=True,
            metavar="FILE",
            short="-o",
            writes=True,
        ),
    ] = "model.mps"
    overwrite: Annotated[bool, Option("replace the output if it exists", everyday=True)] = False
