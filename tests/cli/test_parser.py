"""What is typed wrong costs two lines, and the word that was meant is proposed."""

from __future__ import annotations

import shlex
from argparse import SUPPRESS
from pathlib import Path

import pytest

from batchbound.cli import COMMANDS, EXAMPLES, _parser, main
from batchbound.screen.terminal import is_quiet


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pln x.csv", "there is no 'pln'; did you mean plan?"),
        ("plan x.csv --sloats 5", "there is no option --sloats; did you mean --slots?"),
        ("plan x.csv slots", "'slots' is one word too many; did you mean --slots?"),
        ("plan x.csv --solver serch", "--solver: there is no 'serch'; did you mean search?"),
        ("plan x.csv --slots 0", "--slots: 0 is not at least 1"),
        ("predict trian", "there is no 'trian'; did you mean train?"),
        ("predict train a b -o p --methd x", "there is no option --methd; did you mean --method?"),
        ("plan", "missing: FILE"),
        ("plan x.csv --slots", "--slots: a value is missing after it"),
        ("-v plan x.csv", "-v comes after the command's name"),
        ("run plan.json --model ''", "--model: its value is empty"),
        ("run plan.json --output=", "-o/--output: its value is empty"),
        ("report plan.json ''", "TRACE: its value is empty"),
        ("predict train a '' -o p", "PROMPTS COMPLETIONS: its value is empty"),
        ("run plan.json --top-k 2.5", "--top-k: '2.5' is not a whole number"),
        ("plan x.csv --slots 4 --slots=8", "--slots is given twice"),
        ("predict train a b -o p --output q", "--output is -o, which is given as well"),
        ("plan x.csv --max-tokens 4 --longest-completion 8", "--longest-completion is --max-tokens, which"),
    ],
)
def test_a_typing_error_costs_two_lines(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(words))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert said in lines[0]
    assert lines[1].endswith("--help`.")


def test_an_option_of_several_files_may_be_given_again() -> None:
    words = shlex.split("simulate x.csv --steps step --history a --json --history b c --json")
    assert _parser("simulate").parse_args(words).history == ["a", "b", "c"]


def test_an_option_may_be_given_once_in_each_call() -> None:
    parser = _parser("plan")
    assert [parser.parse_args(["plan", "x", "--slots", n]).slots for n in ("4", "8")] == [4, 8]


def test_nothing_near_is_answered_with_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["xyzzy"])
    assert "validate" in capsys.readouterr().err


def test_the_name_alone_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_an_example_that_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(EXAMPLES[name])[1:]
    assert words[0] == name
    _parser(name).parse_args(words)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert " ".join(capsys.readouterr().out.split()).endswith(f"example: {EXAMPLES[name]}")


def test_quiet_holds_for_one_command_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "exegpt-S:0:4", "--slots", "2", "--work", "1", "--overwrite", "-o", str(tmp_path / "p")]
    assert main([*plan, "--quiet"]) == 0
    assert not is_quiet()
    assert capsys.readouterr().err == ""


def options(text: str) -> list[str]:
    """Return the lines of a help text that describe options."""
    return [line for line in text.splitlines() if line.startswith("  -")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_at_most_twelve_options_and_help_all_every_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for words in ([], ["all"]):
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help", *words])
        shown[bool(words)] = capsys.readouterr().out
    assert len(options(shown[False])) <= 12
    command = _parser(name).chosen([name])
    every = [action for action in command._actions if action.option_strings and action.help != SUPPRESS]
    assert all(f"  {action.option_strings[0]}" in shown[True] for action in every)


def test_everyday_commands_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert printed.index("  plan ") < printed.index("research:") < printed.index("  compare ")
