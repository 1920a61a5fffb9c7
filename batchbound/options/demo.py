"""Options of ``batchbound demo``."""

from __future__ import annotations

from dataclasses import dataclass

from .option import Options, PathText, option


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """Folder of the files."""

    output: PathText = option(
        "demo-output",
        "folder of the files (default %(default)s)",
        metavar="FOLDER",
        short="-o",
        writes=True,
    )
    overwrite: bool = option(False, "replace the files of an earlier demo")
