"""Check the contributors' pages: files, names and commands exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs/releasing.md",
    ".github/PULL_REQUEST_TEMPLATE.md",
)


def code(text: str) -> list[str]:
    """Return the spans between back-quotes; a span may continue on the next line."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def is_path(span: str) -> bool:
    """True for what can only be the name of a file or folder here."""
    return bool(re.fullmatch(r"\.?[\w.-]+(/[\w.-]+)+|[\w.-]+\.(md|toml|txt|yaml)", span))


def items() -> Iterator[str]:
    """Each item of a list in CONTRIBUTING.md, whole."""
    for block in re.split(r"\n\n", (ROOT / "CONTRIBUTING.md").read_text()):
        if re.match(r"\d+\. |\* ", block):
            yield from re.split(r"\n(?=\d+\. |\* )", block)


# --- files and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert not [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    assert not [span for span in code(text) if is_path(span) and not (ROOT / span).exists()]


def test_every_name_of_an_item_is_in_a_file_of_the_item() -> None:
    checked = 0
    for item in items():
        spans = code(item)
        files = [ROOT / span for span in spans if is_path(span) and (ROOT / span).is_file()]
        texts = [path.read_text() for path in files if path.suffix in {".py", ".zig"}]
        for name in [span for span in spans if re.fullmatch(r"\w*[A-Z_]\w*", span)] if texts else ():
            checked += 1
            assert any(re.search(rf"\b{name}\b", text) for text in texts), f"{name} is not in what {item!r} names"
    assert checked > 20


# --- recipes ---------------------------------------------------------------------------------------------------------

RECIPES = dict(re.findall(r"(?ms)^## (Add an? [^\n]+)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text()))
PLACES = ("multus_daemon", "multus_tools", "multus_shim", "charts", "tests/spec", "tests/fakes", "tests/e2e/monitoring")
"""Where a recipe must know every file; other tests and pages may mention its example."""


def test_the_recipes() -> None:
    assert set(RECIPES) == {"Add a setting", "Add a metric", "Add an alert", "Add a built-in plugin", "Add a verb"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_every_file_of_its_example(recipe: str) -> None:
    (example,) = re.findall(r"Follow `([^`]+)`\.", RECIPES[recipe])
    sources = [
        path
        for place in PLACES
        for path in (ROOT / place).rglob("*")
        if path.suffix in {".py", ".zig", ".yaml", ".json", ".tpl"} and example in path.read_text()
    ]
    assert len(sources) > 1, "the example is gone: choose another"
    named = set(code(RECIPES[recipe]))
    assert [name for path in sources if (name := path.relative_to(ROOT).as_posix()) not in named] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_names_after_a_file_are_in_that_file(recipe: str) -> None:
    for path, names in re.findall(r"`([\w./-]+)`:((?:[\s,]+`\w+`)+)", RECIPES[recipe]):
        text = (ROOT / path).read_text()
        assert [name for name in code(names) if not re.search(rf"\b{name}\b", text)] == [], path
