"""What one layer costs on a device: a table of measured (or modelled) operations, and its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..files.disk import InputError, read_json_object, write_json
from ..files.record import plain, record, refuse_unknown
from .cost import FloatArray
from .reference_time import ReferenceTime

AXES = ("tokens", "sequences", "length", "past", "decodes", "context")
"""What an operation can depend on: all new tokens, sequences, new tokens per prompt, tokens already held by
that prompt, decoding sequences, and tokens held by each of those."""
PHASES = ("both", "encode", "decode", "mixed", "run")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """
    The sizes of a transformer that decide what it costs.

    Parameters
    ----------
    name
        As its makers call it.
    layers
        Decoder layers.
    hidden, heads, kv_heads, head_dim, intermediate, vocabulary
        Widths, in values; heads in number.
    bytes_per_value
        Of weights and of keys and values.
    encoder_layers
        Encoder layers; 0 for a decoder-only model, whose decoder layers encode the prompt.
    gated
        Whether the feed-forward part has a gate (three matrices) or not (two).
    tied_embedding
        Whether the output head shares the embedding's weights.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    bytes_per_value: int = 2
    encoder_layers: int = 0
    gated: bool = True
    tied_embedding: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str = "") -> ModelShape:
        """
        Return the shape that a HuggingFace ``config.json`` describes.

        Parameters
        ----------
        config
            The configuration's fields.
        name
            The model's name, ``model_type`` by default.

        Raises
        ------
        InputError
            If a size is missing.
        """

        def size(*names: str, default: int | None = None) -> int:
            for key in names:
                value = config.get(key)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
            if default is None:
                hint = "Give the configuration of a transformer."
                raise InputError(f"has none of the fields {', '.join(names)}", where="config", hint=hint)
            return default

        hidden = size("hidden_size", "d_model", "n_embd")
        heads = size("num_attention_heads", "num_heads", "n_head")
        kind = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
        return cls(
            name=name or str(config.get("model_type", "model")),
            layers=size("num_hidden_layers", "num_decoder_layers", "num_layers", "n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", "d_kv", default=hidden // heads),
            intermediate=size("intermediate_size", "d_ff", "ffn_dim", "n_inner", default=4 * hidden),
            vocabulary=size("vocab_size"),
            bytes_per_value={"float64": 8, "float32": 4}.get(kind.removeprefix("torch."), 2),
            encoder_layers=size("num_layers", "encoder_layers") if config.get("is_encoder_decoder") else 0,
            gated=str(config.get("hidden_act", "silu")) in ("silu", "swish"),
            tied_embedding=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def layer_values(self) -> int:
        """Weights of one layer, in values (cross-attention of an encoder-decoder model left out)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_values(self) -> int:
        """Weights of the embedding and the output head, in values."""
        return (1 if self.tied_embedding else 2) * self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        layers = self.layers + self.encoder_layers
        return self.bytes_per_value * (layers * self.layer_values + self.embedding_values)

    @property
    def kv_bytes_per_layer_token(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """
    One operation of a model, timed at points.

    Parameters
    ----------
    name
        What it is (``qkv_proj``, ``attention``, ...).
    phase
        One of :data:`PHASES`: where it runs. ``mixed`` is the attention of an iteration that both encodes and
        decodes, in the place of the two others; ``run`` is what an engine does besides: how often depends on
        the configuration it runs (:func:`~batchbound.models.exegpt.run_profile.profile_of_run`).
    axes
        What its time depends on, of :data:`AXES`. One with ``length`` but without ``sequences`` is the time
        of one sequence.
    points
        Shape (points, axes).
    seconds
        Shape (points,), of one execution.
    times
        Executions in a layer, or in an iteration.
    per_layer
        Whether every layer runs it, or an iteration once.
    spread
        Half of the range between the quartiles of the repeats, seconds, shape (points,); None if unknown.

    Raises
    ------
    ValueError
        If the shapes disagree, an axis or phase is unknown, or a time is negative or not finite.
    """

    name: str
    phase: str
    axes: tuple[str, ...]
    points: FloatArray
    seconds: FloatArray
    times: int = 1
    per_layer: bool = True
    spread: FloatArray | None = None

    def __post_init__(self) -> None:
        points = np.atleast_2d(np.asarray(self.points, dtype=np.float64))
        seconds = np.asarray(self.seconds, dtype=np.float64)
        if self.phase not in PHASES or not set(self.axes) <= set(AXES):
            raise ValueError(f"operation {self.name!r}: phase {self.phase!r} or axes {self.axes} are unknown")
        if points.shape != (len(seconds), len(self.axes)) or not len(seconds):
            raise ValueError(
                f"operation {self.name!r}: {points.shape} points for {len(seconds)} times of {self.axes}"
            )
        if not (np.isfinite(points).all() and np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise ValueError(f"operation {self.name!r}: a time or point is negative or not finite")
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "seconds", seconds)


@dataclass(frozen=True, slots=True, eq=False)
class LayerProfile:
    """
    The operations of a model on a device at one tensor-parallel degree.

    Parameters
    ----------
    shape
        The model.
    device
        What it ran on.
    device_bytes
        Memory of one device, bytes; 0 if unknown.
    tensor_parallel
        Devices that share every layer.
    operations
        In any order.
    source
        Where the times come from, in a sentence.
    measured
        False for modelled times, which says the source, too.
    versions
        Of the software measured.
    warnings
        What a reader noticed in the data and left out.
    kv_tokens
        Tokens of keys and values that fit on the device beside the weights; 0 if unknown.
    reference
        How fast the machine was meanwhile; None if unknown.
    """

    JSON_HEADER: ClassVar = ("batchbound_layer_profile", 1)
    JSON_HINT: ClassVar = "Profile again, or read it again from its source."

    shape: ModelShape
    device: str
    device_bytes: float
    tensor_parallel: int
    operations: tuple[Operation, ...]
    source: str
    measured: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    kv_tokens: int = 0
    reference: ReferenceTime | None = None

    def operation(self, name: str) -> Operation | None:
        """Return the operation of that name, or None."""
        return next((operation for operation in self.operations if operation.name == name), None)

    @property
    def most_decoding(self) -> float:
        """The most requests that a decode iteration was measured with; infinite for modelled times."""
        if not self.measured:
            return float("inf")
        return min(
            (
                float(operation.points[:, column].max())
                for operation in self.operations
                if operation.phase in ("decode", "both")
                for column, axis in enumerate(operation.axes)
                if axis in ("tokens", "sequences", "decodes")
            ),
            default=float("inf"),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to ``path``, whole or not at all."""
        write_json(path, plain(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerProfile:
        """
        Return the table that :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is no layer profile of this version, or damaged.
        """
        value = read_json_object(path)
        refuse_unknown(ModelShape, value.get("shape"), file=path, within="shape", hint=cls.JSON_HINT)
        return record(cls, value, file=path)
