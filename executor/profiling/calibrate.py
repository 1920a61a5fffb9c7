"""Fit of a cost model to the stages that an engine ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...data.arrays import FloatArray
from ...data.costs.cost import CalibratedCost, CostModel, FitError
from ...data.costs.layer_profile import LayerProfile
from ...data.trace import Stage, StageKind
from ...models.iterations.layer_cost import LayerCost

_FLOOR_CANDIDATES = 64
_REWEIGHTINGS = 8
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_PROFILE_ONLY = ("date", "lengths")
"""Keys of a profile's versions that do not describe the engine."""
_LENGTHS = (16, 32, 64, 128, 256, 512)
"""Tokens of the prefill stages that define a cost model."""
_BEND_GAIN = 0.03
"""Least relative reduction of the error for a bend."""
_FOLDS = 5
_TERM_GAIN = 0.03
"""Least relative reduction of left-out errors for one more term of a decode step."""
_BASE_SHARE, _BASELESS_GAIN = 0.2, 0.5
"""Share of the fixed cost below which a term replaces it, and the gain that this needs: every step reads the
weights, and the few stages of a short run on a busy machine fit anything."""
_OUTLIER = 2.0
"""Residuals beyond this many typical ones weigh less."""


def calibrate(
    stages: Sequence[Stage],
    *,
    engine: Mapping[str, object],
    date: str,
    slots_grid: Sequence[int] = (),
    prompt_grid: Sequence[int] = (),
    held_out: Callable[[CostModel], Sequence[Stage]] | None = None,
) -> CalibratedCost:
    """Fit a cost model to measured stages, with error and range."""
    cost = fit_cost(stages)
    error = fit_error(cost, stages)
    beyond = None if held_out is None else fit_error(cost, held_out(cost))
    return CalibratedCost(cost, error, dict(engine), date, tuple(slots_grid), tuple(prompt_grid), beyond)


def fit_cost(stages: Sequence[Stage]) -> CostModel:
    """Fit a cost model by robust relative least squares.

    KV cache of a decode step counts as the engine reads it, padding included. Cross-validation decides about
    the terms of a decode step: every fifth burst is left out in turn, and a term beyond the fixed cost stays
    if it improves their prediction. Errors are relative, as stages range over orders of magnitude, and robust
    (Huber), as a machine is disturbed now and then. The floor of a prefill stage is found by trying which of
    the smallest stages lie on it. If cost per token rises with length, the line above the floor may be
    negative at zero tokens. The cost model then has a line from zero to the point where floor and line meet,
    and a bend there.
    """
    timed = [stage for stage in stages if stage.seconds > 0]
    prefills = [stage for stage in timed if stage.kind == "prefill"]
    decodes = [stage for stage in timed if stage.kind == "decode"]
    if len(sizes := {stage.tokens for stage in prefills}) < 2:
        what = f"the measured prefill stages have {len(sizes)} different numbers of tokens"
        raise ValueError(f"{what}; a fit needs at least two: measure more")
    if not decodes:
        raise ValueError("no decode step was measured: measure more")
    prefill = _fit_prefill(
        np.array([stage.tokens for stage in prefills], dtype=np.float64),
        np.array([stage.seconds for stage in prefills]),
    )
    decode_steps = np.array([stage.decode_steps for stage in decodes], dtype=np.float64)
    columns = np.column_stack(
        (
            np.ones(len(decodes)),
            np.array([stage.active for stage in decodes]),
            np.array([stage.padded_kv_tokens for stage in decodes]) / decode_steps,
        )
    )
    decode = _fit_decode(columns, np.array([stage.seconds for stage in decodes]) / decode_steps, decode_steps)
    return CostModel(
        decode_base=float(decode[0]),
        decode_per_slot=float(decode[1]),
        decode_per_kv_token=float(decode[2]),
        decode_per_change=float(decode[3]),
        **prefill,
    )


def calibrate_to_profile(profile: LayerProfile) -> CalibratedCost:
    """Fit a cost model to a one-device layer profile."""
    cost, layers = LayerCost(profile), profile.shape.layers
    stages = []
    for batch in _BATCHES:
        for length in _LENGTHS:
            tokens = batch * length
            priced: tuple[tuple[StageKind, tuple[float, float]], ...] = (
                ("prefill", cost.encode(batch, length)),
                ("decode", cost.decode(batch, length)),
            )
            for kind, (per_layer, once) in priced:
                decode_steps, seconds = int(kind == "decode"), layers * per_layer + once
                size = tokens if kind == "prefill" else batch
                stages.append(Stage(kind, 0.0, seconds, decode_steps, batch, size, tokens, tokens))
    engine = {name: text for name, text in profile.versions.items() if name not in _PROFILE_ONLY}
    date = profile.versions.get("date", "")
    return calibrate(stages, engine=engine, date=date, slots_grid=_BATCHES, prompt_grid=_LENGTHS)


