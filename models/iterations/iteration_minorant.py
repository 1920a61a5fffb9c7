"""Affine lower bound on the seconds of an iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import pairwise

import numpy as np

from ...data.arrays import FloatArray
from ...data.iterations import EngineLimits
from ..programme import Programme
from .layer_cost import LayerCost

_ROUNDING = 1e-12
"""Share by which coefficients are lowered, against rounding."""

_LARGEST = 1e4
"""Largest scaled cost in the linear program, as tolerances are absolute."""

_MARGIN = 1e-6
"""Margin of each coefficient, which saves later corrections."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one iteration, or of a job's iterations together.

    decodes: Sequences that compute one token in a decode.
    prompt_tokens: Tokens computed in chunks.
    drawn: Tokens sampled.
    kv_tokens: Tokens held by the decoding sequences, the new one included, summed.
    pairs: Sum over the chunks: new tokens times (tokens held before plus half of the new ones).
    """

    iterations: float
    decodes: float
    prompt_tokens: float
    drawn: float
    kv_tokens: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Minorant:
    """Seconds per unit of :class:`Work`; their sum bounds every iteration.

    points: Points at which it was checked against the table.

    The other fields are seconds per iteration, and per unit of work.
    """

    iterations: float
    decodes: float
    prompt_tokens: float
    drawn: float
    kv_tokens: float
    pairs: float
    points: int = 0

    @property
    def rates(self) -> dict[str, float]:
        """Seconds per unit of each kind of work, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Work)}

    def seconds(self, work: Work) -> float:
        """Return a lower bound on the seconds of some work."""
        mine = self.rates.values()
        return float(sum(rate * amount for rate, amount in zip(mine, astuple(work), strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Part of an iteration's cost, at vertices or at every point.

    features: Features of each point, shape (points, coefficients); the first one is positive.
    seconds: Seconds at each point, shape (points,).
    """

    features: FloatArray
    seconds: FloatArray

    def lowered(self, coefficients: FloatArray) -> FloatArray:
        """Lower the first coefficient until all points hold."""
        lower = coefficients.copy()
        excess = (self.features @ lower - self.seconds) / self.features[:, 0]
        lower[0] -= max(0.0, float(excess.max())) + _ROUNDING * float(np.abs(self.seconds).max())
        return lower

    def holds(self, coefficients: FloatArray) -> bool:
        """Return True if no point's seconds are exceeded."""
        return bool((self.features @ coefficients <= self.seconds).all())


def best_minorant(
    cost: LayerCost,
    limits: EngineLimits,
    longest: int,
    work: Work,
    *,
    graph_tokens: Sequence[int] = (),
    put_back: bool = False,
) -> Minorant:
    """Return the largest affine function below every iteration's seconds.

    An iteration's cost is a sum of parts: dense operations by computed and by sampled tokens, attention of
    decodes and of each chunk, and what decodes add to chunks. Each part is piecewise multilinear, so an
    affine function below it at the vertices is below it everywhere (token counts are tried one by one). One
    linear program chooses all of them, for iterations with and without prompts.

    After a preemption, a resuming chunk also computes the token sampled last. Then that chunk must pay for
    what the decode would have been charged.

    longest: Most tokens of a prompt and its completion.
    graph_tokens: Token counts the engine rounds up to, ascending.
    put_back: True if requests may be preempted.

    Raises ValueError if attention of some operation depends on several prompts at once.
    """
    parts = _parts(cost, limits, longest, graph_tokens, put_back=put_back)
    launch = cost.attention(0, 0.0, [(0.0, 0.0)])
    starts, count = {}, len(_X)
    for name, part in parts.items():
        starts[name] = count
        count += part.features.shape[1]
    scale = _LARGEST / max(float(part.seconds.max()) for part in parts.values())
    rows, rights = _links(starts, launch * scale, count, put_back=put_back)
    for name, part in parts.items():
        block = np.zeros((len(part.seconds), count))
        block[:, starts[name] : starts[name] + part.features.shape[1]] = part.features
        rows.append(block)
        rights.append(part.seconds * scale)
    objective = np.zeros(count)
    objective[: len(_X)] = [-amount for amount in astuple(work)]
    free = {"drawn"} if put_back else {"decodes", "drawn"}
    lower, upper = np.full(count, -np.inf), np.full(count, np.inf)
    lower[: len(_X)] = [-np.inf if name in free else 0.0 for name in _X]
    hidden = starts["decodes beside"]
    # Without decodes nothing is added, whatever the chunks.
    upper[hidden : hidden + 3] = 0.0
    programme = Programme.within(objective, np.vstack(rows), np.concatenate(rights))
    optimum = replace(programme, lower=lower, upper=upper).solved()
    if optimum is None:
        raise ValueError("no function lies under the costs")
    solution = optimum.x
    lowered = {
        name: part.lowered(solution[starts[name] : starts[name] + part.features.shape[1]] / scale)
        for name, part in parts.items()
    }
    return _certified(parts, lowered, launch, put_back=put_back)


_X = ("iterations", "decodes", "prompt_tokens", "drawn", "kv_tokens", "pairs")


def _links(
    starts: dict[str, int], launch: float, count: int, *, put_back: bool
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Return the rows that keep coefficients below their parts."""
    rows, rights = [], []
    for terms, of, constant in _sums(launch, put_back=put_back):
        row = np.zeros(count)
        for name in terms:
            row[_X.index(name)] = 1.0
        for name, column in of:
            row[starts[name] + column] -= 1.0
        rows.append(row[None, :])
        rights.append(np.array([constant - _MARGIN]))
    return rows, rights


Sum = tuple[tuple[str, ...], tuple[tuple[str, int], ...], float]


def _sums(launch: float, *, put_back: bool) -> list[Sum]:
    """Return the sums of coefficients that parts' coefficients bound."""
    sums: list[Sum] = [
        # Without prompts, tokens equal decodes, and each samples another token.
        (("iterations",), (("decode tokens", 0), ("decode drawn", 0), ("decode attention", 0)), 0.0),
        (
            ("decodes", "drawn"),
            (("decode tokens", 1), ("decode drawn", 1), ("decode attention", 1)),
            0.0,
        ),
        (("kv_tokens",), (("decode attention", 2),), 0.0),
        # With prompts.
        (("iterations",), (("mixed tokens", 0), ("mixed drawn", 0), ("decodes beside", 0)), launch),
        (("decodes",), (("mixed tokens", 1), ("decodes beside", 3)), 0.0),
        (("kv_tokens",), (("decodes beside", 4),), 0.0),
        (("drawn",), (("mixed drawn", 1),), 0.0),
        (("prompt_tokens",), (("mixed tokens", 1), ("chunks", 0), ("decodes beside", 1)), 0.0),
        (("pairs",), (("chunks", 1), ("decodes beside", 2)), 0.0),
    ]
    if put_back:
        sums += [
            # A chunk has at least one token, which is charged for the reads it hides.
            (("decodes",), (("mixed tokens", 1), ("decodes beside", 1), ("resumed", 0)), 0.0),
            (("kv_tokens",), (("resumed", 1),), 0.0),
            ((), (("mixed tokens", 1), ("decodes beside", 1)), 0.0),
            ((), (("resumed", 2), ("decodes beside", 2)), 0.0),
        ]
    return sums


def _certified(
    parts: dict[str, _Part],
    chosen: dict[str, FloatArray],
    launch: float,
    *,
    put_back: bool,
) -> Minorant:
    """Return the largest coefficients, checked at every point."""
    for name, part in parts.items():
        if not part.holds(chosen[name]):
            raise ValueError(f"the seconds of {name} are not bounded at every point of the table")
    if max(chosen["decodes beside"][:3]) > 0:
        raise ValueError("chunks without decodes would be charged for them")
    largest: dict[str, float] = {}
    both = float("inf")
    for terms, of, constant in _sums(launch, put_back=put_back):
        allowed = constant + float(sum(chosen[name][column] for name, column in of))
        if not terms and allowed < 0:
            raise ValueError("a token computed again would take less than nothing")
        if len(terms) == 1:
            largest[terms[0]] = min(largest.get(terms[0], float("inf")), allowed)
        elif terms:
            both = allowed
    largest["decodes"] = min(largest["decodes"], both - largest["drawn"])
    wrong = [name for name in _X if name != "drawn" and largest[name] < 0 and (put_back or name != "decodes")]
    if wrong:
        raise ValueError(f"the seconds of {wrong[0]} come out negative")
    points = sum(len(part.seconds) for part in parts.values())
    return Minorant(**largest, points=points)


def _parts(
    cost: LayerCost, limits: EngineLimits, longest: int, graph_tokens: Sequence[int], *, put_back: bool
) -> dict[str, _Part]:
    for operation in cost.profile.operations:
        if (
            operation.phase in ("encode", "both")
            and "length" in operation.axes
            and "sequences" in operation.axes
        ):
            raise ValueError(f"attention of {operation.name!r} depends on several prompts at once")
    sequences, budget = min(limits.sequences, limits.batched_tokens), limits.batched_tokens
    parts = {
        "decode tokens": _dense(cost, sequences, graph_tokens, prompts=False),
        "decode drawn": _drawn(cost, sequences, prompts=False),
        "decode attention": _decode_attention(cost, limits, sequences, longest),
        "mixed tokens": _dense(cost, budget, graph_tokens, prompts=True),
        "mixed drawn": _drawn(cost, sequences, prompts=True),
        "chunks": _chunks(cost, budget, longest),
        "decodes beside": _decodes_beside(cost, limits, sequences, longest),
    }
    if put_back:
        parts["resumed"] = _resumed(cost, budget, longest)
    return parts


def _dense(cost: LayerCost, most: int, graph_tokens: Sequence[int], *, prompts: bool) -> _Part:
    tokens = np.arange(1, most + 1)
    padded = np.array([next((size for size in graph_tokens if size >= t), t) for t in tokens.tolist()])
    seconds = np.array([cost.dense(t, 0, prompts=prompts) for t in padded.tolist()])
    return _Part(np.column_stack([np.ones(most), tokens]), seconds)


def _drawn(cost: LayerCost, most: int, *, prompts: bool) -> _Part:
    drawn = np.arange(0 if prompts else 1, most + 1)
    without = cost.dense(1, 0, prompts=prompts)
    seconds = np.array([cost.dense(1, s, prompts=prompts) - without for s in drawn.tolist()])
    return _Part(np.column_stack([np.ones(len(drawn)), drawn]), seconds)


def _knots(cost: LayerCost, axis: str, least: int, most: int) -> list[float]:
    """Return the points between which every operation is linear."""
    known: set[float] = {least, most}
    for operation in cost.profile.operations:
        names = ["decodes" if name == "sequences" else name for name in operation.axes]
        if axis in names:
            known |= set(operation.points[:, names.index(axis)].tolist())
    return sorted(at for at in known if least <= at <= most)


def _decode_attention(cost: LayerCost, limits: EngineLimits, most: int, longest: int) -> _Part:
    points = []
    for n in range(1, most + 1):
        furthest = min(longest, _room(limits) / n)
        points += [(n, at) for at in [*_knots(cost, "context", 1, longest), furthest] if at <= furthest]
    features = np.array([(1.0, n, n * context) for n, context in points])
    seconds = _positive([cost.attention(n, context, ()) for n, context in points])
    return _Part(features, seconds)


def _positive(seconds: list[float]) -> FloatArray:
    """Return seconds; raise ValueError if the table was cut at zero."""
    values = np.array(seconds)
    if (values <= 0).any():
        raise ValueError("attention beyond the points of the table comes out as nothing")
    return values


def _room(limits: EngineLimits) -> float:
    return float("inf") if limits.blocks is None else float(limits.blocks * limits.block_tokens)


def _excesses(cost: LayerCost, budget: int, longest: int) -> Iterator[tuple[int, float, float]]:
    """Yield chunk sizes, tokens before, and excess seconds."""
    launch, past = cost.attention(0, 0.0, [(0.0, 0.0)]), _knots(cost, "past", 0, longest)
    for new in range(1, min(budget, longest) + 1):
        for context in past:
            yield new, context, cost.attention(0, 0.0, [(float(new), context)]) - launch


def _chunks(cost: LayerCost, budget: int, longest: int) -> _Part:
    points = list(_excesses(cost, budget, longest))
    features = np.array([(new, new * (context + new / 2)) for new, context, _ in points])
    return _Part(features, np.array([seconds for _, _, seconds in points]))


def _resumed(cost: LayerCost, budget: int, longest: int) -> _Part:
    points = list(_excesses(cost, budget, longest))
    features = np.array([(1.0, context + new, new * context) for new, context, _ in points])
    return _Part(features, np.array([seconds for _, _, seconds in points]))


def _decodes_beside(cost: LayerCost, limits: EngineLimits, most: int, longest: int) -> _Part:
    """Return the seconds that decodes add to an iteration with chunks.

    Reads that a chunk hides are charged to the chunk. A grid point counts if the point below it in both
    axes is within the KV capacity.
    """
    chunks = [
        (new, past)
        for new in _knots(cost, "length", 1, limits.batched_tokens)
        for past in _knots(cost, "past", 0, longest)
    ]
    pairs = _corners(
        _finer(_knots(cost, "decodes", 1, most), limits),
        _finer(_knots(cost, "context", 1, longest), limits),
        _room(limits),
    )
    rows, seconds, beside = [], [], []
    for new, past in chunks:
        alone = cost.attention(0, 0.0, [(new, past)])
        for n, context in pairs:
            together = cost.mixed_attention(new, past, n, context)
            rows.append((1.0, new, new * past, n, n * context))
            added = cost.attention(n, context, ()) if together is None else together - alone
            seconds.append(added)
            beside.append(alone + added)
    _positive(beside)
    return _Part(np.array(rows), np.array(seconds))


def _finer(knots: list[float], limits: EngineLimits) -> list[float]:
    """Add knots where a finer grid follows the KV capacity better."""
    if limits.blocks is None:
        return knots
    between = [low + (high - low) * k / 3 for low, high in pairwise(knots) for k in (1, 2)]
    return sorted({*knots, *between})


def _corners(decodes: list[float], contexts: list[float], room: float) -> list[tuple[float, float]]:
    before = {at: decodes[max(0, k - 1)] for k, at in enumerate(decodes)}
    less = {at: contexts[max(0, k - 1)] for k, at in enumerate(contexts)}
    return [(n, at) for n in decodes for at in contexts if before[n] * less[at] <= room]


def dearest_excess(
    cost: LayerCost, minorant: Minorant, limits: EngineLimits, longest: int
) -> tuple[float, Work] | None:
    """Return the iteration that a minorant overprices most, or None.

    It tries whole iterations, priced as an engine's, and not the minorant's parts: every number of decodes
    alone, and a grid of decodes with a chunk. A find refutes the minorant; no find proves nothing.

    cost, limits, longest: As for :func:`best_minorant`.
    """
    sequences, room = min(limits.sequences, limits.batched_tokens), _room(limits)
    worst: tuple[float, Work] | None = None
    for decodes, context, chunk in _iterations_to_try(sequences, limits.batched_tokens, longest, room):
        new, past = chunk or (0, 0)
        for drawn in {decodes, decodes + (1 if chunk else 0)} - {0}:
            work = Work(1.0, decodes, new, drawn, decodes * context, new * (past + new / 2))
            seconds = cost.iteration(decodes, context, [chunk] if chunk else [], sampled=drawn)
            excess = minorant.seconds(work) - seconds
            if excess > 1e-9 * seconds and (worst is None or excess > worst[0]):
                worst = excess, work
    return worst


def _iterations_to_try(
    most: int, budget: int, longest: int, room: float
) -> Iterator[tuple[int, float, tuple[int, int] | None]]:
    """Yield decodes, tokens each holds, and their chunk."""
    spread = sorted({1, 2, most, *(most * k // 8 for k in range(1, 8))} - {0})
    for decodes in range(1, most + 1):
        for context in {1.0, min(longest, room / decodes)}:
            yield decodes, context, None
    for decodes in (0, *spread):
        tokens_left = min(longest, budget - decodes)
        for new in sorted({1, tokens_left // 16, tokens_left // 4, tokens_left // 2, tokens_left}):
            for past in {0, (longest - new) // 2, longest - new} if 1 <= new <= tokens_left else ():
                for context in {1.0, min(longest, room / max(1, decodes))}:
                    yield decodes, context, (new, past)
