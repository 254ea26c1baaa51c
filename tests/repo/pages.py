"""The pages that people read, and what stands in them in the font of code."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [
    path.relative_to(ROOT).as_posix()
    for path in [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *ROOT.glob("docs/*.md")]
]
"""All but the changelog, which is about the past too."""
_BLOCK: Final = re.compile(r"(?ms)^ *```(\w*)\n(.*?)^ *```$")
_SHELL: Final = ("", "console", "sh", "bash")


@functools.cache
def text(page: str) -> str:
    """Return the page."""
    return (ROOT / page).read_text()


def spans(page: str) -> list[str]:
    """Return what is between back-quotes outside of blocks; a span may continue on the next line."""
    found = re.findall(r"(?<!`)`([^`]+)`(?!`)", _BLOCK.sub("", text(page)))
    # A table's cell has no bare `|`.
    return [" ".join(span.split()).replace("\\|", "|") for span in found]


def lines(page: str) -> Iterator[str]:
    """Yield each line of the blocks of commands, continued lines as one, without comments."""
    for language, block in _BLOCK.findall(text(page)):
        if language in _SHELL:
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                # In a console, what is not typed is the output.
                if language != "console" or line.startswith("$ "):
                    yield re.sub(r"\s+#.*", "", line).strip()