def fit_error(cost: CostModel, stages: Sequence[Stage]) -> FitError:
    """Return the error of a cost model on measured stages."""
    prefill: list[float] = []
    decode: list[float] = []
    counts: list[int] = []
    predicted = measured = 0.0
    for stage in stages:
        seconds = stage.model_seconds(cost)
        predicted += seconds
        measured += stage.seconds
        if stage.seconds > 0:
            error = abs(seconds - stage.seconds) / stage.seconds
            (prefill if stage.kind == "prefill" else decode).append(error)
            counts += [stage.decode_steps] if stage.kind == "decode" else []
    return FitError(
        prefill_mape=float(np.mean(prefill)) if prefill else 0.0,
        decode_mape=float(np.average(decode, weights=counts)) if decode else 0.0,
        makespan=predicted / measured - 1 if measured else 0.0,
        prefill_stages=len(prefill),
        decode_steps=sum(counts),
    )


def _fit_prefill(tokens: FloatArray, seconds: FloatArray) -> dict[str, float]:
    """Fit ``max(floor, base + per_token * tokens)``; the base may be negative."""
    sizes = np.unique(tokens)
    best, smallest = {"prefill_base": 0.0, "prefill_per_token": 0.0}, np.inf
    # Two sizes above a floor fit any line, a disturbed stage's too.
    candidates = np.unique(np.linspace(0, max(0, len(sizes) - 3), _FLOOR_CANDIDATES).astype(np.int64))
    for on_floor in candidates.tolist():
        below = tokens < sizes[on_floor]
        floor = float(np.median(seconds[below])) if on_floor else 0.0
        columns = np.column_stack((np.ones_like(tokens), tokens))[~below]
        for bent in (False, True) if on_floor else (False,):
            line = _fit(columns, seconds[~below], free=int(bent))
            fitted = np.maximum(floor, line[0] + line[1] * tokens)
            loss = float(np.abs(fitted / seconds - 1).sum())
            # A floor is one more coefficient, and bounds ignore the part beyond a bend: each must justify
            # itself.
            if loss < smallest * (1 - (_BEND_GAIN if line[0] < 0 else 1e-3)) - 1e-9:
                best, smallest = _prefill_coefficients(float(line[0]), float(line[1]), floor), loss
    return best


def _prefill_coefficients(base: float, per_token: float, floor: float) -> dict[str, float]:
    if base >= 0:
        return {"prefill_base": base, "prefill_per_token": per_token, "prefill_floor": floor}
    bend = (floor - base) / per_token
    return {
        "prefill_base": 0.0,
        "prefill_per_token": floor / bend,
        "prefill_floor": floor,
        "prefill_bend": bend,
        "prefill_per_token_beyond": per_token - floor / bend,
    }


def _fit_decode(columns: FloatArray, seconds: FloatArray, decode_steps: FloatArray) -> FloatArray:
    """Fit the fixed cost and those terms after it that predict left-out bursts better."""
    columns = np.column_stack((columns, 1 / decode_steps))
    most = columns.shape[1]
    if len(np.unique(decode_steps)) < 2 or len(decode_steps) < 2 * _FOLDS:
        most -= 1
    best, missed = np.zeros(0), np.inf
    for terms in range(1, most + 1):
        used = columns[:, :terms]
        fitted, left_out = _fit(used, seconds, decode_steps), _left_out(used, seconds, decode_steps)
        gain = _BASELESS_GAIN if best.size and fitted[0] < _BASE_SHARE * best[0] else _TERM_GAIN
        if left_out <= (1 - gain) * missed:
            best, missed = fitted, left_out
    return np.append(best, np.zeros(columns.shape[1] - best.size))


def _left_out(columns: FloatArray, seconds: FloatArray, weights: FloatArray) -> float:
    """Return the mean relative error at left-out rows."""
    fold = np.arange(len(seconds)) % _FOLDS
    error = np.zeros(len(seconds))
    for number in range(_FOLDS):
        used = fold != number
        fitted = columns[~used] @ _fit(columns[used], seconds[used], weights[used])
        error[~used] = np.abs(fitted / seconds[~used] - 1)
    return float(np.average(error, weights=weights)) + 1e-12


def _fit(
    columns: FloatArray, seconds: FloatArray, weights: FloatArray | None = None, free: int = 0
) -> FloatArray:
    """Fit coefficients; those after the first ``free`` are non-negative."""
    from scipy.optimize import nnls

    relative = columns / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    relative = relative / scale
    counted = np.ones_like(seconds) if weights is None else weights / weights.mean()
    trust = np.ones_like(seconds)
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(counted * trust)
        weighted = relative * root[:, None]
        # A free coefficient is the difference of two.
        parts = nnls(np.hstack((weighted, -weighted[:, :free])), root)[0]
        coefficients = parts[: len(scale)] - np.pad(parts[len(scale) :], (0, len(scale) - free))
        off = np.abs(relative @ coefficients - 1.0)
        typical = 1.4826 * float(np.median(off))
        if typical <= 1e-12:
            break
        trust = np.minimum(1.0, _OUTLIER * typical / np.maximum(off, 1e-300))
    return np.asarray(coefficients / scale, dtype=np.float64)
