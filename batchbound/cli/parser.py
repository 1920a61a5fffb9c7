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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any, NoReturn

from ..options.option import Field, Options, Record, fields_of
from .streams import escaped


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that are refused when they have no effect.

    They have none if no option of ``without`` is given, if one of ``conflicts`` is, or if ``when`` returns
    true. An option counts as given if its value is not its default.
    """

    options: tuple[str, ...]
    """Names of options, or name and value, as ``--slots auto``."""

    without: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    when: Callable[[argparse.Namespace], object] | None = None
    where: str = ""
    """Description of the case; {NAME} stands for that option's value."""

    hint: str = ""

    def applies(self, parser: Parser, args: argparse.Namespace) -> tuple[str, str] | None:
        """Return the case and hint if these options have no effect."""
        both = next((name for name in self.conflicts if parser.is_given(args, name)), None)
        if both is not None:
            return f"with {both}", "Leave one of them out."
        if self.without and not any(parser.is_given(args, name) for name in self.without):
            return f"without {_any_of(self.without)}", f"Give {self.without[0]} as well, or leave it out."
        if self.when is not None and self.when(args):
            return self.where.format_map(vars(args)), "Leave it out."
        return None


class _Declaring(argparse._ActionsContainer):
    """Container that marks everyday options and records what options need."""

    everyday: list[argparse.Action]
    """Options of ``--help``; a parser and its groups share the list."""

    rules: list[Rule]

    def add_argument(
        self,
        *names: str,
        everyday: bool = False,
        needs: Sequence[str] = (),
        excludes: Sequence[str] = (),
        **how: Any,
    ) -> argparse.Action:
        """Add an option, which needs some options and excludes others."""
        action = super().add_argument(*names, **how)
        if everyday:
            self.everyday.append(action)
        if needs:
            self.rules.append(Rule(names[-1:], without=tuple(needs)))
        if excludes:
            self.rules.append(Rule(names[-1:], conflicts=tuple(excludes)))
        return action

    def add_argument_group(self, *args: Any, **how: Any) -> Group:
        group = Group(self, *args, **how)
        self._action_groups.append(group)
        return group

    def add_mutually_exclusive_group(self, **how: Any) -> Exclusive:
        group = Exclusive(self, **how)
        self._mutually_exclusive_groups.append(group)
        return group

    def _share(self, container: _Declaring) -> None:
        self.everyday, self.rules = container.everyday, container.rules


class Group(_Declaring, argparse._ArgumentGroup):
    """Group of options with a title."""

    def __init__(self, container: _Declaring, *args: Any, **how: Any) -> None:
        self._share(container)
        super().__init__(container, *args, **how)


class Exclusive(_Declaring, argparse._MutuallyExclusiveGroup):
    """Group of mutually exclusive options."""

    def __init__(self, container: _Declaring, **how: Any) -> None:
        self._share(container)
        super().__init__(container, **how)


class Parser(_Declaring, argparse.ArgumentParser):
    """Parser whose errors are a sentence and a hint.

    It refuses an option given twice, unless the option takes several values. It refuses empty words, which
    come from unset shell variables.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.everyday, self.rules = [], []
        self.sections: Mapping[str, Sequence[str]] = {}
        """Commands under each title of the help."""
        super().__init__(*args, **{**kwargs, "add_help": False})
        self._given: dict[str, str] = {}
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)
        self.add_argument("-h", "--help", action=_Help, everyday=True)

    def add_options(self, record: type[Options]) -> None:
        """Add the options of a record, in the groups of its classes."""
        groups: dict[str, _Declaring] = {"": self}
        for field in fields_of(record):
            if field.title not in groups:
                groups[field.title] = self.add_argument_group(field.title, field.about or None)
            _add(groups[field.title], field)

    def names_since(self, first: int = 0, *, but: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the options from ``first`` on, without some names."""
        left_out = {*but, argparse.SUPPRESS}
        added = [action for action in self._actions[first:] if action.dest not in left_out]
        return tuple(action.option_strings[-1] for action in added if action.option_strings)

    def is_given(self, args: argparse.Namespace, option: str) -> bool:
        """Return whether an option's value differs from its default."""
        action = self._option_string_actions[option]
        value = getattr(args, action.dest)
        return value is not None and value is not False and value != action.default

    def refuse_without_effect(self, args: argparse.Namespace) -> None:
        """Raise InputError for an option without effect."""
        from ..data.files.disk import InputError

        for rule in self.rules:
            option = next((name for name in rule.options if self.is_given(args, name.split()[0])), None)
            case = None if option is None else rule.applies(self, args)
            if case is not None:
                raise InputError(f"{option} has no effect {case[0]}", hint=rule.hint or case[1])
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(str(getattr(args, action.dest, "")))
                if isinstance(chosen, Parser):
                    chosen.refuse_without_effect(args)

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

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_help(every=values == "all"))
        parser.exit()


class _StoreOnce(argparse._StoreAction):
    """Action of an option that may be given once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None and isinstance(parser, Parser):
            parser.take(self.dest, option_string)
        super().__call__(parser, namespace, values, option_string)


def _add(container: _Declaring, field: Field) -> None:
    """Add an option of a record, with its former names."""
    option, required = field.option, field.default is MISSING
    how: dict[str, Any] = {"help": option.help, "everyday": option.everyday}
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
        container.add_argument(field.name, default=None if required else field.default, **how, **optional)
        return
    names = [name for name in (option.short, field.flag) if name is not None]
    default = None if required or field.several or field.kind is Mapping else field.default
    container.add_argument(*names, dest=field.name, default=default, required=required, **how)
    for older in option.older:
        container.add_argument(
            older, dest=field.name, **{**how, "help": argparse.SUPPRESS, "everyday": False}
        )


def _value(field: Field, text: str) -> Any:
    try:
        return field.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def record_of(record: type[Record], args: argparse.Namespace) -> Record:
    """Return the record of what was typed; raise InputError if an option has no effect."""
    values = {}
    for field in fields_of(record):
        value = getattr(args, field.name)
        if field.several or field.kind is Mapping:
            value = field.default if value is None else tuple(value)
        values[field.name] = dict(value) if field.kind is Mapping else value
    return record(**values)


def _is_half(word: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in word)


def _proposed(word: str, known: Iterable[str]) -> str:
    names = list(known)
    begun = [name for name in names if len(word) > 2 and name.startswith(word)]
    near = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.66)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _any_of(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _named(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return f"[{name}]" if action.nargs in ("?", "*") else name
