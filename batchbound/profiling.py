"""Measure a model on this machine: costs of stages, or a profile of its layers."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .data.costs.cost import CalibratedCost, CostModel
from .data.files.disk import InputError
from .data.files.outputs import refuse_outputs
from .data.problem import Problem
from .data.workload import Workload
from .executor.models.prompts import Prompts
from .executor.profiling.calibrate import calibrate, fit_cost
from .executor.profiling.grid_run import (
    LONGEST_PROMPT,
    MOST_STEPS,
    grid,
    mixed_job,
    order_of,
    seconds_left,
    work_of,
)
from .executor.profiling.grid_run import profile as profile_grid
from .heuristics.engine import Engine
from .heuristics.loop import execute
from .heuristics.registry import policy_named
from .listening import note, progress
from .options.option import takes
from .options.profile import DEFAULT_PROMPT, ProfileOptions

if TYPE_CHECKING:
    from .data.costs.layer_profile import LayerProfile
    from .data.trace import Stage
    from .executor.engines.tiers import Tier
    from .executor.processes.engine_spec import EngineSpec


@takes(ProfileOptions)
def profile(options: ProfileOptions) -> CalibratedCost | LayerProfile:
    """Measure a model on this machine, and save its costs or its profile.

    It takes the options of ``batchbound profile`` as keywords.

    Raises
    ------
    InputError
        If an option does not fit the model, or the output would replace a file.
    """
    refuse_outputs([options.path], options.overwrite or options.extend)
    if options.points < 2 or options.slots < 2:
        message = f"--points {options.points} and --slots {options.slots} measure a single size"
        raise InputError(message, hint="Give at least 2 of each: a line needs two points.")
    _check_positions(options)
    model = options.load()
    if options.layers:
        return _profile_layers(model, options)
    try:
        costs = measure(
            model,
            slots=options.slots,
            prompt_tokens=options.prompt_tokens or DEFAULT_PROMPT,
            points=options.points,
            repeats=options.repeats,
            tier=options.tier_of(model),
        )
    except KeyboardInterrupt:
        note("no measurement is kept; --points 3 --repeats 1 takes fewer")
        raise
    costs.save(options.path)
    _note_shorter(options, max(costs.prompt_grid))
    return costs


def _check_positions(options: ProfileOptions) -> None:
    from .executor.models.source import positions_of

    limit = positions_of(options.model)
    if limit is not None and options.prompt_tokens is not None and options.prompt_tokens > limit:
        what = (
            f"--prompt-tokens {options.prompt_tokens:,} is beyond the {limit:,} positions of {options.model}"
        )
        raise InputError(what, hint="Lower it, or leave it out.")


def _note_shorter(options: ProfileOptions, longest: int) -> None:
    if options.prompt_tokens is not None and longest < options.prompt_tokens:
        note(
            f"batches have prompts of up to {longest:,} tokens on average, not {options.prompt_tokens:,}:"
            " longer prompts and their completions must fit the model's positions"
        )


def _profile_layers(model: Any, options: ProfileOptions) -> LayerProfile:
    import torch

    from .executor.jobs.journal import Journal
    from .executor.models.source import position_limit
    from .executor.profiling.layer_profiling import ProfiledModel, profile_layers
    from .executor.profiling.profile_grid import Grid

    tier = options.tier_of(model)
    worker = _worker(model, tier, options)
    limit = position_limit(model.config)
    # The longest prompt of a batch is about 2.3 times the mean.
    longest = options.prompt_tokens or DEFAULT_PROMPT
    longest = longest if limit is None else min(longest, int((limit - 32) / 2.3))
    _note_shorter(options, longest)
    measured = Grid(
        tuple(grid(options.slots, points=options.points)),
        tuple(grid(longest, least=min(8, longest), points=options.points)),
        repeats=options.repeats,
    )
    output, points_path = options.path, options.points_path
    if output.exists() and not options.extend:
        points_path.unlink(missing_ok=True)
    identity = {
        "model": options.model,
        "load_format": options.load_format,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "tier": tier.name,
        "pinned": options.pinned,
        "decode_steps": measured.decode_steps,
        "encode_device": worker and worker.device,
    }
    with Journal(points_path, identity) as journal, _keeping(model, options, output.parent) as keep:
        if journal.finished:
            note(f"{points_path}: continuing after {len(journal.finished)} measurements")
        total = measured.measurements(paired=worker is not None)
        with progress(total, "measurements") as advance:
            measured_profile = profile_layers(
                ProfiledModel(model, tier, pinned=options.pinned),
                measured,
                journal,
                worker=worker,
                keep=keep,
                on_point=lambda done, _: advance(done),
            )
    measured_profile.save(output)
    for warning in measured_profile.warnings:
        note(warning)
    return measured_profile


@contextmanager
def _keeping(model: Any, options: ProfileOptions, folder: Path) -> Iterator[Callable[[Sequence[int]], None]]:
    """Yield a function that writes a completion, as a run does."""
    from .executor.jobs.job import answer_of
    from .executor.jobs.journal import Journal
    from .executor.models.source import ModelLoadError
    from .executor.models.tokenizers import end_tokens, load_tokenizer

    try:
        tokenizer = load_tokenizer(options.model)
    except ModelLoadError:
        # A model may lack a tokenizer; bytes take about as long to write.
        tokenizer = load_tokenizer("bytes")
    record = Prompts.random(Workload.from_lengths([1], [1]), 1, seed=0).records[0]
    ends = None if options.pinned else end_tokens(model, tokenizer)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, Journal(Path(scratch) / "answers", {}) as kept:

        def keep(tokens: Sequence[int]) -> None:
            line = answer_of(record, 1, tokens, model, tokenizer, ends=ends)
            kept.append(f"{len(kept.finished)}", line)

        yield keep


def _worker(model: Any, tier: Tier, options: ProfileOptions) -> EngineSpec | None:
    import torch

    from .executor.processes.engine_spec import EngineSpec

    device = options.encode_device
    if device is None and model.device.type == "cuda":
        others = [index for index in range(torch.cuda.device_count()) if index != model.device.index]
        device = f"cuda:{others[0]}" if others else "none"
        if not others:
            note("there is no other GPU: the interference of two workers (WAA) is not measured")
    if device == "none":
        return None
    return EngineSpec(
        model=options.model,
        load_format=options.load_format,
        dtype=options.dtype,
        device=device or str(model.device),
        seed=options.seed or 0,
        tier=tier.name,
        threads=options.threads or 1,
    )


def measure(
    model: object,
    *,
    slots: int,
    prompt_tokens: int,
    points: int = 5,
    repeats: int = 3,
    tier: Tier | None = None,
) -> CalibratedCost:
    """Measure a loaded model's costs up to a number of slots."""
    from .executor.engines.device_memory import memory_of, token_bytes_of
    from .executor.engines.huggingface import HuggingFaceEngine, vocabulary_of
    from .executor.engines.tiers import choose_tier
    from .executor.models.source import position_limit

    tier = tier or choose_tier(model)
    limit = position_limit(model.config)  # type: ignore[attr-defined]
    longest = prompt_tokens
    if limit is not None:
        longest = max(1, min(prompt_tokens, int((limit - MOST_STEPS) / LONGEST_PROMPT)))
    described: dict[str, object] = {}

    def engine_for(problem: Problem) -> Engine:
        prompts = Prompts.random(problem.workload, vocabulary_of(model), seed=0)
        engine = HuggingFaceEngine(
            problem, model, prompts.tokens, np.asarray(problem.workload.output_tokens), tier=tier
        )
        described.update(engine.describe())
        return engine

    slots_grid, prompt_grid = grid(slots, points=points), grid(longest, least=min(8, longest), points=points)
    order = order_of(slots_grid, prompt_grid, repeats)
    work = work_of(order, [mixed_job(slots, longest, CostModel.paper(), seed) for seed in (0, 1)])
    ends = [time.perf_counter()]
    with progress(len(work), "measurements") as advance:

        def measured(done: int) -> None:
            ends.append(time.perf_counter())
            advance(done, seconds_left(work, np.diff(ends).tolist()))

        def serve(cost: CostModel, seed: int) -> list[Stage]:
            problem = mixed_job(slots, longest, cost, seed)
            served = execute(problem, policy_named("fcfs-ski", problem), engine_for(problem))
            measured(len(order) + 1 + seed)
            return list(served.stages)

        stages = profile_grid(engine_for, slots_grid, prompt_grid, repeats=repeats, on_point=measured)
        # A whole job has realistic batches; a second one, of other lengths, tests the fit.
        stages += serve(fit_cost(stages), 0)
        found = calibrate(
            stages,
            engine=described,
            date=datetime.date.today().isoformat(),
            slots_grid=slots_grid,
            prompt_grid=prompt_grid,
            held_out=lambda cost: serve(cost, 1),
        )
    _, fitting = memory_of(model, tier)
    return replace(found, kv_token_bytes=token_bytes_of(model, tier), kv_tokens=fitting)
