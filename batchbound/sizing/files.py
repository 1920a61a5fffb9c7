"""Size a deployment: the cheapest machines that finish jobs in their windows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from ..data.costs.communication import with_all_reduce
from ..data.costs.link import usual_link
from ..data.costs.model_shape import ModelShape
from ..data.demand import Excess
from ..data.files.disk import InputError, read_json_object
from ..data.files.sources import opened_once
from ..data.readers.profile_readers import read_profile
from ..listening import working
from ..models.certificates.demand import check_excess, check_work
from ..models.exegpt.roofline import Roofline
from ..models.sizing.demand import demands, excess, fastest, machine_of
from ..models.sizing.load import REACHED, IterationSeconds, ProfiledSeconds, kv_tokens
from ..options.option import PathText, takes
from ..options.size import SizeOptions
from ..planning.mixed_job import read_mixed_job
from ..planning.plan import PlanningError
from .offers import Offer, read_offers
from .pooled_job import PooledJob, pool
from .result import Deployment, Replica, Sizing, by_deadline, finishes_of, loads_of

DEGREES = (1, 2, 4, 8)
"""Devices that may share every layer: those of a node."""
SLOTS = (16, 32, 64, 128, 256, 512, 1024)
FASTER = 0.99
"""Largest ratio of seconds at which more slots are worth it."""
STARTED, LOADED = 120.0, 1e9
"""Seconds of a start without loading, and bytes of weights loaded a second; both are assumed."""
_LARGE, _BUDGETS = 60e9, (2048, 8192)
"""Bytes of a large device, and vLLM's usual tokens of an iteration on a small and on a large one."""


@takes(SizeOptions)
def size(options: SizeOptions) -> Sizing:
    """Find the cheapest deployments that finish jobs in their windows, and those that cannot.

    It takes the options of ``batchbound size`` as keywords. It reads no weights and imports no torch.

    Raises
    ------
    InputError
        If the requests, the model or the prices cannot be read.
    """
    options.check_outputs("picture")
    if options.picture is not None and Path(options.picture).suffix not in (".png", ".svg"):
        raise InputError("a picture is .png or .svg", file=options.picture, hint="Name a .png or .svg file.")
    now = datetime.now()
    windows, offers = options.windows(now), read_offers(options.devices, options.prices)
    path = Path(options.model)
    if not path.exists() and path.suffix != ".json":
        hint = "Give the model's config.json, or its folder; nothing is downloaded."
        raise InputError("no such file or folder", file=path, hint=hint)
    config = read_json_object(path / "config.json" if path.is_dir() else path)
    shape = _shape(config, options)
    with working(f"reading {', '.join(map(str, options.files))}"), opened_once():
        pooled = _read(options)
    tried = _tried(pooled, windows, shape, offers, options.profile)
    cheapest = tuple(sorted(tried, key=lambda one: (one.cost, one.end.expected)))
    impossible = dict(_impossible(pooled, windows, shape, offers))
    model, positions = _model_name(pooled, config, path), config.get("max_position_embeddings")
    longest = positions if isinstance(positions, int) else None
    return Sizing(options, model, shape.weight_bytes, longest, pooled, windows, cheapest, impossible, now)


def _model_name(pooled: PooledJob, config: Mapping[str, object], path: Path) -> str:
    """Return the folder of the weights, or else the hub's name by the requests or the configuration."""
    folder = path if path.is_dir() else path.parent
    if any(folder.glob("*.safetensors")):
        return str(folder)
    named = pooled.served if pooled.served and "/" in pooled.served else config.get("_name_or_path")
    return named if isinstance(named, str) and named else "MODEL"


