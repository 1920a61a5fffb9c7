"""Model in flat KV memory, driven by a serving policy.

Importing this module needs torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from ...data.arrays import IntArray
from ...data.workload import Workload
from ...heuristics.serving.device import DeviceBatch
from ...heuristics.serving.policy import ServingPolicy
from ...heuristics.serving.simulation import ServingRun, serve_on_device
from ..attention.decoder import Decoder
from ..attention.functions import AttentionCall, attend_from_latest, attending
from ..engines.tiers import choose_tier
from ..kv.store import StoreLayer
from ..models.families import UnsupportedModelError
from .regions import PlacedLedger, Span


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a forward call.

    begin: Index of its first token in the call's input.
    held: Tokens of KV cache after the call.
    spans: Places of the tokens, in sequence order.
    """

    begin: int
    tokens: int
    held: int
    spans: tuple[Span, ...]


class FlatLayer(StoreLayer["FlatStore"]):  # type: ignore[no-untyped-call]
    """One layer's KV cache, shape (key-value heads, places, head size)."""

    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(states.shape[1], self.place.places, states.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store both states and return them, shape (1, heads, tokens, head size)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.place.attending = self
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.index_copy_(1, self.place.targets, states[0])
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0, as callers pass positions."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of places."""
        return self.place.places


class FlatStore(Cache):
    """KV cache of all layers.

    places: Capacity in tokens, allocated once.
    sliding_windows: Attention window of each layer in tokens; None for full attention.
    """

    def __init__(self, places: int, sliding_windows: Sequence[int | None]) -> None:
        self.places = places
        self.targets = torch.empty(0, dtype=torch.int64)
        """Places for the next call's tokens, shape (tokens,)."""
        self.rows: Sequence[Row] = ()
        """Rows of the next call."""
        self._flat_layers = [FlatLayer(self, window) for window in sliding_windows]
        self.attending = self._flat_layers[0]
        """Layer stored last: its attention follows at once."""
        super().__init__(layers=list(self._flat_layers))

    def begin(self, rows: Sequence[Row], device: torch.device) -> None:
        """Set the rows of the next call."""
        self.rows = rows
        places = [place for row in rows for place in _last(row.spans, row.tokens)]
        self.targets = torch.tensor(places, dtype=torch.int64, device=device)

    def read(self, spans: Sequence[Span]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy each layer's KV cache, two arrays (heads, tokens, head size)."""
        pairs = (layer.buffers for layer in self._flat_layers)
        return [(joined(keys, spans).clone(), joined(values, spans).clone()) for keys, values in pairs]

    def write(self, spans: Sequence[Span], states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write each layer's KV cache, as :meth:`read` returns it."""
        for layer, pair in zip(self._flat_layers, states, strict=True):
            for buffer, tokens in zip(layer.buffers, pair, strict=True):
                at = 0
                for begin, end in spans:
                    buffer[:, begin:end] = tokens[:, at : at + end - begin]
                    at += end - begin


def joined(buffer: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Return the spans of a buffer; one span is a view.

    The buffer has shape (heads, places, head size).
    """
    parts = [buffer[:, begin:end] for begin, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _last(spans: Sequence[Span], tokens: int) -> list[int]:
    places: list[int] = []
    for begin, end in reversed(spans):
        taken = min(end - begin, tokens - len(places))
        places = [*range(end - taken, end), *places]
        if len(places) == tokens:
            break
    return places


_NAME = "batchbound_regions"
_MEND = "serve one such as Llama, Qwen or Mistral; `batchbound run` completes batches with this one"

States = list[tuple[torch.Tensor, torch.Tensor]]


class ServingEngine:
    """Engine with KV cache in the places of a ledger.

    It computes one model call an iteration. An attention row is a view of its region. Only a guest's row is
    copied, as its prompt and completion lie apart. Decoding is greedy, to the job's lengths.

    ledger: Empty, and shared with the policy.

    Raises UnsupportedModelError if the model's completions would be wrong, as on the ragged tier.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], ledger: PlacedLedger) -> None:
        try:
            choose_tier(model, "ragged")
        except UnsupportedModelError as error:
            # A ledger can divide the memory of no other layout.
            raise UnsupportedModelError(error.model_type, error.reason, _MEND) from None
        self._decoder = Decoder(model)
        self._ledger = ledger
        self._store = FlatStore(ledger.places, self._decoder.sliding_windows)
        self._prompts = prompts
        self.answers: list[list[int]] = [[] for _ in prompts]
        """Tokens generated for each request."""
        self.moved_tokens = 0
        """Tokens copied within the device."""
        self._placed: dict[int, tuple[int, tuple[Span, ...]]] = {}
        self._host: dict[int, States] = {}

    @torch.inference_mode()
    def run(self, work: DeviceBatch) -> float:
        """Run an iteration and return its seconds."""
        begun = time.perf_counter()
        rows = dict.fromkeys(work.decodes.tolist(), 1) | dict(work.prefill)
        self._move(work, rows)
        if rows:
            self._compute(work, rows)
        for request in rows:
            self._note(request, int(work.held[request]))
        return time.perf_counter() - begun

    def _note(self, request: int, tokens: int) -> None:
        self._placed[request] = tokens, self._ledger.spans(request, 0, tokens)

    def _move(self, work: DeviceBatch, rows: dict[int, int]) -> None:
        """Move KV cache to its places; all reads precede all writes."""
        lifted: dict[int, States] = {}
        for request in work.swap_out:
            self._host[request] = [
                (keys.to("cpu"), values.to("cpu"))
                for keys, values in self._store.read(self._placed.pop(request)[1])
            ]
        for request, (tokens, spans) in list(self._placed.items()):
            if work.held[request] == rows.get(request, 0):
                # The request ended, or was preempted and will be recomputed.
                del self._placed[request]
            elif self._ledger.spans(request, 0, tokens) != spans:
                lifted[request] = self._store.read(spans)
                self.moved_tokens += tokens
        for request in work.swap_in:
            device = self._decoder.device
            host = self._host.pop(request)
            lifted[request] = [(keys.to(device), values.to(device)) for keys, values in host]
        for request, states in lifted.items():
            self._note(request, states[0][0].shape[1])
            self._store.write(self._placed[request][1], states)

    def _compute(self, work: DeviceBatch, rows: dict[int, int]) -> None:
        ids: list[int] = []
        positions: list[int] = []
        parts, drawing, last = [], [], []
        for request, tokens in rows.items():
            kv_tokens = int(work.held[request])
            known = [*self._prompts[request], *self.answers[request]]
            parts.append(Row(len(ids), tokens, kv_tokens, self._ledger.spans(request, 0, kv_tokens)))
            ids += known[kv_tokens - tokens : kv_tokens]
            positions += range(kv_tokens - tokens, kv_tokens)
            if kv_tokens == len(known):
                drawing.append(request)
                last.append(len(ids) - 1)
        device = self._decoder.device
        packed = torch.tensor([ids, positions], device=device)
        wanted = torch.tensor([[0] * len(last), last] if last else [[0], [0]], device=device).unbind()
        self._store.begin(parts, device)
        with attending(self._decoder.model, _NAME, self._attend):
            logits = self._decoder.forward(self._store, packed[:1], packed[1:], last=(wanted[0], wanted[1]))
        if drawing:
            for request, token in zip(drawing, logits.argmax(dim=-1).tolist(), strict=True):
                self.answers[request].append(token)

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query = self._store.attending, call.query
        keys, values = layer.buffers
        output = query.new_empty(1, query.shape[2], query.shape[1], call.value.shape[-1])
        for row in self._store.rows:
            tokens = slice(row.begin, row.begin + row.tokens)
            output[:, tokens] = attend_from_latest(
                query[:, :, tokens],
                joined(keys, row.spans)[None],
                joined(values, row.spans)[None],
                window=layer.window,
                scale=call.scaling,
            )
        return output


@dataclass(frozen=True, slots=True, eq=False)
class EngineRun:
    """Run of a model.

    run: As on a simulated device, in measured seconds.
    answers: Token ids of each completion.
    moved_tokens: Tokens of KV cache copied: regions that grew, compactions, and guests that moved out.
    """

    run: ServingRun
    answers: list[list[int]]
    moved_tokens: int
    compactions: int


def serve_on_model(
    model: Any,
    prompts: Sequence[Sequence[int]],
    workload: Workload,
    policy: ServingPolicy,
    kv_capacity: int,
    *,
    block_tokens: int = 32,
    paged: bool = False,
    predicted: IntArray | None = None,
) -> EngineRun:
    """Serve every request greedily, in flat KV memory.

    prompts: Token ids of each request.
    kv_capacity: Tokens of KV memory, allocated exactly.
    paged: True to place blocks anywhere (block allocation) instead of one region per request.
    predicted: Completion lengths the policy sees, shape (requests,); the true ones by default.

    Raises UnsupportedModelError if the model's completions would be wrong, and the errors of
    :func:`~.simulation.serve_on_device`.
    """
    ledger = PlacedLedger(kv_capacity, len(workload), block_tokens, paged=paged)
    engine = ServingEngine(model, prompts, ledger)
    run = serve_on_device(workload, policy, engine, ledger, predicted=predicted)
    return EngineRun(run, engine.answers, engine.moved_tokens, ledger.compactions)


def own_answer(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the model's own greedy completion of some length."""
    ids = torch.tensor([list(prompt)], device=model.device)
    ends, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    finally:
        model.generation_config.eos_token_id = ends
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
