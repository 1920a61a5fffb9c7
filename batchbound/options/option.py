"""Options as fields of frozen dataclasses.

A field says its type, default, range, help and effect. The command line, its help and completion, TOML
tables, the reference page, refusals, and the typed keywords of the library's functions all come from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from ..data.files.disk import read_toml
from ..data.files.errors import InputError, InputTypeError
from ..data.files.outputs import refuse_outputs

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
U = TypeVar("U")
Record = TypeVar("Record", bound="Options")

PathText = str | os.PathLike[str]
"""Path of a file; records hold it as text."""


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a type: a number from ``least`` (or above it) to ``most``; their name in the help."""

    metavar: str | None = None
    least: float = -math.inf
    most: float = math.inf
    above: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """What a field is besides its type, range and default.

    everyday: True for an option of ``--help``; ``--help all`` prints the others too.
    flag: Name on the command line, if it is not the field's.
    older: Former names, which are understood and not shown.
    words: Number of words, as argparse's ``nargs``; for a tuple, ``"append"`` is one word each time.
    needs: Fields without any of which it has no effect; None for those of its class.
    excludes: Fields with any of which it has no effect.
    parse: Function that reads a word; raises ValueError.
    writes: True for a file that is written.
    """

    help: str
    _: dataclasses.KW_ONLY
    everyday: bool = False
    metavar: str | None = None
    flag: str | None = None
    short: str | None = None
    older: tuple[str, ...] = ()
    positional: bool = False
    words: str | None = None
    choices: tuple[str, ...] | None = None
    needs: tuple[str, ...] | None = None
    excludes: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    writes: bool = False


def option(default: Any, help: str, **more: Any) -> Any:
    """Return a field with a default; a required one is annotated with its :class:`Option`."""
    stated: dict[str, Any] = {"metadata": {"option": Option(help, **more)}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, **stated)
    return dataclasses.field(default=default, **stated)


def everyday(default: Any, help: str, **more: Any) -> Any:
    """Return a field that is shown by ``--help``."""
    return option(default, help, everyday=True, **more)


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that have no effect in a case.

    options: Names of fields, or name and value, as ``"slots auto"``.
    excludes: Fields with any of which they have none.
    needs: Fields without any of which they have none.
    when: True for a record in which they have none.
    where: Description of the case; {NAME} stands for that field's value.
    """

    options: tuple[str, ...]
    _: dataclasses.KW_ONLY
    excludes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    when: Callable[[Any], object] | None = None
    where: str = ""
    hint: str = ""

    def case(self, options: Options) -> tuple[str, str] | None:
        """Return the case and hint if the options have no effect."""
        both = next((name for name in self.excludes if options.states(name)), None)
        if both is not None:
            return f"with {options.flag(both)}", "Leave one of them out."
        if self.needs and not any(options.states(name) for name in self.needs):
            flags = [options.flag(name) for name in self.needs]
            return f"without {_any_of(flags)}", f"Give {flags[0]} as well, or leave it out."
        if self.when is not None and self.when(options):
            return self.where.format_map(options.texts()), "Leave it out."
        return None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record of options, resolved."""

    name: str
    kind: Any
    """Type of a value: bool, int, float, str or Mapping."""
    option: Option
    default: Any
    bounds: Values
    choices: tuple[str, ...] | None
    several: bool
    """True for a tuple of values."""
    optional: bool
    objects: tuple[type, ...]
    """Types of other values, which only the library takes."""
    title: str
    """Title of its group in the help; empty for the general one."""
    about: str
    """Text below the title."""

    @property
    def flag(self) -> str:
        """Name on the command line."""
        if self.option.positional:
            return self.option.metavar or self.name
        return f"--{(self.option.flag or self.name).replace('_', '-')}"

    def parse(self, text: str) -> Any:
        """Return the value of a word; raise ValueError if it is none."""
        if self.option.parse is not None:
            return self.option.parse(text)
        if self.kind in (int, float) and text not in (self.choices or ()):
            return self.check(_number(self.kind, text, self.bounds))
        return text

    def check(self, value: Any) -> Any:
        """Return a plain value; raise ValueError if it is out of range, TypeError for another type."""
        if self.several and isinstance(value, list | tuple):
            return tuple(map(self._checked, value))
        return self._checked(value)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, self.objects) or (value is None and (self.optional or self.default is None)):
            return value
        if self.kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if self.kind in (int, float) and not (isinstance(value, str) and value in (self.choices or ())):
            value = self._checked_number(value)
        elif self.choices and value not in self.choices:
            raise ValueError(f"there is no {value!r}; there are {', '.join(self.choices)}")
        elif not isinstance(value, self.kind) and self.kind in (str, bool):
            raise TypeError(f"{type(value).__name__} is no {'text' if self.kind is str else 'True or False'}")
        return value

    def _checked_number(self, value: Any) -> Any:
        try:
            # A number of numpy becomes one of Python; True is no number.
            number = operator.index(value) if self.kind is int else float(value)
        except (TypeError, ValueError):
            number = None
        if number is None or isinstance(value, bool):
            raise TypeError(f"{value!r} is not a {'whole number' if self.kind is int else 'number'}")
        bounds = self.bounds
        if bounds.above and number <= bounds.least:
            raise ValueError(f"{value:g} is not a positive number")
        if number < bounds.least:
            raise ValueError(f"{value} is not at least {bounds.least:g}")
        if number > bounds.most:
            raise ValueError(f"{value} is more than {bounds.most:{'d' if self.kind is int else 'g'}}")
        return number


