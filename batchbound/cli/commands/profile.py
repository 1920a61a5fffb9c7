"""``batchbound profile``: measure a model on this machine."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.costs.calibration import CalibratedCost
from ...data.costs.cost import CostModel
from ...data.files.disk import InputError
from ...data.files.outputs import refuse_outputs
from ...data.problem import Problem
from ...data.workload import Workload
from ...executor.models.prompts import Prompts
from ...executor.profiling.calibrate import calibrate, fit_cost
from ...executor.profiling.grid_run import LONGEST_PROMPT, MOST_STEPS, grid, mixed_job, profile
from ...heuristics.engine import Engine
from ...heuristics.loop import execute
from ...heuristics.registry import policy_named
from ...models.iterations.layer_cost import LayerCost, Surface
from ..inputs import DEFAULT_SLOTS, positive, slot_count
from ..model import add_model, load, tier_of
from ..output import note
from ..parser import Parser
from ..progress import progress
from ..streams import say

if TYPE_CHECKING:
    from ...data.costs.layer_profile import LayerProfile
    from ...data.trace import Stage
    from ...executor.engines.tiers import Tier
    from ...executor.processes.engine_spec import EngineSpec
    from ...executor.profiling.profile_grid import Grid


DEFAULT_PROMPT = 512
"""Longest prompt to measure by default, in tokens."""


def configure(parser: Parser) -> None:
    """Add the options of the command."""
    add_model(parser)
    parser.add_argument(
        "--slots",
        type=slot_count,
        default=DEFAULT_SLOTS,
        everyday=True,
        help="maximum number of slots to measure (default %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        metavar="TOKENS",
        everyday=True,
        help=f"longest prompt to measure (default {DEFAULT_PROMPT}, or as many as the model's positions"
        " allow)",
    )
    parser.add_argument(
        "--points", type=positive, default=5, help="points along each axis of the grid (default %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, help="measurements of each point (default %(default)s)"
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        everyday=True,
        help="measure each layer, attention separately, for `batchbound search --profile`",
    )
    parser.add_argument(
        "--pinned",
        action="store_true",
        needs=["--layers"],
        help="with --layers: measure for runs with `run --pinned`",
    )
    parser.add_argument(
        "--encode-device",
        metavar="DEVICE",
        needs=["--layers"],
        help="with --layers: device of a second worker, which encodes while the first decodes (WAA), or none"
        " (default: the same CPU, or the next GPU)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        everyday=True,
        help="file of the costs (default: cost.json, with --layers profile.json)",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--overwrite", action="store_true", everyday=True, help="replace the output if it exists"
    )
    kept.add_argument(
        "--extend",
        action="store_true",
        needs=["--layers"],
        help="with --layers: keep the points of an existing profile, and measure only the missing ones",
    )


def run(args: argparse.Namespace) -> int:
    """Measure the model and write its costs."""
    output = args.output or ("profile.json" if args.layers else "cost.json")
    refuse_outputs([output], args.overwrite or args.extend)
    if args.points < 2 or args.slots < 2:
        message = f"--points {args.points} and --slots {args.slots} measure a single size"
        raise InputError(message, hint="Give at least 2 of each: a line needs two points.")
    _check_positions(args)
    model = load(args)
    if args.layers:
        return _run_layers(model, args, Path(output))
    calibrated = measure(
        model,
        slots=args.slots,
        prompt_tokens=args.prompt_tokens or DEFAULT_PROMPT,
        points=args.points,
        repeats=args.repeats,
        tier=tier_of(model, args),
    )
    calibrated.save(output)
    _say_shorter(args, max(calibrated.prompt_grid))
    cost, error = calibrated.cost, calibrated.error
    assert error is not None, "it was measured"
    say(f"{output}: {calibrated.engine.get('model')} on {calibrated.engine.get('device')}")
    say(
        f"  prefill stage  {cost.prefill_base * 1e3:.3f} ms + {cost.prefill_per_token * 1e3:.5f} ms/token"
        f"{_bend(cost)}, at least {cost.prefill_floor * 1e3:.3f} ms  (mean error {error.prefill_mape:.1%})"
    )
    say(
        f"  decode step    {cost.decode_base * 1e3:.3f} ms + {cost.decode_per_slot * 1e3:.5f} ms/slot"
        f" + {cost.decode_per_kv_token * 1e9:.5f} ns/KV token  (mean error {error.decode_mape:.1%})"
    )
    say(f"  change of the batch  {cost.decode_per_change * 1e3:.3f} ms")
    say(
        f"  KV cache       {calibrated.kv_token_bytes:,.0f} bytes/token,"
        f" {calibrated.kv_tokens:,} tokens fit with the weights"
    )
    beyond = calibrated.held_out
    if beyond is not None:
        say(
            f"  on a held-out job: {beyond.makespan:+.1%} of all seconds,"
            f" mean error of a stage {beyond.prefill_mape:.1%}, of a step {beyond.decode_mape:.1%}"
        )
    return 0


def _check_positions(args: argparse.Namespace) -> None:
    from ...executor.models.source import positions_of

    limit = positions_of(args.model)
    if limit is not None and args.prompt_tokens is not None and args.prompt_tokens > limit:
        what = f"--prompt-tokens {args.prompt_tokens:,} is beyond the {limit:,} positions of {args.model}"
        raise InputError(what, hint="Lower it, or leave it out.")


def _say_shorter(args: argparse.Namespace, longest: int) -> None:
    if args.prompt_tokens is not None and longest < args.prompt_tokens:
        note(
            f"batches have prompts of up to {longest:,} tokens on average, not {args.prompt_tokens:,}: longer"
            " prompts and their completions must fit the model's positions"
        )


def _bend(cost: CostModel) -> str:
    if not cost.prefill_per_token_beyond:
        return ""
    return f" + {cost.prefill_per_token_beyond * 1e3:.5f} ms/token beyond {cost.prefill_bend:.0f}"


def _run_layers(model: Any, args: argparse.Namespace, output: Path) -> int:
    import torch

    from ...executor.jobs.journal import Journal
    from ...executor.models.source import position_limit
    from ...executor.profiling.layer_profiling import ProfiledModel, profile_layers
    from ...executor.profiling.profile_grid import Grid

    tier = tier_of(model, args)
    worker = _worker(model, tier, args)
    limit = position_limit(model.config)
    # The longest prompt of a batch is about 2.3 times the mean.
    longest = args.prompt_tokens or DEFAULT_PROMPT
    longest = longest if limit is None else min(longest, int((limit - 32) / 2.3))
    _say_shorter(args, longest)
    measured = Grid(
        tuple(grid(args.slots, points=args.points)),
        tuple(grid(longest, least=min(8, longest), points=args.points)),
        repeats=args.repeats,
    )
    points_path = output.with_name(output.name + ".points")
    if output.exists() and not args.extend:
        points_path.unlink(missing_ok=True)
    identity = {
        "model": args.model,
        "load_format": args.load_format,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "tier": tier.name,
        "pinned": args.pinned,
        "decode_steps": measured.decode_steps,
        "encode_device": worker and worker.device,
    }
    with Journal(points_path, identity) as journal, _keeping(model, args, output.parent) as keep:
        if journal.finished:
            note(f"{points_path}: continuing after {len(journal.finished)} measurements")
        total = measured.measurements(paired=worker is not None)
        with progress(total, "measurements") as advance:
            profile = profile_layers(
                ProfiledModel(model, tier, pinned=args.pinned),
                measured,
                journal,
                worker=worker,
                keep=keep,
                on_point=lambda done, _: advance(done),
            )
    profile.save(output)
    say(f"{output}: {profile.shape.name} on {profile.device}, {profile.versions['tier']} tier")
    say(f"  each measurement is in {points_path}; {profile.kv_tokens:,} tokens of KV cache would fit")
    for warning in profile.warnings:
        note(warning)
    say(_layer_table(profile, measured))
    return 0


@contextmanager
def _keeping(model: Any, args: argparse.Namespace, folder: Path) -> Iterator[Callable[[Sequence[int]], None]]:
    """Yield a function that writes a completion, as a run does."""
    from ...executor.jobs.job import answer_of
    from ...executor.jobs.journal import Journal
    from ...executor.models.source import ModelLoadError
    from ...executor.models.tokenizers import end_tokens, load_tokenizer

    try:
        tokenizer = load_tokenizer(args.model)
    except ModelLoadError:
        # A model may lack a tokenizer; bytes take about as long to write.
        tokenizer = load_tokenizer("bytes")
    record = Prompts.random(Workload.from_lengths([1], [1]), 1, seed=0).records[0]
    ends = None if args.pinned else end_tokens(model, tokenizer)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, Journal(Path(scratch) / "answers", {}) as kept:

        def keep(tokens: Sequence[int]) -> None:
            line = answer_of(record, 1, tokens, model, tokenizer, ends=ends)
            kept.append(f"{len(kept.finished)}", line)

        yield keep


def _worker(model: Any, tier: Tier, args: argparse.Namespace) -> EngineSpec | None:
    import torch

    from ...executor.processes.engine_spec import EngineSpec

    device = args.encode_device
    if device is None and model.device.type == "cuda":
        others = [index for index in range(torch.cuda.device_count()) if index != model.device.index]
        device = f"cuda:{others[0]}" if others else "none"
        if not others:
            note("there is no other GPU: the interference of two workers (WAA) is not measured")
    if device == "none":
        return None
    return EngineSpec(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        device=device or str(model.device),
        seed=args.seed or 0,
        tier=tier.name,
        threads=args.threads or 1,
    )


def _layer_table(profile: LayerProfile, measured: Grid) -> str:
    """Return the times at the grid's corners, with attention's share."""
    cost, layers = LayerCost(profile), profile.shape.layers
    heads = ("batch", "tokens", "encode", "attention", "decode step", "attention")
    lines = ["  " + " ".join(f"{head:>12s}" for head in heads)]
    for batch in (min(measured.batches), max(measured.batches)):
        for length in (min(measured.lengths), max(measured.lengths)):
            row = [str(batch), str(length)]
            for phase, (per_layer, once) in (
                ("encode", cost.encode(batch, length)),
                ("decode", cost.decode(batch, length)),
            ):
                attention = next(
                    operation
                    for operation in profile.operations
                    if (operation.name, operation.phase) == ("attention", phase)
                )
                seconds = layers * per_layer + once
                share = layers * Surface(attention.points, attention.seconds)(batch, length) / seconds
                row += [f"{seconds * 1e3:.3f} ms", f"{share:.0%}"]
            lines.append("  " + " ".join(f"{text:>12s}" for text in row))
    return "\n".join(lines)


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
    from ...executor.engines.device_memory import memory_of, token_bytes_of
    from ...executor.engines.huggingface import HuggingFaceEngine, vocabulary_of
    from ...executor.engines.tiers import choose_tier
    from ...executor.models.source import position_limit

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
    points_in_all = len(slots_grid) * len(prompt_grid) * repeats + 1
    with progress(points_in_all + 2, "measurements") as advance:

        def serve(cost: CostModel, seed: int) -> list[Stage]:
            problem = mixed_job(slots, longest, cost, seed)
            served = execute(problem, policy_named("fcfs-ski", problem), engine_for(problem))
            advance(points_in_all + 1 + seed)
            return list(served.stages)

        stages = profile(
            engine_for, slots_grid, prompt_grid, repeats=repeats, on_point=lambda done, _: advance(done)
        )
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
