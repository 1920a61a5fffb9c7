"""``batchbound export``: write a workload's linear model as MPS."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...data.files.disk import InputError
from ...data.files.outputs import refuse_outputs
from ...models.formulations.full_model import UnsupportedProblemError
from ...models.formulations.linear_files import write_mps
from ...models.formulations.named import MODELS
from ..inputs import add_problem, named_files, read_inputs
from ..parser import Parser, Rule
from ..streams import say


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    add_problem(parser)
    parser.add_argument(
        "--formulation",
        choices=list(MODELS),
        default="slot-free",
        everyday=True,
        help="the hybrid paper's model as printed (literal) or completed (repaired), a slot-free one, or the"
        " bin packing of decode steps (default %(default)s)",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="model.mps",
        metavar="FILE",
        everyday=True,
        help="file of the model (default %(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", everyday=True, help="replace the output if it exists"
    )
    where = "on the formulation packing, which counts decode steps"
    parser.rules.append(Rule(("--cost",), when=lambda args: args.formulation == "packing", where=where))


def run(args: argparse.Namespace) -> int:
    """Write the model, and print its size."""
    if Path(args.output).suffix != ".mps":
        raise InputError("a linear model is written as MPS", file=args.output, hint="Name a .mps file.")
    refuse_outputs([args.output], args.overwrite, named_files(args, "output"))
    problem = read_inputs(args, keep_arrivals=False).problem
    try:
        # PuLP's reader ignores the constant of an objective.
        model = MODELS[args.formulation](problem).with_offset_as_column()
    except UnsupportedProblemError as error:
        hint = "Export another formulation, or fewer requests or slots, or drop that option."
        raise InputError(str(error), where=f"--formulation {args.formulation}", hint=hint) from None
    write_mps(model, args.output)
    rows, columns = model.matrix.shape
    whole, unit = int(model.integer.sum()), "decode steps" if args.formulation == "packing" else "seconds"
    say(f"{args.output}: {rows:,} rows, {columns:,} columns, {whole:,} of them whole; minimise, in {unit}")
    return 0
