"""Folder whose content is replaced atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .disk import InputError

_CURRENT = "current"
_VERSION = "version-"


def current_version(path: str | os.PathLike[str]) -> Path:
    """Return the current version's folder, or the folder itself."""
    link = Path(path) / _CURRENT
    if not link.is_dir():
        return Path(path)
    version = link.resolve()
    if version.parent != Path(path).resolve():
        hint = f"Remove it, or point it at a {_VERSION}... folder next to it."
        raise InputError(f"leads out of its folder, to {version}", file=link, hint=hint)
    return version


@contextlib.contextmanager
def new_version(path: str | os.PathLike[str], shown: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder that atomically becomes the content of ``path``.

    Replacing a link is one step, so a process killed at any moment leaves the old or the new version.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            fresh = Path(tempfile.mkdtemp(prefix=_VERSION, dir=folder))
            try:
                fresh.chmod(folder.stat().st_mode)
                yield fresh
                for name in shown:
                    _link(folder / name, f"{_CURRENT}/{name}")
                _link(folder / _CURRENT, fresh.name)
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
            for version in folder.glob(f"{_VERSION}*"):
                if version != fresh:
                    shutil.rmtree(version)
    except OSError as error:
        hint = "Name another folder, or check its permissions and the free space."
        raise InputError(f"cannot be written ({error.strerror})", file=path, hint=hint) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _link(path: Path, target: str) -> None:
    if path.is_symlink() and os.readlink(path) == target:
        return
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    os.replace(beside, path)
