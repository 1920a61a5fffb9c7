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
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """
    An :class:`argparse.ArgumentParser` whose errors are a sentence and a hint instead of the usage.

    Of an option that is given twice the first value would be lost: it is refused, except where it is made to
    take several. No word is empty: that is a variable of the shell which is not set.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: dict[str, str] = {}
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with status 2."""
        choice = re.match(
            r"argument (.+?): invalid choice: '(.*?)' \(choose from (.*)\)$", message, re.DOTALL
        )
        if choice is not None:
            what = "command" if choice[1] == "COMMAND" else choice[1]
            known = [word.strip().strip("'") for word in choice[3].split(",")]
            meant = _proposed(choice[2], known) or f"; there are {', '.join(known)}"
            message = f"{what}: there is no {choice[2]!r}{meant}"
        message = re.sub(r"^argument ([^:]+): ", r"\1: ", message)
        message = message.replace("expected one argument", "a value is missing after it")
        message = re.sub(r"invalid float value: ('.*')", r"\1 is not a number", message)
        message = re.sub(r"invalid int value: ('.*')", r"\1 is not a whole number", message)
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

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the arguments and the words that are none."""
        self._given.clear()
        return super().parse_known_args(args, namespace)

    def take(self, dest: str, option: str) -> None:
        """
        Take note of an option; one that has a value already is an error.

        Parameters
        ----------
        dest
            What its value is kept as.
        option
            As it was typed.
        """
        before = self._given.get(dest)
        if before is not None:
            said = "is given twice" if before == option else f"is {before}, which is given as well"
            self.error(f"{option} {said}; leave one of them out")
        self._given[dest] = option

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "" in arg_strings and not isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(action, "its value is empty")
        return super()._get_values(action, arg_strings)

    def _chosen(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the command that the words name, or of its own subcommand."""
        found: argparse.ArgumentParser = self
        for word in words:
            for action in found._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    found = action.choices[word]
        return found


class _StoreOnce(argparse._StoreAction):
    """What keeps the value of an option, of which there may be one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Keep the value."""
        if option_string is not None and isinstance(parser, Parser):
            parser.take(self.dest, option_string)
        super().__call__(parser, namespace, values, option_string)


def _is_half(word: str) -> bool:
    """Return whether a word of the shell has bytes that are no text, which no file of ours can hold."""
    return any("\ud800" <= letter <= "\udfff" for letter in word)


def _proposed(word: str, known: Iterable[str]) -> str:
    names = list(known)
    begun = [name for name in names if len(word) > 2 and name.startswith(word)]
    near = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.66)
    return f"; did you mean {' or '.join(near)}?" if near else ""
