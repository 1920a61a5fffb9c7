"""Load of a job on a replica, and the seconds that a replica needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray
from ...data.costs.layer_profile import LayerProfile
from ...data.costs.model_shape import ModelShape
from ...data.iterations import Sequences
from ..exegpt.roofline import Efficiency, Roofline, RooflineDevice
from ..iterations.layer_cost import LayerCost

REACHED = Efficiency(0.751, 0.812, 0.599, 0.618, 0.297, 14.9e-6, 2.62e-6, 0.625e-3)
"""Efficiency fitted to measured throughput by ``benchmarks/deployments.py``."""
OFF = {0.05: 0.60, 0.1: 0.77, 0.5: 1.04, 0.95: 1.46}
"""Quantiles of estimated over measured seconds, of models and devices left out of the fit."""

MEMORY_SHARE = 0.9
"""Share of a device's memory that the engine takes (vLLM's ``--gpu-memory-utilization``)."""
RESERVED = 1.7e9
"""Bytes of a device for activations and graphs; more leave less KV cache. It fits a vLLM on an RTX 4090."""

_POINTS = 64
"""Points at which the end of a job is priced."""


class ProfiledSeconds:
    """Seconds of iterations by a layer profile."""

    def __init__(self, profile: LayerProfile) -> None:
        self._cost, self._layers = LayerCost(profile), profile.shape.layers

    def decode_steps(self, sequences: FloatArray, contexts: FloatArray) -> FloatArray:
        """Return the seconds of a token for each sequence."""
        per_layer, once = self._cost.decode_many(sequences, contexts)
        return np.asarray(self._layers * per_layer + once)

    def prompt_seconds(
        self, sequences: float, length: float, *, reused: float = 0.0, together: float = 1.0
    ) -> float:
        """Return the seconds that a prompt adds to iterations of decoding sequences."""
        new, dense = length - reused, self._cost.dense
        mixed = dense(sequences + together * new, sequences + together, prompts=True)
        added = max(0.0, mixed - dense(sequences, sequences, prompts=False)) / together
        return added + self._cost.attention(0, 0.0, [(new, reused)])


IterationSeconds = Roofline | ProfiledSeconds
"""Seconds of iterations of one model on one replica."""


def kv_tokens(shape: ModelShape, device: RooflineDevice, degree: int) -> int:
    """Return the tokens of KV cache that fit next to the weights; at most 0 if the weights do not fit."""
    room = degree * (MEMORY_SHARE * device.memory - RESERVED) - shape.weight_bytes
    return int(room / (shape.layers * shape.kv_bytes_per_layer_token * shape.kv_copies(degree)))


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Means over the requests of a job, from which its seconds are estimated.

    requests: Number of completions.
    prompt, reused: Tokens of a prompt, and those of them that a prefix cache saves.
    output, left: Tokens of a completion, and those that a running one has left on average.
    context: Tokens that a decode reads.
    held, branch: KV tokens of a running request without shared beginnings, and those that it adds to them.
    path: Tokens of the beginnings of one request.
    longest: Tokens of the longest prompt with its completion.
    ages: Tokens at the middle of equal parts of the longest completion, shape (points,).
    older, lasting: Share of completions longer than each age, and of running ones that have more left.
    """

    requests: int
    prompt: float
    reused: float
    output: float
    left: float
    context: float
    held: float
    branch: float
    path: float
    longest: int
    ages: FloatArray
    older: FloatArray
    lasting: FloatArray

    @classmethod
    def of(cls, rows: Sequences) -> Load:
        """Return the load of some completions."""
        output, prompt, tree = rows.output.astype(float), rows.prompt.astype(float), rows.tree
        total, count = output.sum(), len(rows)
        own = prompt if tree is None else tree.own
        ages = (np.arange(_POINTS) + 0.5) * output.max() / _POINTS
        ordered = np.sort(output)
        at = np.searchsorted(ordered, ages, side="right")
        rest = np.append(np.cumsum(ordered[::-1])[::-1], 0.0)[at]
        return cls(
            requests=count,
            prompt=float(prompt.mean()),
            reused=float(rows.cached.mean()),
            output=total / count,
            left=float((output**2).sum() / (2 * total)),
            context=float((output * (prompt + output / 2)).sum() / total),
            held=float((output * (own + output / 2)).sum() / total),
            branch=0.0 if tree is None else float(tree.tokens.sum()) / count,
            path=0.0 if tree is None else float(tree.shared_tokens.mean()),
            longest=int((rows.prompt + rows.output).max()),
            ages=ages,
            older=(count - at) / count,
            lasting=(rest - ages * (count - at)) / total,
        )

    def running(self, slots: int, kv_capacity: int, requests: float) -> float:
        """Return the requests that run at a time on a replica."""
        fitting = (kv_capacity - self.path + self.branch) / (self.held + self.branch)
        return max(1.0, min(slots, requests, fitting))

    def beginnings(self, running: float) -> float:
        """Return the KV tokens of beginnings that running requests share, sent depth first."""
        return self.path + (running - 1) * self.branch

    def seconds(self, cost: IterationSeconds, running: float, budget: int, replicas: int = 1) -> float:
        """Return the seconds of a replica's share of the job.

        Full iterations, those of the end while requests become fewer, and the prompts. A request follows any
        other, as lengths need not be known.

        running: Requests that run at a time.
        budget: Tokens of an iteration.
        """
        share = self.requests / replicas
        # All begin at once, or the end begins with requests at any age.
        at_once = share <= running
        batch = running * (self.older if at_once else self.lasting)
        drained = running * (self.output if at_once else self.left)
        full = max(0.0, share * self.output - drained)
        batch = batch * min(1.0, share * self.output / drained)
        steps = np.append(cost.decode_steps(np.maximum(batch, 1.0), np.full(_POINTS, self.context)), 0.0)
        tail = float((steps[:-1] * np.minimum(batch, 1.0)).sum()) * 2 * self.ages[0]
        step = float(cost.decode_steps(np.array([running]), np.array([self.context]))[0])
        new = max(1.0, self.prompt - self.reused)
        together = min(max(1.0, running / self.output), max(1.0, budget - running) / new)
        prompt = cost.prompt_seconds(running, self.prompt, reused=self.prompt - new, together=together)
        return float(full / running * step + tail + share * prompt)
