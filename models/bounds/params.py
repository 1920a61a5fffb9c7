"""Parameters of a bound: its arguments and their time."""

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
    """Arguments of a bound, each on or off, and shares of time.

    Without any argument the bound still counts the mean load of the slots, the longest request, and the
    fewest stages.

    lifting: Some slots hold many of the longest requests, wherever these are put.
    dual_feasible_functions: Prices of request lengths refute numbers of decode steps that lifting does not.
    kv_tokens: No decode step reads more tokens than the KV capacity.
    two_requests: Two requests overlap only as long as the KV capacity holds both.
    stage_packing: Prefill stages are bins of prompts under the token cap and the KV capacity.
    difference_set: Few stages leave few spans of time that a slot can be held for.
    packing_prices: Prices from column generation refute numbers of decode steps in which no packing fits.
    stage_intervals: Requests hold slots for whole intervals between stages.
    memory_growth: The KV cache of running requests grows and is freed, so it is not always full.
    growth_programmes: Linear programmes look for the values of states; without them only the closed form is
        used.
    time_share: Largest share of a solver's time for its bound; more proves more and searches less.
    growth_share: Share of a bound's time for memory growth, if other arguments may prove more.
    packing_share: Share of a bound's time for packing prices, once stage intervals prove no more.
    memory_binds: Ratio of steps by memory to steps by slots from which memory growth gets all of the time.
    most_lengths: Distinct request lengths up to which intervals are priced, as the checker is slow.
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
        """Return the table ``[bounds]`` of a TOML file, with defaults."""
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
"""Arguments that also hold for schedules that evict requests."""
