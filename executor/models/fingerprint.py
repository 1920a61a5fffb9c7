"""Fingerprint of a model or tokenizer, to detect changed files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...data.files.disk import InputError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_SETTINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_PIECE = 4096
_PIECES = 16
"""Pieces to read of each tensor."""
_LONGEST_HEADER = 100 << 20
"""Most bytes of a safetensors file's header."""


def files_fingerprint(spec: str, *, weights: bool = True) -> str:
    """Return a fingerprint of the files of a model or tokenizer.

    Settings and tokenizer files count with every byte. Weights count with their sizes; each tensor adds its
    name, type, shape and 64 KiB spread evenly over its values. This costs some megabytes per billion
    parameters. It misses a single changed value, but no training step, merged adapter or other checkpoint.
    """
    folder = Path(spec)
    if not folder.is_dir():
        return "" if spec == "bytes" or spec.startswith("tiny:") else _hub_commit(spec)
    digest = hashlib.sha256()
    endings = _SETTINGS + (_WEIGHTS if weights else ())
    for path in sorted(path for path in folder.iterdir() if path.suffix in endings and path.is_file()):
        try:
            with path.open("rb") as stream:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                for piece in _pieces(path, stream):
                    digest.update(piece)
        except OSError as error:
            raise InputError(
                f"cannot be read ({error.strerror})", file=path, hint="Check the file."
            ) from None
    base = _base_of(folder / "adapter_config.json")
    if base and weights:
        digest.update(files_fingerprint(base).encode())
    return digest.hexdigest()[:32]


def _pieces(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    if path.suffix not in _WEIGHTS:
        yield stream.read()
        return
    spans = _tensors(stream) if path.suffix == ".safetensors" else None
    size = os.fstat(stream.fileno()).st_size
    if spans is None:
        # A format without a header gets as many pieces as a model may have tensors.
        spans, pieces = [(0, size)], 64 * _PIECES
    else:
        pieces = _PIECES
        yield _read(stream, 0, spans[0][0] if spans else size)
    for start, end in spans:
        step = max(_PIECE, (end - start) // pieces)
        for at in range(start, end, step):
            yield _read(stream, at, min(_PIECE, end - at))


def _tensors(stream: BinaryIO) -> list[tuple[int, int]] | None:
    """Return the range of each tensor in a safetensors file."""
    try:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _LONGEST_HEADER:
            return None
        header = json.loads(stream.read(length))
        spans = [value["data_offsets"] for name, value in header.items() if name != "__metadata__"]
        return sorted((8 + length + int(start), 8 + length + int(end)) for start, end in spans)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _read(stream: BinaryIO, at: int, count: int) -> bytes:
    stream.seek(at)
    return stream.read(count)


def _base_of(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        base = json.loads(config.read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        return None
    # A directory that names itself would cause an endless loop.
    return base if isinstance(base, str) and Path(base).resolve() != config.parent.resolve() else None


def _hub_commit(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return Path(cached).parent.name[:32]
    return ""
