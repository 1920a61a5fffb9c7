"""A plan: what `plan` writes and `run` reads."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from .bound import PROVEN_WITHIN, Bound
from .configuration import PlannedConfiguration
from .costs.cost import CostModel
from .expectation import Expectation
from .files.disk import InputError, read_json_object, write_json
from .files.json_fields import JsonFields
from .problem import Problem
from .schedule import Schedule
from .workload import Workload

PLAN_VERSION = 1
_COLUMNS = ("input_tokens", "output_tokens", "arrival", "group", "priority", "deadline")
_LIMITS = ("slots", "kv_capacity", "prefill_token_cap", "max_position", "prefill_emits_first_token")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """
    Where the prompts of a plan stand.

    Parameters
    ----------
    path
        The file, relative to the plan's folder.
    sha256
        Of the file's bytes when it was planned.
    tokenizer
        What counted the prompts' tokens.
    """

    path: str
    sha256: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class Maker:
    """
    How a schedule came to be.

    Parameters
    ----------
    solver, version
        What made it.
    status
        ``"optimal"`` if the plan's own bound proves it, else ``"feasible"``.
    stopped_by
        What ended the search.
    seconds
        What it took.
    seed
        Of its random choices.
    """

    solver: str
    version: str
    status: str
    stopped_by: str
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """
    A problem, the schedule found for it, its predicted makespan, and a proven bound.

    Parameters
    ----------
    problem
        Requests, costs and limits.
    schedule
        Breaks no rule of the problem.
    makespan
        Seconds, by the problem's cost model.
    bound
        Proven seconds, or None where nothing is proven.
    maker
        How the schedule was made.
    lengths
        How the answer lengths were chosen, as plain JSON values.
    cost_source
        Where the cost model comes from, as plain JSON values: its name, or the calibration with its error.
    prompts
        Where the prompts stand, or None for a job of lengths only.
    expected
        What to expect, and what to follow, when the lengths are predictions with a stated error; else None.
    configuration
        The execution configuration to run instead of following the schedule; None to follow it.
    """

    problem: Problem
    schedule: Schedule
    makespan: float
    bound: Bound | None
    maker: Maker
    lengths: Mapping[str, object] = field(default_factory=dict)
    cost_source: Mapping[str, object] = field(default_factory=dict)
    prompts: PromptSource | None = None
    expected: Expectation | None = None
    configuration: PlannedConfiguration | None = None

    @property
    def gap(self) -> float | None:
        """How far the makespan is above the bound, as a fraction of it; None without one above zero."""
        if self.bound is None or not self.bound.valid or self.bound.seconds <= 0:
            return None
        return self.bound.gap(self.makespan)

    def digest(self) -> str:
        """Return the SHA-256 of what the plan says, by which a run recognises its own earlier part."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path``, whole or not at all."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain JSON values."""
        workload = self.problem.workload
        columns: dict[str, object] = {"id": workload.ids.tolist()}
        for name in _COLUMNS:
            column = getattr(workload, name)
            if name in ("input_tokens", "output_tokens") or not _is_default(name, column):
                columns[name] = [None if value == np.inf else value for value in column.tolist()]
        limits = {name: getattr(self.problem, name) for name in _LIMITS}
        expected = {} if self.expected is None else {"expected": self.expected.to_json()}
        if self.configuration is not None:
            expected["configuration"] = self.configuration.to_json()
        return {
            "batchbound_plan": PLAN_VERSION,
            "makespan_s": self.makespan,
            "bound": None if self.bound is None else self.bound.to_json(),
            "maker": asdict(self.maker),
            "lengths": dict(self.lengths),
            "cost_source": dict(self.cost_source),
            "prompts": None if self.prompts is None else asdict(self.prompts),
            "cost": self.problem.cost.to_json(),
            "limits": limits,
            "schedule": self.schedule.to_json(),
            "requests": columns,
            **expected,
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """
        Return the plan that :meth:`save` wrote, its schedule checked once more.

        Raises
        ------
        InputError
            If the file is not a plan of this version, or its schedule breaks a rule of its problem.
        """
        file = os.fspath(path)
        value = read_json_object(path)
        version = value.get("batchbound_plan")
        if version != PLAN_VERSION:
            found = "not a batchbound plan" if version is None else f"a plan of version {version!r}"
            hint = f"Give a plan that this version of `batchbound plan` wrote (version {PLAN_VERSION})."
            raise InputError(found, file=file, where="field 'batchbound_plan'", hint=hint)
        try:
            problem = _problem(value, file)
            maker = read_maker(value, file)
            prompts = value.get("prompts")
            source = None if prompts is None else PromptSource(**_object(value, "prompts"))  # type: ignore[arg-type]
            bound = value.get("bound")
            expected, configured = value.get("expected"), value.get("configuration")
            plan = cls(
                problem=problem,
                schedule=Schedule.from_json(_object(value, "schedule"), file=file),
                makespan=JsonFields(value, file, hint="Plan again.").number("makespan_s"),
                bound=None if bound is None else Bound.from_json(_object(value, "bound"), file=file),
                maker=maker,
                lengths=_object(value, "lengths"),
                cost_source=_object(value, "cost_source"),
                prompts=source,
                expected=None if expected is None else Expectation.from_json(expected, file=file),
                configuration=None
                if configured is None
                else PlannedConfiguration.from_json(configured, file=file),
            )
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise InputError(f"the plan is damaged ({error})", file=file, hint="Plan again.") from None
        violation = plan.schedule.check(problem)
        if violation is not None:
            raise InputError(f"the plan's schedule breaks a rule: {violation}", file=file, hint="Plan again.")
        refuse_claims(plan.schedule.makespan(problem), plan.makespan, plan.bound, plan.maker, file)
        return plan


def read_maker(value: Mapping[str, object], file: str) -> Maker:
    """Return how a plan's schedule came to be; raise InputError if a field is of another kind."""
    read = JsonFields(value, file, hint="Plan again.").inside("maker")
    texts = {name: read.text(name) for name in ("solver", "version", "status", "stopped_by")}
    return Maker(**texts, seconds=read.number("seconds"), seed=read.integer("seed"))


