"""Library of instances with best known schedules and certified bounds."""

from __future__ import annotations

from importlib.resources import files

from ..data.files.disk import InputError
from ..data.iteration_plan import IterationPlan
from ..data.plan import Plan

_ARENA = "arena"
"""Folder of the instances for engines of iterations."""

_FOLDER = files(f"{__package__.rpartition('.')[0]}.data") / "instances"


def suites() -> list[str]:
    """Return the names of the library's suites, sorted."""
    return sorted(entry.name for entry in _FOLDER.iterdir() if entry.is_dir() and entry.name != _ARENA)


def suite(name: str) -> dict[str, Plan]:
    """Return a suite's instances by name, each as its best known plan.

    A plan holds the problem, a valid schedule, its solver (``maker``) and a certified bound. Raises
    InputError for an unknown suite or a damaged file.
    """
    if name not in suites():
        hint = f"There are {', '.join(suites())}."
        raise InputError(f"there is no suite {name!r} of instances", where="suite", hint=hint)
    return {file.removesuffix(".json"): Plan.load(str(_FOLDER / name / file)) for file in _files(name)}


def arena() -> dict[str, IterationPlan]:
    """Return the arena's instances by name, each as its best known plan for an objective."""
    return {
        file.removesuffix(".json"): IterationPlan.load(str(_FOLDER / _ARENA / file))
        for file in _files(_ARENA)
    }


def _files(name: str) -> list[str]:
    return sorted(entry.name for entry in (_FOLDER / name).iterdir() if entry.name.endswith(".json"))
