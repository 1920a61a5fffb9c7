"""A measured profile as a configuration runs it: with what requests cost besides the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..data.layer_profile import LayerProfile, Operation
from .layer_cost import Curve

_REQUESTS = np.array([[0.0], [1e6]])


def profile_of_run(
    profile: LayerProfile, iterations: float, *, handed_over: bool = False, input_tokens: float = 0.0
) -> LayerProfile:
    """
    Return a profile whose encode and decode operations include those of phase ``run``.

    Each stage pays what passes in the loop around it (``loop``), and a request what its leaving costs
    (``leave``): where it is encoded, or under WAA by the worker that decodes, with ``receive``; the one that
    encodes pays ``send``. What a change of the decode batch costs (``change``) is paid in the share of decode
    iterations in which a request completes: of :math:`B` requests that stay for :math:`S_D` iterations on
    average, none completes with a chance of about :math:`e^{-B / S_D}`. Under WAA every iteration takes
    requests up: each pays it, and is two stages.

    Parameters
    ----------
    profile
        Measured; one without such operations is returned as it is.
    iterations
        Mean decode iterations of a request, :math:`S_D`.
    handed_over
        Whether another worker encodes (WAA).
    input_tokens
        Mean tokens of a prompt; only looked at for what is handed over.

    Raises
    ------
    ValueError
        If the profile lacks what handing over costs.
    """
    own = {operation.name: operation for operation in profile.operations if operation.phase == "run"}
    if not own:
        return profile
    missing = {"send", "receive"} - own.keys() if handed_over else set()
    if missing:
        raise ValueError(f"the profile does not say what it costs to {' and to '.join(sorted(missing))}")
    leave, loop = (Curve(*_line(own[name]))(1.0) for name in ("leave", "loop"))
    change = own["change"]
    if handed_over:
        sent, received = (Curve(*_line(own[name]))(input_tokens) for name in ("send", "receive"))
        added = [
            _per_request("send", "encode", 0.0, sent),
            _per_request("receive", "decode", 2 * loop, (leave + received) / iterations),
            replace(change, phase="decode", per_layer=False),
        ]
    else:
        completing = 1 - np.exp(-change.points[:, 0] / iterations)
        seconds = (change.seconds + loop) * completing
        added = [
            _per_request("leave", "encode", loop, leave),
            replace(change, phase="decode", per_layer=False, seconds=seconds),
        ]
    kept = tuple(operation for operation in profile.operations if operation.phase != "run")
    return replace(profile, operations=(*kept, *added))


def _per_request(name: str, phase: str, once: float, each: float) -> Operation:
    seconds = once + each * _REQUESTS[:, 0]
    return Operation(name, phase, ("sequences",), _REQUESTS, seconds, per_layer=False)


def _line(operation: Operation) -> tuple[list[float], list[float]]:
    return operation.points[:, 0].tolist(), operation.seconds.tolist()
