"""C++ functions for a decode step on a CPU.

They are attention, norms, rotary embeddings and wide products. They are built once a machine by its C++
compiler and kept in the user's cache. Without a compiler torch's own operations do the same, in more calls,
and with padded rows.

This module needs torch when it is imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .kernels import Held, agree, masked

_LOG = logging.getLogger(__name__)

_SOURCES = {
    # Sums in any order can be vectorized; tiles whose sums were reordered would not fit the registers.
    Path(__file__).with_name("host_kernels.cpp"): ("-fassociative-math",),
    Path(__file__).with_name("host_products.cpp"): (),
}
_HEADER = Path(__file__).with_name("host_tile.hpp")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    # NaN and infinity keep their meaning: a model's NaN must be seen.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
)
_BUILD_SECONDS = 120.0
NORM_KINDS = (0, 1)
"""Norms: rounded before the weight (Llama), times one plus it (Gemma)."""

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
_KV_NAMES = {(dtype, dtype): name for dtype, name in _NAMES.items()} | {
    (torch.float32, torch.bfloat16): "float32_bfloat16"
}
"""Functions by number formats of queries and KV cache."""


class UnfitError(Exception):
    """Error of functions that do not build, or compute wrongly."""


class SharedColumns(NamedTuple):
    """Groups of rows whose columns are the same pages.

    groups: Number of groups.
    numbers: Of each group its first column, the one after its last, its number of rows, and the rows; int64.
        A row's groups follow one another from column 0; each is part of the one before.
    """

    groups: int
    numbers: torch.Tensor


class Rows(NamedTuple):
    """Places of rows in a buffer, and of their coming tokens.

    positions: Column of each row's coming token, int64, shape (rows,), contiguous.
    table: Blocks of each row, int64, shape (rows, blocks); None if a row is contiguous.
    shared: Columns that several rows hold in the same pages, which are read once for all of them.
    """

    positions: torch.Tensor
    table: torch.Tensor | None = None
    block: int = 1
    shared: SharedColumns | None = None


class HostKernels:
    """The functions of a library that :func:`built` loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[tuple[Any, ...], Any] = {}
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        products = {dtype: _NAMES[dtype] for dtype in (torch.float32, torch.bfloat16)}
        takes: tuple[tuple[str, list[Any], dict[Any, str]], ...] = (
            ("attend", [pointer] * 8 + [ctypes.c_double], _KV_NAMES),
            ("keep", [pointer] * 5, _KV_NAMES),
            ("norm", [pointer] * 3 + [number, number, ctypes.c_double, number], _NAMES),
            ("rotate", [pointer] * 5, _NAMES),
            ("product", [pointer] * 5, products),
            ("halves", [pointer] * 5, products),
            ("pack", [pointer] * 2 + [number] * 2, products),
        )
        for name, arguments, formats in takes:
            for dtype, of in formats.items():
                function = getattr(library, f"{name}_{of}")
                function.argtypes, function.restype = arguments, number if name == "pack" else None
                self._functions[name, dtype] = function
        self._panel = int(library.panel_outputs())

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether there are functions for a number format."""
        return dtype in _NAMES

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: Rows,
        *,
        window: int | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Attend from one token a row to the row's columns.

        The coming token's column counts. Shapes: query and result (rows, heads, head size), keys, values
        (rows, key-value heads, columns, head size).
        """
        _refuse_mixed(query, keys, values)
        count, heads, size = query.shape
        query = query.contiguous()
        output = query.new_empty(count, heads, values.shape[-1])
        numbers = (
            count, heads, keys.shape[1], size, values.shape[-1], window or 0,
            *_blocks(rows), *_steps(keys, rows), *_steps(values, rows), torch.get_num_threads(),
            0 if rows.shared is None else rows.shared.groups,
        )  # fmt: skip
        self._functions["attend", (query.dtype, keys.dtype)](
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr(),
            rows.positions.data_ptr(), _pointer(rows.table),
            None if rows.shared is None else rows.shared.numbers.data_ptr(), _array(numbers),
            size**-0.5 if scale is None else scale,
        )  # fmt: skip
        return output

    def keep(self, states: torch.Tensor, buffer: torch.Tensor, rows: Rows) -> None:
        """Write each row's coming keys or values to its column.

        Shape: states (rows, heads, 1, head size).
        """
        _refuse_mixed(states, buffer)
        count, heads, _, size = states.shape
        numbers = (count, heads, size, *states.stride()[:2], *_blocks(rows), *_steps(buffer, rows))
        self._functions["keep", (states.dtype, buffer.dtype)](
            states.data_ptr(),
            buffer.data_ptr(),
            rows.positions.data_ptr(),
            _pointer(rows.table),
            _array(numbers),
        )

    def norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: int) -> torch.Tensor:
        """Return root mean square norms; ``kind`` is of :data:`NORM_KINDS`."""
        inputs = inputs.contiguous()
        output = torch.empty_like(inputs)
        size = inputs.shape[-1]
        self._functions["norm", inputs.dtype](
            inputs.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            inputs.numel() // size,
            size,
            epsilon,
            kind,
        )
        return output

    def rotate(self, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotate states (rows, heads, 1, size) by angles (rows, 1, size)."""
        rows, heads, _, size = states.shape
        output = states.new_empty(states.shape)
        numbers = (rows, heads, size, *states.stride()[:2], cosines.stride(0) if len(cosines) > 1 else 0)
        self._functions["rotate", states.dtype](
            states.data_ptr(), output.data_ptr(), cosines.data_ptr(), sines.data_ptr(), _array(numbers)
        )
        return output

    def product(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return float32 inputs times a weight, plus a bias.

        The weight (outputs, inputs) is float32 or bfloat16 and contiguous; sums are float32.
        """
        size, count = weight.shape[1], weight.shape[0]
        if inputs.dtype is not torch.float32 or inputs.shape[-1] != size:
            raise TypeError(
                f"inputs are {inputs.dtype} of shape {tuple(inputs.shape)}, not float32 of {size}"
            )
        inputs = inputs.contiguous()
        output = inputs.new_empty(*inputs.shape[:-1], count)
        numbers = (inputs.numel() // size, size, count, torch.get_num_threads())
        self._functions["product", weight.dtype](
            inputs.data_ptr(), weight.data_ptr(), _pointer(bias), output.data_ptr(), _array(numbers)
        )
        return output

    def pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return a weight (outputs, inputs) in halves; None if bfloat16 does not hold it exactly."""
        count, size = weight.shape
        weight = weight.contiguous()
        packed = torch.empty(-(-count // self._panel), -(-size // 2), self._panel, dtype=torch.int32)
        lost = self._functions["pack", weight.dtype](weight.data_ptr(), packed.data_ptr(), size, count)
        return None if lost else packed

    def times_halves(
        self, inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, count: int
    ) -> torch.Tensor:
        """Return inputs times a weight of :meth:`pack`, plus a bias; sums are float32."""
        size = inputs.shape[-1]
        if (size + 1) // 2 != packed.shape[1]:
            raise TypeError(f"inputs have {size} numbers, and the weight {2 * packed.shape[1]}")
        inputs, bias = inputs.contiguous(), None if bias is None else bias.float()
        output = inputs.new_empty(*inputs.shape[:-1], count)
        numbers = (inputs.numel() // size, size, count, torch.get_num_threads())
        self._functions["halves", inputs.dtype](
            inputs.data_ptr(), packed.data_ptr(), _pointer(bias), output.data_ptr(), _array(numbers)
        )
        return output


def _refuse_mixed(own: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Refuse number formats that no function takes together."""
    tensors = (own, *tensors)
    mixed = any(tensor.dtype is not tensors[1].dtype for tensor in tensors[2:])
    if mixed or (own.dtype, tensors[1].dtype) not in _KV_NAMES:
        raise TypeError(
            f"tensors of one number format are needed, got {[operand.dtype for operand in tensors]}"
        )


def _array(numbers: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _blocks(rows: Rows) -> tuple[int, int]:
    return (0 if rows.table is None else rows.table.stride(0)), rows.block


def _steps(buffer: torch.Tensor, rows: Rows) -> tuple[int, int, int]:
    """Return the strides of a row, a head and a column."""
    if rows.table is None:
        return buffer.stride(0), buffer.stride(1), buffer.stride(2)
    return 0, buffer.stride(1), buffer.stride(0)


@cache
def built() -> HostKernels | None:
    """Return the functions, built and checked here, or None."""
    program = compiler()
    if program is None:
        _LOG.info("decode steps on this CPU use torch's own operations: there is no C++ compiler")
        return None
    try:
        kernels = HostKernels(ctypes.CDLL(str(_library(program))))
        for dtype in _NAMES:
            _check(kernels, dtype)
    except (OSError, subprocess.SubprocessError, UnfitError) as error:
        _LOG.warning("decode steps on this CPU use torch's own operations, which are slower: %s", error)
        return None
    return kernels


def compiler() -> str | None:
    """Return the machine's C++ compiler, ``$CXX`` first, or None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def _library(compiler: str) -> Path:
    # Torch's own threads, where it brings them along: a second pool would fight with them.
    openmp = next(Path(torch.__file__).with_name("lib").glob("libgomp*.so*"), None)
    threads = [] if openmp is None else [str(openmp), f"-Wl,-rpath,{openmp.parent}"]
    source = b"\0".join(path.read_bytes() for path in (*_SOURCES, _HEADER))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS)
    flags = " ".join((*_FLAGS, *sum(_SOURCES.values(), ()), *threads))
    parts = (source, version.stdout, flags.encode(), machine_name().encode())
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchbound"
    library = home / f"host_kernels-{name}.so"
    if library.exists():
        return library
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _LOG.warning("compiling functions for this processor, once: up to a minute")
    with tempfile.TemporaryDirectory(dir=home) as folder:
        compiled, linked = [f"{folder}/{path.stem}.o" for path in _SOURCES], f"{folder}/kernels.so"
        steps = [
            [*_FLAGS, *own, "-c", str(path), "-o", to]
            for (path, own), to in zip(_SOURCES.items(), compiled, strict=True)
        ]
        link = ["-shared", *compiled, *(threads or ["-fopenmp"]), "-o", linked]
        for arguments in (*steps, link):
            built_ = subprocess.run(
                [compiler, *arguments], capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
            )
            if built_.returncode:
                raise UnfitError(f"{compiler} failed: {built_.stderr.strip()[-500:]}")
        os.replace(linked, library)
    return library


def machine_name() -> str:
    """Return a name that separates machines with a shared cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(names)}))


def _check(kernels: HostKernels, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    positions = torch.tensor([0, 4, 70])
    query, keys, values = random(3, 4, 32), random(3, 2, 80, 32), random(3, 2, 80, 32)
    for window in (None, 5):
        held = Held(keys, values, positions + 1, window, 0.3)
        got = kernels.attend(query, keys, values, Rows(positions), window=window, scale=0.3)
        if not agree(got, masked(query, held)):
            raise UnfitError(f"attention in {dtype} is wrong")
    if ("product", dtype) in kernels._functions:
        for rows, size in ((1, 40), (9, 64)):
            weight, inputs = random(37, size), random(rows, size).float()
            expected, halves = inputs @ weight.float().T, kernels.pack(weight.bfloat16())
            own = [kernels.product(inputs, weight, None)]
            if dtype is torch.bfloat16:
                own.append(kernels.times_halves(inputs, halves, None, 37))  # type: ignore[arg-type]
            if not all(agree(output, expected) for output in own):
                raise UnfitError(f"products with weights in {dtype} are wrong")
