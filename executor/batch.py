"""
A running padded batch of slots on a transformers model: BATON's loop without its scheduling.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .decoder import Decoder
from .families import check_supported
from .sampling import Sampler
from .window import KeyValueWindow

_PREFILL_TOKENS = 16_384
"""Padded tokens of one forward call over prompts: bounds the activations."""


class WindowBatch:
    """
    A batch of slots that decode together, each joined and left by requests at any time.

    A slot is the caller's name for a place in the batch; a row is where its keys and values lie. Rows are
    always packed, so a round computes exactly the occupied slots.

    Parameters
    ----------
    model
        A transformers causal language model in evaluation mode.
    slots
        The most requests that run at once.
    capacity
        The most tokens (prompt and answer) a request is expected to hold; the buffers are somewhat wider,
        and grow when a request turns out longer.
    sampler
        How tokens are chosen; greedily if left out.

    Raises
    ------
    UnsupportedModelError
        If the model's answers would be wrong.
    ValueError
        If ``slots`` or ``capacity`` is not positive.
    """

    def __init__(self, model: Any, slots: int, capacity: int, *, sampler: Sampler | None = None) -> None:
        if slots < 1 or capacity < 1:
            raise ValueError(f"slots and capacity must be positive, got {slots} and {capacity}")
        check_supported(model.config)
        self.slots = slots
        self._sampler = sampler or Sampler()
        self._decoder = Decoder(model)
        columns = capacity + max(64, capacity // 4)
        self._window = KeyValueWindow(slots, columns, self._decoder.sliding_windows)
        self._slot_of_row: list[int | None] = []
        self._row_of_slot: dict[int, int] = {}
        self._mask: torch.Tensor | None = None
        device = self._decoder.device
        self._tokens, self._positions, self._streams, self._emitted = torch.zeros(
            4, slots, 1, dtype=torch.int64, device=device
        ).unbind()

    @property
    def active(self) -> int:
        """Occupied slots."""
        return len(self._row_of_slot)

    @property
    def occupied(self) -> tuple[int, ...]:
        """The occupied slots, in increasing order."""
        return tuple(sorted(self._row_of_slot))

    @property
    def kv_tokens(self) -> int:
        """Tokens held by the occupied slots, without padding."""
        frame = self._window.frame
        return sum(frame.end - frame.starts[row] for row in self._row_of_slot.values())

    @property
    def padded_kv_tokens(self) -> int:
        """Columns that attention reads in the next round, padding included, over all occupied slots."""
        frame = self._window.frame
        starts = [frame.starts[row] for row in self._row_of_slot.values()]
        return len(starts) * (frame.end - min(starts, default=frame.end))

    @torch.inference_mode()
    def prefill(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        *,
        request_ids: Sequence[str] | None = None,
        emitted: Sequence[int] | None = None,
    ) -> list[int]:
        """
        Run prompts and let them join the batch.

        Parameters
        ----------
        slots
            A free slot for each prompt.
        prompts
            Token ids of each prompt; of a resumed request with the tokens it has emitted before.
        request_ids
            Name each request's random stream; needed unless sampling is greedy.
        emitted
            Tokens each request has emitted before; none if left out.

        Returns
        -------
        list of int
            The token that follows each prompt. It is the request's next input: the coming round embeds it.

        Raises
        ------
        ValueError
            If a slot is taken, named twice or out of range, or a prompt is empty.
        """
        self._check_prefill(slots, prompts)
        if not slots:
            return []
        if request_ids is None:
            if not self._sampler.greedy:
                raise ValueError("sampling needs request_ids, which name the random stream of each request")
            request_ids = [""] * len(slots)
        rows = [self._take_row(slot) for slot in slots]
        self._window.make_room_before(max(len(prompt) for prompt in prompts))
        device = self._decoder.device
        streams = [self._sampler.stream(request_id) for request_id in request_ids]
        state = torch.tensor(
            [[len(prompt) for prompt in prompts], streams, emitted or [0] * len(slots)], device=device
        )
        first = torch.empty(len(slots), dtype=torch.int64, device=device)
        for group in length_groups([len(prompt) for prompt in prompts], self._decoder.call_tokens):
            logits = self._decoder.prefill(
                self._window, [rows[i] for i in group], [prompts[i] for i in group]
            )
            chosen = self._sampler.choose(logits, state[1, group], state[2, group])
            first[group] = chosen
        self._tokens[rows, 0] = first
        self._positions[rows, 0] = state[0]
        self._streams[rows, 0] = state[1]
        self._emitted[rows, 0] = state[2] + 1
        self._mask = None
        answer: list[int] = first.tolist()
        return answer

    @torch.inference_mode()
    def decode(self, rounds: int = 1) -> NDArray[np.int64]:
        """
        Give one token to every occupied slot, ``rounds`` times, and read the tokens back once.

        Parameters
        ----------
        rounds
            Rounds to run. All occupied slots take part in all of them: what a request gives beyond its end
            is the caller's to discard.

        Returns
        -------
        numpy.ndarray
            Tokens, shape (rounds, slots); -1 where a slot is free.
        """
        answer = np.full((rounds, self.slots), -1, dtype=np.int64)
        if not self._row_of_slot or rounds == 0:
            return answer
        self._pack()
        window, rows = self._window, self._window.rows
        tokens, positions = self._tokens[:rows], self._positions[:rows]
        streams, emitted = self._streams[:rows, 0], self._emitted[:rows, 0]
        window.frame.release_front()
        history = torch.empty(rounds, rows, dtype=torch.int64, device=self._decoder.device)
        with self._decoder.decoding():
            for round_ in range(rounds):
                if window.make_room_after():
                    self._mask = None
                if self._mask is None:
                    self._mask = self._decoder.mask(window)
                logits = self._decoder.step(window, self._mask, tokens, positions)
                chosen = self._sampler.choose(logits, streams, emitted)
                history[round_] = chosen
                tokens.copy_(chosen[:, None])
                positions += 1
                emitted += 1
        columns = [slot for slot in self._slot_of_row if slot is not None]
        answer[:, columns] = history.cpu().numpy()
        return answer

    def release(self, slot: int) -> None:
        """
        Free a slot: its request is done or evicted.

        Parameters
        ----------
        slot
            An occupied slot.

        Raises
        ------
        ValueError
            If the slot is free.
        """
        if slot not in self._row_of_slot:
            raise ValueError(f"slot {slot} is free already; occupied are {list(self.occupied)}")
        self._slot_of_row[self._row_of_slot.pop(slot)] = None

    def _check_prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        if len(slots) != len(prompts):
            raise ValueError(f"{len(slots)} slots were given for {len(prompts)} prompts")
        if len(set(slots)) != len(slots):
            raise ValueError(f"a slot is named twice: {list(slots)}")
        for slot, prompt in zip(slots, prompts, strict=True):
            if not 0 <= slot < self.slots:
                raise ValueError(f"slot {slot} does not exist: the batch has slots 0 to {self.slots - 1}")
            if slot in self._row_of_slot:
                raise ValueError(f"slot {slot} is taken: release it first")
            if not len(prompt):
                raise ValueError(f"the prompt for slot {slot} is empty: give it at least one token")

    def _take_row(self, slot: int) -> int:
        if None in self._slot_of_row:
            row = self._slot_of_row.index(None)
        else:
            row = len(self._slot_of_row)
            self._slot_of_row.append(None)
            self._window.frame.starts.append(self._window.frame.end)
        self._slot_of_row[row] = slot
        self._row_of_slot[slot] = row
        return row

    def _pack(self) -> None:
        """Fill the rows that were freed from the last ones, so that the rows in use come first."""
        slots, starts = self._slot_of_row, self._window.frame.starts
        while None in slots:
            self._mask = None
            hole, last = slots.index(None), len(slots) - 1
            slot = slots[last]
            if slot is not None:
                self._window.move_row(last, hole)
                for state in (self._tokens, self._positions, self._streams, self._emitted):
                    state[hole] = state[last]
                slots[hole], self._row_of_slot[slot] = slot, hole
            slots.pop()
            starts.pop()


def length_groups(
    lengths: Sequence[int], call_tokens: float, most_tokens: int = _PREFILL_TOKENS
) -> list[list[int]]:
    """
    Split prompts into forward calls so that padding and calls together cost least.

    Parameters
    ----------
    lengths
        Tokens of each prompt.
    call_tokens
        What a call costs beyond its padded tokens, in tokens.
    most_tokens
        The most padded tokens of a call with more than one prompt.

    Returns
    -------
    list of list of int
        The prompts of each call, by index; longest first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # cheapest[j] is the least cost of the first j prompts: a group is padded to its first, longest prompt.
    cheapest = [0.0] + [float("inf")] * len(order)
    begin = [0] * (len(order) + 1)
    for i, index in enumerate(order):
        for j in range(i + 1, len(order) + 1):
            padded = lengths[index] * (j - i)
            if j > i + 1 and padded > most_tokens:
                break
            if cheapest[i] + padded + call_tokens < cheapest[j]:
                cheapest[j], begin[j] = cheapest[i] + padded + call_tokens, i
    groups: list[list[int]] = []
    j = len(order)
    while j:
        groups.append(order[begin[j] : j])
        j = begin[j]
    return groups[::-1]
