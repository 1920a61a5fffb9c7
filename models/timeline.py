"""ExeGPT's simulator: throughput and latency of a configuration, from a profile and length distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..data.cost import FloatArray
from ..data.length_pair import LengthPair
from .completion import Occupancy
from .exec_config import Cluster, ExecConfig, Performance, Strategy
from .layer_cost import LayerCost
from .stage_seconds import StageSeconds

LATENCY_QUANTILE = 0.99
"""Of output lengths: the latency is that of generating an answer so long (section 7.1)."""
_HALVINGS = 12
_TAIL = 2.326
"""Deviations above the mean that 99 % of a normal distribution stay below."""


class Timeline:
    """
    The execution timeline of one model on one cluster, for one pair of length distributions.

    Parameters
    ----------
    costs
        Of the model's layers, by tensor-parallel degree.
    cluster
        The devices.
    lengths
        Of the requests; outputs are decode iterations.
    """

    def __init__(self, costs: Mapping[int, LayerCost], cluster: Cluster, lengths: LengthPair) -> None:
        self.costs, self.cluster, self.lengths = costs, cluster, lengths
        self.shape = next(iter(costs.values())).profile.shape
        self.longest = lengths.outputs.quantile(LATENCY_QUANTILE)
        self._stages: dict[tuple[int, int, int], StageSeconds] = {}
        self._occupancy: dict[int, Occupancy] = {}

    def __call__(self, config: ExecConfig) -> Performance:
        """Return what a configuration reaches."""
        return self._rra(config) if config.strategy is Strategy.RRA else self._waa(config)

    def stage_seconds(self, devices: int, degree: int, groups: int) -> StageSeconds:
        """Return the stages that so many devices make, ``groups`` of ``degree`` of them sharing layers."""
        groups = min(groups, devices // degree)
        key = (devices, degree, groups)
        if key not in self._stages:
            self._stages[key] = StageSeconds(self.costs, self.cluster, self.lengths, *key)
        return self._stages[key]

    def occupancy(self, rounds: int) -> Occupancy:
        """Return what a query keeps in the decode batch, with so many iterations a phase."""
        if rounds not in self._occupancy:
            self._occupancy[rounds] = Occupancy(self.lengths, rounds)
        return self._occupancy[rounds]

    def rra_parts(self, config: ExecConfig) -> tuple[StageSeconds, float, FloatArray]:
        """
        Return the pipeline of an RRA configuration, with its stage seconds.

        Parameters
        ----------
        config
            The configuration.

        Returns
        -------
        tuple
            The stages; seconds in which one encodes a micro-batch; and those in which it decodes one, shape
            (decode rounds,). There are as many micro-batches as stages.
        """
        stages = self.stage_seconds(self.cluster.devices, config.tensor_degree, config.tensor_groups)
        occupancy = self.occupancy(config.decode_rounds)
        batch = config.encode_batch * occupancy.queries / stages.count
        decode = stages.decode(batch, occupancy.context)
        return stages, stages.encode(config.encode_batch / stages.count), decode

    def _rra(self, config: ExecConfig) -> Performance:
        stages, encode, decode = self.rra_parts(config)
        occupancy, count, rounds = self.occupancy(config.decode_rounds), stages.count, config.decode_rounds
        peak = self._peak(occupancy, config.encode_batch)
        share = (self.shape.weight_bytes + peak) / self.cluster.devices
        cluster, batch = self.cluster, config.encode_batch * float(occupancy.queries[0])
        token_bytes = self.shape.layers * self.shape.kv_bytes_per_layer_token
        if batch > (cluster.slots or math.inf) or peak > (cluster.kv_tokens or math.inf) * token_bytes:
            share = math.inf
        first, last = float(decode[0]), float(decode[-1])
        # A faster micro-batch behind a slower one waits in every stage but one (Figure 4(a)'s bubbles).
        slowest = stages.encode_largest(config.encode_batch / count)
        drops = max(0.0, last - encode) + max(0.0, slowest - first) + (first - last)
        cycle = count * (encode + float(decode.sum())) + (count - 1) * drops
        phases, until = divmod(self.longest - 1, rounds)
        drops += last - float(decode[until])
        final = count * (encode + float(decode[: until + 1].sum())) + (count - 1) * drops
        # That is the first micro-batch's; they begin at the distance of encodings, end at that of decodes.
        final -= (count - 1) / 2 * (encode - float(decode[until]))
        return self._performance(
            config.encode_batch / cycle,
            phases * cycle + final,
            batch,
            (count, count),
            share,
            (encode, float(decode.mean())),
        )

    def waa_parts(self, config: ExecConfig) -> tuple[StageSeconds, StageSeconds, int] | None:
        """
        Return the stages that encode and that decode under WAA, and the micro-batches of a decode batch.

        None on fewer than two devices.
        """
        devices = self.cluster.devices
        if devices < 2:
            return None
        encoders = self.encoders(config.strategy, config.encode_batch)
        decoders = devices - encoders
        # Groups are formed among the decoders first: their latency is paid once a token.
        groups = min(config.tensor_groups, decoders // config.tensor_degree)
        decoding = self.stage_seconds(decoders, config.tensor_degree, groups)
        encoding = self.stage_seconds(encoders, config.tensor_degree, config.tensor_groups - groups)
        return encoding, decoding, min(config.micro_batches, decoding.count)

    def waa_lead(self, config: ExecConfig) -> int:
        """Return how many batches the encoders work ahead: as many as keep the decoders from waiting."""
        parts = self.waa_parts(config)
        return 0 if parts is None else self._waa_slot(config, *parts)[1]

    def _waa_slot(
        self, config: ExecConfig, encoding: StageSeconds, decoding: StageSeconds, micro: int
    ) -> tuple[float, int, float, float]:
        """Return seconds between encoded batches, the lead, a batch's way to the decoders, and a decode."""
        encode, handover = encoding.encode(config.encode_batch), self.handover_seconds(config.encode_batch)
        occupancy = self.occupancy(1)
        batch = config.encode_batch * occupancy.queries / micro
        decode = float(decoding.decode(batch, occupancy.context)[0])
        # Encoding runs ahead of decoding: their mean times count, not the larger one of each slot.
        slot = max(handover, encode, micro * decode)
        slowest = max(encode, encoding.encode_largest(config.encode_batch))
        way = encode + (encoding.count - 1) * slowest + handover
        return slot, math.ceil(way / slot) + 1, way, decode

    def _waa(self, config: ExecConfig) -> Performance:
        parts = self.waa_parts(config)
        if parts is None:
            return self._performance(0.0, math.inf, 0.0, (0, 0), math.inf, (0.0, 0.0))
        encoding, decoding, micro = parts
        slot, lead, way, decode = self._waa_slot(config, encoding, decoding, micro)
        batch = config.encode_batch * float(self.occupancy(1).queries[0])
        # So many batches are on their way, and one is taken up every slot (Little's law).
        waited = lead * slot
        if slot > micro * decode:
            batch, decode = self._starved(config.encode_batch / slot, decoding, micro, batch)
            waited = way + micro * decode / 2
        # Without micro-batches, as many batches as stages are under way, each decoding every so many slots.
        batches = -(-decoding.count // micro)
        iterations = (self.longest - 1) * batches * micro * decode
        return self._performance(
            config.encode_batch / slot,
            waited + iterations + (decoding.count + (micro - 1) / 2) * decode,
            batch,
            (encoding.count, decoding.count),
            max(self._waa_bytes(config.encode_batch, encoding.devices, batches, lead)),
            (encoding.encode(config.encode_batch), decode),
        )

    def _starved(
        self, rate: float, decoding: StageSeconds, micro: int, planned: float
    ) -> tuple[float, float]:
        r"""
        Return the decode batch, and the seconds of a decode stage, if encoding cannot fill the planned batch.

        The decoders do not wait: at a rate of :math:`\lambda` requests a second the batch settles where
        :math:`B_D = \lambda S_D B_m t_D(B_D / B_m)`, below the paper's :math:`B_E S_D`.
        """
        occupancy = self.occupancy(1)
        tokens = rate * float(occupancy.queries[0])
        low, high = 0.0, planned
        for _ in range(_HALVINGS):
            batch = (low + high) / 2
            decode = float(decoding.decode(np.array([batch / micro]), occupancy.context)[0])
            low, high = (batch, high) if tokens * micro * decode > batch else (low, batch)
        return batch, decode

    def encoders(self, strategy: Strategy, encode_batch: int) -> int:
        """
        Return how many devices encode under WAA.

        The paper's WAA-C rounds both shares down, which may leave a device idle or a side without one; here
        the encoders' share is rounded, and each side has at least one.

        Parameters
        ----------
        strategy
            WAA-C or WAA-M.
        encode_batch
            Prompts of an encoding batch.
        """
        devices, occupancy = self.cluster.devices, self.occupancy(1)
        if strategy is Strategy.WAA_M:
            loads = [max(self._waa_bytes(encode_batch, count, 1, count + 1)) for count in range(1, devices)]
            return 1 + loads.index(min(loads))
        whole = self.stage_seconds(1, 1, 0)
        encode = whole.encode(encode_batch)
        batch = encode_batch * occupancy.queries
        decode = float(whole.decode(batch, occupancy.context)[0])
        return min(devices - 1, max(1, round(devices * encode / (encode + decode))))

    def _waa_bytes(self, encode_batch: int, encoders: int, batches: int, lead: int) -> tuple[float, float]:
        """Return the bytes on an encoding and on a decoding device."""
        shape, decoders = self.shape, self.cluster.devices - encoders
        peak = self._peak(self.occupancy(1), encode_batch * batches)
        encoded = encode_batch * self.lengths.inputs.mean * shape.layers * shape.kv_bytes_per_layer_token
        if shape.encoder_layers:
            both = shape.layers + shape.encoder_layers
            encoder_weights = shape.weight_bytes * shape.encoder_layers / both
            decoder_weights = shape.weight_bytes - encoder_weights
        else:
            encoder_weights = decoder_weights = float(shape.weight_bytes)
        return (encoder_weights + lead * encoded) / encoders, (decoder_weights + peak) / decoders

    def _peak(self, occupancy: Occupancy, encode_batch: float) -> float:
        """Return the bytes of keys and values that 99 % of the time are enough."""
        shape = self.shape
        tokens = encode_batch * occupancy.tokens + _TAIL * np.sqrt(encode_batch * occupancy.variance)
        return float(tokens.max()) * shape.layers * shape.kv_bytes_per_layer_token

    def handover_seconds(self, encode_batch: float) -> float:
        """Return the seconds in which an encoded batch's keys and values go through the host's memory."""
        shape = self.shape
        tokens = encode_batch * self.lengths.inputs.mean
        return tokens * shape.layers * shape.kv_bytes_per_layer_token / self.cluster.host_bandwidth

    def _performance(
        self,
        throughput: float,
        latency: float,
        decode_batch: float,
        stages: tuple[int, int],
        device_bytes: float,
        seconds: tuple[float, float],
    ) -> Performance:
        limit = self.cluster.device_bytes * self.cluster.usable
        fits = device_bytes <= (limit or 1e300)
        return Performance(
            throughput, latency if fits else math.inf, decode_batch, stages, device_bytes, *seconds
        )
