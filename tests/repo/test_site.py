"""The documentation's site: its list of pages, their summaries, the start page, and links that leave docs/."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(items: list[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            for inner in item.values():
                yield from pages(inner)


def test_every_page_is_in_the_list_once() -> None:
    there = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert sorted(pages(SITE["nav"])) == sorted([*there, "CONTRIBUTING.md"]), "add the page to `nav` of mkdocs.yml"


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name
)
def test_a_summary_of_one_sentence_is_under_the_title(path: Path) -> None:
    title, summary = path.read_text().split("\n\n", 2)[:2]
    assert title.startswith("# ")
    assert re.fullmatch(r"[^\n]+\.", summary), "one line"
    assert ". " not in summary


def test_the_front_page_leads_to_every_other() -> None:
    linked = set(re.findall(r"\]\((?:\.\./)?(\w[\w-]*\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert linked - {"README.md"} == set(pages(SITE["nav"])) - {"README.md"}


def test_make_check_builds_it_and_hears_its_warnings() -> None:
    makefile = (ROOT / "Makefile").read_text()
    check, site = (re.search(rf"(?m)^{name}:.*\n((?:\t.*\n)+)", makefile) for name in ("check", "site"))
    assert check is not None
    assert site is not None
    assert "$(MAKE) --no-print-directory site" in check[1]
    # NB: with --quiet its warnings never reach what counts them.
    assert re.findall(r"mkdocs build.*", site[1]) == ["mkdocs build"]
    assert SITE["strict"] is True


# --- the hooks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / SITE["hooks"][0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewritten(hooks: ModuleType, markdown: str, name: str = "networks.md") -> str:
    config = hooks.on_config(SimpleNamespace(extra={}))
    page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
    text = hooks.on_page_markdown(markdown, config=config, page=page, files=None)
    assert isinstance(text, str)
    return text


def test_links_into_the_repository(hooks: ModuleType) -> None:
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    markdown = "[a](../CHANGELOG.md#x), [b](../manifests), [c](networks.md#ips), `../x`"
    expected = (
        f"[a]({source}/blob/main/CHANGELOG.md#x), [b]({source}/tree/main/manifests), [c](networks.md#ips), `../x`"
    )
    assert rewritten(hooks, markdown) == expected


def test_links_to_files_of_the_repository_that_are_pages(hooks: ModuleType) -> None:
    markdown = "[a](../README.md), [b](../CONTRIBUTING.md#test)"
    assert rewritten(hooks, markdown) == "[a](README.md), [b](CONTRIBUTING.md#test)"


def test_a_file_that_is_not_in_the_repository(hooks: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"a page has a link to .*/no\.md"):
        rewritten(hooks, "[a](../no.md)")


def test_the_repository_s_files_get_the_links_of_docs(hooks: ModuleType) -> None:
    markdown = "[a](docs/networks.md#ips), [b](SECURITY.md), [c](https://example.org/docs/), [d](#test)"
    expected = "[a](networks.md#ips), [b](../SECURITY.md), [c](https://example.org/docs/), [d](#test)"
    assert hooks.as_in_docs(markdown) == expected


def test_the_start_page_has_the_picture_the_comparison_the_figures_and_every_page(hooks: ModuleType) -> None:
    text = rewritten(hooks, (ROOT / "docs" / "README.md").read_text(), "README.md")
    parts = (
        "# multus-daemon\n",
        "](diagram/light.svg#only-light)",
        "](diagram/dark.svg#only-dark)",
        "\n## Why\n",
        "| upstream v4.3.1 |",
        "<!-- figures: readme -->",
        "\n## Documentation\n",
        "| you write pods and networks |",
        "](CONTRIBUTING.md)",
        "\n## Install\n",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "](docs/" not in text
    assert "](../" not in text


@pytest.mark.parametrize(
    ("readme", "contents"),
    [
        ("# A\n", "\n| a |\n"),
        ("# A\n\n## Install\n\n## More\n", "none"),
        ("# A\n\n## Install\n\n## More\n", "\n| a |\n"),
    ],
)
def test_a_start_page_that_would_lack_a_part(hooks: ModuleType, readme: str, contents: str) -> None:
    with pytest.raises(ValueError, match=r"has no (section|picture)"):
        hooks.start_page(readme, contents)
