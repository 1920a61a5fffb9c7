"""Seconds of the pipeline stages on a number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ...data.arrays import FloatArray
from ...data.lengths.pair import LengthPair
from ..iterations.layer_cost import LayerCost
from .configuration import Cluster
from .seconds_table import SecondsTable, rising, saved, saving

_THRESHOLD = 0.1
"""Deviation of the encoding workload to tolerate (section 5.2)."""
LARGEST = (0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424)
"""Mean of the largest of 1, 2, ... standard normal numbers."""
NORMAL = tuple(NormalDist().inv_cdf((part + 0.5) / 32) for part in range(32))
"""Deviations of equal probability."""
_FAR = (1e7, 1e6)
"""Upper limits on sequences and tokens of linear seconds."""
_LEAST = 1e-12
"""Least seconds of a layer, where a curve would reach zero."""
_STEP = 256
"""Encoding batches per block of the table."""


def largest(many: int) -> float:
    """Return the mean of the largest of ``many`` normal numbers."""
    return LARGEST[min(many, len(LARGEST)) - 1]


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """Seconds of a stage for each encoding batch, with bounds.

    mean: Mean seconds, lower bound for larger batches, upper bound on savings of smaller ones, shape (3,
        batches) (see :class:`.SecondsTable`).
    slowest: The same of the slowest of as many encodings as there are stages, shape (3, batches).
    """

    mean: FloatArray
    slowest: FloatArray

    def bounded(self, low: int, at: int) -> tuple[FloatArray, FloatArray]:
        """Return a batch's mean and slowest, shape (3,)."""
        mean, slowest = self.mean[:, at].copy(), self.slowest[:, at].copy()
        mean[2], slowest[2] = saved(self.mean[0], low, at), saved(self.slowest[0], low, at)
        return mean, slowest


