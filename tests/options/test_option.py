"""An option is stated once: what follows for the command line, TOML and the library."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

import batchbound.options
from batchbound.cli import main
from batchbound.cli.parser import Parser, record_of
from batchbound.data.files.disk import InputError
from batchbound.options.option import Option, Options, PathText, Rule, fields_of, table_of, takes
from batchbound.options.values import Positive, Seconds

ROOT = Path(__file__).resolve().parents[2]

for found in pkgutil.iter_modules(batchbound.options.__path__):
    importlib.import_module(f"batchbound.options.{found.name}")


@dataclass(frozen=True)
class Oven(Options):
    """An oven, for tests."""

    RULES = (Rule(("fan",), when=lambda oven: oven.heat == "low", where="at {heat} heat"),)

    dish: Annotated[PathText, Option("file of the dish", positional=True, metavar="DISH")]
    loaves: Annotated[Positive | Literal["auto"], Option("number of loaves")] = 2
    minutes: Annotated[Seconds, Option("time in minutes")] = 30.0
    heat: Annotated[Literal["low", "high"], Option("heat")] = "high"
    fan: Annotated[bool, Option("turn the fan on", excludes=("seeds",))] = False
    seeds: Annotated[tuple[str, ...], Option("seeds on the crust", words="append")] = ()
    glaze: Annotated[str | None, Option("glaze", needs=("seeds",), older=("--icing",))] = None


def typed(*words: str) -> Oven:
    parser = Parser(prog="oven")
    parser.add_options(Oven)
    return record_of(Oven, parser.parse_args(words))


def test_what_is_typed_becomes_a_record() -> None:
    assert typed("rye") == Oven("rye")
    words = ["rye", "--loaves", "auto", "--seeds", "sesame", "--seeds", "poppy", "--icing", "milk"]
    assert typed(*words) == Oven("rye", "auto", seeds=("sesame", "poppy"), glaze="milk")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rye --loaves 0", "--loaves: 0 is not at least 1"),
        ("rye --loaves two", "--loaves: 'two' is not a whole number"),
        ("rye --minutes 0", "--minutes: 0 is not a positive number"),
        ("rye --minutes -1", "--minutes: '-1' is not a number of at least 0"),
        ("rye --heat off", "--heat: there is no 'off'; there are low, high"),
        ("", "missing: DISH"),
    ],
)
def test_a_wrong_word_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        typed(*words.split())
    assert said in capsys.readouterr().err


def test_the_library_refuses_the_same_values() -> None:
    for stated, said in (
        ({"loaves": 0}, "loaves: 0 is not at least 1"),
        ({"loaves": True}, "loaves: True is not a whole number"),
        ({"minutes": 0.0}, "minutes: 0 is not a positive number"),
        ({"heat": "off"}, "heat: there is no 'off'"),
        ({"fan": True, "heat": "low"}, "--fan has no effect at low heat"),
        ({"fan": True, "seeds": ("rye",)}, "--fan has no effect with --seeds. Leave one of them out."),
        ({"glaze": "milk"}, "--glaze has no effect without --seeds. Give --seeds as well"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            Oven("rye", **stated)


def test_paths_and_numbers_of_numpy_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    oven = Oven(Path("rye"), numpy.int64(3))
    assert (oven.dish, oven.loaves) == ("rye", 3)
    assert type(oven.loaves) is int


def test_a_function_takes_the_fields_as_keywords() -> None:
    @takes(Oven)
    def bake(oven: Oven) -> object:
        """Bake."""
        return oven.loaves

    assert bake("rye", loaves=5) == bake.of(Oven("rye", 5)) == 5
    with pytest.raises(TypeError, match="'loafs'"):
        bake("rye", loafs=5)  # type: ignore[call-arg]


def test_a_table_of_toml_states_options(tmp_path: Path) -> None:
    path = tmp_path / "oven.toml"
    path.write_text('[oven]\nloaves = 4\nseeds = ["poppy"]\n')
    assert Oven("rye", **table_of(path, "oven", Oven)) == Oven("rye", 4, seeds=("poppy",))
    path.write_text("[oven]\nloafs = 4\n")
    with pytest.raises(InputError, match=re.escape("oven.toml, table [oven]: no such option: loafs")):
        table_of(path, "oven", Oven)


def test_a_command_reads_its_table_and_what_is_typed_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.toml"
    path.write_text("[bound]\nslots = 2\njson = true\n\n[plan]\nslots = 9\n")
    for words, slots in ([], 2), (["--slots", "4"], 4):
        given = ["--slots", str(slots)]
        assert main(["bound", "exegpt-S:0:4", "--json", *given]) == 0
        wanted = capsys.readouterr().out
        assert main(["bound", "exegpt-S:0:4", "--options", str(path), *words]) == 0
        assert capsys.readouterr().out == wanted
    path.write_text("[bound]\nslotz = 2\n")
    assert main(["bound", "exegpt-S:0:4", "--options", str(path)]) == 2
    assert "options.toml, table [bound]: no such option: slotz" in capsys.readouterr().err


def records(base: type[Options] = Options) -> list[type[Options]]:
    below = [each for record in base.__subclasses__() for each in (record, *records(record))]
    of_a_command = (record for record in dict.fromkeys(below) if not record.__subclasses__())
    return [record for record in of_a_command if record.__module__.startswith("batchbound.")]


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_each_option_has_help_and_refers_to_options_that_exist(record: type[Options]) -> None:
    fields = {field.name: field for field in fields_of(record)}
    for field in fields.values():
        assert field.option.help
        assert {*(field.option.needs or ()), *field.option.excludes} <= fields.keys()
        assert field.kind is not object or field.option.parse is not None, field.name
    for rule in record.RULES:
        names = {name.split()[0] for name in rule.options} | {*rule.needs, *rule.excludes}
        assert names <= fields.keys()


SNIPPET = """
import batchbound

batchbound.profile("tiny:llama", slots="x")
batchbound.audit("run.jsonl", slotz=4)
batchbound.audit("run.jsonl", slots=4)
batchbound.plan("prompts.jsonl", slots="x")
batchbound.plan("prompts.jsonl", slots="auto").makespan
batchbound.run("prompts.jsonl", "tiny:llama", slots="x")
batchbound.run("prompts.jsonl", "tiny:llama", slots=8).completions
"""


@pytest.mark.slow
def test_a_wrong_keyword_is_an_error_of_mypy(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    words = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "snippet.py")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if "snippet.py" in line and ": error:" in line]
    lines = [line.partition("snippet.py:")[2] for line in errors]
    assert [line.partition(":")[0] for line in lines] == ["4", "5", "7", "9"], done.stdout + done.stderr
    assert 'incompatible type "str"; expected "int"' in lines[0]
    assert 'Unexpected keyword argument "slotz"' in lines[1]
