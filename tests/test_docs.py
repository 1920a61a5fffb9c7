"""The pages under docs name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in OTHERS)]
FOLDERS = "batchbound|data|models|heuristics|solvers|executor|tests|benchmarks|docs|examples"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w/]+\.(?:py|md|json|yml))\b", text))
    linked = {target for target in re.findall(r"\]\((?!http)([^)#]+)\)", text)}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    missing += sorted(target for target in linked if not (page.parent / target).exists())
    assert not missing


def test_the_map_has_a_row_for_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {
        file.parent.relative_to(ROOT)
        for folder in ("data", "models", "heuristics", "solvers", "executor")
        for file in (ROOT / folder).rglob("__init__.py")
    }
    shown = {str(room) for room in rooms if "econoserve" not in room.parts} - {"models"}
    assert {room for room in shown if f"`{room}/`" not in page} == set()


def test_every_benchmark_is_listed() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    scripts = [
        file.name
        for file in sorted((ROOT / "benchmarks").glob("*.py"))
        if "__main__" in file.read_text(encoding="utf-8")
    ]
    assert [name for name in scripts if f"`{name}`" not in listed] == []
