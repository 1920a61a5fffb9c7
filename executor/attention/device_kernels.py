"""Triton kernels for the work between matrix products of a decode step.

This module needs torch and triton when it is imported; with ``TRITON_INTERPRET=1`` set before, it runs on the
CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    inputs, weight, output, size, epsilon, kind: tl.constexpr, size_padded: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, size_padded)
    held = at < size
    states = tl.load(inputs + row + at, mask=held, other=0.0)
    wide = states.to(tl.float32)
    # Compiled by torch, a kernel gets epsilon in double precision.
    scaled = wide * (1.0 / tl.sqrt((tl.sum(wide * wide, axis=0) / size + epsilon).to(tl.float32)))
    factors = tl.load(weight + at, mask=held, other=0.0).to(tl.float32)
    result = scaled.to(states.dtype).to(tl.float32) * factors if kind == 0 else scaled * (1.0 + factors)
    tl.store(output + row + at, result.to(states.dtype), mask=held)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    states,
    cosines,
    sines,
    output,
    state_row,
    state_head,
    angle_row,
    size: tl.constexpr,
    size_padded: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, size_padded)
    held = at < size
    # The half that a number is turned with, negative for the first.
    other = tl.where(at < size // 2, at + size // 2, at - size // 2)
    base = states + row * state_row + head * state_head
    own = tl.load(base + at, mask=held, other=0.0)
    turned = tl.load(base + other, mask=held, other=0.0).to(tl.float32)
    turned = tl.where(at < size // 2, -turned, turned)
    cosine = tl.load(cosines + row * angle_row + at, mask=held, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * angle_row + at, mask=held, other=0.0).to(tl.float32)
    # Each product is rounded as torch's own are.
    result = (own.to(tl.float32) * cosine).to(own.dtype).to(tl.float32)
    result += (turned * sine).to(own.dtype).to(tl.float32)
    place = (row * tl.num_programs(1) + head) * size
    tl.store(output + place + at, result.to(own.dtype), mask=held)


class DeviceKernels:
    """Norms and rotary embeddings in a launch each."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether there are kernels for a number format."""
        return dtype in _DTYPES

    def norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: int) -> torch.Tensor:
        """Return root mean square norms; ``kind`` is of ``NORM_KINDS``."""
        inputs = inputs.contiguous()
        output = torch.empty_like(inputs)
        size = inputs.shape[-1]
        _norm[(inputs.numel() // size,)](
            inputs, weight, output, size, epsilon, kind=kind, size_padded=triton.next_power_of_2(size)
        )
        return output

    def rotate(self, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotate states (rows, heads, 1, size) by angles (rows, 1, size)."""
        rows, heads, _, size = states.shape
        output = states.new_empty(states.shape)
        _rotate[(rows, heads)](
            states,
            cosines,
            sines,
            output,
            *states.stride()[:2],
            cosines.stride(0) if len(cosines) > 1 else 0,
            size=size,
            size_padded=triton.next_power_of_2(size),
        )
        return output
