"""Parameters of the search as data: what runs, and for how long."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

TABLES = ("search", "bounds")
"""Tables of a parameter file; ``bounds`` is read by the bound's own parameters."""


class ParamsError(ValueError):
    """A parameter file or a parameter that cannot be used."""


@dataclass(frozen=True, slots=True)
class SearchParams:
    """
    Parameters of the schedule search.

    off: Names of phases that are left out, from :data:`~batchbound.solvers.search.phases.PHASES`.
    share: Share of the time left that each phase gets, 0 to 1. The last one that applies gets all of it. A
        larger share gives more to the first phases.
    shares: Shares of single phases by name, in place of ``share``.
    baseline_requests: Requests up to which every built-in rule is simulated before the search begins,
        whatever the limit. With more, a plan is never worse than a rule for larger jobs, which start later.
    baseline_share: Share of the limits for the other schedules that a search starts from.
    exact_requests: Requests up to which a search limited by time ends with an exact search; 0 for none.
    exact_share: Share of the time for bound and exact search where the exact search takes most of it.
    Raises ParamsError if a share is outside 0 to 1, or a number negative.
    """

    off: tuple[str, ...] = ()
    share: float = 0.3
    shares: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    baseline_requests: int = 2_000
    baseline_share: float = 0.25
    exact_requests: int = 24
    exact_share: float = 0.8

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("share", "baseline_share", "exact_share")}
        shares |= {f"shares.{phase}": share for phase, share in self.shares.items()}
        for name, share in shares.items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ParamsError(f"{name} is {share!r}; it must be from 0 to 1")
        for name in ("baseline_requests", "exact_requests"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ParamsError(f"{name} is {number!r}; it must be a whole number, at least 0")

    @classmethod
    def from_file(cls, path: str | Path) -> SearchParams:
        """
        Return the parameters of the table ``[search]`` of a TOML file; the others keep their defaults.

        Raises ParamsError if the file is no TOML, or holds another table or an unknown parameter.
        Raises OSError if the file cannot be read.
        """
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ParamsError(f"{path} is not a TOML file: {error}") from None
        if others := sorted(set(document) - set(TABLES)):
            raise ParamsError(f"{path} has {others[0]!r}; its tables are {', '.join(TABLES)}")
        return cls._from_table(document.get("search", {}), f"{path}, table search")

    @classmethod
    def _from_table(cls, table: Any, place: str) -> SearchParams:
        known = [each.name for each in fields(cls)]
        if not isinstance(table, dict) or (others := sorted(set(table) - set(known))):
            given = repr(table) if not isinstance(table, dict) else others[0]
            raise ParamsError(f"{place}: there is no parameter {given}; choose from {', '.join(known)}")
        off = table.get("off", [])
        if not isinstance(off, list) or not all(isinstance(name, str) for name in off):
            raise ParamsError(f"{place}: off is {off!r}; it must be a list of names of phases")
        if not isinstance(table.get("shares", {}), dict):
            raise ParamsError(f"{place}: shares is {table['shares']!r}; it must be a table of phases")
        try:
            return cls(**{**table, "off": tuple(off), "shares": MappingProxyType(table.get("shares", {}))})
        except ParamsError as error:
            raise ParamsError(f"{place}: {error}") from None
