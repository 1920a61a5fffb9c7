"""Command line of batchbound: plan, run and judge a batch job."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING

from ..screen.interrupts import heeding, terminating
from ..screen.streams import output_lost, prepare_streams, say
from ..screen.terminal import INTERRUPTED as INTERRUPTED
from ..screen.terminal import WRONG_BOUND as WRONG_BOUND
from ..screen.terminal import warn
from ..version import __version__
from .parser import Parser, record_of

if TYPE_CHECKING:
    from ..options.option import Record

EVERYDAY = {
    "run": "generate the completions of prompts or of a plan, on a model or a server",
    "plan": "make a schedule with a proven lower bound for requests",
    "report": "show the gap of a plan or a run to the lower bound, and the loss by cause",
    "audit": "show what a finished run of a server lost, by cause, against a proven bound",
    "verify": "check a plan's schedule and its bound's certificate without the solver",
    "profile": "measure a model on this machine and fit the cost model",
    "predict": "predict the lengths of completions from past ones, with the measured error",
    "size": "find the cheapest machines that finish jobs in time, and those that cannot",
    "demo": "plan and run bundled prompts on a small local model, and print the report",
}

RESEARCH = {
    "compare": "run solvers and policies on the same instances",
    "simulate": "simulate a policy on a workload",
    "search": "find the configuration of highest throughput under a latency bound",
    "serve": "simulate a serving policy on arriving requests, with the KV cache in blocks",
    "bound": "print the lower bounds of a workload with their terms",
    "export": "write a linear model of a workload as MPS or LP, for any solver",
    "validate": "print the simulator's error against a measured run",
    "replay": "send requests of forced lengths to a server, and compare it with simulation and bound",
}

COMMANDS = EVERYDAY | RESEARCH

EXAMPLES = {
    "demo": "batchbound demo",
    "plan": "batchbound plan prompts.jsonl --model MODEL --cost cost.json --slots 64",
    "run": "batchbound run prompts.jsonl --model MODEL --slots 8",
    "report": "batchbound report plan.json trace.jsonl --gantt gantt.png",
    "simulate": "batchbound simulate table3:0 --slots 200 --cost paper --policy fcfs",
    "serve": "batchbound serve sharegpt:0:1000 --engine MODEL --kv-capacity 40000 --policy vllm",
    "bound": "batchbound bound table3:0 --slots 200 --cost paper",
    "compare": "batchbound compare table3:0:60 --slots 10 --cost paper --solvers search,policy:lpt",
    "export": "batchbound export table3:0:12 --slots 3 --cost paper --formulation repaired -o model.mps",
    "audit": "batchbound audit run.jsonl",
    "verify": "batchbound verify plan.json",
    "profile": "batchbound profile --model MODEL -o cost.json",
    "size": "batchbound size prompts.jsonl --model config.json --by 07:00 --devices h100,l40s",
    "search": "batchbound search table3:0 --profile profile.json --latency-bound 30",
    "predict": "batchbound predict train prompts.jsonl answers.jsonl -o predictor",
    "validate": "batchbound validate measured-run --profile layers.json",
    "replay": "batchbound replay plan.json --server http://localhost:8000",
}
"""Example of each command, shown at the end of its help."""


STREAMED = ("audit", "bound", "compare", "export", "simulate", "verify")
"""Commands that take ``-`` for standard input; a plan and a run come back to their file later."""

TERMINATED = ("plan",)
"""Commands that end in order when the system asks the process to end; ``run`` says how far it came."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The statuses are 0 for done, 1 for failed work, 2 for wrong input, 3 for a run that beats its bound (a
    defect), and 130 for an interrupt.

    argv: Words after the program's name; those of this process by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        with heeding():
            if words[:1] == ["help"]:
                words = [*words[1:], "--help"]
            parser = _parser(words[0] if words else "")
            if not words:
                parser.print_help(sys.stderr)
                return 2
            with _streamed(words) as named:
                args = parser.parse_args(named)
                # --quiet holds for this command and commands that it calls, not for later calls of main.
                return copy_context().run(_carried_out, args, named)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except OSError as error:
        if not output_lost(error):
            raise
        # The reader of the output, perhaps `head`, has closed it: no error, and nowhere to print.
        if isinstance(error, BrokenPipeError):
            return 1
        what = f"standard output or a temporary file cannot be written ({error.strerror})"
        return _failed(f"{what}. Free some space.", 1)


