"""Linear models as LP files."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import highspy

from ...data.files.disk import InputError, atomic_write
from ...models.formulations.linear_files import write_mps
from ...models.formulations.linear_model import LinearModel
from ...models.programme import SilentHighs


def write_lp(model: LinearModel, path: str | os.PathLike[str]) -> None:
    """Write the model as an LP file, by HiGHS.

    The format has no brackets in names: the row ``eq3[0,1]`` is called ``eq3_0_1``.

    Raises InputError if the file cannot be written.
    """
    renamed = replace(
        model,
        column_names=_without_brackets(model.column_names),
        row_names=_without_brackets(model.row_names),
    )
    with tempfile.TemporaryDirectory() as folder:
        mps, lp = Path(folder) / "model.mps", Path(folder) / "model.lp"
        write_mps(renamed, mps)
        solver = SilentHighs()
        for status in (solver.readModel(str(mps)), solver.writeModel(str(lp))):
            if status == highspy.HighsStatus.kError:
                raise InputError("HiGHS does not write this model as LP", file=path, hint="Name a .mps file.")
        with atomic_write(path) as stream:
            stream.write(lp.read_text(encoding="utf-8"))


def _without_brackets(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(re.sub(r"\W+", "_", name).strip("_") for name in names)
