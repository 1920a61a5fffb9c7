"""
The calls into a transformers model: prompts in, keys and values stored, the next token's logits out.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .attention import grouped, repeats_keys
from .families import layer_windows, needs_padding_mask
from .window import KeyValueWindow


class Decoder:
    """
    A causal language model, called without ``generate``.

    Parameters
    ----------
    model
        A transformers causal language model in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        kinds, windows = layer_windows(model.config)
        self.sliding_windows = windows
        self._windows_by_kind = dict(zip(kinds, windows, strict=True))
        self._padding_mask = needs_padding_mask(model.config)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._repeats_keys = repeats_keys(model)
        self.call_tokens = _call_tokens(self.device, model.num_parameters(), len(windows))

    def decoding(self) -> AbstractContextManager[None]:
        """Return the context in which to call :meth:`step`."""
        return grouped(self.model) if self._repeats_keys else nullcontext()

    def mask(self, window: KeyValueWindow) -> torch.Tensor:
        """
        Build what :meth:`step` needs to know about padding; good until rows are inserted, moved or shifted.

        Parameters
        ----------
        window
            The running batch.

        Returns
        -------
        torch.Tensor
            Shape (rows, columns): 0 and the most negative number to be added to the scores, or 1 and 0 for
            models that derive their position bias from such a mask.
        """
        visible = window.visible(self.device)
        if self._padding_mask:
            return visible.long()
        # Finite, so that no arithmetic on masked scores gives NaN.
        return torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(
            ~visible, torch.finfo(self.dtype).min
        )

    def prefill(
        self, window: KeyValueWindow, rows: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """
        Run prompts and embed their keys and values, ending at the window's end column.

        Parameters
        ----------
        window
            The running batch; its end column lies at or behind the longest prompt's length.
        rows
            The row of each prompt.
        prompts
            Token ids of each prompt.

        Returns
        -------
        torch.Tensor
            Logits after the last token of each prompt, shape (prompts, vocabulary).
        """
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        # Padded on the right: real tokens never see what follows them, so plain causal attention is right.
        padded = [list(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
        ids = torch.tensor(padded, device=self.device)
        last = torch.tensor(lengths, device=self.device) - 1
        arguments: dict[str, Any] = {"input_ids": ids, "past_key_values": window, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(longest, device=self.device).expand(len(rows), -1)
        frame = window.frame
        frame.inserting = list(zip(rows, lengths, strict=True))
        try:
            with self._only(last):
                logits: torch.Tensor = self.model(**arguments).logits
        finally:
            frame.inserting = ()
        for row, tokens in zip(rows, lengths, strict=True):
            frame.starts[row] = frame.end - tokens
        frame.low = min(frame.low, frame.end - longest)
        if logits.shape[1] == 1:
            return logits[:, 0]
        return logits[torch.arange(len(rows), device=self.device), last]

    def step(
        self, window: KeyValueWindow, mask: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """
        Run one token of every row.

        Parameters
        ----------
        window
            The running batch; its end column exists.
        mask
            Of :meth:`mask`.
        tokens
            The token of each row, int64, shape (rows, 1).
        positions
            Its position, int64, shape (rows, 1).

        Returns
        -------
        torch.Tensor
            Logits, shape (rows, vocabulary).
        """
        arguments: dict[str, Any] = {"input_ids": tokens, "past_key_values": window, "use_cache": True}
        arguments["attention_mask"] = self._attention_mask(window, mask)
        if self._takes_positions:
            arguments["position_ids"] = positions
        logits: torch.Tensor = self.model(**arguments).logits
        window.frame.end += 1
        return logits[:, -1]

    def _attention_mask(
        self, window: KeyValueWindow, mask: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        low, end = window.frame.low, window.frame.end + 1
        if self._padding_mask:
            return mask[:, low:end]
        masks = {
            kind: mask[:, None, None, low if size is None else max(low, end - size) : end]
            for kind, size in self._windows_by_kind.items()
        }
        if len(masks) == 1:
            return next(iter(masks.values()))
        return masks

    @contextmanager
    def _only(self, last: torch.Tensor) -> Iterator[None]:
        """Show the output layer only each row's last token: logits of whole prompts would dwarf the keys."""
        head = self.model.get_output_embeddings()
        if head is None:
            yield
            return

        def pick(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden = inputs[0]
            return (hidden[torch.arange(len(last), device=hidden.device), last][:, None], *inputs[1:])

        handle = head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()


def _call_tokens(device: torch.device, weights: int, layers: int) -> float:
    """Estimate what a forward call costs beyond its tokens, in tokens, to the order of magnitude."""
    if device.type == "cpu":
        # A layer's interpreter time, 0.4 ms, at some 30 GFLOP/s and two operations per weight and token.
        return layers * 4e-4 * 3e10 / (2 * weights)
    # Its launches, 0.15 ms, at some 400 TFLOP/s, and the weights read once at some 4 TB/s.
    return layers * 1.5e-4 * 4e14 / (2 * weights) + 100
