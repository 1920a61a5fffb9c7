"""Report of a run: gaps, and the slots' time by cause."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from .bound import gap_above
from .configuration import Reached
from .costs.cost import FitError
from .expectation import Expectation
from .figures import percentage, seconds
from .files.disk import InputError, read_json_object, write_json
from .files.record import plain, record, schema
from .files.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

DECODE: Final = "decode"
PREFILL: Final = "prefill"
STALL: Final = "prefill stall"
WAITING: Final = "waiting for a prefill"
TAIL: Final = "tail"
NO_ARRIVAL: Final = "nothing has arrived"
TOOLS: Final = "waiting for tools"
BETWEEN: Final = "between stages"
BUSY: Final = (DECODE, PREFILL)
BUBBLES: Final = (STALL, WAITING, TAIL, NO_ARRIVAL, BETWEEN)
"""Uses of a slot's time: work and causes of loss."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median, 90th and 99th percentile over the requests, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class LengthError:
    """Difference between planned and actual lengths.

    mean_absolute: Mean absolute error of a planned length, tokens.
    bias: Mean of planned minus actual tokens: positive if completions were planned too long.
    wrong: Requests with another length than planned.
    """

    mean_absolute: float
    bias: float
    wrong: int


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown):
    """Comparison of a run with its plan and its bound.

    The report of a run on several replicas holds a report of each replica.

    Parameters
    ----------
    clock
        ``"model"`` for the cost model's seconds (simulated runs), ``"measured"`` for a clock's.
    makespan
        Seconds of the run, on its clock.
    model_makespan
        Seconds of the run's stages by the cost model, from which the run's gap is computed.
    schedule_makespan
        The same without padding and changes of the batch, which the engine added to the schedule.
    planned_makespan
        Seconds the plan predicted, or None without a plan.
    bound, bound_source
        Proven model seconds and the argument's name; None without a proof.
    bound_of
        Schedules and lengths for which ``bound`` is proven; empty without a plan.
    repeats
        Sentence on common beginnings of prompts that are computed several times; empty if few are.
    run_bound
        Bound for the requests that this run served, at their actual lengths, or None. If requests were
        evicted, it covers evicting runs, whereas ``bound`` covers schedules that prefill each request once.
    requests
        Requests served in this run.
    resumed
        Requests that are not in this run's traces: completed in an earlier run, or failed.
    slots
        Slots of the engine.
    prefill_stages, decode_steps
        Counts.
    evictions
        Number of times that a request returned to the queue after its prefill.
    prompt_tokens, output_tokens
        Tokens of the served requests; shared prompt tokens count once, but for each prompt's last token.
    utilization
        Model seconds of full decode steps for the same tokens, divided by the makespan.
    slot_seconds
        Slot-seconds by cause; they add up to slots x makespan.
    finish, first_token, per_token
        Seconds from a request's arrival to its last and to its first token, and seconds per later token; None
        if no request has such a time.
    lengths
        Planned against actual completion lengths.
    padding
        Share of the KV cache read in decode steps that was padding.
    padding_seconds
        Model seconds of reading padding, a part of ``model_makespan``.
    change_seconds
        Model seconds of changes of the running batch, a part of ``model_makespan``.
    pace
        Measured seconds per model second in the median stage, the machine's slowdown against the cost model.
        None for a simulated run.
    missed
        Remaining error of the cost model: measured seconds of all stages over model seconds at that pace,
        minus one. None for a simulated run.
    between
        Measured seconds without a running stage; None for a simulated run or several replicas.
    fit
        Error of the cost model's fit; None if it was not fitted.
    engine
        Facts about the engine.
    expected
        The plan's expectation over possible lengths; None if it took them as known.
    reached
        Steady state of the plan's configuration; None without a configuration or a steady state.
    seconds
        Seconds of the program's own work for the report, or None if not measured.
    moved
        Requests served by another replica than planned.
    lost
        Replicas that died, with reasons.
    planned_ends
        Planned end of each replica in seconds; empty for one machine.
    replicas
        Report of each replica with the gap to its own requests' bound; None if it served none. Empty for one
        machine.
    """

    JSON_HEADER: ClassVar = ("batchbound_report", 2)
    JSON_HINT: ClassVar = "Write it again with `batchbound report`."
    JSON_NAMES: ClassVar = {
        "makespan": "makespan_s",
        "model_makespan": "model_makespan_s",
        "schedule_makespan": "schedule_makespan_s",
        "planned_makespan": "plan_makespan_s",
        "bound": "bound_s",
        "run_bound": "run_bound_s",
        "finish": "finish_s",
        "first_token": "ttft_s",
        "per_token": "tpot_s",
        "padding_seconds": "padding_s",
        "change_seconds": "change_s",
        "between": "between_s",
        "planned_ends": "plan_ends_s",
    }

    clock: Literal["model", "measured"]
    makespan: float
    model_makespan: float
    schedule_makespan: float
    planned_makespan: float | None
    bound: float | None
    bound_source: str | None
    run_bound: float | None
    requests: int
    resumed: int
    slots: int
    prefill_stages: int
    decode_steps: int
    evictions: int
    prompt_tokens: int
    output_tokens: int
    utilization: float
    slot_seconds: Mapping[str, float]
    finish: Percentiles | None
    first_token: Percentiles | None
    per_token: Percentiles | None
    lengths: LengthError
    padding: float
    padding_seconds: float
    change_seconds: float = 0.0
    pace: float | None = None
    missed: float | None = None
    between: float | None = None
    fit: FitError | None = None
    engine: Mapping[str, object] = field(default_factory=dict)
    expected: Expectation | None = None
    reached: Reached | None = None
    seconds: float | None = None
    moved: int = 0
    lost: Mapping[int, str] = field(default_factory=dict)
    planned_ends: tuple[float, ...] = ()
    bound_of: str = ""
    repeats: str = ""
    replicas: tuple[Report | None, ...] = ()

    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield the run's makespan, bound and gap."""
        yield "Report", f"{self.requests:,} requests on {self.slots:,} slots"
        yield "makespan", f"{self.makespan:,.4g} s ({self.clock} clock)"
        pace = f" ({self.pace:,.3g} s measured for each, in the median stage)" if self.pace else ""
        yield "by the cost model", f"{seconds(self.model_makespan)}{pace}"
        yield "lower bound", seconds(self.run_bound)
        yield "above the bound", percentage(self.run_gap)
        yield "decode steps", self.decode_steps
        yield "prefill stages", self.prefill_stages

    def to_frame(self) -> pd.DataFrame:
        """Return the slots' time by cause, in slot-seconds and as a share."""
        import pandas as pd

        spent = pd.Series(dict(self.slot_seconds), name="slot_seconds")
        return pd.DataFrame({"slot_seconds": spent, "share": spent / spent.sum()})

    @property
    def plan_gap(self) -> float | None:
        """Gap of the planned makespan to the bound, as a fraction."""
        return gap_above(self.planned_makespan, self.bound)

    @property
    def run_gap(self) -> float | None:
        """Gap of the run to its bound, in model seconds.

        It is None without a bound for the served requests at their actual lengths.
        """
        return gap_above(self.model_makespan, self.run_bound)

    @property
    def schedule_gap(self) -> float | None:
        """Part of the run's gap that its schedule causes."""
        return gap_above(self.schedule_makespan, self.run_bound)

    @property
    def model_error(self) -> float:
        """Model over measured seconds of the run's stages, minus one."""
        return _relative(self.model_makespan, self.makespan)

    @property
    def plan_error(self) -> float | None:
        """Planned over actual makespan, minus one, or None."""
        if self.planned_makespan is None or self.resumed:
            return None
        return _relative(self.planned_makespan, self.makespan)

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens of completions per second of makespan."""
        return self.output_tokens / self.makespan if self.makespan else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        """Tokens of prompts and completions per second of makespan."""
        return (self.prompt_tokens + self.output_tokens) / self.makespan if self.makespan else 0.0

    def share(self, cause: str) -> float:
        """Return the share of the slots' time that a cause takes."""
        whole = self.slots * self.makespan
        return self.slot_seconds[cause] / whole if whole else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON to ``path`` atomically."""
        write_json(path, self.to_json(), indent=2)

    def to_json(self) -> dict[str, Any]:
        """Return fields and derived values as plain JSON values."""
        value: dict[str, Any] = plain(replace(self, replicas=()))
        lengths = value.pop("lengths")
        return value | {
            **{f"length_{_LENGTHS.get(name, name)}": entry for name, entry in lengths.items()},
            "reached": None if self.reached is None else self.reached.to_json(),
            "replicas": [None if replica is None else replica.to_json() for replica in self.replicas],
            "gap": self.run_gap,
            "schedule_gap": self.schedule_gap,
            "plan_gap": self.plan_gap,
            "model_error": self.model_error,
            "plan_error": self.plan_error,
            "shares": {cause: self.share(cause) for cause in self.slot_seconds},
            "output_tokens_per_s": self.output_tokens_per_second,
            "total_tokens_per_s": self.total_tokens_per_second,
        }

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of :meth:`to_json`."""
        described = schema(cls)
        properties = described["properties"]
        del properties["lengths"]
        described["required"].remove("lengths")
        for name in ("mean_absolute", "bias", "wrong"):
            properties[f"length_{_LENGTHS.get(name, name)}"] = {"type": "number"}
        for name in _DERIVED:
            properties[name] = {"anyOf": [{"type": "number"}, {"type": "null"}]}
        properties["shares"] = {"type": "object", "additionalProperties": {"type": "number"}}
        properties["replicas"] = {"type": "array", "items": {"anyOf": [{"type": "object"}, {"type": "null"}]}}
        return described

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Return the report that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is not a report of this version.
        """
        return cls.from_json(read_json_object(path), file=path)

    @classmethod
    def from_json(cls, value: dict[str, Any], *, file: str | os.PathLike[str] | None = None) -> Report:
        """Return the report that :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If the version differs, or a field is missing or has another type.
        """
        names = {name: f"length_{_LENGTHS.get(name, name)}" for name in ("mean_absolute", "bias", "wrong")}
        lengths = {name: value[theirs] for name, theirs in names.items() if theirs in value}
        listed = value.get("replicas", [])
        if not isinstance(listed, list) or not all(
            replica is None or isinstance(replica, dict) for replica in listed
        ):
            what, where = "is not a list of reports", "field 'replicas'"
            raise InputError(what, file=file, where=where, hint=cls.JSON_HINT)
        replicas = tuple(None if replica is None else cls.from_json(replica, file=file) for replica in listed)
        report = record(cls, {**value, "lengths": lengths, "replicas": []}, file=file)
        return replace(report, replicas=replicas)


_DERIVED = (
    "gap",
    "schedule_gap",
    "plan_gap",
    "model_error",
    "plan_error",
    "output_tokens_per_s",
    "total_tokens_per_s",
)
_LENGTHS = {"mean_absolute": "mean_absolute_error"}


def _relative(value: float, reference: float) -> float:
    return (value - reference) / reference if reference else 0.0