@contextmanager
def _streamed(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words with a file in place of standard input, for commands that need it only now."""
    streams = ("-", "/dev/stdin")
    if words[0] not in STREAMED or not any(word in streams for word in words[1:]):
        yield list(words)
        return
    content = sys.stdin.buffer.read()
    suffix = ".json" if content.lstrip()[:1] in (b"{", b"[") else ".csv"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"standard-input{suffix}"
        file.write_bytes(content)
        yield [str(file) if word in streams else word for word in words]


def _carried_out(args: argparse.Namespace, words: Sequence[str]) -> int:
    from ..data.files.disk import InputError, WriteError
    from ..data.problem import ProblemError
    from ..data.workload import WorkloadError
    from ..planning.plan import PlanningError
    from ..screen.terminal import keep_typed

    _set_voice(args)
    keep_typed(words)
    try:
        with terminating() if args.command in TERMINATED else nullcontext():
            status: int = args.carry_out(args)
        sys.stdout.flush()
    except (WriteError, PlanningError) as error:
        return _failed(str(error), 1)
    except (InputError, WorkloadError, ProblemError) as error:
        return _failed(str(error), 2)
    except ImportError as error:
        if error.name is not None:  # a broken installation, not a missing extra
            raise
        return _failed(str(error), 2)
    except OSError as error:
        if error.filename is None:
            raise
        # A path that cannot be accessed: no permission, or too long a name.
        return _failed(f"{error.filename}: cannot be reached ({error.strerror}). Check the path.", 2)
    return status


def whole_parser() -> Parser:
    """Return the parser with the options of every command."""
    return _parser(*COMMANDS)


def _parser(*chosen: str) -> Parser:
    """Return the parser, and import only the modules of the chosen command."""
    parser = Parser(
        prog="batchbound",
        description="Plan an LLM batch job, run the plan, and report how far it was from a proven bound.",
    )
    parser.add_common(f"batchbound {__version__}", whole_parser)
    parser.sections = {"everyday commands": list(EVERYDAY), "research": list(RESEARCH)}
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example: {EXAMPLES[name]}",
        )
        if name in chosen:
            module = importlib.import_module(f".commands.{name}", __package__)
            if hasattr(module, "TASKS"):
                tasks = command.add_subparsers(dest="task", metavar="TASK", required=True)
                for task, (summary, record, run) in module.TASKS.items():
                    _set_options(tasks.add_parser(task, help=summary), record, run)
            else:
                _set_options(command, module.OPTIONS, module.run)
            command.add_common()
    return parser


def _set_options(parser: Parser, record: type[Record], run: Callable[[Record], int]) -> None:
    """Let a parser read a record of options, which a function then takes."""
    parser.add_options(record)
    parser.set_defaults(carry_out=lambda args: run(record_of(record, args)))


def _set_voice(args: argparse.Namespace) -> None:
    from ..listening import LISTENER, Listener
    from ..screen.progress import progress, working
    from ..screen.terminal import note, set_voice

    LISTENER.set(Listener(note, warn, working, progress, silent=args.quiet))
    set_voice(quiet=args.quiet, verbose=args.verbose)
    logger = logging.getLogger("batchbound")
    logger.addHandler(_HANDLER)
    _HANDLER.setLevel(logging.INFO if args.verbose else logging.WARNING)
    if args.verbose:
        logger.setLevel(logging.INFO)


class _Spoken(logging.Handler):
    """Print what the library logs as a remark."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        warn(self.format(record))


_HANDLER = _Spoken()


def _failed(message: str, status: int) -> int:
    say(f"batchbound: {message}", sys.stderr)
    return status
