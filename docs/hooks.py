"""Hooks of mkdocs: the repository's README and CONTRIBUTING as pages of the site, and links that leave docs/.

On a forge the pages of docs/ work as they stand. The site has docs/ only, so the start page gets the README's text, and
CONTRIBUTING.md becomes a page. Links to both stay inside the site. Every other link that leaves docs/
(`../CHANGELOG.md`) leads to that file in the repository.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
START: Final = "README.md"
"""The start page, in docs/ and in the repository."""
PAGES: Final = (START, "CONTRIBUTING.md")
"""Files of the repository's root that the site has as pages."""

_LINK: Final = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")
_OUTSIDE: Final = re.compile(r"\]\(\.\./([^)#]+)")
_PICTURE: Final = re.compile(
    r'<picture><source [^>]*srcset="docs/([^"]+)"><img\s+alt="([^"]+)"\s+src="docs/([^"]+)"></picture>'
)


def on_config(config: Any) -> Any:
    """Set the address of the repository: pyproject.toml is the one place that has it.

    NB: not as `repo_url`, with which the theme has each reader's browser ask the forge for its figures.
    """
    config.extra["repository"] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages from the repository's root; the start page is in docs/ already."""
    from mkdocs.structure.files import File

    for name in PAGES:
        if name != START:
            files.append(File.generated(config, name, content=as_in_docs((ROOT / name).read_text())))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page. Raises FileNotFoundError for a file that does not exist, which ends the build."""

    def rewrite(link: re.Match[str]) -> str:
        if link[1] in PAGES:
            return f"]({link[1]}"
        target = ROOT / link[1]
        if not target.exists():
            raise FileNotFoundError(f"a page has a link to {target}")
        return f"]({config.extra['repository']}/{'tree' if target.is_dir() else 'blob'}/main/{link[1]}"

    if page.file.src_uri == START:
        markdown = start_page((ROOT / START).read_text(), markdown)
    return _OUTSIDE.sub(rewrite, markdown)


def start_page(readme: str, contents: str) -> str:
    """Return the repository's README with the tables of docs/README.md before its section "Install".

    Raises ValueError if either lacks what it is divided by.
    """
    about, install, rest = readme.partition("\n## Install\n")
    steps, more, _ = rest.partition("\n## More\n")
    _, first, tables = contents.partition("\n| ")
    if not (install and more and first):
        raise ValueError("the README has no section Install or More, or docs/README.md has no table")
    about, count = _PICTURE.subn(r"![\2](\3#only-light)![\2](\1#only-dark)", about)
    if count != 1:
        raise ValueError("the README has no picture for light and dark pages")
    return f"{as_in_docs(about)}\n## Documentation\n\n| {tables.rstrip()}\n{as_in_docs(install + steps)}"


def as_in_docs(markdown: str) -> str:
    """Return the text with the links that it would have in docs/."""

    def rewrite(link: re.Match[str]) -> str:
        inside = link[1].removeprefix("docs/")
        return f"]({inside})" if inside != link[1] or link[1].startswith("diagram/") else f"](../{link[1]})"

    return _LINK.sub(rewrite, markdown)