class Options:
    """Base of the records: checks values, and refuses options without effect."""

    __slots__ = ()
    TITLE: ClassVar[str] = ""
    """Title of the class's own options in the help."""
    ABOUT: ClassVar[str] = ""
    """Text below the title."""
    NEEDS: ClassVar[tuple[str, ...]] = ()
    """Options of which the class's own need one, unless they state others."""
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Cases in which options have no effect, beside ``needs`` and ``excludes``."""

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, field.check(value))
            except (TypeError, ValueError) as error:
                wrong = InputTypeError if isinstance(error, TypeError) else InputError
                raise wrong(f"{field.name}: {error}", hint="Correct it, or leave it out.") from None
        for rule in _rules_of(cast("Any", type(self))):
            name = next((name for name in rule.options if self.states(name)), None)
            case = None if name is None else rule.case(self)
            if name is not None and case is not None:
                flag = " ".join([self.flag(name), *name.split()[1:]])
                raise InputError(f"{flag} has no effect {case[0]}", hint=rule.hint or case[1])

    def states(self, option: str) -> bool:
        """Return whether an option, or a value of it, is stated."""
        name, _, wanted = option.partition(" ")
        value = getattr(self, name)
        if wanted:
            return str(value) == wanted
        return value not in (None, False, (), _by_name(type(self))[name].default)

    def texts(self) -> dict[str, str]:
        """Return the values as texts, for messages."""
        values = {field.name: getattr(self, field.name) for field in fields_of(type(self))}
        return {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in values.items()
        }

    @classmethod
    def flag(cls, option: str) -> str:
        """Return an option's name on the command line."""
        return _by_name(cls)[option.split()[0]].flag

    def refuse(
        self, names: Sequence[str], where: str, hint: str = "Leave it out.", *, file: PathText | None = None
    ) -> None:
        """Raise InputError if an option is stated that the input makes useless."""
        name = next((name for name in names if self.states(name)), None)
        if name is not None:
            raise InputError(f"{self.flag(name)} has no effect {where}", file=file, hint=hint)

    def check_outputs(self, *outputs: str, read: Sequence[PathText] = (), overwrite: bool = False) -> None:
        """Raise InputError if an output would replace a file that matters."""
        values = [getattr(self, name) for name in outputs]
        files = [file for value in values for file in (value if isinstance(value, tuple) else (value,))]
        written = [file for file in files if file is not None]
        refuse_outputs(written, overwrite or getattr(self, "overwrite", False), [*self.read_files(), *read])

    def read_files(self) -> list[str]:
        """Return the files that options name to be read, also as ``KIND:FILE``."""
        values = [getattr(self, field.name) for field in fields_of(type(self)) if not field.option.writes]
        words = [word for value in values for word in (value if isinstance(value, tuple) else (value,))]
        texts = [word for word in words if isinstance(word, str)]
        return [name for text in texts for name in {text, text.rpartition(":")[2]} if Path(name).is_file()]


def fields_of(record: type[Options]) -> tuple[Field, ...]:
    """Return the options of a record, group by group."""
    return tuple(_by_name(record).values())


def _by_name(record: type[Options]) -> Mapping[str, Field]:
    return _all_resolved(cast("Any", record))


@functools.cache
def _all_resolved(record: Any) -> Mapping[str, Field]:
    hints = get_type_hints(record, include_extras=True)
    defaults = {field.name: field for field in dataclasses.fields(record)}
    resolved: dict[str, Field] = {}
    for owner in _lineage(record):
        for name in inspect.get_annotations(owner):
            if name in defaults and name not in resolved:
                field = _resolved(name, hints[name], defaults[name], owner)
                if field is not None:
                    resolved[name] = field
    return resolved


@functools.cache
def _rules_of(record: Any) -> tuple[Rule, ...]:
    rules = []
    for field in fields_of(record):
        if field.option.needs:
            rules.append(Rule((field.name,), needs=field.option.needs))
        if field.option.excludes:
            rules.append(Rule((field.name,), excludes=field.option.excludes))
    return (*rules, *(rule for owner in _lineage(record) for rule in owner.__dict__.get("RULES", ())))


