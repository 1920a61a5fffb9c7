"""Seconds of the pipeline stages that a number of devices make."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..data.cost import FloatArray
from ..data.length_pair import LengthPair
from .exec_config import Cluster
from .layer_cost import LayerCost

_THRESHOLD = 0.1
"""Deviation of the encoding workload that the dynamic adjustment lets pass (section 5.2)."""
_LARGEST = (0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424)
"""Mean of the largest of 1, 2, ... standard normal numbers."""


class StageSeconds:
    """
    A pipeline whose layers are shared out so that all its stages take equally long.

    The shares may be fractional (as the paper's :math:`E / N`); the embedding and the output head count as
    the layers they are worth.

    Parameters
    ----------
    costs
        Of the model's layers, by tensor-parallel degree.
    cluster
        Links between the devices.
    lengths
        Of the requests.
    devices
        Of the pipeline.
    degree, groups
        Groups of ``degree`` devices that share each of their layers; every other device is a stage itself.

    Raises
    ------
    ValueError
        If there is no cost at a degree that is needed.
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
        self._kinds = [(each, number) for each, number in kinds if number]
        missing = [each for each, _ in self._kinds if each not in costs]
        if missing:
            raise ValueError(f"there is no profile at tensor-parallel degree {missing[0]}")
        self.count = sum(number for _, number in self._kinds)
        self._costs = {each: costs[each] for each, _ in self._kinds}
        self._shape = next(iter(costs.values())).profile.shape
        self._attention = {
            each: cost.encode_attention_mean(lengths.inputs) for each, cost in self._costs.items()
        }

    def encode(self, prompts: float) -> float:
        """
        Return the mean seconds in which a stage encodes so many prompts; for less than one, its share.

        The mean over the sum of their lengths, as times do not quite grow in proportion.
        """
        if prompts < 1:
            return prompts * self.encode(1)
        tokens, away = prompts * self._inputs.mean, np.sqrt(3.0) * self._token_deviation(prompts)
        # Three points with these weights give the mean of any cubic over a normal distribution.
        seconds = [self._encode_seconds(prompts, max(1.0, tokens + side * away)) for side in (-1, 0, 1)]
        return (seconds[0] + 4 * seconds[1] + seconds[2]) / 6

    def encode_largest(self, prompts: float) -> float:
        """Return the mean seconds of the slowest of as many encodings as there are stages."""
        whole = float(np.ceil(prompts))
        many = min(self.count, int(np.ceil(self.count * prompts)), len(_LARGEST))
        slowest = _LARGEST[many - 1] * self._token_deviation(whole)
        return self._encode_seconds(whole, max(prompts, 1.0) * self._inputs.mean + slowest)

    def _token_deviation(self, prompts: float) -> float:
        """
        Return the standard deviation of the tokens of a batch.

        Prompts are added or left out until the tokens are near the planned ones
        (:class:`~batchbound.heuristics.dynamic_batch.DynamicBatch`): what is left is taken as uniform over
        the threshold and half of the prompt at its edge, which is likely a long one.
        """
        mean, spread = self._inputs.mean, self._inputs.sd
        edge = (mean**2 + spread**2) / mean / 2
        within = (_THRESHOLD * prompts * mean + edge) / np.sqrt(3.0)
        return float(min(spread * np.sqrt(prompts), within))

    def encode_chunks(self, lengths: FloatArray) -> float:
        """Return the seconds in which a stage encodes prompts of the given lengths, tokens."""
        if not len(lengths):
            return 0.0
        chunks = [(float(length), 0.0) for length in lengths]
        parts = {each: cost.encode_many(chunks) for each, cost in self._costs.items()}
        layers = {each: np.array([part[0]]) for each, part in parts.items()}
        once = {each: np.array([part[1]]) for each, part in parts.items()}
        seconds = self._balanced(self._encoder_layers, layers, once, np.array([float(lengths.sum())]))
        return float(seconds[0])

    def decode(self, sequences: FloatArray, contexts: FloatArray) -> FloatArray:
        """
        Return the seconds in which a stage decodes a token of each sequence, shape (batches,).

        Parameters
        ----------
        sequences
            Of each batch; for less than one, that share of the seconds of one.
        contexts
            Tokens each sequence of it holds.
        """
        whole = np.maximum(1.0, sequences)
        parts = {each: cost.decode_many(whole, contexts) for each, cost in self._costs.items()}
        layers = {each: part[0] for each, part in parts.items()}
        once = {each: part[1] for each, part in parts.items()}
        seconds = self._balanced(self._shape.layers, layers, once, whole)
        return np.asarray(seconds * np.minimum(1.0, sequences))

    @property
    def _encoder_layers(self) -> int:
        return self._shape.encoder_layers or self._shape.layers

    def _encode_seconds(self, prompts: float, tokens: float) -> float:
        layers, once = {}, {}
        for each, cost in self._costs.items():
            rest, single = cost.encode_rest(tokens, prompts)
            attention = self._attention[each]
            layers[each] = np.array([rest + attention(prompts)[0]])
            once[each] = np.array([single + attention(prompts)[1]])
        return float(self._balanced(self._encoder_layers, layers, once, np.array([tokens]))[0])

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
        for each, number in self._kinds:
            one = layers[each]
            if each > 1 and self._costs[each].profile.operation("synchronisation") is None:
                # Two all-reduces a layer: after the attention, and after the feed-forward part.
                synchronised = self._cluster.all_reduce_seconds(each, 1.0)
                latency = self._cluster.link_latency
                one = one + 2 * (latency + (synchronised - latency) * data)
            speed = speed + number / one
            work = depth + once[each] / one
        hop = 0.0 if self.count == 1 else self._cluster.link_latency + data / self._cluster.link_bandwidth
        return np.asarray(work / speed + hop)
