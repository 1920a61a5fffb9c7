"""ExeGPT's XRunner: runs of an execution configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.configuration import PlannedConfiguration
from ...data.trace import Stage, Trace
from ...heuristics.exegpt.adaptive_configuration import AdaptiveConfiguration, Replanning
from ...heuristics.exegpt.dynamic_batch import DynamicBatch
from ...heuristics.exegpt.round_robin import RoundRobinAllocation
from ...heuristics.exegpt.workload_aware import WorkloadAwareAllocation
from ...heuristics.loop import execute
from ..engines.huggingface import HuggingFaceEngine
from ..models.faults import device_failures
from ..processes.encode_worker import EncodeWorker
from ..processes.tensor_parallel import share_layers
from ..processes.tensor_peers import TensorPeers
from ..processes.workload_aware import DecodeEngine
from .job import Job, Outcome
from .journal import Journal
from .machine_speed import MachineSpeed

if TYPE_CHECKING:
    from ..processes.engine_spec import EngineSpec

MOST_GROWTH = 2
"""Largest growth of the encoding batch within a run."""


def run_configuration(
    job: Job,
    configuration: PlannedConfiguration,
    journal: Journal,
    *,
    worker: EngineSpec | None = None,
    replanning: Replanning | None = None,
    tensor_parallel: int = 1,
    on_stage: Callable[[Stage, int], None] | None = None,
) -> Outcome:
    """Serve the unfinished requests by a configuration."""
    whole = job.plan.problem
    names = whole.workload.ids.tolist()
    waiting = job.left(journal)
    if not waiting.size:
        return Outcome((), len(names))
    problem = replace(whole, workload=whole.workload.select(waiting))
    prompts = [job.prompts.tokens[i] for i in waiting]
    options: dict[str, Any] = {
        "most_tokens": job.most_tokens[waiting],
        "decoding": job.decoding,
        "tier": job.tier,
    }

    def serve(engine: HuggingFaceEngine, policy: RoundRobinAllocation | WorkloadAwareAllocation) -> Trace:
        adapting = None if replanning is None else AdaptiveConfiguration(policy, configuration, replanning)

        def keep(request: int) -> None:
            index = int(waiting[request])
            journal.append(names[index], job.answer(index, engine.answers[request]))

        with device_failures():
            trace = execute(problem, adapting or policy, engine, on_finish=keep, on_stage=on_stage)
            # A reading would need all processes that share layers.
            readings = [*before, *speed.readings()] if alone else []
        return replace(trace, readings=np.array(readings))

    resumed = len(names) - len(waiting)
    alone = tensor_parallel == 1
    if worker is None and (configuration.handed_over or not alone):
        raise ValueError(f"{configuration.strategy} needs a worker for what other processes load")
    if not alone and (configuration.handed_over or replanning is not None):
        raise ValueError("layers are shared under RRA alone, without re-planning")
    speed = MachineSpeed(job.model, time.perf_counter)
    with device_failures():
        before = speed.readings() if alone else []
    if not configuration.handed_over:
        with ExitStack() as peers:
            model = job.model
            if worker is not None and not alone:
                # Each batch has its own sampler.
                own_options = {**options, "decoding": replace(job.decoding, sampler=None)}
                peers.enter_context(
                    TensorPeers(worker, tensor_parallel, problem, configuration, prompts, own_options)
                )
                model = share_layers(model, tensor_parallel)
            single = HuggingFaceEngine(problem, model, prompts, **options)
            return Outcome((serve(single, RoundRobinAllocation.of(configuration)),), resumed)
    assert worker is not None
    batch = DynamicBatch.of(configuration)
    largest_batch = batch.most if replanning is None else MOST_GROWTH * batch.most
    with closing(EncodeWorker(worker, largest_batch, int(problem.prompt_tokens.max()))) as encoder:
        engine = DecodeEngine(encoder, problem, job.model, prompts, **options)
        trace = serve(engine, WorkloadAwareAllocation(engine, batch, configuration.lead))
    return Outcome((replace(trace, prefilled=engine.encode_began),), resumed)
