"""Source of the planned completion lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import IntArray
from ..files.disk import InputError
from ..files.jsonl import file_digest
from ..files.record import Positive, plain, record, refuse_unknown
from ..lengths.distributions import FAMILIES, LengthDistribution
from ..lengths.history import LengthHistory
from ..workload import LONGEST
from .completions import lengths_by_name


@dataclass(frozen=True, slots=True)
class LengthSource:
    """Source of the planned completion lengths.

    kind: ``known`` (stated by each request), ``completions`` (an earlier run's, by name; older plans call it
        ``answers``), ``history`` (earlier completions of the same prompts, by :class:`.LengthHistory`),
        ``constant``, ``quantile`` (of the lengths in a file) or ``cap`` (the request's own ``max_tokens``).
    value: Tokens of a constant, or the quantile.
    family: Family that is fitted for a quantile.
    longest: Most tokens of any completion, in addition to its request's limit; None for no limit.
    sampled: True for earlier completions that were drawn without a seed: their lengths need not repeat.
    """

    kind: str
    value: float | None = None
    file: str | None = None
    digest: str | None = None
    family: str = "empirical"
    longest: Positive | None = None
    sampled: bool = False

    def __post_init__(self) -> None:
        if self.kind == "answers":
            object.__setattr__(self, "kind", "completions")
        if self.kind not in _MEND:
            raise ValueError(f"the kind {self.kind!r} is none of {', '.join(_MEND)}")

    @classmethod
    def parse(cls, spec: str) -> LengthSource:
        """Return the source named on the command line.

        ``known``, ``cap``, ``constant:N``, ``completions:FILE``, ``history:FILE``, ``quantile:Q:FILE`` or
        ``quantile:Q:FAMILY:FILE``.
        """
        kind, _, rest = spec.partition(":")
        if kind in ("known", "cap") and not rest:
            return cls(kind)
        if kind == "constant" and rest:
            tokens = _number(
                rest,
                spec,
                f"a whole number of tokens from 1 to {LONGEST}",
                lambda n: n == int(n) and 1 <= n <= LONGEST,
            )
            return cls(kind, value=int(tokens))
        if kind in ("completions", "answers", "history") and rest:
            return cls(kind, file=rest, digest=file_digest(rest))
        share, _, file = rest.partition(":")
        if kind == "quantile" and file:
            value = _number(share, spec, "a quantile above 0 and up to 1", lambda q: 0 < q <= 1)
            family, _, behind = file.partition(":")
            family, file = (family, behind) if behind and family in FAMILIES else ("empirical", file)
            return cls(kind, value=value, file=file, digest=file_digest(file), family=family)
        raise InputError(
            f"{spec!r} names no source of completion lengths",
            where="lengths",
            hint="Give known, cap, constant:N, completions:FILE, history:FILE, quantile:Q:FILE or"
            " quantile:Q:FAMILY:FILE "
            f"(FAMILY one of {', '.join(FAMILIES)}).",
        )

    def resolve(
        self,
        ids: Sequence[str],
        *,
        caps: Sequence[int | None] | None = None,
        known: Sequence[int | None] | None = None,
        prompts: Sequence[object] | None = None,
        names: Sequence[str] | None = None,
    ) -> IntArray:
        """Return the planned length of each completion.

        It has at least one token, and never more than its cap.
        """
        nothing: Sequence[int | None] = [None] * len(ids)
        caps, known = self.capped(nothing if caps is None else caps), nothing if known is None else known
        lengths = (
            self._of_history(prompts) if self.kind == "history" else self._choose(ids, caps, known, names)
        )
        missing = [i for i, length in enumerate(lengths) if length is None]
        if missing and self.kind == "cap":
            and_others = "" if len(missing) == 1 else f" and {len(missing) - 1:,} others"
            raise InputError(f"no max_tokens in {ids[missing[0]]!r}{and_others}", hint=_MEND["cap"])
        if missing:
            raise InputError(
                f"{len(missing)} of {len(ids)} requests have no completion length, first {ids[missing[0]]!r}",
                file=self.file,
                where=f"lengths '{self.kind}'",
                hint=_MEND[self.kind],
            )
        chosen = np.array(lengths, dtype=np.int64)
        ceiling = np.array([LONGEST if cap is None else cap for cap in caps], dtype=np.int64)
        return np.minimum(chosen, ceiling)

    def capped(self, caps: Sequence[int | None]) -> Sequence[int | None]:
        """Return each completion's most tokens, or None.

        They come from its cap or from :attr:`longest`.
        """
        if self.longest is None:
            return caps
        return [self.longest if cap is None else min(cap, self.longest) for cap in caps]

    def _choose(
        self,
        ids: Sequence[str],
        caps: Sequence[int | None],
        known: Sequence[int | None],
        names: Sequence[str] | None,
    ) -> Sequence[int | None]:
        if self.kind == "known":
            return known
        if self.kind == "cap":
            return caps
        if self.kind == "constant":
            return [int(self.value or 0)] * len(ids)
        lengths = lengths_by_name(self.file or "")
        if self.kind == "completions":
            return [
                lengths.get(name, lengths.get(request))
                for name, request in zip(names or ids, ids, strict=True)
            ]
        try:
            fitted = LengthDistribution.fit(list(lengths.values()), self.family)
        except ValueError as error:
            hint = "Use the empirical quantile: quantile:Q:FILE."
            if self.family == "empirical":
                hint = "Correct the lengths."
            raise InputError(str(error), file=self.file, where="lengths 'quantile'", hint=hint) from None
        return [fitted.quantile(self.value or 0)] * len(ids)

    def _of_history(self, prompts: Sequence[object] | None) -> Sequence[int]:
        history = LengthHistory.load(self.file or "")
        if prompts is None or not len(history):
            what = (
                "has no lengths yet" if prompts is not None else "is of prompts, and there are only lengths"
            )
            hint = "Choose another source of lengths."
            raise InputError(what, file=self.file, where="lengths 'history'", hint=hint)
        lengths: list[int] = history.expected(prompts).tolist()
        return lengths

    def to_json(self) -> dict[str, object]:
        """Return the fields that are set, as plain JSON values."""
        return {name: value for name, value in plain(self).items() if value not in (None, "empirical", False)}


def length_source_of(lengths: Mapping[str, object], *, file: str | None = None) -> LengthSource:
    """Return a plan's source of lengths; raise InputError if none."""
    within, hint = "provenance.lengths", "Plan again."
    refuse_unknown(LengthSource, lengths, file=file, within=within, hint=hint)
    return record(LengthSource, lengths, file=file, within=within, hint=hint)


def longest_planned(lengths: Mapping[str, object], *, file: str | None = None) -> int | None:
    """Return a plan's recorded most tokens of any completion."""
    limit = {name: value for name, value in lengths.items() if name == "longest"}
    return length_source_of({"kind": "cap", **limit}, file=file).longest


_MEND = {
    "known": "Give each request output_tokens, or choose constant:N, cap, completions:FILE or"
    " quantile:Q:FILE.",
    "cap": "Add --longest-completion 1024, give each request a max_tokens, or choose lengths constant:N,"
    " completions:FILE or quantile:Q:FILE.",
    "completions": "The file must hold a completion of every request; for an estimate choose"
    " quantile:Q:FILE.",
    "constant": "",
    "history": "",
    "quantile": "",
}


def _number(text: str, spec: str, what: str, holds: Callable[[float], bool]) -> float:
    try:
        number = float(text)
        good = holds(number)
    except (ValueError, OverflowError):
        good = False
    if not good:
        raise InputError(f"{text!r} in {spec!r} is not {what}", where="lengths", hint=f"Give {what}.")
    return number