class StageSeconds:
    """Pipeline with layers divided so that stages take equally long.

    Shares may be fractional (as the paper's :math:`E / N`). Embedding and output head count as the layers
    they are worth.

    costs: Layer costs by tensor-parallel degree.
    cluster: Links between the devices.
    lengths: Length distributions of the requests.
    degree, groups: Groups of ``degree`` devices that share each of their layers; every other device is a
    stage itself.

    Raises ValueError if there is no cost at a degree.
    """

    def __init__(
        self,
        costs: Mapping[int, LayerCost],
        cluster: Cluster,
        lengths: LengthPair,
        devices: int,
        degree: int,
        groups: int,
    ) -> None:
        single = devices - degree * groups if degree > 1 else devices
        kinds = [(1, single)] if degree == 1 else [(1, single), (degree, groups)]
        self.devices = devices
        self._cluster, self._inputs = cluster, lengths.inputs
        self._kinds = [(kind, number) for kind, number in kinds if number]
        missing = [kind for kind, _ in self._kinds if kind not in costs]
        if missing:
            raise ValueError(f"there is no profile at tensor-parallel degree {missing[0]}")
        self.count = sum(number for _, number in self._kinds)
        self._costs = {kind: costs[kind] for kind, _ in self._kinds}
        self._shape = next(iter(costs.values())).profile.shape
        self._attention = {
            kind: cost.encode_attention_mean(lengths.inputs) for kind, cost in self._costs.items()
        }
        self._table: SecondsTable | None = None
        self._encodings: dict[int, Encoding] = {}

    def encoding(self, most: int, parts: int = 1) -> Encoding:
        """Return the seconds of batches of 0 to ``most`` prompts.

        They are means over the sum of the prompts' lengths, as they are not proportional to it. A fraction of
        a prompt takes its share of one.
        """
        known = self._encodings.get(parts)
        if known is None or known.mean.shape[1] <= most:
            batches = np.arange(-(-(most + 1) // _STEP) * _STEP, dtype=np.float64)
            prompts = batches / parts
            whole = np.maximum(1.0, prompts)
            tokens, deviation = whole * self._inputs.mean, self._token_deviation(whole)
            # Measured seconds rise in steps: a few points would miss them.
            around = [np.maximum(1.0, tokens + away * deviation) for away in NORMAL]
            mean = np.mean([self._encode_seconds(whole, length) for length in around], axis=0)
            mean = mean * np.minimum(1.0, prompts)
            whole = np.ceil(prompts)
            many = np.minimum(self.count, np.ceil(self.count * prompts)).astype(np.int64)
            slowest = np.array(LARGEST)[np.clip(many, 1, len(LARGEST)) - 1] * self._token_deviation(whole)
            slow = self._encode_seconds(whole, np.maximum(prompts, 1.0) * self._inputs.mean + slowest)
            slow[0] = 0.0
            known = Encoding(
                np.stack((mean, rising(mean), saving(batches, mean))),
                np.stack((slow, rising(slow), saving(batches, slow))),
            )
            self._encodings[parts] = known
        return known

    def _token_deviation(self, prompts: FloatArray) -> FloatArray:
        """Return the standard deviation of a batch's tokens.

        Prompts are added or left out until the tokens are near the plan
        (:class:`~batchbound.heuristics.exegpt.dynamic_batch.DynamicBatch`). The rest is taken as uniform over
        the threshold or, if larger, over half of the prompt at its edge, which is likely a long one.
        """
        mean, spread = self._inputs.mean, self._inputs.sd
        edge = (mean**2 + spread**2) / mean / 2
        within = np.maximum(_THRESHOLD * prompts * mean, edge) / np.sqrt(3.0)
        return np.asarray(np.minimum(spread * np.sqrt(prompts), within))

    def encode_chunks(self, lengths: FloatArray) -> float:
        """Return a stage's seconds for prompts of some lengths."""
        if not len(lengths):
            return 0.0
        chunks = [(float(length), 0.0) for length in lengths]
        parts = {kind: cost.encode_many(chunks) for kind, cost in self._costs.items()}
        layers = {kind: np.array([part[0]]) for kind, part in parts.items()}
        once = {kind: np.array([part[1]]) for kind, part in parts.items()}
        seconds = self._balanced(self._encoder_layers, layers, once, np.array([float(lengths.sum())]))
        return float(seconds[0])

    def decode(self, sequences: FloatArray, contexts: FloatArray) -> FloatArray:
        """Return a stage's seconds for a token of each sequence.

        sequences: Number in each batch, shape (batches,); less than one takes that share of the seconds of
            one.
        contexts: Tokens each sequence holds.
        """
        return self.table(sequences, contexts)

    @property
    def table(self) -> SecondsTable:
        """Seconds of decoding, linear between knots."""
        if self._table is None:
            knots = [cost.decode_knots() for cost in self._costs.values()]
            inner = np.unique(np.concatenate([kind for kind, _ in knots]))
            sequences = np.concatenate(([0.0, 1.0], inner[inner > 1], _FAR[:1]))
            contexts = np.concatenate((np.unique(np.concatenate([kind for _, kind in knots])), _FAR[1:]))
            at = [grid.ravel() for grid in np.meshgrid(sequences[1:], contexts, indexing="ij")]
            parts = {kind: cost.decode_many(at[0], at[1]) for kind, cost in self._costs.items()}
            layers = {kind: part[0] for kind, part in parts.items()}
            once = {kind: part[1] for kind, part in parts.items()}
            seconds = self._balanced(self._shape.layers, layers, once, at[0]).reshape(-1, len(contexts))
            # Less than one sequence takes its share of the seconds of one.
            seconds = np.concatenate((np.zeros((1, len(contexts))), seconds))
            self._table = SecondsTable(sequences, contexts, seconds)
        return self._table

    @property
    def _encoder_layers(self) -> int:
        return self._shape.encoder_layers or self._shape.layers

    def _encode_seconds(self, prompts: FloatArray, tokens: FloatArray) -> FloatArray:
        layers, once = {}, {}
        for kind, cost in self._costs.items():
            rest, single = cost.encode_rest(tokens, prompts)
            attention = self._attention[kind](prompts)
            layers[kind], once[kind] = rest + attention[0], single + attention[1]
        return self._balanced(self._encoder_layers, layers, once, tokens)

    def _balanced(
        self,
        depth: int,
        layers: Mapping[int, FloatArray],
        once: Mapping[int, FloatArray],
        tokens: FloatArray,
    ) -> FloatArray:
        data = tokens * self._shape.hidden * self._shape.bytes_per_value
        speed = np.zeros_like(tokens)
        work = np.zeros_like(tokens)
        for kind, number in self._kinds:
            seconds = np.maximum(layers[kind], _LEAST)
            if kind > 1 and self._costs[kind].profile.operation("synchronisation") is None:
                # Two all-reduces a layer: after the attention, and after the feed-forward part.
                synchronised = self._cluster.all_reduce_seconds(kind, 1.0)
                latency = self._cluster.link_latency
                seconds = seconds + 2 * (latency + (synchronised - latency) * data)
            speed = speed + number / seconds
            work = depth + once[kind] / seconds
        hop = 0.0 if self.count == 1 else self._cluster.link_latency + data / self._cluster.link_bandwidth
        return np.asarray(work / speed + hop)
