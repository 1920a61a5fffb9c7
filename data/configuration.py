"""An execution configuration in a plan: what is run, and what is expected of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from .files import InputError

STRATEGIES = ("RRA", "WAA-C", "WAA-M")


@dataclass(frozen=True, slots=True)
class PlannedConfiguration:
    """
    The configuration a plan is run with, and the lengths it was chosen for (ExeGPT).

    Parameters
    ----------
    strategy
        One of :data:`STRATEGIES`.
    encode_batch
        Prompts of an encoding, :math:`B_E`.
    decode_rounds
        Decode iterations between two encodings, :math:`N_D`; 1 under WAA.
    decode_batch
        Requests a decode iteration starts with, :math:`B_D`; 0 to leave it as it comes.
    lead
        Batches that are encoded ahead under WAA; 0 under RRA.
    input_tokens, input_deviation
        Mean and standard deviation of prompts, tokens.
    iterations, iterations_deviation
        Mean and standard deviation of the decode iterations of an answer.
    latency_bound
        Seconds from the start of a request's encoding to its last token; None for no bound.
    latency
        Seconds expected, for an answer of the 99th-percentile length.
    throughput
        Requests a second expected, in the steady state.
    """

    strategy: str
    encode_batch: int
    decode_rounds: int
    decode_batch: float
    lead: int
    input_tokens: float
    input_deviation: float
    iterations: float
    iterations_deviation: float
    latency_bound: float | None
    latency: float
    throughput: float

    @property
    def handed_over(self) -> bool:
        """Whether one worker encodes for another that decodes (WAA)."""
        return self.strategy != "RRA"

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object, *, file: str | None = None) -> PlannedConfiguration:
        """
        Return the configuration that :meth:`to_json` wrote.

        Raises
        ------
        InputError
            If a field is missing or of another kind.
        """
        entries: Mapping[str, object] = value if isinstance(value, dict) else {}
        strategy = entries.get("strategy")
        if strategy not in STRATEGIES:
            message = f"{strategy!r} is none of {', '.join(STRATEGIES)}"
            raise InputError(message, file=file, where="field 'configuration.strategy'", mend="Search again.")
        numbers: dict[str, float | None] = {}
        for field in fields(cls)[1:]:
            number = entries.get(field.name)
            optional = field.name == "latency_bound" and number is None
            wrong = (
                isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number)
            )
            if wrong and not optional:
                where = f"field 'configuration.{field.name}'"
                raise InputError(f"{number!r} is not a number", file=file, where=where, mend="Search again.")
            whole = field.name in ("encode_batch", "decode_rounds", "lead")
            assert number is None or isinstance(number, int | float)
            numbers[field.name] = int(number) if whole and number is not None else number
        return cls(str(strategy), **numbers)  # type: ignore[arg-type]