def refuse_claims(makespan: float, stated: float, bound: Bound | None, maker: Maker, file: str) -> None:
    """
    Refuse a plan that claims more than its schedule and its bound say.

    Parameters
    ----------
    makespan, stated
        Seconds the schedule takes, and those the plan states.
    bound, maker
        Of the plan.
    file
        Where it stands.

    Raises
    ------
    InputError
        If it states another makespan, or calls itself optimal where its bound is lower.
    """
    hint = "Plan again."
    if not math.isclose(makespan, stated, rel_tol=PROVEN_WITHIN):
        what = f"its schedule takes {makespan!r} s, not {stated!r} s"
        raise InputError(what, file=file, where="field 'makespan_s'", hint=hint)
    status, field = maker.status.lower(), "field 'maker.status'"
    if status not in ("optimal", "feasible"):
        raise InputError(
            f"{maker.status!r} is neither optimal nor feasible", file=file, where=field, hint=hint
        )
    if status == "optimal" and (bound is None or not bound.proves(makespan)):
        proven = "there is no bound" if bound is None else f"its bound proves {bound.seconds!r} s"
        what = f"{maker.status!r} is not proven: the schedule takes {makespan!r} s and {proven}"
        raise InputError(what, file=file, where=field, hint=hint)


def _problem(value: Mapping[str, object], file: str) -> Problem:
    columns = _object(value, "requests")
    given = {}
    for name in columns.keys() & set(_COLUMNS):
        column = columns[name]
        if not isinstance(column, list):
            raise TypeError(f"requests.{name} is not a list")
        given[name] = np.array([np.inf if entry is None else entry for entry in column])
    workload = Workload(ids=np.array(columns["id"], dtype=np.str_), **given)
    read = JsonFields(value, file, hint="Plan again.").inside("limits")
    limits: dict[str, int] = {}
    for name in (name for name in _LIMITS if read.get(name) is not None):
        limits[name] = read.flag(name) if name == "prefill_emits_first_token" else read.at_least(1, name)
    cost = CostModel.from_json(_object(value, "cost"), file=file)
    return Problem(workload, cost, **limits)  # type: ignore[arg-type]


def _is_default(name: str, column: np.ndarray[tuple[int], np.dtype[np.generic]]) -> bool:
    default = {"arrival": 0.0, "group": -1, "priority": 0, "deadline": np.inf}[name]
    return bool((column == default).all())


def _object(value: Mapping[str, object], name: str) -> dict[str, object]:
    entry = value.get(name)
    if not isinstance(entry, dict):
        raise TypeError(f"field '{name}' is missing or not an object")
    return entry
