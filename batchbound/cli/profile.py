"""``batchbound profile``: measure a model on this machine and fit the cost model."""

from __future__ import annotations

import argparse
import datetime
from typing import TYPE_CHECKING

import numpy as np

from ..data.calibration import CalibratedCost
from ..data.files import InputError
from ..data.problem import Problem
from ..executor.calibrate import calibrate
from ..executor.engine import Engine
from ..executor.profiling import grid, profile
from ..executor.prompts import Prompts
from .inputs import DEFAULT_SLOTS, positive, refuse_existing
from .model import add_model, load, tier_of
from .progress import progress

if TYPE_CHECKING:
    from ..executor.tiers import Tier


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser)
    parser.add_argument(
        "--slots", type=positive, default=DEFAULT_SLOTS, help="most slots to measure (default %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        default=512,
        metavar="TOKENS",
        help="longest prompt to measure (default %(default)s)",
    )
    parser.add_argument(
        "--points", type=positive, default=5, help="points along each side of the grid (default %(default)s)"
    )
    parser.add_argument("--repeats", type=positive, default=3, help="of which the median counts")
    parser.add_argument("-o", "--output", default="cost.json", metavar="FILE", help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write the cost model, and say how well it fits."""
    refuse_existing(args.output, args.overwrite)
    if args.points < 2 or args.slots < 2:
        message = f"--points {args.points} and --slots {args.slots} measure a single size"
        raise InputError(message, mend="Give at least 2 of each: a line needs two points.")
    model = load(args)
    calibrated = measure(
        model,
        slots=args.slots,
        prompt_tokens=args.prompt_tokens,
        points=args.points,
        repeats=args.repeats,
        tier=tier_of(model, args),
    )
    calibrated.save(args.output)
    cost, error = calibrated.cost, calibrated.error
    print(f"{args.output}: {calibrated.engine.get('model')} on {calibrated.engine.get('device')}")
    print(
        f"  prefill stage  {cost.prefill_base * 1e3:.3f} ms + {cost.prefill_per_token * 1e3:.5f} ms/token"
        f", at least {cost.prefill_floor * 1e3:.3f} ms  (mean error {error.prefill_mape:.1%})"
    )
    print(
        f"  decode round   {cost.decode_base * 1e3:.3f} ms + {cost.decode_per_slot * 1e3:.5f} ms/slot"
        f" + {cost.decode_per_kv_token * 1e9:.5f} ns/KV token  (mean error {error.decode_mape:.1%})"
    )
    return 0


def measure(
    model: object,
    *,
    slots: int,
    prompt_tokens: int,
    points: int = 5,
    repeats: int = 3,
    tier: Tier | None = None,
) -> CalibratedCost:
    """
    Return the cost model of a loaded model on this machine.

    Parameters
    ----------
    model
        Loaded.
    slots, prompt_tokens
        Most slots and longest prompt to measure.
    points
        Points along each side of the grid, evenly spaced by ratio.
    repeats
        Of which the median counts.
    tier
        The layout of keys and values; chosen if left out.
    """
    from ..executor.huggingface import HuggingFaceEngine, vocabulary_of
    from ..executor.model_source import position_limit
    from ..executor.tiers import choose_tier

    tier = tier or choose_tier(model)
    limit = position_limit(model.config)  # type: ignore[attr-defined]
    longest = prompt_tokens if limit is None else min(prompt_tokens, limit - 16)
    described: dict[str, object] = {}

    def engine_for(problem: Problem) -> Engine:
        prompts = Prompts.random(problem.workload, vocabulary_of(model), seed=0)
        engine = HuggingFaceEngine(
            problem, model, prompts.tokens, np.asarray(problem.workload.output_tokens), tier=tier
        )
        described.update(engine.describe())
        return engine

    slots_grid, prompt_grid = grid(slots, points=points), grid(longest, least=min(8, longest), points=points)
    with progress(len(slots_grid) * len(prompt_grid) * repeats + 1, "measurements") as advance:
        stages = profile(
            engine_for, slots_grid, prompt_grid, repeats=repeats, on_point=lambda done, _: advance(done)
        )
    return calibrate(
        stages,
        engine=described,
        date=datetime.date.today().isoformat(),
        slots_grid=slots_grid,
        prompt_grid=prompt_grid,
    )
