"""Options that name and load a model."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..run_job.options import ModelOptions
from .inputs import positive, random_seed
from .output import is_quiet
from .parser import Parser

if TYPE_CHECKING:
    from ..executor.engines.tiers import Tier


def add_model(parser: Parser, *, required: bool = True) -> None:
    """Add the options that name and load a model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=required,
        metavar="MODEL",
        everyday=True,
        help="hub name, directory or tiny:FAMILY[:SEED]",
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "partial", "dummy"),
        default="auto",
        help="weights to load; partial: random weights if missing in the checkpoint; dummy: all random",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float64", "bfloat16", "float16"),
        help="data type of the weights",
    )
    group.add_argument(
        "--device", default="auto", help="device: cpu, cuda, cuda:N or auto (default %(default)s)"
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads of torch (default: torch's own)"
    )
    group.add_argument("--seed", type=random_seed, help="seed of sampling and of random weights (default 0)")
    group.add_argument(
        "--tier",
        choices=("auto", "window", "ragged"),
        default="auto",
        help="layout of the KV cache (default: the fastest that reproduces this model's completions)",
    )


def model_options(args: argparse.Namespace) -> ModelOptions:
    """Return the values of the options of :func:`add_model`."""
    return ModelOptions(**{field.name: getattr(args, field.name) for field in fields(ModelOptions)})


def load(args: argparse.Namespace) -> Any:
    """Load the model of the options of :func:`add_model`."""
    silence()
    return model_options(args).load()


def tier_of(model: Any, args: argparse.Namespace) -> Tier:
    """Return the tier of the options, checked on the loaded model."""
    return model_options(args).tier_of(model)


def silence() -> None:
    """Disable the progress of transformers under --quiet."""
    if is_quiet():
        from ..executor.models.source import require_engine

        require_engine()
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
