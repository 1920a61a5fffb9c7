"""The options that name a model, and the model they name."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..run_job.options import ModelOptions
from .inputs import positive, random_seed
from .output import is_quiet

if TYPE_CHECKING:
    from ..executor.engines.tiers import Tier


def add_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that name and load a model; one is optional where a server may run the requests."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=required, metavar="MODEL", help="hub name, directory or tiny:FAMILY[:SEED]"
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "partial", "dummy"),
        default="auto",
        help="partial: random weights where the checkpoint has none; dummy: for the whole configuration",
    )
    group.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "float64", "bfloat16", "float16")
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default %(default)s)")
    group.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads of torch (default: torch's own)"
    )
    group.add_argument("--seed", type=random_seed, help="of sampling and random weights (default 0)")
    group.add_argument(
        "--tier",
        choices=("auto", "window", "ragged"),
        default="auto",
        help="layout of the KV cache (default: the fastest that gives this model's own completions)",
    )


def model_options(args: argparse.Namespace) -> ModelOptions:
    """Return what the options of :func:`add_model` say."""
    return ModelOptions(**{field.name: getattr(args, field.name) for field in fields(ModelOptions)})


def load(args: argparse.Namespace) -> Any:
    """Return the model that the options of :func:`add_model` name, loaded."""
    silence()
    return model_options(args).load()


def tier_of(model: Any, args: argparse.Namespace) -> Tier:
    """Return the tier that the options of :func:`add_model` ask for, checked on the loaded model."""
    return model_options(args).tier_of(model)


def silence() -> None:
    """Have transformers print no progress either, if it was asked to be quiet."""
    if is_quiet():
        from ..executor.models.source import require_engine

        require_engine()
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
