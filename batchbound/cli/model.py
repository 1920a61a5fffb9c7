"""The options that name a model, and the model they name."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .inputs import positive, random_seed
from .output import is_quiet

if TYPE_CHECKING:
    from ..executor.engines.tiers import Tier
    from ..executor.processes.engine_spec import EngineSpec
    from ..executor.runs.job import Job


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
        help="layout of keys and values (default: the fastest that gives this model's own answers)",
    )


def load(args: argparse.Namespace) -> Any:
    """Return the model that the options of :func:`add_model` name, loaded."""
    from ..executor.models.source import load_model, require_engine

    require_engine()
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    if is_quiet():
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return load_model(
        args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        seed=args.seed or 0,
    )


def tier_of(model: Any, args: argparse.Namespace) -> Tier:
    """Return the tier that the options of :func:`add_model` ask for, checked on the loaded model."""
    from ..executor.engines.tiers import choose_tier

    return choose_tier(model, args.tier)


def engine_spec(args: argparse.Namespace, job: Job) -> EngineSpec:
    """Return what a process of its own has to load to serve a job as this command would."""
    from ..executor.processes.engine_spec import EngineSpec

    return EngineSpec(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        seed=args.seed or 0,
        tier=args.tier,
        eos_ids=tuple(sorted(job.decoding.eos_ids)),
        sampler=job.sampler,
        threads=args.threads or 1,
    )


def shape_of(args: argparse.Namespace) -> Any:
    """Return the model without its weights, whose vocabulary and positions are all that a driver looks at."""
    from ..executor.models.source import load_config, take_generation_settings

    config = load_config(args.model)
    import torch
    from transformers import AutoModelForCausalLM

    named = config.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=named or torch.float32)  # type: ignore[no-untyped-call]
    take_generation_settings(model, args.model)
    return model