def _shape(config: Mapping[str, object], options: SizeOptions) -> ModelShape:
    try:
        shape = ModelShape.from_config(config)
    except InputError as error:
        raise InputError(str(error), file=options.model) from None
    if shape.encoder_layers:
        raise InputError("an encoder-decoder cannot be sized", file=options.model, hint="Give a decoder's.")
    # Engines compute models of 32 bits in 16.
    shape = replace(shape, bytes_per_value=2)
    if options.quantization is None:
        return shape
    if shape.multiply_bits < 16 or shape.feed_forward_bytes:
        what = "--quantization has no effect on a model that is quantised"
        raise InputError(what, file=options.model, hint="Leave it out.")
    return replace(shape, feed_forward_bytes=1.0, attention_bytes=1.0, multiply_bits=8)


def _read(options: SizeOptions) -> PooledJob:
    tokenizer = None
    if options.tokenizer is not None:
        from ..executor.models.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    columns, lengths, most = (
        options.columns_of(options.tokenizer),
        options.lengths,
        options.longest_completion,
    )
    read = partial(read_mixed_job, tokenizer=tokenizer, lengths=lengths, longest=most, columns=columns)
    return pool([os.fspath(file) for file in options.files], read, tokenizer)


def _tried(
    pooled: PooledJob,
    windows: Sequence[float],
    shape: ModelShape,
    offers: Sequence[Offer],
    profiles: Sequence[PathText],
) -> Iterator[Deployment]:
    loads, spread, costs = loads_of(pooled, by_deadline(windows)), pooled.spread(), _profiled(profiles)
    for offer in offers:
        for degree in DEGREES:
            kv = kv_tokens(shape, offer.device, degree)
            if degree > offer.most or kv < loads[-1].longest or shape.heads % degree:
                continue
            cost = costs.get((offer.name, degree)) or Roofline(shape, offer.device, degree, REACHED)
            startup = STARTED + shape.weight_bytes / LOADED if offer.startup is None else offer.startup
            budget = _BUDGETS[offer.device.memory >= _LARGE]
            best, *others = (
                Replica(offer, degree, cost, slots, max(budget, slots), kv, startup) for slots in SLOTS
            )
            for other in others:
                if other.seconds(loads[-1]) < FASTER * best.seconds(loads[-1]):
                    best = other
            price = 1.0 if offer.price is None else offer.price
            for replicas in range(1, min(offer.most // degree, loads[-1].requests) + 1):
                finishes = finishes_of(best, replicas, loads, spread)
                hours = replicas * degree * finishes[-1].expected / 3600
                yield Deployment(best, replicas, finishes, hours * price)


def _profiled(files: Sequence[PathText]) -> dict[tuple[str, int], IterationSeconds]:
    costs: dict[tuple[str, int], IterationSeconds] = {}
    for path in files:
        profile = read_profile(path)
        (offer,) = read_offers((profile.device,), None)
        link = usual_link(profile.device)
        whole = profile if link is None else with_all_reduce(profile, link)
        costs[offer.name, profile.tensor_parallel] = ProfiledSeconds(whole)
    return costs


def _impossible(
    pooled: PooledJob, windows: Sequence[float], shape: ModelShape, offers: Sequence[Offer]
) -> Iterator[tuple[str, tuple[int, Excess]]]:
    """Yield the most devices of a kind that are too few, with a checked demand."""
    due = demands(pooled.rows, pooled.jobs, windows)
    job_of = np.repeat(np.arange(len(pooled.jobs)), [len(job) for job in pooled.jobs]).tolist()
    checked: dict[tuple[int, ...], str | None] = {}
    for offer in offers:
        device, worst, count = offer.device, None, 0
        while count < offer.most and (more := excess(due, machine_of(shape, device, count + 1))) is not None:
            worst, count = more, count + 1
        if worst is not None:
            rates = [count * rate for rate in (fastest(device, shape), device.bandwidth, device.memory)]
            if worst.demand.jobs not in checked:
                checked[worst.demand.jobs] = check_work(worst.demand, pooled.rows, job_of)
            wrong = checked[worst.demand.jobs] or check_excess(worst, shape, rates)
            if wrong is not None:
                raise PlanningError(f"the demand contradicts itself: {wrong}")
            yield device.name, (count, worst)
