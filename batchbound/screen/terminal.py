"""Remarks and errors on stderr, and the command that was typed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextvars import ContextVar

from .streams import say

WRONG_BOUND = 3
"""Exit status of a run that beats its bound with all assumptions checked: a defect."""

INTERRUPTED = 130
"""Exit status of an interrupted command (Ctrl-C), as in shells."""

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
_VERBOSE: ContextVar[bool] = ContextVar("verbose", default=False)
_TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())


def keep_typed(words: Sequence[str]) -> None:
    """Keep the words of the command, to propose the next one."""
    _TYPED.set(tuple(words))


def typed_again(option: str) -> str:
    """Return the typed command with one more option, quoted."""
    words = [word for word in _TYPED.get() if word != option]
    return shlex.join(["batchbound", *words, option])


def typed_retry(retry: str) -> str:
    """Return the typed command with other options of a retry, quoted."""
    return shlex.join(["batchbound", *_typed_without(retry.split()[::2]), *retry.split()])


def typed_rest() -> str:
    """Return the typed command that sends all rows without a completion, quoted."""
    return shlex.join(["batchbound", *_typed_without(("--retry", "--deadline"))])


def _typed_without(dropped: Sequence[str]) -> list[str]:
    """Return the typed words without some options with values, and without ``--overwrite``."""
    words, skips = list[str](), False
    for word in _TYPED.get():
        if not skips and word.partition("=")[0] not in (*dropped, "--overwrite"):
            words.append(word)
        skips = word in dropped
    return words


def set_voice(*, quiet: bool, verbose: bool) -> None:
    """Print only errors from now on, or more than usual."""
    _QUIET.set(quiet)
    _VERBOSE.set(verbose)


def is_quiet() -> bool:
    """Return whether only errors are printed."""
    return _QUIET.get()


def is_verbose() -> bool:
    """Return whether details are printed."""
    return _VERBOSE.get()


def note(message: str) -> None:
    """Print a remark on stderr, unless --quiet is given."""
    if not is_quiet():
        warn(message)


def warn(message: str) -> None:
    """Print a message on stderr, even with --quiet."""
    say(f"batchbound: {message}", sys.stderr)


def fail(message: str) -> int:
    """Print an error on stderr, and return exit status 1."""
    warn(message)
    return 1
