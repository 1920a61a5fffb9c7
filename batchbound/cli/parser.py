"""Parser of the command line, with everyday options first.

Its errors take two lines and propose the right word. It extends argparse, with shtab for completion.
cyclopts was tried on ``plan``: it completes and proposes no more words, and its import (60 ms; Typer 50 ms)
takes longer than the whole ``--help`` (40 ms).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ..screen.streams import escaped

if TYPE_CHECKING:
    from ..options.option import Field, Options, Record

SHELLS = ("bash", "zsh", "fish")

_FILES = re.compile(r"\b(FILE|PATH|PLAN|RUN|TRACE|PROFILE|PROMPTS|COMPLETIONS|MODEL)\b")
"""Metavars of values that are files or folders."""


class Parser(argparse.ArgumentParser):
    """Parser whose errors are a sentence and a hint.

    It refuses an option given twice, unless the option takes several values. It refuses empty words, which
    come from unset shell variables.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.everyday: list[argparse.Action] = []
        """Options of ``--help``; ``--help all`` prints the others too."""
        self.sections: Mapping[str, Sequence[str]] = {}
        """Commands under each title of the help."""
        super().__init__(*args, **{**kwargs, "add_help": False})
        self._given: dict[str, str] = {}
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)
        self.everyday.append(self.add_argument("-h", "--help", action=_Help))

    def add_options(self, record: type[Options]) -> None:
        """Add the options of a record, in the groups of its classes."""
        from ..options.option import fields_of

        groups: dict[str, argparse._ActionsContainer] = {"": self}
        for field in fields_of(record):
            if field.title not in groups:
                groups[field.title] = self.add_argument_group(field.title, field.about or None)
            action = _add(groups[field.title], field)
            if field.option.everyday:
                self.everyday.append(action)

    def add_common(self, version: str = "", completion: Callable[[], Parser] | None = None) -> None:
        """Add what all commands have; for the program, its version and the scripts of shells."""
        if completion is None:
            said = self.add_mutually_exclusive_group()
            said.add_argument(
                "--quiet", action="store_true", help="print no progress and no remarks on stderr"
            )
            more = "print on stderr what is chosen and why"
            said.add_argument("-v", "--verbose", action="store_true", help=more)
            table = f"TOML file with options in its table [{self.prog.split()[1]}]; typed ones come first"
            self.add_argument("--options", metavar="FILE", dest="options_file", help=table)
            return
        self.add_argument("--version", action="version", version=version)
        self.add_argument(
            "--print-completion",
            action=PrintCompletion,
            const=completion,
            metavar="SHELL",
            help="print the completion script of a shell: bash, zsh or fish"
            " (`batchbound --print-completion bash >> ~/.bashrc`)",
        )

    def format_help(self, *, every: bool = False) -> str:
        """Return the help of the everyday options or of all."""
        some = not every and len(self.everyday) > 1
        formatter = self._get_formatter()
        words = [_named(action) for action in self._get_positional_actions()]
        formatter.add_usage(f"{self.prog} {' '.join([*words, '[OPTION ...]'])}", (), ())
        formatter.add_text(self.description)
        for title, names in self.sections.items():
            formatter.start_section(title)
            formatter.add_arguments([each for each in self._commands() if each.metavar in names])
            formatter.end_section()
        for group in self._action_groups:
            shown = [action for action in group._group_actions if not some or action in self.everyday]
            shown += [action for action in group._group_actions if some and not action.option_strings]
            if self.sections:
                shown = [each for each in shown if not isinstance(each, argparse._SubParsersAction)]
            if shown:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(shown)
                formatter.end_section()
        if some:
            formatter.add_text(f"All options: {self.prog} --help all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _commands(self) -> list[argparse.Action]:
        parents = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        return [command for parent in parents for command in parent._get_subactions()]

    def error(self, message: str) -> NoReturn:
        """Print the error and the help command, and exit with status 2."""
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
        both = r"^(.*): not allowed with argument (.*)$"
        message = re.sub(both, r"\1 has no effect with \2; leave one of them out", message)
        message = re.sub(r"invalid float value: ('.*')", r"\1 is not a number", message)
        message = re.sub(r"invalid int value: ('.*')", r"\1 is not a whole number", message)
        needed = message.removeprefix("the following arguments are required: ")
        if needed != message:
            message = f"missing: {', '.join(dict.fromkeys(needed.split(', ')))}"
        self.exit(2, f"{self.prog}: {escaped(message)}\nSee `{self.prog} --help`.\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the words; propose the nearest option for an unknown one."""
        words = list(sys.argv[1:] if args is None else args)
        unread = next((word for word in words if _is_half(word)), None)
        if unread is not None:
            self.error(f"{unread!r} is not UTF-8 text; rename the file, or set LC_ALL to a UTF-8 locale")
        parsed, rest = self.parse_known_args(words, namespace)
        if not rest:
            return parsed
        chosen = self.chosen(words)
        wrong = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
        shown = [action for action in chosen._actions if action.help != argparse.SUPPRESS]
        known = [name for action in shown for name in action.option_strings if name.startswith("--")]
        option = wrong if wrong.startswith("-") else f"--{wrong}"
        if words[0] == wrong and wrong in ("-v", "--verbose", "--quiet"):
            return chosen.error(f"{wrong} comes after the command's name")
        wrong_word = f"there is no option {wrong}" if option == wrong else f"{wrong!r} is one word too many"
        return chosen.error(f"{wrong_word}{_proposed(option, known)}")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the arguments and the remaining words."""
        self._given.clear()
        return super().parse_known_args(args, namespace)

    def take(self, dest: str, option: str) -> None:
        """Record a typed option; refuse a second value."""
        before = self._given.get(dest)
        if before is not None:
            wrong = "is given twice" if before == option else f"is {before}, which is given as well"
            self.error(f"{option} {wrong}; leave one of them out")
        self._given[dest] = option

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "" in arg_strings and not isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(action, "its value is empty")
        return super()._get_values(action, arg_strings)

    def chosen(self, words: Sequence[str]) -> Parser:
        """Return the parser of the command that the words name."""
        found = self
        for word in words:
            for action in found._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    found = action.choices[word]
        return found


class _Help(argparse.Action):
    """Action that prints the everyday options, or ``all``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        more = "print this help, or with 'all' the help of every option"
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", metavar="all", help=more)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_help(every=values == "all"))
        parser.exit()


class _StoreOnce(argparse._StoreAction):
    """Action of an option that may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string is not None and isinstance(parser, Parser):
            parser.take(self.dest, option_string)
        super().__call__(parser, namespace, values, option_string)


def _add(container: argparse._ActionsContainer, field: Field) -> argparse.Action:
    """Add an option of a record, with its former names."""
    option, required = field.option, field.default is MISSING
    how: dict[str, Any] = {"help": option.help}
    if field.kind is bool:
        how["action"] = "store_true"
    else:
        how |= {"type": partial(_value, field), "metavar": option.metavar or field.bounds.metavar}
        if field.choices and field.kind is str:
            how |= {"choices": field.choices, "metavar": option.metavar}
        if option.words == "append":
            how["action"] = "append"
        elif option.words is not None:
            how |= {"nargs": option.words, "action": None if option.positional else "extend"}
    if option.positional:
        optional: dict[str, Any] = {} if required or "nargs" in how else {"nargs": "?"}
        return container.add_argument(
            field.name, default=None if required else field.default, **how, **optional
        )
    names = [name for name in (option.short, field.flag) if name is not None]
    default = None if required or field.several or field.kind is Mapping else field.default
    action = container.add_argument(*names, dest=field.name, default=default, required=required, **how)
    for older in option.older:
        container.add_argument(older, dest=field.name, **{**how, "help": argparse.SUPPRESS})
    return action


def _value(field: Field, text: str) -> Any:
    try:
        return field.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def record_of(record: type[Record], args: argparse.Namespace) -> Record:
    """Return the record of what was typed; raise InputError if an option has no effect."""
    from ..options.option import fields_of, table_of

    file, values = getattr(args, "options_file", None), dict[str, Any]()
    stated = {} if file is None else table_of(file, args.command, record)
    for field in fields_of(record):
        value = getattr(args, field.name)
        if field.name in stated and value in (None, False, field.default):
            values[field.name] = stated[field.name]
            continue
        if field.kind is Mapping:
            values[field.name] = _named_once(field, value or ())
        elif field.several:
            values[field.name] = field.default if value is None else tuple(value)
        else:
            values[field.name] = value
    return record(**values)


def _named_once(field: Field, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        from ..data.files.disk import InputError

        raise InputError(f"{field.flag}: {twice!r} is given twice", hint="Leave one of them out.")
    return dict(pairs)


def _is_half(word: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in word)


def _proposed(word: str, known: Iterable[str]) -> str:
    names = list(known)
    begun = [name for name in names if len(word) > 2 and name.startswith(word)]
    near = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.66)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _named(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return f"[{name}]" if action.nargs in ("?", "*") else name


class PrintCompletion(argparse.Action):
    """Option that prints a shell's script and exits; ``const`` returns the parser of all commands."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
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
