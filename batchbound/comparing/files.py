"""Comparison of solvers on files of requests or linear models."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from ..data.files.disk import InputError
from ..inputs import read_inputs
from ..listening import note, working
from ..models.formulations.linear_files import read_mps
from ..options.compare import DEFAULT_SECONDS, CompareOptions, is_linear
from ..options.option import Either, PathText, takes
from ..solvers.result import Limits
from .instance_library import suite, suites
from .result import Comparison, Measurement
from .runner import Instance, write_text
from .runner import compare as compare_instances


@takes(CompareOptions)
def compare_files(options: CompareOptions) -> Comparison:
    """Run every solver on every file or instance, and write the table and the pictures."""
    options.check_outputs("csv", "markdown", "profile", "over_time")
    for path in (options.profile, options.over_time):
        if path is not None and Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
            what = "is not an image file that can be written"
            raise InputError(what, file=path, hint="Name a .png, .svg or .pdf file.")
    if options.ignored:
        note(f"{', '.join(options.ignored)}: no effect on {', '.join(options.solvers)}")
    instances, seconds = _instances(options), options.time_limit
    if options.work is None and seconds is None:
        seconds = DEFAULT_SECONDS
    limits = Limits(seconds=seconds, work=options.work, threads=options.threads, seed=options.seed)
    runs = len(instances) * len(options.solvers)
    with working(f"comparing {runs:,} runs") as show:
        number = count(1)

        def begin(instance: str, solver: str) -> None:
            show(f"{instance}, {solver}: run {next(number)} of {runs}")

        comparison = compare_instances(instances, options.solvers, limits, on_begin=begin, on_done=_tell)
    if options.csv is not None:
        write_text(options.csv, comparison.to_csv())
    if options.markdown is not None:
        write_text(options.markdown, comparison.to_markdown())
    if options.profile is not None:
        comparison.plot_profile(options.profile)
    if options.over_time is not None:
        comparison.plot_over_time(options.over_time)
    return comparison


compare = Either(compare_files, compare_instances)


def _tell(row: Measurement) -> None:
    if row.message:
        note(f"{row.instance}, {row.solver}: {row.message}")


def _instances(options: CompareOptions) -> dict[str, Instance]:
    if not options.suite:
        if options.workload is None:
            hint = f"Name files, or --suite NAME of {', '.join(suites())}."
            raise InputError("missing: FILE", hint=hint)
        names = dict.fromkeys(map(str, (options.workload, *options.more)))
        return {name: _instance(name, options) for name in names}
    if options.workload is not None:
        raise InputError("a file has no effect with --suite", hint="Leave one of them out.")
    named = dict.fromkeys(options.suite)
    return {f"{name}/{each}": plan for name in named for each, plan in suite(name).items()}


def _instance(path: PathText, options: CompareOptions) -> Instance:
    return read_mps(path) if is_linear(path) else read_inputs(options, path, keep_arrivals=False).problem
