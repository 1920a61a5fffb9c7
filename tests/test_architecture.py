"""The arrows of the design, enforced: who may import whom, and what stays unloaded until it is needed."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "data": set[str](),
    "models": {"data"},
    "heuristics": {"data", "models"},
    "solvers": {"data", "models", "heuristics"},
    "executor": {"data", "models", "heuristics"},
}
"""Which folders a folder may import, besides itself."""

ROOMS = {
    "data.files": set[str](),
    "data.costs": {"data.files"},
    "data.lengths": {"data", "data.costs", "data.files"},
    "data.prompts": {"data", "data.files"},
    "data.readers": {"data", "data.costs", "data.files", "data.lengths"},
    "models.bounds": {"data", "models"},
    "models.bounds.memory_growth": {"data", "models"},
    "models.bounds.packing": {"data", "models"},
    "models.certificates": {"data"},
    "models.formulations": {"data", "models.bounds"},
    "models.iterations": {"data", "models"},
    "models.exegpt": {"data", "models", "models.iterations"},
    "heuristics": {
        "data",
        "models.bounds",
        "models.bounds.packing",
        "heuristics.queues",
        "heuristics.unknown_lengths",
    },
    "heuristics.queues": {"data", "heuristics"},
    "heuristics.unknown_lengths": {"data", "heuristics", "heuristics.queues"},
    "heuristics.fleet": {"data", "models.bounds", "heuristics", "heuristics.queues"},
    "heuristics.serving": {
        "data",
        "models.bounds",
        "heuristics",
        "heuristics.prefixes",
        "heuristics.serving.econoserve",
    },
    "heuristics.serving.econoserve": {"data", "heuristics.serving"},
    "heuristics.iterations": {
        "data",
        "models.bounds",
        "models.iterations",
        "heuristics.prefixes",
        "heuristics.serving",
    },
    "heuristics.prefixes": {"data", "models.bounds", "models.iterations"},
    "heuristics.exegpt": {"data", "models.exegpt", "heuristics"},
    "solvers": {
        "data",
        "models",
        "heuristics",
        "heuristics.fleet",
        "heuristics.prefixes",
        "solvers.search",
        "solvers.search.stages",
        "solvers.exact",
        "solvers.backends",
    },
    "solvers.exact": {"data", "models", "solvers", "solvers.search", "solvers.search.core"},
    "solvers.search": {
        "data",
        "models",
        "heuristics",
        "heuristics.queues",
        "solvers",
        "solvers.search.core",
        "solvers.search.stages",
    },
    "solvers.search.core": {"data", "solvers.search"},
    "solvers.search.stages": {"data", "models", "solvers.search"},
    "solvers.backends": {"data", "models", "models.formulations", "solvers"},
    "solvers.exegpt": {"data", "models.exegpt"},
    "executor.models": {"data"},
    "executor.attention": {"executor.models"},
    "executor.kv": {"executor.attention", "executor.models"},
    "executor.engines": {"data", "heuristics", "executor.attention", "executor.kv", "executor.models"},
    "executor.jobs": {
        "data",
        "heuristics",
        "heuristics.exegpt",
        "heuristics.fleet",
        "heuristics.serving",
        "heuristics.unknown_lengths",
        "executor.engines",
        "executor.models",
        "executor.processes",
    },
    "executor.server": {
        "data",
        "heuristics.serving",
        "heuristics.unknown_lengths",
        "executor.jobs",
        "executor.models",
    },
    "executor.reports": {
        "data",
        "heuristics",
        "heuristics.prefixes",
        "heuristics.serving",
        "models.bounds",
    },
}
"""
Which rooms a room may import, besides itself; ``data`` and ``models`` stand for all of theirs.

