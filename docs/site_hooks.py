"""What the documentation site adds to the pages: the README as its start, and the commands' own help."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other things than Markdown under docs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links to files outside the site are plain names."""

    def kept(link: re.Match[str]) -> str:
        target = os.path.normpath(Path(page.file.src_uri).parent / link[2])
        return link[0] if files.get_file_from_path(target) is not None else f"`{link[1].strip('`')}`"

    return LINK.sub(kept, markdown)


def commands() -> str:
    """Return the help of every command, as the program prints it."""
    from batchbound.cli import COMMANDS

    parts = ["# Commands\n\nEach command's own `--help`. Mistakes cost two lines and exit status 2.\n"]
    parts += [f"## {name}\n\n```text\n{help_of(name)}```\n" for name in sorted(COMMANDS)]
    return "\n".join(parts)


def help_of(name: str) -> str:
    """Return what `batchbound NAME --help` prints."""
    from batchbound.cli import main

    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([name, "--help", "all"])
    return printed.getvalue()


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page on which references in docstrings, which Sphinx would link, are plain names."""
    html = html.replace(":math:<code", "<code")
    return re.sub(r":(?:[a-z]+:)?[a-z]+:(<code[^>]*>)~?(?:[\w.]*\.)?(\w+</code>)", r"\1\2", html)
