"""What a run was worth: its makespan against plan and bound, and where its slots' time went."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from .costs.calibration import FitError
from .expectation import Expectation
from .files.disk import InputError, read_json_object, write_json
from .files.json_fields import JsonFields
from .reached import Reached

REPORT_VERSION = 1
_MEND = "Write it again with `batchbound report`."

DECODE: Final = "decode"
PREFILL: Final = "prefill"
STALL: Final = "prefill stall"
WAITING: Final = "waiting for a prefill"
TAIL: Final = "tail"
NO_ARRIVAL: Final = "nothing has arrived"
BETWEEN: Final = "between stages"
BUSY: Final = (DECODE, PREFILL)
BUBBLES: Final = (STALL, WAITING, TAIL, NO_ARRIVAL, BETWEEN)
"""What a slot's time goes into: work, and the causes of its being lost."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """
    The median and the 90th and 99th percentile of a quantity over the requests.

    Parameters
    ----------
    p50, p90, p99
        Seconds; linearly interpolated between requests.
    """

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class LengthError:
    """
    Planned against actual answer lengths.

    Parameters
    ----------
    mean_absolute
        Tokens a planned length is off by, on average.
    bias
        Mean of planned minus actual tokens: positive if answers were planned too long.
    wrong
        Requests whose length turned out different.
    """

    mean_absolute: float
    bias: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Report:
    """
    A run against its plan and its bound; every quantity is defined in ``docs/metrics.md``.

    Parameters
    ----------
    clock
        ``"model"`` if the run's seconds are the cost model's (simulated), ``"measured"`` if a clock's.
    makespan
        Seconds of the run, on its clock.
    model_makespan
        Seconds the cost model gives the stages that the run ran: what the run's gap is taken of.
    schedule_makespan
        The same without what the engine added, padding and changes of the batch: what the schedule that came
        out takes.
    planned_makespan
        Seconds the plan predicted, or None without a plan.
    bound, bound_source
        Proven model seconds and by what argument, or None where nothing is proven.
    run_bound
        The same for the requests this run served and the answer lengths that came out, or None.
    requests
        Requests served in this run.
    resumed
        Requests of the problem that an earlier, interrupted run had answered.
    slots
        Slots of the engine.
    prefill_stages, decode_rounds
        Counts.
    evictions
        Requests put back into the queue after they had been prefilled.
    prompt_tokens, output_tokens
        Of the requests served.
    utilization
        Model seconds that full decode rounds would have needed for the same tokens, over the makespan's.
    slot_seconds
        What the slots' time went into, slot-seconds by cause; they add up to slots x makespan.
    finish, first_token, per_token
        Seconds from a request's arrival to its last token and to its first, and seconds per later token;
        None if no request has such a time.
    lengths
        Planned against actual answer lengths.
    padding
        Share of the keys and values read in decode rounds that was padding.
    padding_seconds
        Model seconds of reading it, a part of ``model_makespan``.
    change_seconds
        Model seconds of changes of the running batch, another part of it.
    pace
        Measured seconds for each model second in the median stage: what the machine was slower by than the
        cost model. None for a simulated run.
    missed
        What the model missed besides: measured seconds of all stages over model seconds at that pace, minus
        one. None for a simulated run.
    between
        Measured seconds in which no stage ran; None for a simulated run.
    fit
        Error of the cost model's fit, or None if it is not a fitted one.
    engine
        What ran it.
    expected
        What the plan expected over the lengths that might come out, or None if it took them as known.
    reached
        What the plan's configuration reached in its steady state; None without one of either.
    seconds
        What the work behind the report took the program, or None if nobody measured it.
    """

    clock: str
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
    decode_rounds: int
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

    @property
    def plan_gap(self) -> float | None:
        """How far the planned makespan is above the bound, as a fraction of it: all in model seconds."""
        if self.bound is None or self.planned_makespan is None:
            return None
        return _relative(self.planned_makespan, self.bound)

    @property
    def run_gap(self) -> float | None:
        """
        How far the run is above its bound, as a fraction of it: in model seconds of what the run did.

        None without a bound for what this run served, at the lengths that came out.
        """
        if self.run_bound is None:
            return None
        return _relative(self.model_makespan, self.run_bound)

    @property
    def schedule_gap(self) -> float | None:
        """The part of the run's gap that its schedule lost: the rest is what the engine added."""
        if self.run_bound is None:
            return None
        return _relative(self.schedule_makespan, self.run_bound)

    @property
    def model_error(self) -> float:
        """The cost model's error on the run: model seconds of its stages over measured ones, minus one."""
        return _relative(self.model_makespan, self.makespan)

    @property
    def plan_error(self) -> float | None:
        """The planned makespan over the run's, minus one; None without a plan or for a part of a problem."""
        if self.planned_makespan is None or self.resumed:
            return None
        return _relative(self.planned_makespan, self.makespan)

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens of answers per second of makespan."""
        return self.output_tokens / self.makespan if self.makespan else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        """Tokens of prompts and answers per second of makespan."""
        return (self.prompt_tokens + self.output_tokens) / self.makespan if self.makespan else 0.0

    def share(self, cause: str) -> float:
        """Return the share of slots x makespan that went into a cause of :attr:`slot_seconds`."""
        whole = self.slots * self.makespan
        return self.slot_seconds[cause] / whole if whole else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON to ``path``, whole or not at all."""
        write_json(path, self.to_json(), indent=2)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values, derived ones included."""
        values: dict[str, object] = {
            "batchbound_report": REPORT_VERSION,
            "clock": self.clock,
            "makespan_s": self.makespan,
            "model_makespan_s": self.model_makespan,
            "schedule_makespan_s": self.schedule_makespan,
            "plan_makespan_s": self.planned_makespan,
            "bound_s": self.bound,
            "bound_source": self.bound_source,
            "run_bound_s": self.run_bound,
            "gap": self.run_gap,
            "schedule_gap": self.schedule_gap,
            "plan_gap": self.plan_gap,
            "model_error": self.model_error,
            "plan_error": self.plan_error,
            "utilization": self.utilization,
            "slot_seconds": dict(self.slot_seconds),
            "shares": {cause: self.share(cause) for cause in self.slot_seconds},
            "output_tokens_per_s": self.output_tokens_per_second,
            "total_tokens_per_s": self.total_tokens_per_second,
        }
        values |= {name: getattr(self, name) for name in _COUNTS}
        values |= {
            "finish_s": _percentiles_json(self.finish),
            "ttft_s": _percentiles_json(self.first_token),
            "tpot_s": _percentiles_json(self.per_token),
            "length_mean_absolute_error": self.lengths.mean_absolute,
            "length_bias": self.lengths.bias,
            "length_wrong": self.lengths.wrong,
            "padding": self.padding,
            "padding_s": self.padding_seconds,
            "change_s": self.change_seconds,
            "pace": self.pace,
            "missed": self.missed,
            "between_s": self.between,
            "fit": None if self.fit is None else self.fit.to_json(),
            "engine": dict(self.engine),
            "expected": None if self.expected is None else self.expected.to_json(),
            "reached": None if self.reached is None else self.reached.to_json(),
            "seconds": self.seconds,
        }
        return values

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """
        Return the report that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is not a report of this version.
        """
        return cls.from_json(read_json_object(path), file=os.fspath(path))

    @classmethod
    def from_json(cls, value: Mapping[str, object], *, file: str | None = None) -> Report:
        """
        Return the report that :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If it is of another version, or a field is missing or of another kind.
        """
        if value.get("batchbound_report") != REPORT_VERSION:
            what = f"not a batchbound report of version {REPORT_VERSION}"
            raise InputError(what, file=file, where="field 'batchbound_report'", hint=_MEND)
        read = JsonFields(value, file, hint=_MEND)
        causes = read.inside("slot_seconds")
        return cls(
            clock=read.text("clock"),
            makespan=read.number("makespan_s"),
            model_makespan=read.number("model_makespan_s"),
            schedule_makespan=read.number("schedule_makespan_s"),
            planned_makespan=read.optional_number("plan_makespan_s"),
            bound=read.optional_number("bound_s"),
            bound_source=None if value.get("bound_source") is None else read.text("bound_source"),
            run_bound=read.optional_number("run_bound_s"),
            requests=read.integer("requests"),
            resumed=read.integer("resumed"),
            slots=read.integer("slots"),
            prefill_stages=read.integer("prefill_stages"),
            decode_rounds=read.integer("decode_rounds"),
            evictions=read.integer("evictions"),
            prompt_tokens=read.integer("prompt_tokens"),
            output_tokens=read.integer("output_tokens"),
            utilization=read.number("utilization"),
            slot_seconds={name: causes.number(name) for name in read.mapping("slot_seconds")},
            finish=_percentiles(read, "finish_s"),
            first_token=_percentiles(read, "ttft_s"),
            per_token=_percentiles(read, "tpot_s"),
            lengths=LengthError(
                read.number("length_mean_absolute_error"),
                read.number("length_bias"),
                read.integer("length_wrong"),
            ),
            padding=read.number("padding"),
            padding_seconds=read.number("padding_s"),
            change_seconds=read.number("change_s"),
            pace=read.optional_number("pace"),
            missed=read.optional_number("missed"),
            between=read.optional_number("between_s"),
            fit=None if value.get("fit") is None else FitError.from_json(value["fit"], file=file),
            engine=read.mapping("engine"),
            expected=None
            if value.get("expected") is None
            else Expectation.from_json(value["expected"], file=file),
            reached=None if value.get("reached") is None else Reached.from_json(value["reached"], file=file),
            seconds=read.optional_number("seconds"),
        )


_COUNTS = (
    "requests",
    "resumed",
    "slots",
    "prefill_stages",
    "decode_rounds",
    "evictions",
    "prompt_tokens",
    "output_tokens",
)


def _percentiles(read: JsonFields, name: str) -> Percentiles | None:
    if read.get(name) is None:
        return None
    given = read.inside(name)
    return Percentiles(given.number("p50"), given.number("p90"), given.number("p99"))


def _percentiles_json(value: Percentiles | None) -> dict[str, float] | None:
    return None if value is None else {"p50": value.p50, "p90": value.p90, "p99": value.p99}


def _relative(value: float, reference: float) -> float:
    return (value - reference) / reference if reference else 0.0
