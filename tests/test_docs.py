"""The pages under docs name what is there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from batchbound.cli import COMMANDS, whole_parser
from batchbound.data.readers.tables import FORMATS
from batchbound.solvers.search.phases import PHASES

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


def test_every_phase_of_the_search_and_every_table_of_lengths_has_a_row() -> None:
    search = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    assert [phase.name for phase in PHASES if f"\n| `{phase.name}` | " not in search] == []
    formats = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    rows = (f"\n| {table.name} | `{table.input_tokens}` | `{table.output_tokens}` | " for table in FORMATS)
    assert [row for row in rows if row not in formats] == []


def test_a_benchmark_is_said_to_have_results_only_where_they_are_shown() -> None:
    rows = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").splitlines()
    shown = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for row in rows:
        if "(../docs/results.md)" in row:
            assert any(script in shown for script in re.findall(r"`([\w/]+\.py)`", row)), row


def test_every_benchmark_is_listed() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    scripts = [
        file.name
        for file in sorted((ROOT / "benchmarks").glob("*.py"))
        if "__main__" in file.read_text(encoding="utf-8")
    ]
    assert [name for name in scripts if f"`{name}`" not in listed] == []


def shown(pattern: str) -> dict[str, str]:
    """Return the commands of a kind that pages show, and the page of each."""
    found: dict[str, str] = {}
    pages = [*PAGES, ROOT / "README.md"]
    for page in pages:
        text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
        lines = re.findall(rf"(?:^ {{4}}|`|\$ )({pattern}[^`\n]*)", text, re.MULTILINE)
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines += re.findall(rf"^{pattern}.*", block, re.MULTILINE)
        for line in lines:
            command = re.sub(r"^BATCHBOUND_DATA=\S+ ", "", line.split("  #")[0].split(" > ")[0].strip())
            if "..." not in command and "|" not in command and "[" not in command:
                found.setdefault(command, page.name)
    return found


@pytest.mark.parametrize(("command", "page"), shown("batchbound ").items())
def test_every_command_shown_is_understood(command: str, page: str) -> None:
    _, name, *words = shlex.split(command, comments=True)
    if name.startswith("-") or name in ("COMMAND", "help"):
        return
    assert name in COMMANDS, page
    if words and "--help" not in words:
        assert whole_parser().parse_args([name, *words]).command == name


ENGINES = {
    "vllm serve": "test_examples.py",
    "vllm serve MODEL --scheduler-cls batchbound.integrations.vllm.LongestFirst": "cli/test_real_server.py",
    "vllm bench serve --save-detailed": "data/test_tables.py",
}
"""Commands of another program: what runs them, or reads what they write."""


def test_a_command_of_vllm_is_run_or_its_output_read() -> None:
    assert shown("vllm ").keys() == ENGINES.keys()
    for command, name in ENGINES.items():
        text = (ROOT / "tests" / name).read_text(encoding="utf-8")
        words = [word for word in command.split() if word.startswith(("--scheduler", "batchbound."))]
        assert [word for word in words if word not in text] == []


def test_an_extra_to_install_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pages = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md"])
    named = set(re.findall(r"pip install '?batchbound\[(\w+)\]", pages))
    assert named
    assert named <= declared["optional-dependencies"].keys()


PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PUBLISHED = {"Hybrid": (11, 3), "ExeGPT": (11, 7), "BATON": (7, 2), "MICO": (14, 1), "EconoServe": (15, 2)}
"""Figures and tables of each paper, by the first word of its section."""


def sections() -> dict[str, str]:
    return {text.split()[0]: text for text in PAPERS.split("\n## ")[1:]}


def numbers(text: str, kind: str) -> set[int]:
    """Return the numbers that a text names after "Figure" or "Table", in ranges and lists, too."""
    roman = {"I": "1", "II": "2", "III": "3"}
    found = set()
    for named in re.findall(rf"{kind}s? ((?:\d+|I+)(?:(?:, | and | to )(?:\d+|I+))*)", text):
        arabic = re.sub("I+", lambda number: roman[number[0]], named)
        for part in re.split(r", | and ", arabic):
            low, _, high = part.partition(" to ")
            found |= set(range(int(low), int(high or low) + 1))
    return found


def test_every_row_of_the_papers_has_a_command() -> None:
    for name, text in sections().items():
        written = re.sub(r"<!-- table.*?<!-- end -->", "", text, flags=re.DOTALL)
        head, _, *rows = re.findall(r"^\|(.*)\|$", written, re.MULTILINE)
        assert head.endswith("| command ")
        assert len(rows) > 5, name
        cells = [row.split("|") for row in rows]
        assert [row for row in cells if len(row) != 5 or "`" not in row[-1]] == []


@pytest.mark.parametrize("paper", PUBLISHED)
def test_every_figure_and_table_of_a_paper_is_there_or_named_as_a_drawing(paper: str) -> None:
    for kind, count in zip(("Figure", "Table"), PUBLISHED[paper], strict=True):
        assert set(range(1, count + 1)) <= numbers(sections()[paper], kind)


def test_measured_tables_of_the_papers_are_those_of_what_the_benchmarks_wrote() -> None:
    module = loaded("write_papers")
    figures = json.loads((ROOT / "docs" / "papers.json").read_text(encoding="utf-8"))
    assert set(re.findall(r"<!-- table (\w+) -->", PAPERS)) == figures.keys() == module.TABLES.keys()
    assert module.page(PAPERS, figures) == PAPERS, "run `python docs/write_papers.py`"


def loaded(script: str) -> Any:
    """Return a module of docs/."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "docs" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_are_those_of_the_file_of_figures() -> None:
    module = loaded("write_results")
    figures = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert module.page(figures) == page, "run `python docs/write_results.py`"
    for found in figures.values():
        assert found["question"].endswith("?")
        assert "`" in found["command"]
        assert re.match(r"20\d\d-\d\d-\d\d", found["date"])
        assert {len(row) for row in found["rows"]} == {len(found["columns"])}


