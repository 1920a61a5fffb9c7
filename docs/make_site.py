"""
Gather the pages of the documentation site under build/pages; Zensical makes the site of them.

    make site

Pages of docs/ are copied. The README becomes the start page, the parsers of the commands become tables, and
the notebooks of examples/ become pages. A link that leads outside the site becomes a plain name.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
KEPT = (".svg", ".png", ".json", ".css")
LANGUAGES = {".py": "python", ".sh": "sh"}


def main() -> None:
    """Write every page."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for file in sorted(DOCS.rglob("*")):
        if file.suffix in KEPT:
            target = PAGES / file.relative_to(DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for name, text in pages_of_site().items():
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def pages_of_site() -> dict[str, str]:
    """Return the text of each page of the site by its name."""
    pages = {"index.md": start_page(read(ROOT / "README.md"))}
    pages["reference/commands.md"] = commands()
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        pages[f"examples/{notebook.stem}.md"] = notebook_page(json.loads(read(notebook)))
    for script in sorted((ROOT / "examples").glob("*")):
        if script.suffix in LANGUAGES:
            title, language = script.name, LANGUAGES[script.suffix]
            pages[f"examples/{script.stem}.md"] = f"# {title}\n\n```{language}\n{read(script)}```\n"
    for file in sorted(DOCS.rglob("*.md")):
        pages[file.relative_to(DOCS).as_posix()] = read(file)
    return {name: with_links(text, name, pages) for name, text in pages.items()}


def start_page(readme: str) -> str:
    """Return the README as the site's start page, without badges."""
    here = re.sub(r'(\]\(|src=")docs/', r"\1", readme)
    return re.sub(r"^!\[.*\]\(https://img\..*\n\n", "", here, flags=re.MULTILINE)


def read(file: Path) -> str:
    """Return the text of a file."""
    return file.read_text(encoding="utf-8")


def with_links(text: str, name: str, pages: Mapping[str, str]) -> str:
    """Return a page with plain names in place of links to files outside the site."""

    def kept(link: re.Match[str]) -> str:
        target = os.path.normpath(Path(name).parent / link[2])
        example = re.sub(r"^(?:\.\./)?(examples/\w+)\.(?:ipynb|py|sh)$", r"\1.md", target)
        if example in pages and example != target:
            return f"[{link[1]}]({os.path.relpath(example, Path(name).parent)})"
        there = target in pages or (Path(target).suffix in KEPT and (DOCS / target).is_file())
        return link[0] if there else f"`{link[1].strip('`')}`"

    return LINK.sub(kept, text)


def commands() -> str:
    """Return the page of all commands: their options as tables."""
    from batchbound.cli import EVERYDAY, EXAMPLES, RESEARCH, whole_parser

    parts = ["# Commands\n\nOptions in bold are those of `--help`; `--help all` prints every option.\n"]
    of_command = _choices(whole_parser())
    for title, names in (("Everyday", EVERYDAY), ("Research", RESEARCH)):
        parts.append(f"## {title}\n")
        for name in names:
            parts += [f"### batchbound {name}\n", f"```console\n$ {EXAMPLES[name]}\n```\n"]
            parts += _tables(of_command[name])
            for sub, parser in _choices(of_command[name]).items():
                parts += [f"#### batchbound {name} {sub}\n", *_tables(parser)]
    return "\n".join(parts)


def _choices(parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    subs = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in subs), {})


def _tables(parser: Any) -> Iterator[str]:
    yield f"{parser.description}\n"
    groups = {
        group.title: [
            action
            for action in group._group_actions
            if not isinstance(action, argparse._SubParsersAction) and action.help != argparse.SUPPRESS
        ]
        for group in parser._action_groups
    }
    first = [action for actions in groups.values() for action in actions if _is_everyday(parser, action)]
    if len(first) > 1:
        yield _table(parser, first)
    for group in parser._action_groups:
        others = [action for action in groups[group.title] if action not in first and action.dest != "help"]
        if not others:
            continue
        if group.title not in ("options", "positional arguments"):
            yield f"*{group.title}*" + (f": {_plain(group.description)}" if group.description else "") + "\n"
        elif len(first) > 1:
            yield "*more*\n"
        yield _table(parser, others)


def _is_everyday(parser: Any, action: argparse.Action) -> bool:
    return action in parser.everyday or not action.option_strings


def _table(parser: Any, actions: Iterable[argparse.Action]) -> str:
    formatter = argparse.HelpFormatter(parser.prog)
    rows = [
        f"| {_name(formatter, action, action in parser.everyday)} | {_meaning(formatter, action)} |\n"
        for action in actions
    ]
    return "| option | meaning |\n|---|---|\n" + "".join(rows)


def _name(formatter: argparse.HelpFormatter, action: argparse.Action, everyday: bool) -> str:
    if action.choices is not None and action.option_strings:
        invocation = action.option_strings[-1]
    else:
        invocation = formatter._format_action_invocation(action).split(", ")[-1]
    name = f"`{invocation}`".replace("|", "\\|")
    return f"**{name}**" if everyday and action.option_strings else name


def _meaning(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    meaning = _plain(formatter._expand_help(action)) if action.help else ""
    if action.choices is None or not action.option_strings:
        return meaning
    return f"{meaning}; one of {', '.join(f'`{choice}`' for choice in action.choices)}"


def _plain(text: str) -> str:
    spaced = " ".join(text.split())
    return re.sub(r"([|<*_])", r"\\\1", spaced)


def notebook_page(notebook: Mapping[str, Any]) -> str:
    """Return a notebook as a page: its cells and the outputs that it keeps."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += _outputs(cell.get("outputs", ()))
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/svg+xml" in data or "image/png" in data:
            kind = "image/svg+xml" if "image/svg+xml" in data else "image/png"
            content = "".join(data[kind])
            encoded = content if kind == "image/png" else base64.b64encode(content.encode()).decode()
            yield f"![output](data:{kind};base64,{''.join(encoded.split())})"
        elif "text/html" in data:
            yield "".join(data["text/html"])
        else:
            yield f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


if __name__ == "__main__":
    main()
