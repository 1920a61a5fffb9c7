"""Measured profile with a running configuration's overheads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...data.arrays import FloatArray
from ...data.costs.layer_profile import LayerProfile, Operation
from ..iterations.layer_cost import LayerCost, Surface

WARMING_STEPS = 8
"""Decode steps slowed after an encoding, by cold caches."""
_OF_TWO_WORKERS = frozenset({"send", "join", "crowding"})


def profile_of_run(
    profile: LayerProfile, iterations: float, *, handed_over: bool = False, input_tokens: float = 0.0
) -> LayerProfile:
    r"""Add the operations of phase ``run`` to encode and decode.

    Each stage pays the loop around it (``loop``). A request pays for leaving (``leave``) and for storing its
    completion (``keep``) when it is encoded. Decode iterations in which a request completes pay for a changed
    decode batch (``change``) and for the slow-down of a call after other work (``interrupted``). Among
    :math:`B` requests that stay for :math:`S_D` iterations on average, none completes with a chance of about
    :math:`e^{-B / S_D}`. After an encoding they are always paid, and iterations are slower for a while
    (``start`` and ``warming``): see :func:`seconds_after_encoding`.

    Under WAA every iteration admits :math:`B / S_D` requests. It pays the change, their leaving, the time
    between two iterations (``join``) and the slow-down of the iteration per decoding request (``joined``).
    The encoding worker pays its slow-down by the decoding one (``send``, including the transfer). Each of its
    busy seconds costs the other a part of a second (``crowding``): workers of one host share caches, memory
    and cores.

    profile: Measured; one without such operations is returned unchanged.
    iterations: Mean decode iterations of a request, :math:`S_D`.
    handed_over: True if another worker encodes (WAA).
    input_tokens: Mean tokens of a prompt; used only under WAA.
    Raises ValueError if the profile lacks the costs of two workers.
    """
    of_run = {operation.name: operation for operation in profile.operations if operation.phase == "run"}
    if not of_run:
        return profile
    loop = float(of_run["loop"].seconds[0])
    if handed_over:
        missing = _OF_TWO_WORKERS - of_run.keys()
        if missing:
            raise ValueError(f"the profile does not say what two workers cost: {', '.join(sorted(missing))}")
        added = _handed_over(profile, of_run, iterations, input_tokens)
    else:
        change = of_run["change"]
        completing = 1 - np.exp(-change.points[:, 0] / iterations)
        seconds = (change.seconds + _between(of_run, change.points[:, 0])) * completing
        added = [
            replace(of_run["leave"], phase="encode", per_layer=False, seconds=loop + _leaving(of_run)),
            replace(change, phase="decode", per_layer=False, seconds=seconds),
        ]
        if "start" in of_run:
            start = of_run["start"]
            counted = Surface(change.points, seconds).many(*start.points.T)
            first = np.maximum(0.0, start.seconds + _between(of_run, start.points[:, 0]) - counted)
            added += [replace(start, seconds=first), of_run["warming"]]
    operations = tuple(operation for operation in profile.operations if operation.phase != "run")
    return replace(profile, operations=(*operations, *added))


def seconds_after_encoding(
    profile: LayerProfile, batches: FloatArray, context: float, decode_steps: int
) -> FloatArray:
    """Return the delay of decode iterations after an encoding, in seconds.

    profile: As returned by :func:`profile_of_run`; without ``start`` and ``warming`` the result is zero.
    batches: Decoding sequences, shape (batches,).
    context: Mean tokens each holds.
    decode_steps: Iterations until the next encoding.
    """
    start, warming = profile.operation("start"), profile.operation("warming")
    if start is None or warming is None:
        return np.zeros_like(batches)
    at = (batches, np.full_like(batches, context))
    share = min(1.0, (decode_steps - 1) / (WARMING_STEPS - 1))
    return Surface(start.points, start.seconds).many(*at) + share * Surface(
        warming.points, warming.seconds
    ).many(*at)


def can_hand_over(profile: LayerProfile) -> bool:
    """Return whether a profile allows two workers."""
    names = {operation.name for operation in profile.operations if operation.phase == "run"}
    return not names or names >= _OF_TWO_WORKERS


def _handed_over(
    profile: LayerProfile, own: dict[str, Operation], iterations: float, input_tokens: float
) -> list[Operation]:
    cost, layers = LayerCost(profile), profile.shape.layers
    change, crowding, send = own["change"], own["crowding"], own["send"]
    batches, contexts = change.points.T
    joining = batches / iterations
    sending = Surface(send.points, send.seconds)
    # Less than a prompt in each iteration means one prompt now and then.
    whole, share = np.maximum(1.0, joining), np.minimum(1.0, joining)

    encode = np.array([layers * a + b for a, b in (cost.encode(prompts, input_tokens) for prompts in whole)])
    encode = share * (encode + [sending(prompts, input_tokens) for prompts in whole])
    loop, join = float(own["loop"].seconds[0]), Surface(own["join"].points, own["join"].seconds)
    joined = np.array([join(prompts, input_tokens) for prompts in whole])
    between = loop + share * (joined - loop)
    if "joined" in own:
        longer = Surface(own["joined"].points, own["joined"].seconds)
        between += share * batches * [longer(prompts, input_tokens) for prompts in whole]
    lost = np.interp(batches, crowding.points[:, 0], crowding.seconds)
    per_layer, once = cost.decode_many(batches, contexts)
    decode = layers * per_layer + once + change.seconds
    # At most, the other worker is always busy.
    crowded = np.minimum(lost * encode, decode * lost / (1 - lost))
    per_token = float(np.diff(_leaving(own))[0] / np.diff(own["leave"].points[:, 0])[0])
    seconds = change.seconds + joining * per_token + between + crowded
    return [
        replace(send, phase="encode", per_layer=False),
        replace(change, phase="decode", per_layer=False, seconds=seconds),
    ]


def _between(own: Mapping[str, Operation], batches: FloatArray) -> FloatArray:
    loop = np.full_like(batches, own["loop"].seconds[0])
    if "interrupted" not in own:
        return loop
    interrupted = own["interrupted"]
    return np.asarray(loop + np.interp(batches, interrupted.points[:, 0], interrupted.seconds))


def _leaving(own: Mapping[str, Operation]) -> FloatArray:
    return np.asarray(sum(own[name].seconds for name in ("leave", "keep") if name in own))
