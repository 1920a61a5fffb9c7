"""KV cache in pages of one token, which rows may share.

Rows take pages as they grow, which may lie anywhere (PagedAttention, Kwon et al. 2023). A page holds one
token, as in SGLang: rows share a beginning of any length, and nothing is copied.

This module needs torch and transformers when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.host_kernels import HostKernels, Rows, SharedColumns
from .store import KeyValueStore, Path, StoreLayer, untouched_zeros


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens in a forward call, and their place.

    offset: Column of its first token: earlier columns are stored, or computed in the same call.
    begin: Index of the first token in the input of the call.
    """

    row: int
    offset: int
    begin: int
    tokens: int


_Places = tuple[list[int], list[int], list[int]]
"""Rows, columns and pages to write into the table."""


@dataclass(slots=True, eq=False)
class _Beginning:
    """Pages of a beginning that rows share.

    rows: Rows that read it.
    kept: True while further rows may begin with it.
    """

    name: int
    pages: list[int]
    rows: int = 0
    kept: bool = True


class PagedLayer(StoreLayer["PagedSlots"]):  # type: ignore[no-untyped-call]
    """One layer's KV cache, shape (pages, heads, head size).

    Parameters are those of :class:`~.store.StoreLayer`.
    """

    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        shape = self.place.pages + 1, states.shape[1], states.shape[3]
        return untouched_zeros(shape, self.place.dtype or states.dtype, states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values; return those to attend to.

        While the store has segments these are the prompts' own, of shape (1, heads, tokens, head size), else
        the whole buffers.
        """
        if value_states.dtype != key_states.dtype:
            # Under autocast rotary embeddings return float32; attention rounds keys to the values' format.
            own = key_states.dtype
            key_states, value_states = key_states.to(value_states.dtype).to(own), value_states.to(own)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        store = self.place
        store.attending = self
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            if store.kernels is not None and not store.segments:
                store.kernels.keep(states, buffer, store.held)
            else:
                tokens = states.transpose(1, 2).flatten(0, 1)
                buffer.index_copy_(0, store.targets(), tokens.to(buffer.dtype))
        return (key_states, value_states) if store.segments else self.buffers

    def get_seq_length(self) -> int:
        """Return the columns held before the coming tokens."""
        return 0 if self.place.segments else max(self.place.lengths, default=0)


class PagedSlots(KeyValueStore):
    """KV cache of all layers in pages.

    slots, columns: Most rows, and tokens of the longest row; the latter grows.
    capacity: Pages; None for a pool that grows with the columns.
    shared: Pages for beginnings that no row reads, in addition.
    """

    def __init__(
        self,
        slots: int,
        columns: int,
        sliding_windows: Sequence[int | None],
        *,
        capacity: int | None,
        device: torch.device,
        shared: int = 0,
    ) -> None:
        self.slots, self.columns, self._shared = slots, columns, shared
        self._grows = capacity is None
        # A row has room for its coming token as well.
        self.pages = self._pool() if capacity is None else capacity + slots + shared
        self._free = list(range(self.pages - 1, -1, -1))
        self.lengths: list[int] = []
        """Tokens that each row in use holds."""
        self.kernels: HostKernels | None = None
        """Functions that write the KV cache of decode steps; torch's without them."""
        self.dtype: torch.dtype | None = None
        """Number format of the KV cache; None for that of the first keys."""
        self.segments: Sequence[Segment] = ()
        """Token ranges of the prompts that a prefill packs into one sequence."""
        self._own: list[list[int]] = []
        self._begins: list[list[_Beginning]] = []
        # The least recently used one is first.
        self._beginnings: dict[int, _Beginning] = {}
        # Rows out of use that fill a captured decode step up write to the last page, which is no one's.
        self.table = torch.full((slots, columns), self.pages, dtype=torch.int64, device=device)
        """Pages of each row, shape (slots, columns)."""
        self._shared_columns: SharedColumns | None = None
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._targets: torch.Tensor | None = None
        self._paged_layers = [PagedLayer(self, window) for window in sliding_windows]
        self.attending = self._paged_layers[0]
        """The layer that attends next: its KV cache was requested last."""
        super().__init__(layers=list(self._paged_layers))

    @property
    def rows(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    @property
    def held(self) -> Rows:
        """Places of the rows, and of their next tokens."""
        if self._shared_columns is None:
            self._shared_columns = self.shared_columns(range(self.rows))
        return Rows(self._positions, self.table, 1, self._shared_columns)

    def shared_columns(self, rows: Sequence[int], held: Sequence[int] | None = None) -> SharedColumns:
        """Return the beginnings that several of some rows read; a row is named by its place among them.

        held: Columns that each row attends to; by default at least those of its beginnings.
        """
        # By all beginnings up to it: one that was dropped and computed again has others before it.
        readers: dict[tuple[_Beginning, ...], tuple[int, int, list[int]]] = {}
        for place, row in enumerate(rows):
            end = 0
            for depth, beginning in enumerate(self._begins[row], start=1):
                begin, end = end, end + len(beginning.pages)
                if held is not None and end > held[place]:
                    break
                readers.setdefault(tuple(self._begins[row][:depth]), (begin, end, []))[2].append(place)
        groups = sorted(
            (begin, end, len(places), *places) for begin, end, places in readers.values() if len(places) > 1
        )
        numbers = [number for group in groups for number in group]
        return SharedColumns(len(groups), torch.tensor(numbers, dtype=torch.int64))

    def begin_steps(self, positions: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Set the places of the coming tokens, shape (tokens,).

        ``positions`` is read again in every decode step.
        """
        self._rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        self._positions, self._targets = positions, None

    def end_steps(self, decode_steps: int = 1) -> None:
        """Count the tokens of decode steps as held."""
        self.lengths = [tokens + decode_steps for tokens in self.lengths]
        self._targets = None

    def targets(self) -> torch.Tensor:
        """Return the pages of coming keys and values, shape (tokens,)."""
        if self._targets is None:
            self._targets = self.table[self._rows, self._positions]
        return self._targets

    def pages_of(self, row: int, tokens: int) -> torch.Tensor:
        """Return the pages of a row's first tokens."""
        return self.table[row, :tokens]

    def begin_rows(self, rows: Sequence[int], tokens: Sequence[int], paths: Sequence[Path]) -> list[int]:
        """Take the pages of empty rows; return the first column that each has to compute.

        Beginnings that are not there are computed by the first row with them.
        """
        self.make_room(max(tokens))
        places: _Places = [], [], []
        begins = [self._begin_row(row, path, places) for row, path in zip(rows, paths, strict=True)]
        self._grow(rows, tokens, places)
        return begins

    def _begin_row(self, row: int, path: Path, places: _Places) -> int:
        self._shared_columns = None
        begin, first = 0, None
        for name, end in path:
            beginning = self._beginnings.get(name)
            if beginning is None:
                first = begin if first is None else first
                beginning = self._beginnings[name] = _Beginning(name, self._take(end - begin))
            self._read(row, beginning, begin, places)
            begin = end
        self._use(self._begins[row])
        return begin if first is None else first

    def _read(self, row: int, beginning: _Beginning, begin: int, places: _Places) -> None:
        """Let a row read a beginning from a column on."""
        beginning.rows += 1
        self._begins[row].append(beginning)
        _extend(places, row, begin, beginning.pages)

    def _use(self, path: Sequence[_Beginning]) -> None:
        """Note the use of beginnings, the ends of a path before its root."""
        for beginning in reversed(path):
            if beginning.kept:
                self._beginnings[beginning.name] = self._beginnings.pop(beginning.name)

    def keep_row(self, row: int, name: int, begin: int, end: int) -> None:
        """Make some tokens of a row a new beginning, and wipe the row.

        It goes on from beginnings of ``begin`` tokens.
        """
        begins, own = self._begins[row], self._own[row]
        # A row that came back from the host may hold all pages by itself.
        shared = sum(len(each.pages) for each in begins)
        if begin >= shared and name not in self._beginnings:
            self._beginnings[name] = _Beginning(name, own[begin - shared : end - shared])
            self._own[row] = own[: begin - shared] + own[end - shared :]
            self._use(begins)
        self.wipe_row(row)

    def split(self, name: int, tokens: int, head: int) -> None:
        """Give the first tokens of a beginning a name of their own."""
        tail = self._beginnings.get(name)
        if tail is None:
            return
        first = _Beginning(head, tail.pages[:tokens], tail.rows)
        tail.pages = tail.pages[tokens:]
        for begins in self._begins:
            if tail in begins:
                begins.insert(begins.index(tail), first)
        order = list(self._beginnings.values())
        order.insert(order.index(tail) + 1, first)
        self._beginnings = {beginning.name: beginning for beginning in order}

    def forget(self, names: Iterable[int] | None = None) -> None:
        """Drop beginnings that no further row begins with, by default all."""
        for name in list(self._beginnings) if names is None else names:
            beginning = self._beginnings.pop(name, None)
            if beginning is not None:
                beginning.kept = False
                if not beginning.rows:
                    self._give_back(beginning.pages)

    def reserve(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Take as many pages as rows need."""
        self.make_room(max(tokens))
        self._grow(rows, tokens, ([], [], []))

    def _grow(self, rows: Sequence[int], tokens: Sequence[int], places: _Places) -> None:
        """Take the pages that rows lack, and write the table."""
        lacking = self._lacking(rows, tokens)
        pages = self._take(sum(lacking))
        for row, count in zip(rows, lacking, strict=True):
            if count:
                own, pages = pages[:count], pages[count:]
                _extend(places, row, self._taken(row), own)
                self._own[row] += own
        if places[0]:
            written = torch.tensor(places, device=self.table.device)
            self.table[written[0], written[1]] = written[2]

    def reserve_steps(self, decode_steps: int) -> int:
        """Take the pages for some decode steps of all rows; return how many."""
        longest, rows = max(self.lengths), range(self.rows)
        self.make_room(longest + 1)
        decode_steps = min(decode_steps, self.columns - longest)
        while decode_steps > 1 and not self._fits(sum(self._lacking(rows, self._after(decode_steps)))):
            decode_steps -= 1
        self.reserve(rows, self._after(decode_steps))
        return decode_steps

    def _after(self, decode_steps: int) -> list[int]:
        return [tokens + decode_steps for tokens in self.lengths]

    def _taken(self, row: int) -> int:
        return len(self._own[row]) + sum(len(beginning.pages) for beginning in self._begins[row])

    def _lacking(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int]:
        return [max(0, held - self._taken(row)) for row, held in zip(rows, tokens, strict=True)]

    def _fits(self, pages: int) -> bool:
        """Return whether some pages are free, or kept for further rows."""
        unread = (len(each.pages) for each in self._beginnings.values() if not each.rows)
        return pages <= len(self._free) or pages <= len(self._free) + sum(unread)

    def _free_pages(self, pages: int) -> None:
        """Free pages by dropping beginnings that no row reads."""
        if not self._fits(pages):
            raise MemoryError(f"the rows outgrow the {self.pages} tokens of the KV capacity")
        while len(self._free) < pages:
            self.forget([next(name for name, each in self._beginnings.items() if not each.rows)])

    def _take(self, count: int) -> list[int]:
        self._free_pages(count)
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return pages

    def _give_back(self, pages: list[int]) -> None:
        freed = torch.tensor(pages, dtype=torch.int64, device=self.table.device)
        for layer in self._paged_layers:
            if layer.is_initialized:
                for buffer in layer.buffers:
                    buffer.index_fill_(0, freed, 0)
        self._free += pages[::-1]

    def make_room(self, tokens: int) -> None:
        """Make room for a row of some tokens."""
        if tokens <= self.columns:
            return
        before = self.columns
        self.columns = tokens + max(64, tokens // 4)
        try:
            if self._grows:
                self._grow_pool(self._pool())
        except BaseException:
            self.columns = before
            raise
        wider = self.table.new_full((self.slots, self.columns), self.pages)
        wider[:, :before] = self.table
        self.table = wider

    def _pool(self) -> int:
        return self.slots * self.columns + self._shared

    def _grow_pool(self, pages: int) -> None:
        grown = []
        used = torch.tensor(sorted(set(range(self.pages)).difference(self._free)), dtype=torch.int64)
        used = used.to(self.table.device)
        # All allocations before any assignment: running out of memory leaves the store as it was.
        for layer in self._paged_layers:
            if layer.is_initialized:
                wider = []
                for buffer in layer.buffers:
                    wider.append(untouched_zeros((pages + 1, *buffer.shape[1:]), buffer.dtype, buffer.device))
                    wider[-1].index_copy_(0, used, buffer[used])
                grown.append((layer, wider))
        for layer, (keys, values) in grown:
            layer.keys, layer.values = keys, values
        self.table[self.table == self.pages] = pages
        self._free = list(range(pages - 1, self.pages - 1, -1)) + self._free
        self.pages = pages

    def tokens_of(self, row: int) -> int:
        """Return the tokens of a row."""
        return self.lengths[row]

    def append_row(self) -> None:
        """Add an empty row."""
        self.lengths.append(0)
        self._own.append([])
        self._begins.append([])

    def drop_row(self) -> None:
        """Remove the last row."""
        for column in (self.lengths, self._own, self._begins):
            column.pop()

    def move_row(self, source: int, target: int) -> None:
        """Give a wiped row the pages of another."""
        self._shared_columns = None
        self.lengths[target], self.lengths[source] = self.lengths[source], 0
        self._own[target], self._own[source] = self._own[source], []
        self._begins[target], self._begins[source] = self._begins[source], []
        self.table[target] = self.table[source]

    def wipe_row(self, row: int) -> None:
        """Zero and free what a row alone holds."""
        self._shared_columns = None
        pages, self._own[row] = self._own[row], []
        for beginning in self._begins[row]:
            beginning.rows -= 1
            if not (beginning.rows or beginning.kept):
                pages = pages + beginning.pages
        self._begins[row] = []
        if pages:
            self._give_back(pages)
        self.table[row].fill_(self.pages)
        self.lengths[row] = 0

    def read_row(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy a row's KV cache, each of shape (heads, tokens, head size)."""
        pages = self.pages_of(row, self.lengths[row])
        copies = []
        for layer in self._paged_layers:
            keys, values = (buffer.index_select(0, pages).transpose(0, 1) for buffer in layer.buffers)
            copies.append((keys, values))
        return copies

    def shared_by(self, row: int) -> Sequence[tuple[_Beginning, int]]:
        """Return the beginnings of a row, each with its tokens."""
        return [(beginning, len(beginning.pages)) for beginning in self._begins[row]]

    def write_row(
        self,
        row: int,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        shared: Sequence[tuple[_Beginning, int]] = (),
    ) -> None:
        """Write every layer's KV cache, (heads, tokens, head size), into a row."""
        tokens, begin = layers[0][0].shape[1], 0
        places: _Places = [], [], []
        self._shared_columns = None
        for beginning, count in shared:
            # One that was split, or computed again, has other pages.
            if self._beginnings.get(beginning.name) is not beginning or len(beginning.pages) != count:
                break
            self._read(row, beginning, begin, places)
            begin += count
        self.make_room(tokens)
        self._grow([row], [tokens], places)
        pages = self.pages_of(row, tokens)[begin:]
        for layer, (keys, values) in zip(self._paged_layers, layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            for buffer, states in zip(layer.buffers, (keys, values), strict=True):
                buffer.index_copy_(0, pages, states[:, begin:].to(buffer).transpose(0, 1))
        self.lengths[row] = tokens


def _extend(places: _Places, row: int, column: int, pages: Sequence[int]) -> None:
    for part, values in zip(
        places, ([row] * len(pages), range(column, column + len(pages)), pages), strict=True
    ):
        part.extend(values)
