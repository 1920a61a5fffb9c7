"""Requests of a job, a row each, stored as columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IntArray
from .files.shown import Shown
from .prefix_tree import PrefixTree

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 2**31 - 1
"""Most tokens of a length."""

LATEST = 1e12
"""Latest arrival in seconds; beyond it rounding hides a decode step."""


class WorkloadError(ValueError):
    """Error for a column of a workload with an impossible value.

    row: Position of the request, from zero; None if the whole column is wrong.
    """

    def __init__(self, message: str, *, row: int | None, column: str) -> None:
        super().__init__(f"{column}{'' if row is None else f' of request {row}'}: {message}")
        self.reason = message
        self.row = row
        self.column = column


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of the job, with its completion.

    id: User's name of the request (``custom_id`` in a batch file).
    input_tokens, output_tokens: Tokens of the prompt and of the completion, known or predicted.
    arrival: Seconds after the job's start before which the request cannot be prefilled.
    group: Requests with the same number share a prompt; -1 for none.
    priority: Larger is more urgent.
    deadline: Seconds after the job's start; infinite for none.
    """

    id: str
    input_tokens: int
    output_tokens: int
    arrival: float = 0.0
    group: int = -1
    priority: int = 0
    deadline: float = float("inf")


COLUMNS = ("ids", *(field.name for field in fields(Request)[1:]))
"""Columns of a workload, one for each field of a request."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Workload(Shown):
    """Requests as numpy arrays of shape (requests,), one for each field.

    The arrays are read-only. Missing columns take the defaults of :class:`Request`.

    Parameters
    ----------
    ids
        Unique names, as Python strings, because fixed-width arrays are as wide as the longest name.
    input_tokens, output_tokens
        Tokens, at least one each.
    arrival, deadline
        Seconds, not negative.
    group, priority
        Integers.
    tree
        Beginnings that the prompts share; None if there are none, or they are not known.

    Raises
    ------
    WorkloadError
        If there is no request, or a column has an invalid value or another length than the others.
    ValueError
        If the tree is of other prompts.
    """

    ids: npt.NDArray[np.object_]
    input_tokens: IntArray
    output_tokens: IntArray
    arrival: FloatArray = None  # type: ignore[assignment]  # filled with the default column below
    group: IntArray = None  # type: ignore[assignment]
    priority: IntArray = None  # type: ignore[assignment]
    deadline: FloatArray = None  # type: ignore[assignment]
    tree: PrefixTree | None = None

    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield the number of requests and their lengths."""
        yield "Workload", f"{len(self):,} requests"
        for name, tokens in (("prompts", self.input_tokens), ("completions", self.output_tokens)):
            yield name, f"{tokens.mean():,.1f} tokens on average, {tokens.max():,} at most"
        groups = len(np.unique(self.group[self.group >= 0]))
        yield "groups", groups or None

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with a row for each request."""
        import pandas as pd

        columns = ("input_tokens", "output_tokens", "arrival", "group", "priority", "deadline")
        return pd.DataFrame({"id": self.ids, **{name: getattr(self, name) for name in columns}})

    def __post_init__(self) -> None:
        count = len(self.input_tokens)
        if count == 0:
            raise WorkloadError("there is no request", row=None, column="input_tokens")
        self._set("ids", _names(self.ids), count)
        for name in ("input_tokens", "output_tokens"):
            self._set(name, _integers(getattr(self, name), name), count)
        for name, default in (("arrival", 0.0), ("deadline", np.inf)):
            values = getattr(self, name)
            column = np.full(count, default) if values is None else _seconds(values, name)
            self._set(name, column, count)
            _refuse(np.isnan(column) | (column < 0), column, name, "must be seconds, not negative")
        _refuse(self.arrival > LATEST, self.arrival, "arrival", f"is too late ({LATEST:g} seconds at most)")
        for name, default_integer in (("group", -1), ("priority", 0)):
            values = getattr(self, name)
            column = np.full(count, default_integer) if values is None else _integers(values, name)
            self._set(name, column, count)
        for name in ("input_tokens", "output_tokens"):
            column = getattr(self, name)
            _refuse(column < 1, column, name, "must be at least one token")
            _refuse(column > LONGEST, column, name, f"is beyond any model ({LONGEST} tokens at most)")
        _refuse_repeated(self.ids)
        if self.tree is not None and not np.array_equal(self.tree.prompt_tokens, self.input_tokens):
            raise ValueError("the prefix tree is of prompts with other lengths")

    def sharing(self, shared_tokens: npt.ArrayLike) -> Workload:
        """Return the requests with the first tokens that each group's prompts share.

        shared_tokens: Common first tokens of its group's prompts, fewer than the prompt's; shape (requests,).

        Raises WorkloadError if a group's numbers differ, or a request without a group shares tokens.
        """
        name = "shared_tokens"
        shared = _integers(shared_tokens, name)
        _refuse(shared < 0, shared, name, "must not be negative")
        _refuse(shared >= self.input_tokens, shared, name, "must be fewer than the prompt's tokens")
        _refuse((shared > 0) & (self.group < 0), shared, name, "are shared with no group")
        _, first, label = np.unique(self.group, return_index=True, return_inverse=True)
        differs = (shared != shared[first[label]]) & (self.group >= 0)
        _refuse(differs, shared, name, "differ from those of its group")
        return self.with_tree(PrefixTree.of_groups(self.input_tokens, self.group, shared))

    def _set(self, name: str, column: npt.NDArray[Any], count: int) -> None:
        if column.shape != (count,):
            raise WorkloadError(f"has {column.shape} values for {count} requests", row=None, column=name)
        column = column.copy() if column.flags.writeable and column.base is not None else column
        column.flags.writeable = False
        object.__setattr__(self, name, column)

    @classmethod
    def from_lengths(cls, input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> Workload:
        """Return a workload of given lengths, named ``request-0`` and so on.

        Both have tokens, shape (requests,).
        """
        inputs, outputs = _integers(input_tokens, "input_tokens"), _integers(output_tokens, "output_tokens")
        return cls(numbered_ids(len(inputs)), inputs, outputs)

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> Workload:
        """Make a workload of a table with :class:`Request`'s columns.

        Parameters
        ----------
        frame
            ``input_tokens`` and ``output_tokens`` are required; ``id``, which may be the index, defaults to
            ``request-N``.

        Raises
        ------
        WorkloadError
            If a required column is missing, or a value is impossible.
        """
        for name in ("input_tokens", "output_tokens"):
            if name not in frame:
                raise WorkloadError(f"there is no such column among {list(frame)}", row=None, column=name)
        optional: dict[str, Any] = {
            name: frame[name].to_numpy()
            for name in ("arrival", "group", "priority", "deadline")
            if name in frame.columns
        }
        names = frame if "id" in frame.columns else frame.index.to_frame()
        ids = _names(names["id"].to_list()) if "id" in names else numbered_ids(len(frame))
        work = cls(ids, frame["input_tokens"].to_numpy(), frame["output_tokens"].to_numpy(), **optional)
        return work.sharing(frame["shared_tokens"].to_numpy()) if "shared_tokens" in frame else work

    def __len__(self) -> int:
        return len(self.input_tokens)

    def __getitem__(self, index: int) -> Request:
        return Request(
            id=str(self.ids[index]),
            input_tokens=int(self.input_tokens[index]),
            output_tokens=int(self.output_tokens[index]),
            arrival=float(self.arrival[index]),
            group=int(self.group[index]),
            priority=int(self.priority[index]),
            deadline=float(self.deadline[index]),
        )

    def __iter__(self) -> Iterator[Request]:
        return (self[index] for index in range(len(self)))

    def select(self, indices: npt.ArrayLike | Sequence[int]) -> Workload:
        """Return the workload of the requests at ``indices``, in that order."""
        chosen = np.asarray(indices)
        if chosen.size and chosen.dtype.kind not in "iu":
            raise TypeError(f"indices are positions, got {chosen.dtype}; np.flatnonzero makes them of a mask")
        chosen = chosen.astype(np.int64)
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in COLUMNS}
        if not chosen.size or len(np.unique(chosen % len(self))) < len(chosen):
            return Workload(**columns)
        tree = None if self.tree is None else self.tree.select(chosen % len(self))
        # A subset of valid requests is valid, so it is not checked again.
        part = object.__new__(Workload)
        for name, column in columns.items():
            part._set(name, column, len(chosen))
        object.__setattr__(part, "tree", tree)
        return part

    def group_numbers(self) -> IntArray:
        """Return each request's group from zero; a lone request is one."""
        group, alone = self.group.copy(), self.group < 0
        group[alone] = group.max(initial=-1) + 1 + np.arange(int(alone.sum()))
        return np.unique(group, return_inverse=True)[1].astype(np.int64)

    @property
    def own_tokens(self) -> IntArray:
        """Tokens of each prompt that it shares with no other, shape (requests,)."""
        return self.input_tokens if self.tree is None else self.tree.own

    @property
    def shared_once(self) -> int:
        """Tokens of all shared beginnings, each once."""
        return 0 if self.tree is None else int(self.tree.tokens.sum())

    @property
    def computed_tokens(self) -> int:
        """Tokens of all prompts; those that several share count once."""
        return int(self.own_tokens.sum()) + self.shared_once

    def without_arrivals(self) -> Workload:
        """Return the same requests, all arriving at the start."""
        return replace(self, arrival=np.zeros(len(self))) if self.arrival.any() else self

    def with_shared_prompts(self) -> Workload:
        """Share the whole prompt in each group of equal prompts.

        Every request still computes the last prompt token itself.
        """
        grouped, shared = self.group >= 0, np.zeros(len(self), dtype=np.int64)
        if not grouped.any():
            return self
        _, first, label = np.unique(self.group, return_index=True, return_inverse=True)
        unlike = np.bincount(label, weights=self.input_tokens != self.input_tokens[first[label]])
        alike = grouped & (unlike[label] == 0) & (np.bincount(label)[label] > 1)
        shared[alike] = self.input_tokens[alike] - 1
        return self.sharing(shared)

    def with_output_tokens(self, output_tokens: npt.ArrayLike) -> Workload:
        """Return the requests with other completion lengths."""
        return replace(self, output_tokens=np.array(output_tokens))

    def with_tree(self, tree: PrefixTree) -> Workload:
        """Return the requests with the beginnings that their prompts share.

        A tree without nodes is left out.
        """
        return replace(self, tree=tree if len(tree.parent) else None)


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Order of a job's requests within conversations.

    A turn arrives when the previous turn has finished and its pause, for a tool call, is over. Its prompt is
    the whole conversation so far.

    after: Earlier request that each request continues; -1 for the first turn.
    pause: Seconds between the previous turn's end and the arrival, shape (requests,).

    Raises WorkloadError if a turn continues itself or a later one, or a pause is not in seconds.
    """

    after: IntArray
    pause: FloatArray

    def __post_init__(self) -> None:
        after, pause = np.asarray(self.after, dtype=np.int64), np.asarray(self.pause, dtype=np.float64)
        object.__setattr__(self, "after", after)
        object.__setattr__(self, "pause", pause)
        if after.shape != pause.shape:
            raise WorkloadError(f"has {len(pause)} values for {len(after)} turns", row=None, column="pause")
        wrong = (after < -1) | (after >= np.arange(len(after)))
        _refuse(wrong, after, "after", "is no earlier request, and not -1")
        _refuse(~((pause >= 0) & (pause <= LATEST)), pause, "pause", "must be seconds, not negative")

    @property
    def first(self) -> npt.NDArray[np.bool_]:
        """True for requests that begin a conversation, shape (requests,)."""
        firsts: npt.NDArray[np.bool_] = self.after < 0
        return firsts

    def followers(self) -> dict[int, list[int]]:
        """Return the requests that continue each request."""
        followers_of: dict[int, list[int]] = {}
        for request in np.flatnonzero(~self.first).tolist():
            followers_of.setdefault(int(self.after[request]), []).append(request)
        return followers_of


def numbered_ids(count: int) -> npt.NDArray[np.object_]:
    """Return the names ``request-0`` to ``request-(count-1)``."""
    return np.array([f"request-{number}" for number in range(count)], dtype=np.object_)


def _names(given: Any) -> npt.NDArray[np.object_]:
    values = given.tolist() if isinstance(given, np.ndarray) else list(given)
    for row, name in enumerate(values):
        if not isinstance(name, str):
            if str(name) in _MISSING:
                raise WorkloadError(f"{name} is no name", row=row, column="id")
            values[row] = str(name)
        # A file of arrays would drop it at the end of a name.
        elif "\0" in name:
            raise WorkloadError(f"{name!r} holds the character NUL", row=row, column="id")
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        row = next(row for row, name in enumerate(values) if _SURROGATE.search(name))
        what = f"{values[row]!r} holds half of a Unicode surrogate pair"
        raise WorkloadError(what, row=row, column="id") from None
    ids = np.empty(len(values), dtype=np.object_)
    ids[:] = values
    return ids


_SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which no UTF-8 file holds."""

