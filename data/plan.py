"""Plans, which `plan` writes and `run` reads."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .bound import PROVEN_WITHIN, Bound, gap_above
from .claims.assumptions import AS_EXPECTED, AT_CAP
from .configuration import PlannedConfiguration
from .costs.cost import CostModel
from .expectation import Expectation
from .figures import percentage, seconds
from .files.disk import InputError, read_json_object, write_json
from .files.kinds import refuse_other_kinds
from .files.record import plain, record, refuse_unknown
from .files.shown import Shown
from .files.sources import first_bytes, is_url
from .fleet import Fleet, FleetSchedule, Groups
from .objective import Goal
from .problem import Problem
from .prompts.columns import PromptColumns, is_header
from .schedule import Schedule
from .workload import Workload

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class PromptSource:
    """File of a plan's prompts.

    path: Path of the file, relative to the plan's folder.
    sha256: Digest of the file at planning.
    tokenizer: Tokenizer that counted the tokens: a name, or a folder relative to the plan's, which begins
        with a dot.
    columns: Columns of a table; None for a batch file.
    distinct_tokens: Tokens of all prompts, with common beginnings counted once; None if not counted.
    """

    path: str
    sha256: str
    tokenizer: str
    columns: PromptColumns | None = None
    distinct_tokens: int | None = None

    def file(self, folder: str | os.PathLike[str]) -> str:
        """Return the path of the file, given the plan's folder."""
        return self.path if is_url(self.path) else os.path.join(folder, self.path)

    def seen_from(self, folder: str | os.PathLike[str], planned_in: str | os.PathLike[str]) -> PromptSource:
        """Return the source for a copy of the plan elsewhere."""
        path = relative_path(self.file(planned_in), folder)
        tokenizer = self.tokenizer
        if tokenizer.startswith("."):
            tokenizer = relative_path(os.path.join(planned_in, tokenizer), folder)
        return replace(self, path=path.removeprefix("./"), tokenizer=tokenizer)


def holds_requests(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's first lines are requests or a table."""
    head = first_bytes(path, 4096)
    first, _, more = head.removeprefix(codecs.BOM_UTF8).partition(b"\n")
    if first.startswith(b"{"):
        return re.search(rb'"custom_id"\s*:', first) is not None or _is_row(first, more)
    return first.startswith(b"PAR1") or is_header(first)


def _is_row(first: bytes, more: bytes) -> bool:
    try:
        value = json.loads(first) if more.startswith(b"{") or not more.strip() else None
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(value, dict) and bool(value) and not any(name.startswith("batchbound_") for name in value)
    )


