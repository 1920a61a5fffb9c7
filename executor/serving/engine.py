"""Model in flat KV memory, driven by a serving policy.

Importing this module needs torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ...heuristics.serving.device import DeviceBatch
from ..attention.decoder import Decoder
from ..attention.functions import AttentionCall, attend_from_latest, attending
from ..engines.tiers import choose_tier
from ..models.families import UnsupportedModelError
from .flat_store import FlatStore, Row, joined
from .regions import PlacedLedger, Span

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
            held = int(work.held[request])
            known = [*self._prompts[request], *self.answers[request]]
            parts.append(Row(len(ids), tokens, held, self._ledger.spans(request, 0, held)))
            ids += known[held - tokens : held]
            positions += range(held - tokens, held)
            if held == len(known):
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
