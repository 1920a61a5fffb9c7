"""Options of ``batchbound compare``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from difflib import get_close_matches
from typing import Any

from ..comparing.instance_library import suites
from ..comparing.runner import known_solvers, limits_heeded_by
from .option import PathText, Rule, everyday, option
from .problem import WORKLOAD, SlotOptions
from .values import File, Positive, Seconds, Seed

DEFAULT_SECONDS = 10.0
DEFAULT_SOLVERS = ("search", "lpt-ski", "policy:fcfs")

_PROBLEM = tuple(field.name for field in fields(SlotOptions))


def _solver_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = next((name for name in names if name not in known_solvers()), None)
    if unknown is not None:
        near = get_close_matches(unknown, known_solvers(), n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known_solvers())}"
        raise ValueError(f"there is no solver {unknown!r}; {meant}")
    return names


def is_linear(name: PathText) -> bool:
    """Return whether a file is a linear model."""
    return str(name).lower().endswith(".mps")


def _are_linear(options: Any) -> bool:
    return options.workload is not None and all(map(is_linear, (options.workload, *options.more)))


@dataclass(frozen=True)
class CompareOptions(SlotOptions):
    """Files of requests, solvers, their limits, and files to write."""

    TITLE = ""
    RULES = (
        Rule(
            _PROBLEM, excludes=("suite",), hint="The library's instances have limits and costs of their own."
        ),
        Rule(_PROBLEM, when=_are_linear, where="on linear models"),
    )

    workload: PathText | None = option(None, WORKLOAD, positional=True, metavar="FILE")
    more: tuple[PathText, ...] = option(
        (),
        "further workloads under the same limits, or linear models (.mps) for the backends",
        positional=True,
        metavar="FILE",
        words="*",
    )
    _: KW_ONLY
    suite: tuple[str, ...] = everyday(
        (),
        "instances of a suite of the library instead of files, each with its best known schedule and"
        f" certified bound ({', '.join(suites())}); may be repeated",
        metavar="NAME",
        words="append",
    )
    solvers: tuple[str, ...] = everyday(
        DEFAULT_SOLVERS,
        f"solvers to compare: {', '.join(known_solvers())} (default {','.join(DEFAULT_SOLVERS)})",
        metavar="NAME,NAME",
        parse=_solver_names,
    )
    time_limit: Seconds | None = everyday(
        None, f"time limit of each solver in seconds (default {DEFAULT_SECONDS:g}, none with --work)"
    )
    work: Positive | None = option(None, "limit of each solver in steps, as in `plan`")
    seed: Seed = option(0, "seed of random choices (default %(default)s)")
    threads: Positive = option(1, "threads of each solver (default %(default)s)")
    csv: File | None = option(None, "write the table as CSV", writes=True)
    markdown: File | None = option(None, "write the table in Markdown", writes=True)
    profile: File | None = option(None, "write the performance profile as an image", writes=True)
    over_time: File | None = option(None, "write the gap over time as an image", writes=True)
    overwrite: bool = option(
        False, "replace files that exist", needs=("csv", "markdown", "profile", "over_time")
    )
    json: bool = everyday(False, "print one JSON object instead of the table")

    @property
    def ignored(self) -> list[str]:
        """Options that no chosen solver obeys."""
        heeded = {limit for name in self.solvers for limit in limits_heeded_by(name)}
        limits = {"time_limit": "seconds", "work": "work", "seed": "seed", "threads": "threads"}
        return [
            self.flag(name) for name, limit in limits.items() if limit not in heeded and self.states(name)
        ]