def relative_path(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str:
    """Return a path relative to a folder; keep a URL."""
    if is_url(path):
        return os.fspath(path)
    seen = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return seen if seen.startswith(".") else os.path.join(".", seen)


ASSUMED = "assumed"
"""Name of costs that were not measured; a plan's seconds are then no prediction."""

KEPT = "measured by an earlier run"
"""Name of costs that an earlier run of the model measured."""

EXPECTED_LENGTHS = ("constant", "history", "quantile")
"""Sources of lengths that completions need not have."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a plan's numbers.

    lengths: Source of the completion lengths, as plain JSON values.
    cost_source: Source of the cost model, as plain JSON values: its name, or the calibration with its error.
    prompts: File of the prompts; None for a job of lengths only.
    """

    lengths: Mapping[str, object] = field(default_factory=dict)
    cost_source: Mapping[str, object] = field(default_factory=dict)
    prompts: PromptSource | None = None

    @property
    def condition(self) -> str:
        """Condition of bounds on the lengths; empty if these are known."""
        if self.lengths.get("kind") == "cap":
            return AT_CAP
        return AS_EXPECTED if self.expects else ""

    @property
    def assumes_costs(self) -> bool:
        """True if the costs were not measured."""
        return self.cost_source.get("name") == ASSUMED

    @property
    def expects(self) -> bool:
        """True if completions need not have the planned lengths."""
        return self.lengths.get("kind") in EXPECTED_LENGTHS or self.lengths.get("sampled") is True


LEAST_REPEATED = 0.02
"""Share of prompt tokens in common beginnings from which screens name them."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Origin of a schedule.

    status: ``"optimal"`` if the plan's own bound proves it, else ``"feasible"``.
    stopped_by: Reason for the end of the search.
    seconds: Search time; None under a work limit alone, so that equal plans make equal files.
    message: Further remark for the user; empty for none.
    """

    solver: str
    version: str
    status: str
    stopped_by: str
    seconds: float | None
    seed: int
    message: str = ""

    @property
    def outcome(self) -> str:
        """Status in words, with a proof of the optimum that the plan does not hold."""
        if (self.status, self.stopped_by) != ("feasible", "proof"):
            return self.status
        search = "exhaustive search" if self.solver in ("search", "exact") else self.solver
        return f"optimal by {search}, whose proof the plan does not hold: `verify` derives the bound above"


@dataclass(frozen=True, slots=True)
class FollowedPolicy:
    """Evicting policy that takes less time than the plan's schedule.

    seconds: Makespan by the cost model.
    prefill_stages, decode_steps, evictions: Counts of its simulated run.
    bound: Bound of all schedules, evicting ones included.
    """

    policy: str
    seconds: float
    prefill_stages: int
    decode_steps: int
    evictions: int
    bound: Bound


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan(Shown):
    """A job on a fleet, with schedules and a bound.

    Parameters
    ----------
    fleet
        Requests and replicas, each with its costs and limits; one machine is a fleet of one.
    shares
        Valid schedules of the replicas.
    makespan
        Seconds until the last replica is done, by the replicas' cost models.
    bound
        Proven seconds for the whole fleet; None without a proof.
    maker
        Origin of the schedule.
    groups
        Placement of a group's requests (completions of one prompt), also when a run moves requests.
    provenance
        Origin of lengths, costs and prompts.
    expected
        Expected makespan and policy if the lengths are predictions with a stated error; else None.
    configuration
        Execution configuration to run instead of the schedule; None follows the schedule.
    followed
        Policy to run instead of the schedule, because it takes less; None follows the schedule.
    goal
        Objective of the schedule of one replica other than the makespan, whose bound the plan keeps.
    """

    JSON_HEADER: ClassVar = ("batchbound_plan", 3)
    JSON_NAMES: ClassVar = {"makespan": "makespan_s", "shares": "schedule"}
    JSON_HINT: ClassVar = "Plan again."

    fleet: Fleet
    shares: FleetSchedule
    makespan: float
    bound: Bound | None
    maker: Maker
    groups: Groups = "any"
    provenance: Provenance = field(default_factory=Provenance)
    expected: Expectation | None = None
    configuration: PlannedConfiguration | None = None
    followed: FollowedPolicy | None = None
    goal: Goal | None = None

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule, bound: Bound | None, maker: Maker, **more: Any) -> Plan:
        """Return the plan of one machine.

        Parameters
        ----------
        problem, schedule
            Problem and schedule of the machine.
        bound, maker
            Fields of the class.
        more
            Further fields of the class, by name.
        """
        fleet, shares = Fleet.of(problem, 1), FleetSchedule.of(schedule)
        return cls(fleet, shares, schedule.makespan(problem), bound, maker, **more)

    @property
    def workload(self) -> Workload:
        """Requests of the plan."""
        return self.fleet.workload

    @property
    def problem(self) -> Problem:
        """Problem of the only replica; raise ValueError if there are several."""
        self._refuse_several()
        return self.fleet.problem()

    @property
    def schedule(self) -> Schedule:
        """Schedule of the only replica; raise ValueError if there are several."""
        self._refuse_several()
        schedule = self.shares.schedules[0]
        assert schedule is not None
        return schedule

    @property
    def seconds(self) -> float:
        """Predicted seconds of the policy or schedule that a run follows."""
        return self.makespan if self.followed is None else self.followed.seconds

    @property
    def value(self) -> float | None:
        """Seconds of the goal by the cost model; None for the makespan."""
        return None if self.goal is None else self.goal.value(self.schedule.finishes(self.problem))

    @property
    def claim(self) -> Bound | None:
        """Bound that holds for the followed policy or schedule."""
        return self.bound if self.followed is None else self.followed.bound

    @property
    def bound_of(self) -> str | None:
        """The schedules that the bound holds for; None for every one."""
        limited = any(replica.kv_capacity is not None for replica in self.fleet.replicas)
        rules = ["evicts no request"] if limited and self.followed is None else []
        rules += ["computes each prompt whole"] if self._counts_whole else []
        evicting = "" if self.followed is None else ", evicting or not"
        if rules:
            return f"every schedule{evicting}{',' if evicting else ''} that {' and '.join(rules)}"
        return f"every schedule{evicting}" if evicting else None

    @property
    def _counts_whole(self) -> bool:
        """True if prompts share many tokens that the plan counts for each."""
        source, total = self.provenance.prompts, self.workload.computed_tokens
        distinct = None if source is None or self.workload.tree is not None else source.distinct_tokens
        return distinct is not None and distinct < (1 - LEAST_REPEATED) * total

    @property
    def repeats(self) -> str:
        """Sentence on beginnings that prompts share; empty if these are few."""
        source, tree = self.provenance.prompts, self.workload.tree
        if self._counts_whole:
            assert source is not None
            return (
                f"{self.workload.computed_tokens:,} prompt tokens, {source.distinct_tokens:,} of them"
                " distinct: the plan and its bound count all, engines that share beginnings compute less"
            )
        if tree is None:
            return ""
        computed = None if self.followed is not None else self.shares.computed_tokens(self.fleet)
        return _computed_once(int(self.workload.input_tokens.sum()), tree.distinct_tokens, computed)

    def repeats_in(self, served: Iterable[str], computed: Sequence[int | None]) -> str:
        """Return the sentence on beginnings for a run of the plan.

        served: Requests that the run served.
        computed: Prompt tokens with shared beginnings counted once, for each replica; None if it computes
            each prompt whole.
        """
        rows = np.isin(self.workload.ids, list(served))
        whole, tokens = int(self.workload.input_tokens[rows].sum()), sum(each or 0 for each in computed)
        if not self.repeats or None in computed or tokens > (1 - LEAST_REPEATED) * whole:
            return self.repeats if self._counts_whole else ""
        return _computed_once(whole, tokens, tokens)

    @property
    def gap(self) -> float | None:
        """Gap of the predicted seconds to their bound, or None."""
        return gap_above(self.seconds, None if self.claim is None else self.claim.proven)

    @property
    def lengths_unknown(self) -> bool:
        """True if each length is a cap, so seconds are upper limits."""
        return self.provenance.lengths.get("kind") == "cap"

    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield makespan, bound and gap; without lengths only an upper limit."""
        slots = sum(replica.slots for replica in self.fleet.replicas)
        yield "Plan", f"{len(self.fleet):,} requests on {slots:,} slots"
        if self.provenance.assumes_costs:
            yield "costs", ASSUMED
            yield "above the bound", None if self.lengths_unknown else percentage(self.gap)
            return
        yield "at most" if self.lengths_unknown else "predicted", seconds(self.seconds)
        if self.lengths_unknown:
            return
        yield "expected", None if self.expected is None else seconds(self.expected.mean)
        yield "lower bound", None if self.claim is None else seconds(self.claim.proven)
        yield "bound of", None if self.claim is None else self.bound_of
        yield "above the bound", percentage(self.gap)
        took = "" if self.maker.seconds is None else f", {self.maker.seconds:.2g} s"
        yield "solver", f"{self.maker.solver}, {self.maker.outcome}{took}"

    def to_frame(self) -> pd.DataFrame:
        """Return one replica's requests: slot, first decode step, end."""
        schedule = self.schedule
        return self.workload.to_frame().assign(
            slot=schedule.slot_of,
            first_step=schedule.starts[schedule.bin_of],
            finished_s=schedule.finishes(self.problem),
        )

    def _refuse_several(self) -> None:
        if len(self.fleet.replicas) > 1:
            raise ValueError(f"the plan is for {len(self.fleet.replicas)} replicas, not for one")

    def digest(self) -> str:
        """Return the SHA-256 by which a resumed run recognises its plan."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def schedule_digest(self) -> str:
        """Return the SHA-256 by which a trace names its plan."""
        work = self.workload
        columns = work.ids, work.input_tokens, work.output_tokens
        shares = plain(self.shares)
        for one in shares["schedules"]:
            if one is not None:
                # The former name, so that traces of earlier runs name the same plan.
                one["rounds"] = one.pop("decode_steps")
        text = json.dumps([shares, *(column.tolist() for column in columns)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` atomically."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without columns of defaults."""
        value: dict[str, Any] = plain(self)
        drop_defaults(value["fleet"]["workload"], value["maker"])
        for name in ("followed", "goal"):
            if value[name] is None:
                del value[name]
        return value

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Load a plan that :meth:`save` wrote, and check its schedule.

        Raises
        ------
        InputError
            If the file is not a plan, or its schedule breaks a rule of its problem.
        """
        refuse_other_kinds(path, "no plan", {"batchbound_plan"})
        if holds_requests(path):
            what, hint = "holds requests", f"Make a plan from it: batchbound plan {os.fspath(path)}."
            if b'"response"' in first_bytes(path, 4096):
                beside = os.path.splitext(os.fspath(path))[0] + ".plan.json"
                what, hint = "holds completions", f"Give the plan of that run, by default {beside}."
            raise InputError(f"{what} and is not a plan", file=path, hint=hint)
        value = read_json_object(path)
        if cls.JSON_HEADER[0] not in value:
            hint = "Give a plan that `batchbound plan` or `run` wrote, or requests as JSONL, CSV or Parquet."
            raise InputError("holds neither a plan nor requests", file=path, hint=hint)
        fleet = value.get("fleet")
        workload = fleet.get("workload") if isinstance(fleet, dict) else None
        refuse_unknown(Workload, workload, file=path, within="fleet.workload", hint=cls.JSON_HINT)
        for number, entry in enumerate(_listed(fleet.get("replicas")) if isinstance(fleet, dict) else ()):
            within = f"fleet.replicas.{number}.cost"
            cost = entry.get("cost") if isinstance(entry, dict) else None
            refuse_unknown(CostModel, cost, file=path, within=within, hint=cls.JSON_HINT)
        plan = record(cls, value, file=path)
        violation = plan.shares.check(plan.fleet, plan.groups)
        if violation is not None:
            what = f"the plan's schedule breaks a rule: {violation}"
            raise InputError(what, file=path, hint=cls.JSON_HINT)
        plan._refuse_claims(path)
        return plan

    def _refuse_claims(self, path: str | os.PathLike[str]) -> None:
        """Raise InputError if the plan claims more than it proves."""
        makespan, hint = self.shares.makespan(self.fleet), self.JSON_HINT
        if not math.isclose(makespan, self.makespan, rel_tol=PROVEN_WITHIN):
            what = f"its schedule takes {makespan!r} s, not {self.makespan!r} s"
            raise InputError(what, file=path, where="field 'makespan_s'", hint=hint)
        status, where = self.maker.status.lower(), "field 'maker.status'"
        if status not in ("optimal", "feasible"):
            what = f"{self.maker.status!r} is neither optimal nor feasible"
            raise InputError(what, file=path, where=where, hint=hint)
        if self.followed is not None and self.followed.seconds >= makespan:
            what = f"{self.followed.policy} takes {self.seconds!r} s, the schedule {makespan!r} s"
            raise InputError(what, file=path, where="field 'followed.seconds'", hint=hint)
        seconds, bound = (makespan, self.bound) if self.followed is None else (self.seconds, self.claim)
        claimed = {"makespan_s": (makespan, self.bound), "followed.seconds": (self.seconds, self.claim)}
        for name, (taken, least) in claimed.items():
            if least is not None and least.proven is not None and least.proven > taken * (1 + PROVEN_WITHIN):
                what = f"its bound is {least.seconds!r} s, above the plan's {taken!r} s"
                raise InputError(what, file=path, where=f"field '{name}'", hint=hint)
        if status == "optimal" and (bound is None or not bound.proves(seconds)):
            proven = "there is no bound" if bound is None else f"its bound proves {bound.seconds!r} s"
            what = f"{self.maker.status!r} is not proven: the plan takes {seconds!r} s and {proven}"
            raise InputError(what, file=path, where=where, hint=hint)


_DEFAULTS = {"arrival": 0.0, "group": -1, "priority": 0, "deadline": None}


def _computed_once(whole: int, needed: int, computed: int | None) -> str:
    """Return a sentence on shared beginnings; empty if these are few.

    computed: Prompt tokens that stages compute; None if not counted.
    """
    if needed > (1 - LEAST_REPEATED) * whole:
        return ""
    sentence = f"{whole:,} prompt tokens, {needed:,} of them computed: what prompts share is computed once"
    again = 0 if computed is None else computed - needed
    return f"{sentence}, and {again:,} tokens again for want of memory" if again else sentence


def drop_defaults(columns: dict[str, Any], maker: dict[str, Any]) -> None:
    """Remove a workload's columns of defaults, and a maker's empty message."""
    # Older plans have no such columns, and keep the digest by which their runs resume.
    if not maker["message"]:
        del maker["message"]
    if columns["tree"] is None:
        del columns["tree"]
    for name, default in _DEFAULTS.items():
        if columns[name].count(default) == len(columns[name]):
            del columns[name]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