Rooms left out hold to their folder's arrows alone.
"""

LEAVES = {"data.arrays"}
"""Modules that import nothing of ours, and that every room may import."""

STUDIES = ("exegpt", "serving")
"""Rooms of one paper each, which the core must be able to do without."""

CORE = (
    "data", "models.bounds", "models.bounds.memory_growth", "models.bounds.packing", "models.certificates",
    "models.formulations", "models.iterations", "heuristics", "heuristics.queues",
    "heuristics.unknown_lengths", "heuristics.fleet", "solvers.search", "solvers.search.core",
    "solvers.search.stages", "solvers.exact", "solvers.backends",
    "executor.models", "executor.attention", "executor.kv", "executor.engines",
)  # fmt: skip

HEAVY = ("torch", "transformers", "ortools", "pyscipopt", "pulp", "scipy", "pandas", "matplotlib")


class Arrow(NamedTuple):
    """One import: where it stands, and the modules at its ends, dotted from below ``batchbound``."""

    place: str
    source: str
    target: str


def _modules() -> dict[str, Path]:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    roof = ROOT / "batchbound"
    files += [*roof.glob("*.py")]
    for room in sorted(path for path in roof.iterdir() if path.is_dir() and not path.is_symlink()):
        files += room.rglob("*.py")
    names = {}
    for file in files:
        parts = file.relative_to(roof if file.is_relative_to(roof) else ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


MODULES = _modules()


def _room(module: str) -> str:
    is_package = MODULES[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


def _targets(node: ast.ImportFrom | ast.Import, package: list[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "batchbound":
                yield alias.name.removeprefix("batchbound").lstrip(".")
        return
    if node.level:
        base = package[: len(package) - (node.level - 1)] + (node.module or "").split(".")
    elif node.module and node.module.split(".")[0] == "batchbound":
        base = node.module.split(".")[1:]
    else:
        return
    start = ".".join(part for part in base if part)
    for alias in node.names:
        within = f"{start}.{alias.name}".lstrip(".")
        yield within if within in MODULES else start


@functools.cache
def _arrows() -> list[Arrow]:
    arrows = []
    for module, file in MODULES.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        for node in _statements(tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                place = f"{file.relative_to(ROOT)}:{node.lineno}"
                arrows += [Arrow(place, module, target) for target in _targets(node, package)]
    return arrows


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements, those within others too."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _statements(inner.body)


def _may(room: str, target: str) -> bool:
    allowed = ROOMS[room] | {room}
    return target in allowed or (
        target.split(".")[0] in allowed and target.split(".")[0] in ("data", "models")
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_between_folders_point_one_way(folder: str) -> None:
    allowed = FOLDERS[folder] | {folder}
    wrong = [
        f"{arrow.place} imports {arrow.target or 'the roof'}"
        for arrow in _arrows()
        if arrow.source.split(".")[0] == folder and arrow.target.split(".")[0] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms_point_one_way(room: str) -> None:
    wrong = [
        f"{arrow.place} imports {arrow.target}"
        for arrow in _arrows()
        if _room(arrow.source) == room and arrow.target not in LEAVES and not _may(room, _room(arrow.target))
    ]
    assert not wrong


def test_leaves_import_nothing_of_ours() -> None:
    assert not [arrow.place for arrow in _arrows() if arrow.source in LEAVES]


def test_the_core_imports_no_study_of_one_paper() -> None:
    wrong = [
        f"{arrow.place} imports {arrow.target}"
        for arrow in _arrows()
        if _room(arrow.source) in CORE and set(arrow.target.split(".")) & set(STUDIES)
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle_not_even_late() -> None:
    after: dict[str, set[str]] = {module: set() for module in MODULES}
    for arrow in _arrows():
        if arrow.target != arrow.source:
            after[arrow.source].add(arrow.target)
    try:
        list(TopologicalSorter(after).static_order())
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


def test_no_folder_holds_more_than_twenty_modules() -> None:
    held = Counter(file.parent for file in MODULES.values() if file.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): count for folder, count in held.items() if count > 20} == {}


def test_the_executor_is_at_most_eleven_rooms() -> None:
    assert len([path for path in (ROOT / "executor").iterdir() if (path / "__init__.py").exists()]) <= 11


def test_every_folder_of_modules_is_a_package_that_an_installation_finds() -> None:
    assert {file.parent for file in MODULES.values() if not (file.parent / "__init__.py").exists()} == set()


def test_planning_imports_no_engine() -> None:
    engines = {arrow.target for arrow in _arrows() if arrow.source.split(".")[0] == "planning"}
    assert {name for name in engines if name.startswith("executor")} <= {"executor.models.tokenizers"}


def test_importing_batchbound_loads_nothing_heavy() -> None:
    modules = ", ".join(
        f"batchbound.{name}" for name in ("data", "models", "heuristics", "solvers", "executor")
    )
    code = (
        f"import sys, batchbound, batchbound.cli, {modules}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planning_for_a_tiny_model_loads_no_engine(tmp_path: Path) -> None:
    request = {"custom_id": "a", "body": {"prompt": "Name a prime.", "max_tokens": 4}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
    words = ["plan", "in.jsonl", "--model", "tiny:llama", "--slots", "1", "--time-limit", "0.1", "--json"]
    code = (
        f"import sys\nfrom batchbound.cli import main\nassert main({words!r}) == 0\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    (replica,) = json.loads((tmp_path / "plan.json").read_text())["fleet"]["replicas"]
    assert replica["max_position"] == 512


def test_the_five_folders_are_reached_through_the_package() -> None:
    for folder in FOLDERS:
        link = ROOT / "batchbound" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


COMMANDS = sorted(path.stem for path in (ROOT / "batchbound/cli/commands").glob("[!_]*.py"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_its_options_a_function_and_a_screen(command: str) -> None:
    targets = [arrow.target for arrow in _arrows() if arrow.source == f"cli.commands.{command}"]
    others = {name for name in targets if name.split(".")[0] not in ("options", "screen")}
    # The demo is a run.
    assert len(others - {"cli.commands.run"}) == 1


def test_arguments_are_made_in_one_module_and_argparse_stays_in_the_command_line() -> None:
    texts = {name: file.read_text(encoding="utf-8") for name, file in MODULES.items()}
    assert [name for name, text in texts.items() if ".add_argument(" in text] == ["cli.parser"]
    importing = [name for name, text in texts.items() if re.search(r"^ *(import|from) argparse", text, re.M)]
    assert {name.split(".")[0] for name in importing} == {"cli"}
