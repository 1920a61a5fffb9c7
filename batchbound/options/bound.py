"""Options of ``bound`` and ``export``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from ..models.formulations.named import MODELS
from .option import Rule, everyday
from .problem import ProblemOptions
from .values import File


@dataclass(frozen=True)
class BoundOptions(ProblemOptions):
    """A problem to bound."""

    _: KW_ONLY
    json: bool = everyday(False, "print JSON, certificates included")


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
    formulation: str = everyday(
        "slot-free",
        "the hybrid paper's model as printed (literal) or completed (repaired), a slot-free one, or the"
        " bin packing of decode steps (default %(default)s)",
        choices=tuple(MODELS),
    )
    output: File = everyday(
        "model.mps", "file of the model, .mps or .lp (default %(default)s)", short="-o", writes=True
    )
    overwrite: bool = everyday(False, "replace the output if it exists")
