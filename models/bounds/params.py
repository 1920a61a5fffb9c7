"""Parameters of a bound: which arguments are on, and how its time is shared."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from ...data.files.disk import InputError
from ...data.files.record import record

TABLE = "bounds"
"""Name of the table in a TOML file."""


@dataclass(frozen=True, slots=True)
class BoundParams:
    """
    Arguments of a bound, each on or off by its name, and shares of its time.

    Without any argument the bound still counts the mean load of the slots, the longest request, and the
    fewest stages.

    lifting: Some slots hold many of the longest requests, wherever these are put.
    dual_feasible_functions: Prices of request lengths refute numbers of decode steps that lifting does not.
    kv_tokens: No decode step reads more tokens than the KV capacity.
    two_requests: Two requests overlap only as long as the KV capacity holds both.
    stage_packing: Prefill stages are bins of prompts under the token cap and the KV capacity.
    difference_set: Few stages leave few spans of time that a slot can be held for.
    packing_prices: Prices from column generation refute numbers of decode steps in which no packing fits the
        slots.
    stage_intervals: Requests hold slots for whole intervals between stages.
    memory_growth: The KV cache of running requests grows and is freed, so it is not always full.
    growth_programmes: Linear programmes look for the values of states; without them only the closed form is
        used.
    time_share: Share of a solver's time that its bound gets at most; more proves more and leaves less for the
        search.
    growth_share: Share of a bound's time for the growth of memory, where other arguments may still prove
        more.
    packing_share: Share of a bound's time for packing prices, once the intervals between stages prove no
        more.
    memory_binds: Steps that the KV capacity takes, in steps of fully packed slots, from which the growth of
        memory gets all of the time; less gives the intervals between stages no time more often.
    most_lengths: Distinct request lengths up to which intervals are priced; a checker repeats it in plain
        Python.
    """

    lifting: bool = True
    dual_feasible_functions: bool = True
    kv_tokens: bool = True
    two_requests: bool = True
    stage_packing: bool = True
    difference_set: bool = True
    packing_prices: bool = True
    stage_intervals: bool = True
    memory_growth: bool = True
    growth_programmes: bool = True
    time_share: float = 0.3
    growth_share: float = 0.4
    packing_share: float = 0.4
    memory_binds: float = 1.05
    most_lengths: int = 2000

    def __post_init__(self) -> None:
        for name in ("time_share", "growth_share", "packing_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0 and at most 1")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> BoundParams:
        """Return the table ``[bounds]`` of a TOML file; fields left out keep their default."""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get(TABLE, {})
        except (OSError, ValueError) as error:
            raise InputError(f"is no TOML file: {error}", file=path) from None
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(table) - set(names)) if isinstance(table, dict) else []
        if unknown:
            what = f"[{TABLE}] has no parameter {unknown[0]!r}"
            raise InputError(what, file=path, hint=f"Choose from {', '.join(names)}.")
        try:
            return record(cls, table, file=path, within=TABLE)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(str(error), file=path, where=f"[{TABLE}]") from None


EVICTING = BoundParams(
    lifting=False,
    dual_feasible_functions=False,
    two_requests=False,
    difference_set=False,
    packing_prices=False,
    stage_intervals=False,
    memory_growth=False,
)
"""Arguments that hold of schedules that may evict requests and prefill them again."""
