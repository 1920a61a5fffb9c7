"""Parameters of a bound: its arguments and their time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...data.files.params import read_params


@dataclass(frozen=True, slots=True)
class BoundParams:
    """Arguments of a bound that are left out, and shares of time.

    Without any argument the bound still counts the mean load of the slots, the longest request, and the
    fewest stages.

    off: Names of arguments to leave out:

        - ``lifting``: some slots hold many of the longest requests, wherever these are put;
        - ``kv_tokens``: no decode step reads more tokens than the KV capacity;
        - ``two_requests``: two requests overlap only as long as the KV capacity holds both;
        - ``stage_packing``: prefill stages are bins of prompts under the token cap and the KV capacity;
        - ``difference_set``: few stages leave few spans of time that a slot can be held for;
        - ``packing_prices``: prices from column generation refute numbers of decode steps in which no packing
          fits;
        - ``stage_intervals``: requests hold slots for whole intervals between stages;
        - ``memory_growth``: the KV cache of running requests grows and is freed, so it is not always full.
    growth_programmes: Linear programmes look for the values of states; without them only the closed form is
        used.
    time_share: Largest share of a solver's time for its bound; more proves more and searches less.
    growth_share: Share of a bound's time for memory growth, if other arguments may prove more.
    packing_share: Share of a bound's time for packing prices, once stage intervals prove no more.
    memory_binds: Ratio of steps by memory to steps by slots from which memory growth gets all of the time.
    most_lengths: Distinct request lengths up to which intervals are priced, as the checker is slow.
    """

    off: tuple[str, ...] = ()
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
        return read_params(cls, path, "bounds")
