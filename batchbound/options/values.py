"""Types of values that several records share: ranges of numbers, and names in the help."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from ..data.lengths.prediction_error import LARGEST_SD
from ..data.problem import MOST_SLOTS
from ..data.workload import LONGEST
from .option import PathText, Values

Positive: TypeAlias = Annotated[int, Values("N", 1, LONGEST)]
TokenCount: TypeAlias = Annotated[int, Values("TOKENS", 1, LONGEST)]
Tokens: TypeAlias = Annotated[int, Values("TOKENS", 0, LONGEST)]
SlotCount: TypeAlias = Annotated[int, Values("N", 1, MOST_SLOTS)]
Seed: TypeAlias = Annotated[int, Values("N", 0, 2**31 - 1)]
"""A seed that every random generator accepts."""
Seconds: TypeAlias = Annotated[float, Values("SECONDS", 0, above=True)]
AtLeastZero: TypeAlias = Annotated[float, Values(None, 0)]
LogDeviation: TypeAlias = Annotated[float, Values("SD", 0, LARGEST_SD)]
"""Standard deviation of a length's logarithm."""
File: TypeAlias = Annotated[PathText, Values("FILE")]
AnyPath: TypeAlias = Annotated[PathText, Values("PATH")]
Name: TypeAlias = Annotated[str, Values("NAME")]
ModelName: TypeAlias = Annotated[str, Values("MODEL")]
