"""Options of ``batchbound plan``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Literal

from ..data.files.errors import InputError
from ..data.objective import MAKESPAN, Objective
from ..heuristics.dispatch import RULES as DISPATCH_RULES
from ..integrations.handover import ENGINES
from ..solvers.result import Limits
from ..solvers.solve import DEFAULT_SECONDS, DEFAULT_SOLVER, SOLVERS, limits_heeded
from .option import Option, Options, PathText, Rule, everyday, option
from .problem import WORKLOAD, LimitOptions
from .values import File, Positive, Seconds, Seed, TokenCount

DEFAULT_OUTPUT = "plan.json"
USUAL_BUDGET, USUAL_BLOCK = 2048, 16
"""Simulated tokens per iteration and per block by default: vLLM's on most devices."""


@dataclass(frozen=True, kw_only=True)
class UncertainOptions(Options):
    """Error of predicted lengths."""

    TITLE = "predicted lengths"

    length_error: str | None = option(
        None,
        "error of predicted lengths: the standard deviation of log(predicted / actual), or a CSV file"
        " with columns predicted and actual; the plan is then the best over sampled lengths, with an interval"
        " of its makespan",
        metavar="SD|FILE",
    )


@dataclass(frozen=True, kw_only=True)
class FleetOptions(Options):
    """Replicas, and the requests of each."""

    TITLE = "replicas"

    replicas: str | None = option(
        None,
        "number of engines of one plan, or a JSON file that describes each:"
        ' {"replicas": [{"count": 2}, {"speed": 0.5, "slots": 16, "kv_capacity": 9000, "busy": 3}]}'
        " (--slots and the other limits are each replica's)",
        metavar="N|FILE",
    )
    dispatch: str | None = option(
        None,
        "rule that dispatches requests to replicas: mico, karmarkar-karp, Graham's lpt, round-robin or"
        " hash (default: by the cost of each request and the idle time of the schedules)",
        choices=tuple(sorted(DISPATCH_RULES)),
        needs=("replicas",),
    )
    groups: Literal["any", "together", "spread"] | None = option(
        None,
        "placement of a prompt's completions: on any replicas, together on one, or spread over as many as"
        " possible (default any)",
        needs=("replicas",),
    )
    price: Seconds | None = option(
        None,
        "price of one device-hour, with one device per replica; adds the cost of the job",
        metavar="MONEY",
    )


def _objective(text: str) -> str:
    Objective.of(text)
    return text


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Options):
    """What the plan minimizes."""

    TITLE = "objective"

    objective: str = everyday(
        MAKESPAN,
        "what to minimize: makespan (default), total (the sum of completion times), first:K or groups:K (the"
        " time at which K requests, or K groups of a table, are complete)",
        metavar="makespan|total|first:K|groups:K",
        parse=_objective,
    )

    @property
    def aim(self) -> Objective | None:
        """The objective; None for the makespan."""
        try:
            return Objective.of(self.objective)
        except ValueError as error:
            raise InputError(str(error), where="objective", hint="Choose one of them.") from None


