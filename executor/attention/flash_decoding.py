"""Decode attention in Triton, which reads only the held columns.

Flash decoding: the columns of a row are split among programs, each keeps a running softmax over its part, and
a second kernel joins the parts. The number of parts is fixed per call. So a row's result depends neither on
other rows nor on the order of programs.

This module needs torch and triton when it is imported; with ``TRITON_INTERPRET=1`` set before, it runs on the
CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 64
"""Columns that a program reads at once: 16 KiB of bfloat16 keys."""

_WAVES = 4
"""Programs to start per multiprocessor, to hide reads."""

_LEAST_HEADS = 16
"""Rows of the smallest matrix product that tensor cores take."""


@triton.jit  # type: ignore[untyped-decorator]
def _attend_to_part(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    starts,
    lengths,
    table,
    sums,
    largest,
    weights,
    scale,
    table_row,
    query_row,
    query_head,
    key_row,
    key_head,
    key_column,
    value_row,
    value_head,
    value_column,
    parts,
    window: tl.constexpr,
    has_starts: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    group_padded: tl.constexpr,
    size: tl.constexpr,
    size_padded: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    key_value_head = tl.program_id(1)
    part = tl.program_id(2)
    end = tl.load(lengths + row).to(tl.int32)
    begin = tl.full((), 0, tl.int32)
    if has_starts:
        begin = tl.load(starts + row).to(tl.int32)
    if window > 0:
        begin = tl.maximum(begin, end - window)
    blocks = tl.cdiv(end - begin, columns)
    per_part = tl.cdiv(blocks, parts) * columns
    first = begin + part * per_part
    last = tl.minimum(first + per_part, end)

    heads = tl.arange(0, group_padded)
    sizes = tl.arange(0, size_padded)
    held_head = heads < group
    held_size = sizes < size
    head = key_value_head * group + heads
    asked = tl.load(
        query + row * query_row + head[:, None] * query_head + sizes[None, :],
        mask=held_head[:, None] & held_size[None, :],
        other=0.0,
    )
    key_base = keys + row * key_row + key_value_head.to(tl.int64) * key_head
    value_base = values + row * value_row + key_value_head.to(tl.int64) * value_head
    top = tl.full((group_padded,), float("-inf"), tl.float32)
    weight = tl.zeros((group_padded,), tl.float32)
    total = tl.zeros((group_padded, size_padded), tl.float32)
    for at in range(first, last, columns):
        column = at + tl.arange(0, columns)
        held = column < last
        inside = held[:, None] & held_size[None, :]
        place = column
        if block > 0:
            first_of_block = tl.load(table + row * table_row + column // block, mask=held, other=0) * block
            place = first_of_block + column % block
        key = tl.load(key_base + place[:, None] * key_column + sizes[None, :], mask=inside, other=0.0)
        value = tl.load(value_base + place[:, None] * value_column + sizes[None, :], mask=inside, other=0.0)
        if group_padded == 1:
            products = asked.to(tl.float32) * key.to(tl.float32)
            scores = tl.sum(products, axis=1)[None, :]
        else:
            scores = tl.dot(asked, tl.trans(key), input_precision="ieee")
        # Compiled by torch, a kernel gets its scale in double precision.
        scores = tl.where(held[None, :], (scores * scale).to(tl.float32), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shares = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        weight = weight * fade + tl.sum(shares, axis=1)
        if group_padded == 1:
            added = tl.sum(tl.trans(shares) * value.to(tl.float32), axis=0)[None, :]
        else:
            added = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        total = total * fade[:, None] + added
        top = higher

    place = (row * tl.num_programs(1) * group + head) * parts + part
    tl.store(
        sums + place[:, None] * size + sizes[None, :], total, mask=held_head[:, None] & held_size[None, :]
    )
    tl.store(largest + place, top, mask=held_head)
    tl.store(weights + place, weight, mask=held_head)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(  # type: ignore[no-untyped-def]
    sums,
    largest,
    weights,
    output,
    parts,
    parts_padded: tl.constexpr,
    size: tl.constexpr,
    size_padded: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, parts_padded)
    sizes = tl.arange(0, size_padded)
    held = part < parts
    top = tl.load(largest + place * parts + part, mask=held, other=float("-inf"))
    weight = tl.load(weights + place * parts + part, mask=held, other=0.0)
    total = tl.load(
        sums + (place * parts + part)[:, None] * size + sizes[None, :],
        mask=held[:, None] & (sizes < size)[None, :],
        other=0.0,
    )
    highest = tl.max(top, axis=0)
    # A row without columns: every part is empty, and what comes out is zero instead of 0 / 0.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    fade = tl.exp(top - highest)
    whole = tl.sum(fade * weight, axis=0)
    whole = tl.where(whole == 0.0, 1.0, whole)
    result = tl.sum(total * fade[:, None], axis=0) / whole
    tl.store(output + place * size + sizes, result.to(output.dtype.element_ty), mask=sizes < size)


def parts_for(rows: int, key_value_heads: int, columns: int, device: torch.device) -> int:
    """Return the number of programs for a row's columns."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, _WAVES * processors // (rows * key_value_heads))
    most = triton.cdiv(columns, _COLUMNS)
    return int(min(triton.next_power_of_2(wanted), triton.next_power_of_2(most)))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    blocks: tuple[torch.Tensor, int] | None = None,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """Attend from one token per row to the row's columns.

    Shapes: query and result (rows, heads, head size), keys, values (at least rows, key-value heads, columns,
        head size), lengths, starts (rows,), blocks (at least rows, blocks).
    """
    rows, heads, size = query.shape
    key_value_heads = keys.shape[1]
    if blocks is None:
        columns, table, block = keys.shape[2], lengths, 0
    else:
        table, block = blocks
        columns = table.shape[1] * block
        # In a pool every row begins at the first token, and each column is one token.
        keys, values = (states.transpose(0, 1)[None] for states in (keys, values))
    group = heads // key_value_heads
    if parts is None:
        parts = parts_for(rows, key_value_heads, columns, query.device)
    sums = torch.empty(rows, heads, parts, size, dtype=torch.float32, device=query.device)
    largest, weights = torch.empty(2, rows, heads, parts, dtype=torch.float32, device=query.device).unbind()
    output = torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
    size_padded = max(_LEAST_HEADS, triton.next_power_of_2(size))
    _attend_to_part[(rows, key_value_heads, parts)](
        query,
        keys,
        values,
        lengths if starts is None else starts,
        lengths,
        table,
        sums,
        largest,
        weights,
        size**-0.5 if scale is None else scale,
        table.stride(0),
        *query.stride()[:2],
        0 if block else keys.stride(0),
        *keys.stride()[1:3],
        0 if block else values.stride(0),
        *values.stride()[1:3],
        parts,
        window=window or 0,
        has_starts=starts is not None,
        block=block,
        group=group,
        group_padded=1 if group == 1 else max(_LEAST_HEADS, triton.next_power_of_2(group)),
        size=size,
        size_padded=size_padded,
        columns=_COLUMNS,
    )
    _join_parts[(rows * heads,)](
        sums,
        largest,
        weights,
        output,
        parts,
        parts_padded=triton.next_power_of_2(parts),
        size=size,
        size_padded=size_padded,
    )
    return output
