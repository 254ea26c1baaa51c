"""The terms of docs/glossary.md, and the first use of each on a page.

python -m tests.repo.glossary PAGE...    link each first use
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[2] / "docs"
GLOSSARY: Final = DOCS / "glossary.md"
# The start page is a list of links, and a program makes the page of troubleshooting.
_LISTS: Final = ("glossary.md", "README.md", "troubleshooting.md")
PAGES: Final = sorted(set(DOCS.glob("*.md")) - {DOCS / name for name in _LISTS})
# Words that are a term only in some of their places.
_ELSEWHERE: Final = re.compile(
    r"Linux capabilit\w+|network (?:namespace|interface|card|plugin)s?|daemon[- ]?sets?", re.IGNORECASE
)
# Code, links, comments and HTML are no prose, and neither are tables, headings and snippets.
_NO_PROSE: Final = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|<[^>]*>|https?://\S+")
_NO_PARAGRAPH: Final = re.compile(r"^(#|\s*\||```|:::|!!!|    |---|<|\[)")


@dataclass(frozen=True)
class Use:
    """The first use of a term on a page, from `start` to `end`."""

    term: str
    start: int
    end: int
    linked: bool


def terms() -> dict[str, re.Pattern[str]]:
    """Map each term to its spellings."""
    found = re.findall(r"^### (.+)$", GLOSSARY.read_text(), re.MULTILINE)
    return {
        term: re.compile(rf"(?<![\w/.-]){re.escape(term)}s?(?![\w-]|\.\w)", 0 if term == "GC" else re.IGNORECASE)
        for term in found
    }


def anchor(term: str) -> str:
    """Return the link to a term's entry."""
    return f"glossary.md#{term.lower().replace(' ', '-')}"


def _prose(text: str) -> str:
    """Blank out all that is not prose; offsets stay."""
    lines, in_code = [], False
    for line in text.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        keeps = not (in_code or fence or _NO_PARAGRAPH.match(line))
        in_code ^= fence
        lines.append(line if keeps else re.sub(r"[^\n]", " ", line))
    # The summary under the title is shown alone.
    lines[: lines.index("\n", 2)] = [" " * (len(line) - 1) + "\n" for line in lines[: lines.index("\n", 2)]]
    prose = "".join(lines)
    for pattern in (_NO_PROSE, _ELSEWHERE):
        prose = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), prose)
    return prose


def first_uses(text: str) -> Iterator[Use]:
    """Yield the first use of each term in the prose of a page, in any order. Longer terms go first."""
    prose = _prose(text)
    for term, pattern in sorted(terms().items(), key=lambda item: -len(item[0])):
        link = text.find(f"]({anchor(term)})")
        match = pattern.search(prose)
        if match and not 0 <= link < match.start():
            yield Use(term, match.start(), match.end(), linked=False)
        elif link >= 0:
            yield Use(term, link, link, linked=True)
        prose = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), prose)


def _linked(text: str) -> str:
    for use in sorted(first_uses(text), key=lambda use: -use.start):
        if not use.linked:
            text = f"{text[: use.start]}[{text[use.start : use.end]}]({anchor(use.term)}){text[use.end :]}"
    return text


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(_linked(Path(name).read_text()))
