"""Library of instances, each with its best known schedule and a certified bound."""

from __future__ import annotations

from importlib.resources import files

from ..data.files.disk import InputError
from ..data.plan import Plan

_FOLDER = files(f"{__package__.rpartition('.')[0]}.data") / "instances"


def suites() -> list[str]:
    """Return the names of the library's suites, sorted."""
    return sorted(entry.name for entry in _FOLDER.iterdir() if entry.is_dir())


def suite(name: str) -> dict[str, Plan]:
    """
    Return the instances of a suite by name, each as the best known plan.

    A plan holds the problem, a valid schedule, the solver that found it (``maker``), and a bound with a
    certificate that :func:`batchbound.verify` derives again.

    name: Name of the suite, one of :func:`suites`.
    Raises InputError if there is no such suite, or one of its files is damaged.
    """
    if name not in suites():
        hint = f"There are {', '.join(suites())}."
        raise InputError(f"there is no suite {name!r} of instances", where="suite", hint=hint)
    found = sorted(entry.name for entry in (_FOLDER / name).iterdir() if entry.name.endswith(".json"))
    return {file.removesuffix(".json"): Plan.load(str(_FOLDER / name / file)) for file in found}
