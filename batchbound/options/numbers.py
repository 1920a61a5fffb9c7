"""Types of numbers that several records share, with their ranges."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from ..data.lengths.prediction_error import LARGEST_SD
from ..data.problem import MOST_SLOTS
from ..data.workload import LONGEST
from .option import Range

Positive: TypeAlias = Annotated[int, Range(1, LONGEST)]
Tokens: TypeAlias = Annotated[int, Range(0, LONGEST)]
SlotCount: TypeAlias = Annotated[int, Range(1, MOST_SLOTS)]
Seed: TypeAlias = Annotated[int, Range(0, 2**31 - 1)]
"""A seed that every random generator accepts."""
Seconds: TypeAlias = Annotated[float, Range(0, above=True)]
AtLeastZero: TypeAlias = Annotated[float, Range(0)]
LogDeviation: TypeAlias = Annotated[float, Range(0, LARGEST_SD)]
"""Standard deviation of a length's logarithm."""
