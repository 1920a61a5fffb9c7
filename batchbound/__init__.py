"""Offline planning of LLM batch inference.

Plan a whole job of prompts, run the plan on a HuggingFace model, and report how far the run was from a
proven lower bound.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .auditing import Audit, audit
    from .comparing.files import compare
    from .data import Bound, CostModel, Problem, Schedule, Workload
    from .data.iteration_plan import IterationPlan
    from .data.iterations import EngineLimits
    from .data.objective import Objective
    from .data.plan import Plan
    from .data.readers.replayed import Replayed
    from .data.readers.requests import read_workload
    from .data.readers.sampling import Sampling
    from .data.report import Report
    from .data.trace import Trace
    from .drawing import gantt
    from .executor.async_rollouts import AsyncRollouts
    from .executor.jobs.params import Patience, RunParams
    from .executor.llm import LLM
    from .executor.partial import Partial, Until
    from .executor.rollout import replace_generation, rollout_function
    from .heuristics.registry import policy_named
    from .judging import verify
    from .models.exegpt.configuration import Targets
    from .plan_for_engines import plan_for_engine
    from .plan_requests import plan
    from .planning.history import known_lengths
    from .planning.iterations import Engines, make_iteration_plan
    from .planning.mixed_job import MixedJob, read_mixed_job
    from .planning.plan import make_plan
    from .predicting import predict
    from .profiling import profile
    from .reporting import report
    from .run_job.batch_to_send import ServerOptions
    from .run_job.options import ModelOptions, RunOptions
    from .run_job.replaying import replay
    from .run_job.run import RunResult
    from .run_job.server_result import ServerResult
    from .running import run
    from .searching import ConfigurationSearch, search
    from .simulating import simulate
    from .sizing.files import size
    from .sizing.result import Sizing
    from .solvers import Limits, Result, solve
    from .version import show_versions


__all__ = [
    "LLM",
    "AsyncRollouts",
    "Audit",
    "Bound",
    "ConfigurationSearch",
    "CostModel",
    "EngineLimits",
    "Engines",
    "IterationPlan",
    "Limits",
    "MixedJob",
    "ModelOptions",
    "Objective",
    "Partial",
    "Patience",
    "Plan",
    "Problem",
    "Replayed",
    "Report",
    "Result",
    "RunOptions",
    "RunParams",
    "RunResult",
    "Sampling",
    "Schedule",
    "ServerOptions",
    "ServerResult",
    "Sizing",
    "Targets",
    "Trace",
    "Until",
    "Workload",
    "__version__",
    "audit",
    "compare",
    "gantt",
    "known_lengths",
    "make_iteration_plan",
    "make_plan",
    "plan",
    "plan_for_engine",
    "policy_named",
    "predict",
    "profile",
    "read_mixed_job",
    "read_workload",
    "replace_generation",
    "replay",
    "report",
    "rollout_function",
    "run",
    "search",
    "show_versions",
    "simulate",
    "size",
    "solve",
    "suite",
    "verify",
]
if find_spec("torch") is None or find_spec("transformers") is None:
    for _of_engine in ("LLM", "replace_generation", "rollout_function"):
        __all__.remove(_of_engine)
if find_spec("trl") is None:
    __all__.remove("AsyncRollouts")

_HOMES = {
    "LLM": ".executor.llm",
    "AsyncRollouts": ".executor.async_rollouts",
    "Audit": ".auditing",
    "Bound": ".data.bound",
    "ConfigurationSearch": ".searching",
    "CostModel": ".data.costs.cost",
    "EngineLimits": ".data.iterations",
    "Engines": ".planning.iterations",
    "IterationPlan": ".data.iteration_plan",
    "Limits": ".solvers.result",
    "MixedJob": ".planning.mixed_job",
    "ModelOptions": ".run_job.options",
    "Objective": ".data.objective",
    "Partial": ".executor.partial",
    "Patience": ".executor.jobs.params",
    "Plan": ".data.plan",
    "Problem": ".data.problem",
    "Replayed": ".data.readers.replayed",
    "Report": ".data.report",
    "Result": ".solvers.result",
    "RunOptions": ".run_job.options",
    "RunParams": ".executor.jobs.params",
    "RunResult": ".run_job.run",
    "Sampling": ".data.readers.sampling",
    "Schedule": ".data.schedule",
    "ServerOptions": ".run_job.batch_to_send",
    "ServerResult": ".run_job.server_result",
    "Targets": ".models.exegpt.configuration",
    "Trace": ".data.trace",
    "Until": ".executor.partial",
    "Workload": ".data.workload",
    "audit": ".auditing",
    "compare": ".comparing.files",
    "known_lengths": ".planning.history",
    "make_iteration_plan": ".planning.iterations",
    "gantt": ".drawing",
    "make_plan": ".planning.plan",
    "plan": ".plan_requests",
    "plan_for_engine": ".plan_for_engines",
    "policy_named": ".heuristics.registry",
    "read_mixed_job": ".planning.mixed_job",
    "read_workload": ".data.readers.requests",
    "replace_generation": ".executor.rollout",
    "replay": ".run_job.replaying",
    "report": ".reporting",
    "rollout_function": ".executor.rollout",
    "predict": ".predicting",
    "profile": ".profiling",
    "run": ".running",
    "search": ".searching",
    "show_versions": ".version",
    "simulate": ".simulating",
    "Sizing": ".sizing.result",
    "size": ".sizing.files",
    "solve": ".solvers.solve",
    "suite": ".comparing.instance_library",
    "verify": ".judging",
}
"""Module of each public name, imported on first use, so that planning loads no torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchbound' has no attribute {name!r}")
    module, _, original = _HOMES[name].partition(":")
    try:
        value = getattr(import_module(module, __name__), original or name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        message = f"batchbound.{name} needs {error.name}: in the clone, run `pip install '.[engine]'`"
        raise ModuleNotFoundError(message, name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
