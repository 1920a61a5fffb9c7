"""Cost of an iteration, composed from a table of operations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from ...data.arrays import FloatArray
from ...data.costs.layer_profile import LayerProfile, Operation
from ...data.lengths.distributions import LengthDistribution

_FAR = 0.5
"""Start of the slope after the last point, as a share of it."""


class Curve:
    """Piecewise linear function: flat, linear between points, then a line.

    at: Abscissae, ascending.
    values: Values there, same length.
    """

    __slots__ = ("_at", "_slope", "_values")

    def __init__(self, at: Sequence[float], values: Sequence[float]) -> None:
        self._at, self._values = list(at), list(values)
        self._slope = 0.0
        if len(self._at) > 1:
            far = min(bisect_right(self._at, _FAR * self._at[-1]) - 1, len(self._at) - 2)
            far = max(far, 0)
            rise = self._values[-1] - self._values[far]
            self._slope = max(0.0, rise / (self._at[-1] - self._at[far]))

    def __call__(self, x: float) -> float:
        """Return the value at ``x``."""
        at, values = self._at, self._values
        if x <= at[0]:
            return values[0]
        if x >= at[-1]:
            return values[-1] + self._slope * (x - at[-1])
        right = bisect_right(at, x)
        lower = right - 1
        share = (x - at[lower]) / (at[right] - at[lower])
        return values[lower] + share * (values[right] - values[lower])

    @property
    def at(self) -> list[float]:
        """Abscissae of the points."""
        return self._at

    def many(self, x: FloatArray) -> FloatArray:
        """Return the values at several places, shape (places,)."""
        inside = np.interp(x, self._at, self._values)
        return np.asarray(inside + self._slope * np.maximum(0.0, x - self._at[-1]))

    def plus(self, other: Curve, times: int) -> Curve:
        """Return the sum of this curve and ``times`` the other."""
        at = sorted({*self._at, *other._at})
        return Curve(at, [self(x) + times * other(x) for x in at])


class Surface:
    """Piecewise linear function of several numbers.

    Each known value of the first number has a function of the others. Between two such values it is linear,
    and beyond the last a line.

    points: Shape (points, axes).
    values: Shape (points,).
    """

    __slots__ = ("_at", "_inner")

    def __init__(self, points: FloatArray, values: FloatArray) -> None:
        firsts = np.unique(points[:, 0])
        self._at: list[float] = firsts.tolist()
        self._inner: list[Curve | Surface] = []
        for first in firsts:
            rows = points[:, 0] == first
            rest, inner = points[rows][:, 1:], values[rows]
            if rest.shape[1] == 1:
                order = np.argsort(rest[:, 0], kind="stable")
                self._inner.append(Curve(rest[order, 0].tolist(), inner[order].tolist()))
            else:
                self._inner.append(Surface(rest, inner))

    def __call__(self, first: float, *rest: float) -> float:
        """Return the value at a point."""
        at = self._at
        if first <= at[0] or len(at) == 1:
            return self._inner[0](*rest)
        right = min(bisect_right(at, first), len(at) - 1)
        lower = right - 1
        if first >= at[-1]:
            # The slope starts as far back as a curve's: on a fine grid neighbours predict little.
            lower = min(max(bisect_right(at, _FAR * at[-1]) - 1, 0), right - 1)
        low, high = self._inner[lower](*rest), self._inner[right](*rest)
        share = (first - at[lower]) / (at[right] - at[lower])
        return max(0.0, low + share * (high - low))

    def many(self, first: FloatArray, *rest: FloatArray) -> FloatArray:
        """Return the values at several points."""
        at = np.array(self._at)
        if len(at) == 1:
            return self._inner[0].many(*rest)
        known = np.array([inner.many(*rest) for inner in self._inner])
        right = np.clip(np.searchsorted(at, first, side="right"), 1, len(at) - 1)
        far = min(max(bisect_right(self._at, _FAR * self._at[-1]) - 1, 0), len(at) - 2)
        lower = np.where(first >= at[-1], far, right - 1)
        points = np.arange(len(first))
        low, high = known[lower, points], known[right, points]
        share = (np.maximum(first, at[0]) - at[lower]) / (at[right] - at[lower])
        return np.asarray(np.maximum(0.0, low + share * (high - low)))


class LayerCost:
    """Seconds of encoding, decoding and mixed iterations."""

    def __init__(self, profile: LayerProfile) -> None:
        self.profile = profile
        self._encode = _Phase(profile, "encode")
        self._decode = _Phase(profile, "decode")
        mixed = next((op for op in profile.operations if op.phase == "mixed"), None)
        self._mixed = None if mixed is None else Surface(mixed.points, mixed.seconds)

    def encode(self, sequences: float, length: float) -> tuple[float, float]:
        """Return the seconds of encoding equal prompts.

        They are seconds per layer, and seconds once an iteration. ``sequences`` may be fractional, as an
        expectation.
        """
        return self._encode(sequences * length, sequences, (length, 0.0))

    def encode_many(self, chunks: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return the seconds of encoding chunks of prompts.

        They are as in :meth:`encode`. ``chunks`` are new tokens and tokens held before, of each prompt.
        """
        return self._encode.chunks(chunks)

    def encode_rest(self, tokens: FloatArray, sequences: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the part of :meth:`encode` by tokens and prompts alone."""
        return self._encode.rest_many(tokens, sequences)

    def encode_attention_mean(
        self, lengths: LengthDistribution
    ) -> Callable[[FloatArray], tuple[FloatArray, FloatArray]]:
        """Return attention's part of :meth:`encode` by the number of prompts.

        Cost is convex in length, so the mean of ``lengths`` is not enough.
        """
        return self._encode.attention_mean(lengths)

    def decode_many(self, sequences: FloatArray, contexts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return :meth:`decode` for several iterations, shapes (iterations,)."""
        return self._decode.many(sequences, contexts)

    def decode_knots(self) -> tuple[FloatArray, FloatArray]:
        """Return the knots of decoding: sequences, and tokens each."""
        return self._decode.knots()

    def decode(self, sequences: float, context: float) -> tuple[float, float]:
        """Return the seconds of one decode iteration.

        They are seconds per layer, and seconds once an iteration. ``context`` is the mean tokens of a
        sequence.
        """
        return self._decode(sequences, sequences, (context, 0.0))

    def iteration(
        self,
        decodes: int,
        context: float,
        chunks: Sequence[tuple[int, int]],
        *,
        sampled: int | None = None,
        padded_tokens: int | None = None,
    ) -> float:
        """Return the seconds of one iteration on one pipeline stage.

        decodes: Sequences that get one token.
        context: Mean tokens each of them holds.
        chunks: New tokens and tokens held before, of each prompt in the iteration.
        sampled: Sequences that sample a token; all by default.
        padded_tokens: Computed tokens, if the engine rounds up (for instance to a captured graph).
        """
        tokens = padded_tokens or decodes + sum(new for new, _ in chunks)
        drawn = decodes + len(chunks) if sampled is None else sampled
        return self.dense(tokens, drawn, prompts=bool(chunks)) + self.attention(decodes, context, chunks)

    def dense(self, tokens: float, drawn: float, *, prompts: bool) -> float:
        """Return an iteration's seconds except attention.

        tokens: Computed tokens, padding included.
        drawn: Sequences that sample a token.
        prompts: True if some of the tokens are of prompts.
        """
        per_layer, once = (self._encode if prompts else self._decode).rest(tokens, drawn)
        return self.profile.shape.layers * per_layer + once

    def attention(self, decodes: float, context: float, chunks: Sequence[tuple[float, float]]) -> float:
        """Return the attention seconds of one :meth:`iteration`."""
        if not chunks:
            attention, whole = self._decode.attention(decodes, (context, 0.0))
        elif not decodes:
            attention, whole = self._encode.attention_of(chunks)
        else:
            attention, whole = self._mixed_attention(decodes, context, chunks)
        return self.profile.shape.layers * attention + whole

    def mixed_attention(self, new: float, past: float, decodes: float, context: float) -> float | None:
        """Return the attention seconds of a chunk with decodes, or None.

        It is None if they were not measured. ``new`` and ``past`` are tokens of the chunk, and those held
        before.
        """
        if self._mixed is None:
            return None
        return self.profile.shape.layers * self._mixed(new, past, decodes, context)

    def _mixed_attention(
        self, decodes: float, context: float, chunks: Sequence[tuple[float, float]]
    ) -> tuple[float, float]:
        encoded, once = self._encode.attention_of(chunks)
        if self._mixed is None:
            decoded, also = self._decode.attention(decodes, (context, 0.0))
            return encoded + decoded, once + also
        new = sum(chunk for chunk, _ in chunks)
        # One chunk of the same size that reads as many keys in total represents them.
        past = sum(chunk * held for chunk, held in chunks) / new
        alone = self._encode.attention_of([(new, past)])[0]
        return encoded + max(0.0, self._mixed(new, past, decodes, context) - alone), once


class _Phase:
    """Operations of one phase: curves and parts by lengths."""

    def __init__(self, profile: LayerProfile, phase: str) -> None:
        zero = Curve([0.0], [0.0])
        self.by_tokens = {True: zero, False: zero}
        self.by_sequences = {True: zero, False: zero}
        self.others: list[tuple[Operation, Curve | Surface]] = []
        for operation in profile.operations:
            if operation.phase not in ("both", phase):
                continue
            if operation.axes in (("tokens",), ("sequences",)):
                curve = _curve(operation)
                sums = self.by_tokens if operation.axes == ("tokens",) else self.by_sequences
                sums[operation.per_layer] = sums[operation.per_layer].plus(curve, operation.times)
            else:
                self.others.append((operation, _through(operation)))

    def rest(self, tokens: float, sequences: float) -> tuple[float, float]:
        per_layer = self.by_tokens[True](tokens) + self.by_sequences[True](sequences)
        return per_layer, self.by_tokens[False](tokens) + self.by_sequences[False](sequences)

    def rest_many(self, tokens: FloatArray, sequences: FloatArray) -> tuple[FloatArray, FloatArray]:
        per_layer = self.by_tokens[True].many(tokens) + self.by_sequences[True].many(sequences)
        return per_layer, self.by_tokens[False].many(tokens) + self.by_sequences[False].many(sequences)

    def knots(self) -> tuple[FloatArray, FloatArray]:
        sums = [*self.by_tokens.values(), *self.by_sequences.values()]
        sequences, contexts = {at for curve in sums for at in curve.at}, {0.0}
        for operation, _ in self.others:
            for column, axis in enumerate(operation.axes):
                known = set(operation.points[:, column].tolist())
                if axis in ("sequences", "decodes"):
                    sequences |= known
                elif axis in ("context", "length"):
                    contexts |= known
        return np.array(sorted(sequences)), np.array(sorted(contexts))

    def attention(self, sequences: float, size: tuple[float, float]) -> tuple[float, float]:
        """Return attention's seconds for equal sequences."""
        seconds = {True: 0.0, False: 0.0}
        for operation, surface in self.others:
            values = {"sequences": sequences, "decodes": sequences, "length": size[0], "context": size[0]}
            values |= {"past": size[1], "tokens": sequences * size[0]}
            term = operation.times * surface(*(values[axis] for axis in operation.axes))
            if "length" in operation.axes and "sequences" not in operation.axes:
                term = _together(term, surface, operation, sequences)
            seconds[operation.per_layer] += term
        return seconds[True], seconds[False]

    def attention_mean(
        self, lengths: LengthDistribution
    ) -> Callable[[FloatArray], tuple[FloatArray, FloatArray]]:
        launch, variable = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        joint: list[tuple[Operation, Curve | Surface]] = []
        probable = lengths.probabilities > 0
        values, chances = lengths.values[probable].astype(np.float64), lengths.probabilities[probable]
        for operation, surface in self.others:
            if "sequences" in operation.axes:
                joint.append((operation, surface))
                continue
            coordinates = {"length": values, "past": np.zeros_like(values)}
            seconds = surface.many(*(coordinates[axis] for axis in operation.axes))
            alone = _launch(surface, operation)
            launch[operation.per_layer] += operation.times * alone
            excess = float(np.maximum(0.0, seconds - alone) @ chances)
            variable[operation.per_layer] += operation.times * excess

        def of(prompts: FloatArray) -> tuple[FloatArray, FloatArray]:
            total = {key: launch[key] + prompts * variable[key] for key in (True, False)}
            for operation, surface in joint:
                length, past = np.full_like(prompts, lengths.mean), np.zeros_like(prompts)
                coordinates = {"sequences": prompts, "length": length, "past": past}
                seconds = surface.many(*(coordinates[axis] for axis in operation.axes))
                total[operation.per_layer] = total[operation.per_layer] + operation.times * seconds
            return total[True], total[False]

        return of

    def many(self, sequences: FloatArray, contexts: FloatArray) -> tuple[FloatArray, FloatArray]:
        per_layer, once = self.rest_many(sequences, sequences)
        seconds = {True: per_layer, False: once}
        values = {"sequences": sequences, "decodes": sequences, "context": contexts, "length": contexts}
        for operation, surface in self.others:
            term = surface.many(*(values[axis] for axis in operation.axes))
            seconds[operation.per_layer] = seconds[operation.per_layer] + operation.times * term
        return seconds[True], seconds[False]

    def attention_of(self, chunks: Sequence[tuple[float, float]]) -> tuple[float, float]:
        seconds = {True: 0.0, False: 0.0}
        for operation, surface in self.others:
            if "sequences" in operation.axes:
                length = sum(new for new, _ in chunks) / len(chunks)
                values = {"sequences": float(len(chunks)), "length": length, "past": 0.0}
                total = surface(*(values[axis] for axis in operation.axes))
            else:
                launch = _launch(surface, operation)
                total = launch
                for new, context in chunks:
                    values = {"length": new, "past": context}
                    total += max(0.0, surface(*(values[axis] for axis in operation.axes)) - launch)
            seconds[operation.per_layer] += operation.times * total
        return seconds[True], seconds[False]

    def chunks(self, chunks: Sequence[tuple[float, float]]) -> tuple[float, float]:
        per_layer, once = self.rest(sum(new for new, _ in chunks), len(chunks))
        attention, whole = self.attention_of(chunks)
        return per_layer + attention, once + whole

    def __call__(self, tokens: float, sequences: float, size: tuple[float, float]) -> tuple[float, float]:
        per_layer, once = self.rest(tokens, sequences)
        attention, whole = self.attention(sequences, size)
        return per_layer + attention, once + whole


def _through(operation: Operation) -> Curve | Surface:
    if len(operation.axes) > 1:
        return Surface(operation.points, operation.seconds)
    return _curve(operation)


def _curve(operation: Operation) -> Curve:
    order = np.argsort(operation.points[:, 0], kind="stable")
    return Curve(operation.points[order, 0].tolist(), operation.seconds[order].tolist())


def _launch(surface: Curve | Surface, operation: Operation) -> float:
    """Return a launch's fixed cost, paid once by a batch."""
    return surface(*(0.0 for _ in operation.axes))


def _together(one: float, surface: Curve | Surface, operation: Operation, sequences: float) -> float:
    launch = operation.times * _launch(surface, operation)
    return launch + sequences * max(0.0, one - launch)
