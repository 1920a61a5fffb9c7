"""Completion of commands, options and files by a shell's TAB key: scripts that shtab writes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

SHELLS = ("bash", "zsh", "fish")

_FILES = re.compile(r"\b(FILE|PATH|PLAN|RUN|TRACE|PROFILE|PROMPTS|COMPLETIONS|MODEL)\b")
"""What options and words are called whose values are files or folders."""


class PrintCompletion(argparse.Action):
    """The option that prints a shell's script and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script of the shell that was named."""
        if values not in SHELLS:
            parser.error(f"there is no script for {values!r}; there are {', '.join(SHELLS)}")
        sys.stdout.write(completion_script(str(values)))
        parser.exit()


def completion_script(shell: str) -> str:
    """
    Return what makes one of :data:`SHELLS` complete this program's commands and options.

    Nothing of ours runs when the key is pressed: the script holds every word.
    """
    import shtab

    from . import whole_parser

    parser = whole_parser()
    for action in _actions(parser):
        names = (
            " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or action.dest
        )
        if "FOLDER" in names:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.nargs != 0 and not action.choices and _FILES.search(names):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every option and word of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                yield from _actions(command)
        else:
            yield action
