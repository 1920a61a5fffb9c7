"""A cost model fitted to measurements, with its error and what was measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..files.disk import InputError, read_json_object, write_json
from ..files.json_fields import JsonFields
from .cost import CostModel

CALIBRATION_VERSION = 1
_MEND = "Measure again with `batchbound profile`."


@dataclass(frozen=True, slots=True)
class FitError:
    """
    How far a fitted cost model is from the stages it was fitted to.

    Parameters
    ----------
    prefill_mape, decode_mape
        Mean absolute error of a prefill stage and of a decode round, as a fraction of the measured seconds.
    makespan
        Predicted over measured seconds of all stages together, minus one: positive if the model is slow.
    prefill_stages, decode_rounds
        Measured stages and rounds the error is taken over.
    """

    prefill_mape: float
    decode_mape: float
    makespan: float
    prefill_stages: int
    decode_rounds: int

    def to_json(self) -> dict[str, float | int]:
        """Return the errors by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object, *, file: str | None = None) -> FitError:
        """
        Return the errors that :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If one is missing or not a number.
        """
        read = JsonFields(value, file, "error", _MEND)
        return cls(
            prefill_mape=read.number("prefill_mape"),
            decode_mape=read.number("decode_mape"),
            makespan=read.number("makespan"),
            prefill_stages=int(read.number("prefill_stages")),
            decode_rounds=int(read.number("decode_rounds")),
        )


@dataclass(frozen=True, slots=True)
class CalibratedCost:
    """
    A cost model of one model on one machine.

    Parameters
    ----------
    cost
        The fitted coefficients.
    error
        Of the fit, on the stages it was made from.
    engine
        What was measured, as the engine describes itself: its name, tier, model, device, dtype and versions.
    date
        When, as an ISO date.
    slots_grid, prompt_grid
        Slots and prompt lengths (tokens) that were measured; outside them the model extrapolates.
    held_out
        Error on a whole job that the fit was not made from; None if none was run.
    """

    cost: CostModel
    error: FitError
    engine: Mapping[str, object]
    date: str
    slots_grid: tuple[int, ...]
    prompt_grid: tuple[int, ...]
    held_out: FitError | None = None

    def beyond(self, slots: int, longest: int, held: float) -> tuple[str, ...]:
        """
        Return where a plan leaves what was measured, one text each; empty if nowhere, or nothing is recorded.

        Parameters
        ----------
        slots
            Of the plan.
        longest
            Tokens of its longest prompt.
        held
            Tokens of keys and values that a request holds in a decode round, on average.
        """
        found = []
        if self.slots_grid and slots > max(self.slots_grid):
            found.append(f"{slots} slots, measured up to {max(self.slots_grid)}")
        if self.prompt_grid and longest > max(self.prompt_grid):
            found.append(f"a prompt of {longest} tokens, measured up to {max(self.prompt_grid)}")
        if self.prompt_grid and held > max(self.prompt_grid):
            found.append(f"{held:.0f} tokens held by a request, measured up to {max(self.prompt_grid)}")
        return tuple(found)

    def differences(self, engine: Mapping[str, object]) -> tuple[str, ...]:
        """
        Return in what another engine differs from the one measured, one text each; empty if in nothing.

        Parameters
        ----------
        engine
            As the other engine describes itself.
        """
        names = sorted(self.engine.keys() | engine.keys())
        return tuple(
            f"{name} {engine.get(name, 'unknown')} instead of {self.engine.get(name, 'unknown')}"
            for name in names
            if self.engine.get(name) != engine.get(name)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to ``path``, whole or not at all."""
        write_json(path, self.to_json(), indent=2)

    def to_json(self) -> dict[str, object]:
        """Return the calibration as plain JSON values."""
        return {
            "batchbound_cost": CALIBRATION_VERSION,
            "cost": self.cost.to_json(),
            "error": self.error.to_json(),
            "engine": dict(self.engine),
            "date": self.date,
            "slots_grid": list(self.slots_grid),
            "prompt_grid": list(self.prompt_grid),
            "held_out": None if self.held_out is None else self.held_out.to_json(),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibratedCost:
        """
        Return the calibration that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is not a calibration of this version.
        """
        return cls.from_json(read_json_object(path), file=os.fspath(path))

    @classmethod
    def from_json(cls, value: Mapping[str, object], *, file: str | None = None) -> CalibratedCost:
        """
        Return the calibration that :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If it is of another version, or a field is missing or of another kind.
        """
        version = value.get("batchbound_cost")
        if version != CALIBRATION_VERSION:
            what = (
                "not a batchbound calibration" if version is None else f"a calibration of version {version!r}"
            )
            raise InputError(what, file=file, where="field 'batchbound_cost'", hint=_MEND)
        read = JsonFields(value, file, hint=_MEND)
        return cls(
            cost=CostModel.from_json(read.mapping("cost"), file=file),
            error=FitError.from_json(read.mapping("error"), file=file),
            engine=read.mapping("engine"),
            date=read.text("date"),
            slots_grid=read.integers("slots_grid"),
            prompt_grid=read.integers("prompt_grid"),
            held_out=None
            if value.get("held_out") is None
            else FitError.from_json(value["held_out"], file=file),
        )
