"""A plan for several replicas: one job, who serves what and when, and one bound for all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import get_args

import numpy as np

from .bound import Bound
from .costs.cost import CostModel
from .files.disk import InputError, read_json_object, write_json
from .files.json_fields import JsonFields
from .fleet import Fleet, FleetSchedule, Groups, Replica
from .plan import Maker, PromptSource, read_maker, refuse_claims
from .workload import Workload

FLEET_PLAN_VERSION = 1
_COLUMNS = ("input_tokens", "output_tokens", "group")
_OPTIONAL = ("kv_capacity", "prefill_token_cap", "max_position")


@dataclass(frozen=True, slots=True, eq=False)
class FleetPlan:
    """
    A job on several replicas, the schedule of each, and the bound that is proven for the fleet.

    Parameters
    ----------
    fleet
        The requests and the replicas.
    schedule
        Breaks no rule of the fleet.
    makespan
        Seconds until the last replica is done, by the replicas' cost models.
    bound
        Proven seconds for the whole fleet.
    maker
        How the schedule was made.
    groups
        What was asked of the answers to one prompt; a run that moves requests keeps to it.
    lengths, cost_source, prompts
        As of :class:`~batchbound.data.plan.Plan`.
    """

    fleet: Fleet
    schedule: FleetSchedule
    makespan: float
    bound: Bound
    maker: Maker
    groups: Groups = "any"
    lengths: Mapping[str, object] = field(default_factory=dict)
    cost_source: Mapping[str, object] = field(default_factory=dict)
    prompts: PromptSource | None = None

    @property
    def gap(self) -> float | None:
        """How far the makespan is above the bound, as a fraction of it; None for a bound of no time."""
        return self.bound.gap(self.makespan) if self.bound.seconds > 0 else None

    def digest(self) -> str:
        """Return the SHA-256 of what the plan says, by which a run recognises its own earlier part."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path``, whole or not at all."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain JSON values."""
        workload = self.fleet.workload
        return {
            "batchbound_fleet_plan": FLEET_PLAN_VERSION,
            "makespan_s": self.makespan,
            "bound": self.bound.to_json(),
            "maker": asdict(self.maker),
            "groups": self.groups,
            "lengths": dict(self.lengths),
            "cost_source": dict(self.cost_source),
            "prompts": None if self.prompts is None else asdict(self.prompts),
            "replicas": [_replica_to_json(replica) for replica in self.fleet.replicas],
            "prefill_emits_first_token": self.fleet.prefill_emits_first_token,
            "schedule": self.schedule.to_json(),
            "requests": {
                "id": workload.ids.tolist(),
                **{name: getattr(workload, name).tolist() for name in _COLUMNS},
            },
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FleetPlan:
        """
        Return the plan that :meth:`save` wrote, its schedule checked once more.

        Raises
        ------
        InputError
            If the file is not a fleet's plan of this version, or its schedule breaks a rule.
        """
        file, value = os.fspath(path), read_json_object(path)
        if value.get("batchbound_fleet_plan") != FLEET_PLAN_VERSION:
            raise InputError(
                "is not a fleet's plan of this version",
                file=file,
                where="field 'batchbound_fleet_plan'",
                hint="Give a plan that this version of `batchbound plan --replicas` wrote.",
            )
        try:
            plan = _from_json(cls, value, file)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise InputError(f"the plan is damaged ({error})", file=file, hint="Plan again.") from None
        violation = plan.schedule.check(plan.fleet, plan.groups)
        if violation is not None:
            raise InputError(f"the plan's schedule breaks a rule: {violation}", file=file, hint="Plan again.")
        refuse_claims(plan.schedule.makespan(plan.fleet), plan.makespan, plan.bound, plan.maker, file)
        return plan


def is_fleet_plan(path: str | os.PathLike[str]) -> bool:
    """
    Return whether a file is a plan for several replicas.

    Raises
    ------
    InputError
        If it cannot be read, or is no JSON object.
    """
    return "batchbound_fleet_plan" in read_json_object(path)


def _from_json(kind: type[FleetPlan], value: Mapping[str, object], file: str) -> FleetPlan:
    columns, groups, prompts = _object(value, "requests"), value.get("groups"), value.get("prompts")
    replicas = value.get("replicas")
    if groups not in get_args(Groups) or not isinstance(replicas, list):
        raise TypeError("field 'groups' or 'replicas' is not what a plan has there")
    given = {name: np.array(columns[name]) for name in _COLUMNS}
    workload = Workload(ids=np.array(columns["id"], dtype=np.str_), **given)
    emits = JsonFields(value, file, hint="Plan again.").flag("prefill_emits_first_token")
    return kind(
        fleet=Fleet(workload, tuple(_replica(entry, file) for entry in replicas), emits),
        schedule=FleetSchedule.from_json(_object(value, "schedule"), file=file),
        makespan=JsonFields(value, file, hint="Plan again.").number("makespan_s"),
        bound=Bound.from_json(_object(value, "bound"), file=file),
        maker=read_maker(value, file),
        groups=groups,  # type: ignore[arg-type]  # compared above
        lengths=_object(value, "lengths"),
        cost_source=_object(value, "cost_source"),
        prompts=None if prompts is None else PromptSource(**_object(value, "prompts")),  # type: ignore[arg-type]
    )


def _replica_to_json(replica: Replica) -> dict[str, object]:
    names = [entry.name for entry in fields(replica) if entry.name != "cost"]
    return {"cost": replica.cost.to_json(), **{name: getattr(replica, name) for name in names}}


def _replica(value: object, file: str) -> Replica:
    if not isinstance(value, dict):
        raise TypeError("a replica is not an object")
    cost = CostModel.from_json(_object(value, "cost"), file=file)
    read = JsonFields(value, file, "replicas", "Plan again.")
    limits = {name: None if read.get(name) is None else read.at_least(1, name) for name in _OPTIONAL}
    return Replica(cost, read.at_least(1, "slots"), busy=read.number("busy"), **limits)


def _object(value: Mapping[str, object], name: str) -> dict[str, object]:
    entry = value.get(name)
    if not isinstance(entry, dict):
        raise TypeError(f"field '{name}' is missing or not an object")
    return entry