def _lineage(record: type) -> Iterator[type[Any]]:
    """Yield the base records of a record, left to right, then itself."""
    for base in record.__bases__:
        if issubclass(base, Options):
            yield from _lineage(base)
    yield record


_PLAIN = (bool, int, float, str, Mapping)


def _resolved(name: str, hint: Any, field: dataclasses.Field[Any], owner: type[Options]) -> Field | None:
    option, bounds, choices, kinds = field.metadata.get("option"), Values(), None, []
    waiting, several, optional = [hint], False, False
    while waiting:
        part = waiting.pop(0)
        origin = get_origin(part)
        if origin is Annotated:
            part, *extras = get_args(part)
            option = next((extra for extra in extras if isinstance(extra, Option)), option)
            bounds = next((extra for extra in extras if isinstance(extra, Values)), bounds)
            waiting.append(part)
        elif origin in (Union, types.UnionType):
            waiting += get_args(part)
        elif origin is Literal:
            choices = get_args(part)
        elif origin is tuple:
            several = True
            waiting.append(get_args(part)[0])
        elif part is types.NoneType:
            optional = True
        else:
            kinds.append(origin if origin in (Mapping, os.PathLike) else part)
    if option is None:
        return None
    if option.needs is None:
        needs = owner.__dict__.get("NEEDS", ())
        option = dataclasses.replace(option, needs=() if name in needs else needs)
    kind = next((kind for kind in kinds if kind in _PLAIN), str if choices else object)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if option.parse is not None and kind is not Mapping:
        several, kind = False, object
    known, group = option.choices or choices, (owner.TITLE, owner.ABOUT)
    objects = tuple(kind for kind in kinds if kind not in (*_PLAIN, os.PathLike))
    return Field(name, kind, option, default, bounds, known, several, optional, objects, *group)


def _number(kind: type, text: str, bounds: Values) -> int | float:
    try:
        number: int | float = int(text) if kind is int else float(text)
    except ValueError:
        number = math.nan
    if kind is int and math.isnan(number):
        raise ValueError(f"{text!r} is not a whole number")
    if not math.isfinite(number) or (kind is float and number < bounds.least == 0):
        least = " of at least 0" if bounds.least == 0 else ""
        raise ValueError(f"{text!r} is not a number{least}")
    return number


def _any_of(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def table_of(path: PathText, table: str, record: type[Options]) -> dict[str, Any]:
    """Return the options that a table of a TOML file states.

    Raises
    ------
    InputError
        If the file is no TOML, or names an option that there is not.
    """
    stated = read_toml(path).get(table, {})
    known = _by_name(record)
    for name in stated:
        if name not in known:
            hint = f"Known are {', '.join(known)}."
            raise InputError(f"no such option: {name}", file=path, where=f"table [{table}]", hint=hint)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()}


class Taking(Generic[P, Record, T]):
    """Function of a record of options, which also takes them as typed keywords."""

    def __init__(self, record: Callable[P, Record], function: Callable[[Record], T]) -> None:
        functools.update_wrapper(self, function)
        self._record, self.of = record, function
        # Users know ``plan``, which is :class:`Either` of ``plan_file`` and a function of objects.
        self._name = getattr(function, "__name__", "").removesuffix("_file").removesuffix("_files")
        self.__signature__ = inspect.signature(record)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function with these options."""
        refuse_unknown(self._name, self._record, kwargs)
        options = self._record(*args, **kwargs)
        if getattr(options, "json", False):
            raise InputError("json has no effect on a function, which prints nothing", hint="Leave it out.")
        return self.of(options)


def refuse_unknown(function: str, record: Callable[..., Any], stated: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown keyword, in the name of the function that the user called."""
    known = inspect.signature(record).parameters
    wrong = next((name for name in stated if name not in known), None)
    if wrong is not None:
        near = difflib.get_close_matches(wrong, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {wrong!r}{meant}")


def takes(record: Callable[P, Record]) -> Callable[[Callable[[Record], T]], Taking[P, Record, T]]:
    """Let a function of a record take the record's fields as typed keywords."""
    return lambda function: Taking(record, function)


class Either(Generic[P, Record, T, Q, U]):
    """Function of a file and options, or of an object in place of the file."""

    def __init__(self, of_file: Taking[P, Record, T], of_object: Callable[Q, U]) -> None:
        functools.update_wrapper(self, of_object)
        self.of, self._of_file, self._of_object = of_file.of, of_file, of_object

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> U: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of a file if the first argument is a path."""
        first = args[0] if args else next(iter(kwargs.values()), None)
        of_file = first is None or isinstance(first, str | os.PathLike)
        return (self._of_file if of_file else self._of_object)(*args, **kwargs)