@dataclass(frozen=True, kw_only=True)
class SolverOptions(Options):
    """The solver, and its limits."""

    TITLE = "solver"

    solver: str = option(
        DEFAULT_SOLVER, "solver that makes the schedule (default %(default)s)", choices=tuple(sorted(SOLVERS))
    )
    time_limit: Seconds | None = option(
        None, f"search time in seconds (default {DEFAULT_SECONDS:g}, none with --work)"
    )
    work: Positive | None = option(
        None, "search limit in steps; unlike a time limit, it gives the same schedule for the same seed"
    )
    seed: Seed = option(0, "seed of the search's random choices (default %(default)s)")
    threads: Positive = option(1, "threads of an external solver (default %(default)s)")
    params: File | None = option(None, "TOML file of search parameters: phases and shares")

    @property
    def limits(self) -> Limits:
        """Limits of the search."""
        seconds = DEFAULT_SECONDS if self.work is None and self.time_limit is None else self.time_limit
        return Limits(seconds=seconds, work=self.work, threads=self.threads, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class MixingOptions(Options):
    """Engines that mix prompts with generated tokens."""

    TITLE = "engines that mix prompts with generated tokens"
    NEEDS = ("engine",)
    ABOUT = (
        "Without --for, a plan is for batchbound's own engine, which alternates prefill stages and decode"
        " steps. vLLM and SGLang mix both in their iterations: --for plans the order of requests, the number"
        " in flight, and the iterations with their lower bound. --slots is then max_num_seqs, and"
        " --kv-capacity the KV capacity of the engine."
    )

    engine: str | None = everyday(
        None,
        "engine, or trainer with one; its input is written next to the plan: a batch with priorities per"
        " replica (vllm, sglang), or an order with priorities and settings (verl, openrlhf, trl). --cost is"
        " then a file of `audit --save-cost` or a layer profile, and adds seconds",
        flag="for",
        choices=ENGINES,
    )
    token_budget: TokenCount | None = option(
        None,
        f"maximum tokens per iteration, vLLM's max_num_batched_tokens (default: {USUAL_BUDGET} in the"
        " simulation, no limit in the bound)",
    )
    block_tokens: TokenCount | None = option(
        None, f"tokens per block of KV cache (default: {USUAL_BLOCK} in the simulation, 1 in the bound)"
    )
    unit: TokenCount | None = option(
        None,
        "tokens by which the engine reuses a common beginning: vLLM's prefix_match_unit, or else its block"
        " size (default 1, which is always safe: a larger one than the engine's gives a false bound)",
    )
    no_prefix_caching: bool = option(
        False,
        "compute each prompt in full, as vLLM with --no-enable-prefix-caching (default: compute a common"
        " beginning of prompts once)",
    )


def _ignores(limit: str, options: Any) -> bool:
    heeded = limits_heeded(options.solver)
    return options.engine is None and (limit not in heeded if limit == "threads" else not heeded)


def _prices_iterations(options: Any) -> bool:
    return options.engine is not None and options.cost not in (None, "paper")


def _is_auto(options: Any) -> bool:
    return bool(options.slots == "auto")


_ON_SOLVER = "with --solver {solver}"
_ON_ENGINE = {
    "prefill_token_cap": "Say --token-budget.",
    "prefix_cache": "The engine keeps prompts in its KV cache.",
    "first_token": "The last chunk of a prompt yields it.",
    "length_error": "Give the best --lengths available.",
    "solver": "Orders are simulated.",
    "threads": "",
}
"""Options that an engine of its own iterations ignores, with hints."""


@dataclass(frozen=True)
class PlanOptions(
    LimitOptions,
    UncertainOptions,
    FleetOptions,
    ObjectiveOptions,
    SolverOptions,
    MixingOptions,
):
    """Requests, the limits of their engines, and the file of their plan."""

    TITLE = ABOUT = ""
    RULES = (
        Rule(("solver",), excludes=("replicas",)),
        Rule(("slots auto",), when=lambda options: options.replicas, where="with --replicas"),
        Rule(("objective",), excludes=("replicas", "length_error")),
        Rule(("slots auto",), when=lambda options: options.aim, where="with --objective"),
        Rule(("solver", "params"), when=lambda options: options.aim, where="with --objective {objective}"),
        Rule(
            ("objective",),
            when=_prices_iterations,
            where="with --for {engine} and --cost: it counts iterations",
        ),
        Rule(("work",), when=_is_auto, where="with --slots auto", hint="Give --time-limit instead."),
        Rule(("threads",), when=lambda options: _ignores("threads", options), where=_ON_SOLVER),
        Rule(
            ("time_limit",),
            when=lambda options: not _is_auto(options) and _ignores("seconds", options),
            where=_ON_SOLVER,
        ),
        Rule(("work",), when=lambda options: _ignores("work", options), where=_ON_SOLVER),
        Rule(
            ("seed",),
            # Lengths are drawn with it.
            when=lambda options: (
                not _is_auto(options) and options.length_error is None and _ignores("seed", options)
            ),
            where=_ON_SOLVER,
        ),
        Rule(
            ("time_limit", "work"),
            when=lambda options: options.replicas is not None and options.length_error is not None,
            where="with --replicas and --length-error: queues are compared",
        ),
        Rule(("unit",), excludes=("no_prefix_caching",)),
        Rule(("params",), excludes=("replicas", "length_error", "engine")),
        Rule(("params",), when=lambda options: options.solver != DEFAULT_SOLVER, where=_ON_SOLVER),
        *(Rule((name,), excludes=("engine",), hint=hint) for name, hint in _ON_ENGINE.items()),
        Rule(
            ("slots auto",),
            when=lambda options: options.engine is not None,
            where="with --for {engine}",
            hint="Give the engine's own limit (max_num_seqs).",
        ),
        Rule(
            ("price",),
            when=lambda options: options.engine is not None and options.cost in (None, "paper"),
            where="with --for {engine} and no --cost",
            hint="Give the cost of an iteration as --cost FILE.",
        ),
    )

    workload: Annotated[PathText, Option(WORKLOAD, positional=True, metavar="FILE")]
    _: KW_ONLY
    output: File | None = everyday(
        None, f"file of the plan (default {DEFAULT_OUTPUT})", short="-o", writes=True
    )
    overwrite: bool = everyday(False, "replace the output if it exists")
    json: bool = option(False, "print one JSON object instead of a table")

    def saved(self) -> PlanOptions:
        """Return the options with a file of the plan."""
        return self if self.output else replace(self, output=DEFAULT_OUTPUT)
