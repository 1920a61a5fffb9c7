"""Commands of the command line as functions, with the same defaults."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from contextvars import copy_context
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from .data.files.disk import InputError
from .data.plan import Plan, holds_requests
from .data.problem import Problem
from .planning.plan import make_plan
from .run_job.batch_to_send import ServerOptions
from .run_job.options import ModelOptions, RunOptions
from .run_job.run import RunResult
from .run_job.run import run as run_plan
from .run_job.server_result import ServerResult
from .solvers.result import Limits, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Paths = str | os.PathLike[str]


@overload
def run(
    plan: Paths,
    model: ModelOptions | Paths,
    options: RunOptions | None = None,
    *,
    output: Paths | None = ...,
    trace: Paths | None = ...,
    overwrite: bool = ...,
    slots: int | None = ...,
    **more: Any,
) -> RunResult: ...


@overload
def run(
    plan: Paths,
    model: ServerOptions,
    options: None = None,
    *,
    output: Paths | None = ...,
    trace: Paths | None = ...,
    overwrite: bool = ...,
    **more: Any,
) -> ServerResult: ...


def run(
    plan: Paths,
    model: ModelOptions | ServerOptions | Paths,
    options: RunOptions | None = None,
    *,
    output: Paths | None = None,
    trace: Paths | None = None,
    overwrite: bool = False,
    slots: int | None = None,
    **more: Any,
) -> RunResult | ServerResult:
    """Run prompts or a plan on a model or on servers.

    Each finished completion is on disk. After a stop, the same call resumes the run.

    Parameters
    ----------
    plan
        File of prompts, or a plan.
    model
        Model and its loading, or servers.
    options
        Options of a run on a model.
    output, trace
        Files to write, by default ``answers.jsonl`` and ``trace.jsonl``. For an output ``NAME.jsonl`` the
        trace is ``NAME.trace.jsonl`` by default.
    overwrite
        True to replace existing outputs.
    slots
        Maximum number of requests in progress, for prompts.
    more
        ``watching`` and ``remark``, as in :func:`batchbound.run_job.run.run`.

    Raises
    ------
    InputError
        If prompts, plan, model and options do not match, or an output would be lost.
    RunStoppedError
        If the run cannot continue; finished completions are kept.
    """
    path = Path(_path(plan, "plan"))
    files = _files(output, trace)
    writing: dict[str, Any] = {"output": files[0], "trace": files[1], "overwrite": overwrite, **more}
    if isinstance(model, ServerOptions):
        return run_plan(path, model, cast("None", options), **writing)
    source = model if isinstance(model, ModelOptions) else ModelOptions(_path(model, "model"))
    chosen = options or RunOptions()
    if path.is_dir() or holds_requests(path):
        path, chosen = _planned(path, source, chosen, files, overwrite, slots)
    elif slots is not None:
        raise InputError("slots has no effect on a plan", file=path, hint="Leave it out.")
    return run_plan(path, source, chosen, **writing)


def gantt(result: Plan | RunResult | Result, problem: Problem | None = None) -> Figure:
    """Draw a plan or a run below first come, first served.

    Parameters
    ----------
    result
        Plan, run on one replica, or result of a solver.
    problem
        Problem of the solver's result.
    """
    from .executor.reports.gantt import Panel
    from .executor.reports.gantt import gantt as drawn
    from .executor.reports.report import simulated
    from .heuristics.simulate import simulate
    from .judging import report

    if isinstance(result, Result):
        if problem is None:
            raise InputError("gantt() needs the problem of a solver's result", hint="Give problem=...")
        result = make_plan(problem, limits=Limits(work=1), start=result.schedule)
    if not isinstance(result, Plan | RunResult):
        raise InputError(f"gantt() draws a plan or a run, not {type(result).__name__}", hint="Give one.")
    made = result if isinstance(result, Plan) else result.plan
    name, trace = ("plan", simulated(made)[0]) if made is result else ("run", result.traces[0])  # type: ignore[union-attr]
    tokens = dict(zip(trace.ids, trace.tokens.tolist(), strict=True))
    true = [tokens.get(one, 1) for one in made.workload.ids.tolist()]
    first = simulate(made.problem, "fcfs", made.workload.with_output_tokens(true).output_tokens)
    panels = [("first come, first served", first), (name, trace)]
    return drawn(*(Panel.of(title, made.problem.cost, one, report(made, (one,))) for title, one in panels))


def _files(output: Paths | None, trace: Paths | None) -> tuple[Path, Path]:
    if output is None:
        return Path("answers.jsonl"), Path(trace or "trace.jsonl")
    answers = Path(output)
    by_default = answers.with_suffix(".trace.jsonl") if answers.name else Path("trace.jsonl")
    return answers, by_default if trace is None else Path(trace)


def _planned(
    path: Path,
    source: ModelOptions,
    options: RunOptions,
    files: tuple[Path, Path],
    overwrite: bool,
    slots: int | None,
) -> tuple[Path, RunOptions]:
    """Return a plan of prompts, and the run's options."""
    from .cli.run_prompts import plan_of_prompts, policy_of

    words = [str(path), "--model", source.model, "-o", str(files[0]), "--trace", str(files[1])]
    given = {"slots": slots, "overwrite": overwrite, "seed": source.seed, "tokenizer": options.tokenizer}
    given |= {name: getattr(options, name) for name in ("temperature", "any_model")}
    args = _options("run", words, given)
    found = _quietly(plan_of_prompts, args)
    policy = options.policy or policy_of(Plan.load(found))
    return found, replace(options, policy=policy)


def _options(command: str, words: Sequence[str], given: dict[str, Any]) -> argparse.Namespace:
    from .cli.parser import Parser

    module = import_module(f".cli.commands.{command}", __package__)
    parser = Parser()
    module.configure(parser)
    args = parser.parse_args(words)
    for name, value in given.items():
        if not hasattr(args, name):
            known = ", ".join(sorted(one for one in vars(args) if not one.startswith("_")))
            raise InputError(f"{command}() has no option {name!r}", hint=f"Choose from {known}.")
        if value is not None:
            setattr(args, name, value)
    args.carry_out = getattr(args, "carry_out", module.run)
    return args


def _quietly(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    from .cli.output import be_quiet

    def silent() -> Any:
        be_quiet()
        with redirect_stdout(io.StringIO()):
            return call(*args, **more)

    return copy_context().run(silent)


def _path(given: object, what: str) -> str:
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    raise InputError(f"{what} is {type(given).__name__}, not a path", hint="Give the path of a file.")
