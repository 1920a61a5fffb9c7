"""Parameters of the search as data."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ...data.files.disk import InputError
from ...data.files.params import read_params
from ...models.bounds.params import BoundParams
from .core.parameters import CoreParameters
from .stages.parameters import StageTimeParameters


class ParamsError(InputError):
    """Error of a parameter that cannot be used."""


@dataclass(frozen=True, slots=True)
class SearchParams:
    """Parameters of the schedule search.

    off: Names of phases to leave out, from :data:`~batchbound.solvers.search.phases.PHASES`.
    share: Share of the time left for each phase, 0 to 1; the last one gets all. Larger favours the first
        phases.
    shares: Shares of single phases by name, in place of ``share``.
    rest_seconds: Most seconds that single phases leave for later ones.
    baseline_requests: Requests up to which every built-in rule is simulated before the search begins. With
        more, a plan is never worse than a rule for larger jobs, which start later.
    linear_requests: Requests up to which longest first and first come, first served are simulated, each with
        and without waiting. Larger jobs begin with longest first alone.
    learning_requests: Requests up to which rules that learn the lengths of groups are simulated before the
        search. With more they take seconds, and come last.
    baseline_share: Share of the limits for the other initial schedules.
    patiences: Patiences of the ski-rental rule that give initial schedules, the best first; 0 never waits.
    exact_requests: Requests up to which a search limited by time ends with an exact search; 0 for none.
    exact_share: Share of the time for bound and exact search where the exact search takes most of it.
    packed_requests: Requests without decode steps up to which prefill stages are packed evenly.
    packing_share: Largest share of the time left for packing stages.
    stage_times: Parameters of the phase ``stage_times``.
    core: Parameters of the compiled phases.
    bounds: Arguments of the bound, and their shares of time; the table ``[bounds]`` of a file.

    Raises ParamsError if a share is outside 0 to 1, or a number negative.
    """

    off: tuple[str, ...] = ()
    share: float = 0.3
    shares: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    rest_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"stage_times": 1.5}))
    baseline_requests: int = 2_000
    linear_requests: int = 5_000
    learning_requests: int = 100
    baseline_share: float = 0.25
    patiences: tuple[float, ...] = (0.5, 0.0, 0.25, 0.35, 0.7, 1.0, 1.4, 2.0, 5.0, 15.0)
    exact_requests: int = 24
    exact_share: float = 0.8
    packed_requests: int = 20_000
    packing_share: float = 0.1
    stage_times: StageTimeParameters = field(default_factory=StageTimeParameters)
    core: CoreParameters = field(default_factory=CoreParameters)
    bounds: BoundParams = field(default_factory=BoundParams)

    def __post_init__(self) -> None:
        shares = {
            name: getattr(self, name) for name in ("share", "baseline_share", "exact_share", "packing_share")
        }
        shares |= {f"shares.{phase}": share for phase, share in self.shares.items()}
        for name, share in shares.items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ParamsError(f"{name} is {share!r}; it must be from 0 to 1")
        if not self.patiences or not all(0 <= patience < math.inf for patience in self.patiences):
            raise ParamsError(f"patiences are {self.patiences!r}; name one at least, each at least 0")
        for phase, rest in self.rest_seconds.items():
            if isinstance(rest, bool) or not isinstance(rest, int | float) or not rest >= 0:
                raise ParamsError(f"rest_seconds.{phase} is {rest!r}; it must be at least 0")
        sizes = (
            "baseline_requests",
            "linear_requests",
            "learning_requests",
            "exact_requests",
            "packed_requests",
        )
        for name in sizes:
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ParamsError(f"{name} is {number!r}; it must be a whole number, at least 0")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> SearchParams:
        """Read the tables ``[search]`` and ``[bounds]`` of a TOML file.

        Parameters that are left out keep their defaults. Raises InputError if the file cannot be read, or
        holds an unknown or impossible parameter.
        """
        params = read_params(cls, path, "search", apart=("bounds",))
        return dataclasses.replace(params, bounds=BoundParams.from_file(path))
