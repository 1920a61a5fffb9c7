"""Serve arriving requests by a policy, simulated or on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .data.arrays import IntArray
from .data.costs.iteration_cost import read_distserve_cost
from .data.files.disk import InputError
from .data.files.kinds import refuse_other_kinds
from .data.readers.requests import read_workload
from .data.readers.tables import is_table
from .data.workload import LONGEST, Workload
from .heuristics.serving.disaggregated import simulate_disaggregated
from .heuristics.serving.metrics import serving_metrics
from .heuristics.serving.registry import BLOCK_ALLOCATION, ServingOptions, serving_policy
from .heuristics.serving.simulation import ServingError, ServingRun, simulate_serving
from .options.option import takes
from .options.serve import TWO_DEVICES, ServeOptions


@takes(ServeOptions)
def serve(options: ServeOptions) -> dict[str, Any]:
    """Serve arriving requests by a policy, and return its figures.

    It takes the options of ``batchbound serve`` as keywords.
    """
    refuse_other_kinds(options.workload, "no requests")
    if Path(options.workload).is_file() and not is_table(options.workload):
        hint = "Give a table of lengths, or a generator; `run --policy` serves prompts."
        raise InputError("holds prompts, not lengths", file=options.workload, hint=hint)
    workload = read_workload(options.workload).workload
    longest = int((workload.input_tokens + workload.output_tokens).max())
    if options.longest is not None and options.longest < longest:
        what = f"a request has {longest:,} tokens, beyond --longest {options.longest:,}"
        raise InputError(what, file=options.workload, hint=f"Raise it to {longest}, or leave it out.")
    figures: dict[str, Any] = {"policy": options.policy, "requests": len(workload)}
    try:
        serving = ServingOptions(options.longest or longest, options.forward_size, options.sizes)
        noise = np.random.default_rng(options.seed).standard_normal(len(workload))
        guess = np.rint(workload.output_tokens * np.exp(options.length_error * noise))
        predicted = np.clip(guess, 1, LONGEST).astype(np.int64)
        if options.engine is not None:
            served, extra = _on_model(options, options.engine, workload, serving, predicted)
            figures |= extra
        else:
            served = _simulated(options, workload, serving, predicted)
    except (ServingError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        hint = "Check --kv-capacity and the sizes."
        raise InputError(str(error), file=options.workload, hint=hint) from None
    figures |= serving_metrics(served).to_json()
    figures["failures"], figures["lent_tokens"] = served.failures, served.lent_tokens
    figures["kv_held_per_iteration"] = float(served.held.mean()) / served.capacity
    return figures


def _simulated(
    options: ServeOptions, workload: Workload, serving: ServingOptions, predicted: IntArray
) -> ServingRun:
    if options.cost is None or options.model is None:
        raise InputError(
            "there is neither a device to simulate nor a model to run",
            hint="Give --cost FILE and --model NAME, or --engine MODEL.",
        )
    cost = read_distserve_cost(
        options.cost,
        options.model,
        options.tensor_parallel,
        swap_per_token=options.swap,
        transfer_per_token=options.transfer,
    )
    if options.policy == TWO_DEVICES:
        return simulate_disaggregated(
            workload, cost, options.kv_capacity, block_tokens=options.block_tokens
        ).run
    return simulate_serving(
        workload,
        serving_policy(options.policy, serving),
        cost,
        options.kv_capacity,
        block_tokens=options.block_tokens,
        predicted=predicted,
    )


def _on_model(
    options: ServeOptions, model_name: str, workload: Workload, serving: ServingOptions, predicted: IntArray
) -> tuple[ServingRun, dict[str, Any]]:
    if options.policy == TWO_DEVICES:
        raise InputError(f"policy '{TWO_DEVICES}' needs two devices", hint="Simulate it, without --engine.")
    from .executor.models.prompts import Prompts
    from .executor.models.source import load_model, position_limit, require_engine

    require_engine()
    # It imports torch, whose absence is told first.
    from .executor.serving.engine import own_answer, serve_on_model

    model = load_model(model_name, dtype=options.dtype, seed=options.seed)
    limit, longest = position_limit(model.config), workload.input_tokens + workload.output_tokens
    if limit is not None and longest.max() > limit:
        raise InputError(
            f"a request of {longest.max()} tokens on a model of {limit} positions",
            file=options.workload,
            hint="Choose a model with more positions, or leave such requests out.",
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = Prompts.random(workload, vocabulary, options.seed).tokens
    done = serve_on_model(
        model,
        prompts,
        workload,
        serving_policy(options.policy, serving),
        options.kv_capacity,
        block_tokens=options.block_tokens,
        paged=options.policy in BLOCK_ALLOCATION,
        predicted=predicted,
    )
    extra: dict[str, Any] = {"moved_tokens": done.moved_tokens, "compactions": done.compactions}
    if options.verify:
        own = zip(prompts, done.answers, strict=True)
        extra["wrong_answers"] = sum(own_answer(model, prompt, len(a)) != a for prompt, a in own)
    return done.run, extra