_MISSING = ("None", "nan", "<NA>", "NaT")
"""Texts of missing values."""


def _seconds(values: npt.ArrayLike, name: str) -> FloatArray:
    column = np.array(values)
    if column.dtype.kind in "mM":
        raise WorkloadError(f"must be numbers of seconds, not {column.dtype}", row=None, column=name)
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        raise WorkloadError("is not a column of numbers", row=None, column=name) from None


def _integers(values: npt.ArrayLike, name: str) -> IntArray:
    column = np.array(values)
    if column.ndim == 0 or column.dtype.kind in "mM":
        raise WorkloadError("is not a column of whole numbers", row=None, column=name)
    if column.dtype.kind in "iu":
        return column.astype(np.int64)
    beyond = f"is beyond any model ({LONGEST} tokens at most)"
    try:
        numbers = column.astype(np.float64)
    except (TypeError, ValueError):
        raise WorkloadError("is not a column of whole numbers", row=None, column=name) from None
    except OverflowError:
        # A whole number of over 308 digits is among them.
        far = np.array([isinstance(value, int) and abs(value) > LONGEST for value in column])
        _refuse(far, column, name, beyond)
        raise
    _refuse(np.abs(numbers) > LONGEST, numbers, name, beyond)
    _refuse(numbers != np.floor(numbers), numbers, name, "must be a whole number")
    return numbers.astype(np.int64)


def numbered_rows(*columns: IntArray) -> IntArray:
    """Return a number for each row, equal for equal rows.

    ``numpy.unique`` along an axis does the same, but turns an interrupt into a TypeError.
    """
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), dtype=np.bool_)
    for column in columns:
        new[1:] |= np.diff(column[order]) != 0
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(new)
    return number


def _refuse(wrong: npt.NDArray[np.bool_], column: npt.NDArray[Any], name: str, rule: str) -> None:
    rows = np.flatnonzero(wrong)
    if rows.size:
        row = int(rows[0])
        raise WorkloadError(f"{column[row]} {rule}", row=row, column=name)


def _refuse_repeated(ids: npt.NDArray[np.object_]) -> None:
    names = ids.tolist()
    if len(set(names)) == len(names):
        return
    row_of: dict[str, int] = {}
    for row, name in enumerate(names):
        first = row_of.setdefault(name, row)
        if first != row:
            raise WorkloadError(f"{name!r} also names request {first}", row=row, column="id")
