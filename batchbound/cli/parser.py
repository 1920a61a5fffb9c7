"""
The parser of the command line: a mistake costs two lines, and the word that was meant is proposed.

It stands on argparse and, for completion, on shtab. A trial of cyclopts on ``plan`` proposed and completed no
more, and importing it (60 ms; Typer 50 ms) takes longer than the whole ``--help`` (40 ms).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An :class:`argparse.ArgumentParser` whose errors are a sentence and a hint instead of the usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with status 2."""
        choice = re.match(
            r"argument (.+?): invalid choice: '(.*?)' \(choose from (.*)\)$", message, re.DOTALL
        )
        if choice is not None:
            what = "command" if choice[1] == "COMMAND" else choice[1]
            known = [word.strip().strip("'") for word in choice[3].split(",")]
            message = f"{what}: there is no {choice[2]!r}{_proposed(choice[2], known) or _listed(known)}"
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        message = message.replace("expected one argument", "a value is missing after it")
        message = re.sub(r"invalid float value: ('.*')", r"\1 is not a number", message)
        needed = message.removeprefix("the following arguments are required: ")
        if needed != message:
            message = f"missing: {', '.join(dict.fromkeys(needed.split(', ')))}"
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the arguments; an option that there is not is answered with the nearest one there is."""
        words = list(sys.argv[1:] if args is None else args)
        unread = next((word for word in words if _is_half(word)), None)
        if unread is not None:
            self.error(f"{unread!r} is not UTF-8 text; rename the file, or set LC_ALL to a UTF-8 locale")
        parsed, rest = self.parse_known_args(words, namespace)
        if not rest:
            return parsed
        chosen = self._chosen(words)
        wrong = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
        shown = [action for action in chosen._actions if action.help != argparse.SUPPRESS]
        known = [name for action in shown for name in action.option_strings if name.startswith("--")]
        option = wrong if wrong.startswith("-") else f"--{wrong}"
        if words[0] == wrong and wrong in ("-v", "--verbose", "--quiet"):
            return chosen.error(f"{wrong} comes after the command's name")
        said = f"there is no option {wrong}" if option == wrong else f"{wrong!r} is one word too many"
        return chosen.error(f"{said}{_proposed(option, known)}")

    def _chosen(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the command that the words name, or of its own subcommand."""
        found: argparse.ArgumentParser = self
        for word in words:
            for action in found._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    found = action.choices[word]
        return found


def _is_half(word: str) -> bool:
    """Return whether a word of the shell has bytes that are no text, which no file of ours can hold."""
    return any("\ud800" <= letter <= "\udfff" for letter in word)


def _proposed(word: str, known: Iterable[str]) -> str:
    names = list(known)
    begun = [name for name in names if len(word) > 2 and name.startswith(word)]
    near = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.66)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _listed(known: Sequence[str]) -> str:
    return f"; there are {', '.join(known)}"
