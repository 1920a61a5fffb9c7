"""How far a plan of several steps has come: what a run keeps from one step to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..files.disk import read_json_object, write_json
from ..files.kinds import refuse_other_kinds
from ..files.record import Count, plain, record


@dataclass(frozen=True, slots=True)
class StepEnds:
    """
    What ended in one step.

    Parameters
    ----------
    requests
        Positions in the plan, in the order in which they ended, kept or not.
    tokens
        Of each.
    before
        How many of them had ended already as the step was gone on with after it had broken off.
    """

    requests: tuple[Count, ...]
    tokens: tuple[Count, ...]
    before: Count = 0


@dataclass(frozen=True, slots=True)
class Unfinished:
    """
    A completion that goes on in the next step.

    Parameters
    ----------
    request
        Its position in the plan.
    tokens
        Its token ids so far.
    versions
        In which steps, counted from zero, how many of them were drawn, in their order.
    told
        Of each, its log-probability and the likeliest tokens with theirs; None unless asked for.
    """

    request: Count
    tokens: tuple[Count, ...]
    versions: tuple[tuple[Count, Count], ...]
    told: tuple[tuple[float, tuple[tuple[Count, float], ...]], ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepsProgress:
    """
    How far a plan of several steps has come.

    Parameters
    ----------
    plan
        Digest of the plan.
    steps
        Those that have ended.
    unfinished
        What goes on in the next one.
    waiting
        Output lines of completions whose groups are not complete, by name.
    """

    JSON_HEADER: ClassVar = ("batchbound_steps_progress", 1)
    JSON_HINT: ClassVar = "Begin with the first step: move it and the steps' completions away."

    plan: str
    steps: tuple[StepEnds, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    waiting: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to ``path``, whole or not at all."""
        write_json(path, plain(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepsProgress:
        """Return what :meth:`save` wrote; InputError if the file is none."""
        refuse_other_kinds(path, "no progress of a plan of several steps", {cls.JSON_HEADER[0]})
        return record(cls, read_json_object(path), file=path)