def test_every_picture_shown_is_drawn_by_the_script() -> None:
    drawn = set(loaded("draw_pictures").PICTURES)
    there = {file.stem for file in (ROOT / "docs" / "pictures").glob("*.svg")}
    pages = "".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md"])
    shown_there = set(re.findall(r"pictures/(\w+)\.svg", pages))
    assert drawn == there == shown_there
    assert len(drawn) >= 15
    for name in there:
        ElementTree.parse(ROOT / "docs" / "pictures" / f"{name}.svg")


def test_a_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded("draw_pictures")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    for name in ("slot", "stage", "move_shift", "bound_counts", "gain"):
        module.PICTURES[name]()
        kept = ROOT / "docs" / "pictures" / f"{name}.svg"
        assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")


def test_the_site_has_every_page_and_every_option_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = loaded("make_site")
    monkeypatch.setattr(module, "PAGES", tmp_path)
    module.main()
    made = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.md")}
    named = set(
        re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    examples = {
        f"examples/{file.stem}.md"
        for file in (ROOT / "examples").iterdir()
        if file.suffix in (".ipynb", ".py", ".sh")
    }
    assert named | examples == made
    commands = (tmp_path / "reference" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"### batchbound {name}\n" not in commands] == []
    assert all(f"`{option}" in commands for option in ("--kv-tokens N", "--slots N", "--stall-seconds S"))


BENCHMARKS = {
    words.split("python ")[1]: page
    for words, page in shown("(?:BATCHBOUND_DATA=\\S+ )?python benchmarks/").items()
}


NEEDS = {"mutation_score.py": "mutmut", "trl_rounding.py": "trl"}


def test_every_link_of_the_site_leads_to_a_page_and_a_heading() -> None:
    pages = loaded("make_site").pages_of_site()
    headings = {
        name: {_anchor(line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        for name, text in pages.items()
    }
    dead = []
    for name, text in pages.items():
        for target, anchor in re.findall(r"\]\((?!https?:|data:)([^)#\s]*)(#[^)\s]*)?\)", text):
            page = os.path.normpath(Path(name).parent / target) if target else name
            if page not in pages and not (ROOT / "docs" / page).is_file():
                dead.append((name, target))
            elif anchor and page in pages and anchor[1:] not in headings[page]:
                dead.append((name, target + anchor))
    assert dead == []
    # Every script and notebook of the examples is a page, and the gallery leads to each.
    gallery = pages["gallery.md"]
    assert [name for name in pages if name.startswith("examples/") and name not in gallery] == []


def _anchor(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
    return re.sub(r"[-\s]+", "-", words).strip("-")
