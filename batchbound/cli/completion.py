"""Shell scripts that complete commands, options and files, written by shtab."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

SHELLS = ("bash", "zsh", "fish")

_FILES = re.compile(r"\b(FILE|PATH|PLAN|RUN|TRACE|PROFILE|PROMPTS|COMPLETIONS|MODEL)\b")
"""Metavars of values that are files or folders."""


class PrintCompletion(argparse.Action):
    """Option that prints a shell's script and exits; ``const`` returns the parser of all commands."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script of the named shell."""
        if values not in SHELLS:
            parser.error(f"there is no script for {values!r}; there are {', '.join(SHELLS)}")
        assert callable(self.const)
        sys.stdout.write(completion_script(self.const(), str(values)))
        parser.exit()


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of a shell.

    The script holds every word, so completion does not start this program.
    """
    import shtab

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
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                yield from _actions(command)
        else:
            yield action
