"""Options of ``batchbound simulate``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from ..data.files.disk import InputError
from ..heuristics.dispatch import RULES as DISPATCH_RULES
from ..heuristics.registry import POLICIES
from ..heuristics.unknown_lengths.registry import CHOSEN, WITHOUT_LENGTHS, HiddenEntry
from .option import Options, Rule, everyday, option
from .problem import ProblemOptions
from .values import AtLeastZero, File, Positive

DEFAULT_POLICY = "fcfs"

_OF_THE_PLAN = (
    *("slots", "kv_capacity", "prefill_token_cap", "max_position", "cost", "first_token"),
    *("policy", "assignment"),
)
"""Options that a plan fixes."""


def hidden_entry(policy: str | None) -> HiddenEntry:
    """Return the policy for hidden lengths of a name."""
    name = policy or CHOSEN
    if name not in WITHOUT_LENGTHS:
        hint = f"Choose one of {', '.join(WITHOUT_LENGTHS)}."
        raise InputError(f"--policy {name} needs lengths", hint=hint)
    return WITHOUT_LENGTHS[name]


def _takes_no_swap(options: Any) -> bool:
    return options.hidden_lengths and not hidden_entry(options.policy).takes_swap


def _takes_no_history(options: Any) -> bool:
    # For a single step the history gives an expected makespan to any policy.
    return options.steps is not None and not hidden_entry(options.policy).takes_known


@dataclass(frozen=True, kw_only=True)
class HiddenOptions(Options):
    """Earlier completions, training steps, and unfinished completions of a step."""

    TITLE = "unknown lengths"
    NEEDS = ("steps",)
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(("trace",), excludes=("steps",)),
        Rule(("swap",), when=_takes_no_swap, where="on the policy {policy}", hint=f"Give --policy {CHOSEN}."),
        Rule(
            ("history",),
            when=_takes_no_history,
            where="on the policy {policy} with --steps",
            hint=f"Leave it out, or give --policy {CHOSEN}.",
        ),
    )

    history: tuple[File, ...] = option(
        (),
        "files of earlier completions: tables, or traces or outputs of runs. Those of other requests give the"
        " distribution of lengths; those of the same ids (an earlier epoch, another model) predict each"
        " length. Adds an expected makespan",
        words="+",
        needs=("hidden_lengths",),
    )
    swap: AtLeastZero | None = option(
        None,
        "allow to preempt running requests for waiting ones; seconds to move the KV cache of one token to the"
        " host or back",
        metavar="SECONDS",
        needs=("hidden_lengths",),
        excludes=("steps",),
    )
    steps: str | None = option(
        None,
        "column of the table with the training step of each request",
        metavar="COLUMN",
        needs=("hidden_lengths",),
    )
    ahead: AtLeastZero | None = option(
        None,
        "share of groups in flight beyond those that a step waits for; unfinished ones continue in the next"
        " step (APRIL; default 0: a barrier)",
        metavar="SHARE",
    )
    keep: Positive | None = option(
        None, "keep the first K completions of each group to end, and stop the others", metavar="K"
    )
    keep_groups: AtLeastZero | None = option(
        None,
        "share of a step's groups that is enough; the others are given up (K of N)",
        metavar="SHARE",
        excludes=("ahead", "keep", "restart"),
    )
    restart: bool = option(False, "start unfinished groups again, in phases of their own (RollPacker)")
    keep_kv: bool = option(False, "keep the KV cache of continued completions although the weights changed")
    training: AtLeastZero | None = option(
        None,
        "seconds of a step besides its generation (default: those of a log of rollouts, else none)",
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class SimulateOptions(ProblemOptions, HiddenOptions):
    """Requests, and the policy, plan or replicas that serve them."""

    TITLE = ""
    RULES = (Rule(_OF_THE_PLAN, excludes=("plan",)),)

    _: KW_ONLY
    policy: str | None = everyday(
        None,
        "; ".join(f"{name}: {entry.summary}" for name, entry in POLICIES.items())
        + f" (default {DEFAULT_POLICY})",
        metavar="POLICY",
        choices=tuple(sorted(POLICIES)),
    )
    plan: File | None = everyday(
        None,
        "follow this plan, with its slots, costs and limits, instead of a policy; the lengths are those"
        " of FILE, for instance the true ones for a plan of predicted lengths",
        metavar="PLAN",
        excludes=("replicas", "hidden_lengths"),
    )
    assignment: Literal["own", "optimal"] = option(
        "own",
        "assignment of requests to slots, for policies that use one: the policy's own, or an optimal bin"
        " packing (default %(default)s)",
        excludes=("hidden_lengths", "replicas"),
    )
    replicas: str | None = option(
        None,
        "number of engines, or a file as in `plan --replicas`; each follows the policy, and an idle one"
        " takes over waiting requests of the others",
        metavar="N|FILE",
        excludes=("hidden_lengths",),
    )
    dispatch: str | None = option(
        None,
        "rule that dispatches requests to replicas (default: lpt)",
        choices=tuple(sorted(DISPATCH_RULES)),
        needs=("replicas",),
    )
    hidden_lengths: bool = everyday(
        False,
        f"hide the lengths from the policy ({', '.join(WITHOUT_LENGTHS)}; default {CHOSEN}); the bound"
        " uses them",
    )
    trace: File | None = everyday(None, "write the trace to this file", writes=True)
    overwrite: bool = option(False, "replace the trace if it exists", needs=("trace",))
    json: bool = everyday(False, "print one JSON object instead of a table")
