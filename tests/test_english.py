"""Pages and help texts are in plain English: few words of dialect, short sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchbound.cli import whole_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DIALECT = re.compile(
    r"\b(?:beside|nobody|everybody|alike|under way|anew|put(?:s|ting)? back|told|lest|thereof"
    r"|mend(?:s|ed|ing)?"
    r"|dear(?:er|est)?|go(?:es|ing)? on|keys and values|answers?|stands? (?:still|for|alone)|comes? to"
    r"|so (?:many|much|few)|who(?:ever|se)?(?! (?:has|have|uses|wants|reads|runs|may)))\b"
    r"|(?:^|(?<=[.:;] ))(?:What|Of|That|Whether|Where|How) (?![^.\n]*\?)",
    re.MULTILINE,
)
"""Words that the field does not use in this sense, and sentences without a subject."""
PER_THOUSAND, MEAN, LONGEST = 1.5, 18, 35
WORDS = 22_000
"""Most words of all pages, apart from code and figures."""


def prose(page: Path) -> str:
    """Return what a person reads of a page: no code, no comments."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "", text)
    return re.sub(r"`[^`\n]*`", "code", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))


def sentences(page: Path) -> list[str]:
    """Return the sentences of paragraphs and lists; tables and headings have none."""
    paragraphs: list[str] = [""]
    for line in prose(page).splitlines():
        line = line.strip()
        if not line or line.startswith(("|", "#", "![", ":::")):
            paragraphs.append("")
        elif item := re.match(r"(?:[-*]|\d+\.) (.*)", line):
            paragraphs.append(item[1])
        else:
            paragraphs[-1] += f" {line}"
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).strip() for text in paragraphs)
    found = (re.split(r"(?<=[.?!:])[\"')*]*\s+(?=[A-Z0-9*\"(c])", text) for text in plain if text)
    return [sentence for parts in found for sentence in parts if re.search(r"\w", sentence)]


def helps() -> str:
    """Return the help of every command."""
    import argparse

    parser = whole_parser()
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return "\n".join(each.format_help(every=True) for action in subs for each in action.choices.values())


def rate(text: str) -> float:
    return 1000 * len(DIALECT.findall(text)) / len(text.split())


def test_the_counter_notices_dialect_and_long_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "It stands beside it. That was told to us. " + "Word " + "word " * 39 + "end.\n", encoding="utf-8"
    )
    assert DIALECT.findall(prose(page)) == ["beside", "That ", "told"]
    assert [len(each.split()) for each in sentences(page)] == [4, 5, 41]


def test_pages_and_help_texts_have_few_words_of_dialect() -> None:
    pages = "\n".join(prose(page) for page in PAGES)
    assert rate(pages) <= PER_THOUSAND, DIALECT.findall(pages)
    text = helps()
    assert rate(text) <= PER_THOUSAND, DIALECT.findall(text)


def test_sentences_of_the_docs_are_short_on_average() -> None:
    lengths = [len(sentence.split()) for page in PAGES for sentence in sentences(page)]
    assert sum(lengths) / len(lengths) <= MEAN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_long(page: Path) -> None:
    assert [each for each in sentences(page) if len(each.split()) > LONGEST] == []


def test_the_docs_can_be_read_in_an_afternoon() -> None:
    words = [word for page in PAGES for word in prose(page).split()]
    assert sum(any(map(str.isalpha, word)) for word in words) <= WORDS
