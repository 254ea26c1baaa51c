"""The documentation's site: each page is in its list, and links that leave docs/ lead into the repository."""

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
    assert sorted(pages(SITE["nav"])) == there, "add the page to `nav` of mkdocs.yml"


def test_the_front_page_leads_to_every_other() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert linked == set(pages(SITE["nav"])) - {"README.md"}


def test_make_check_builds_it_and_hears_its_warnings() -> None:
    makefile = (ROOT / "Makefile").read_text()
    check, site = (re.search(rf"(?m)^{name}:.*\n((?:\t.*\n)+)", makefile) for name in ("check", "site"))
    assert check is not None
    assert site is not None
    assert "$(MAKE) --no-print-directory site" in check[1]
    # NB: with --quiet its warnings never reach what counts them.
    assert re.findall(r"mkdocs build.*", site[1]) == ["mkdocs build"]
    assert SITE["strict"] is True


# --- links that leave docs/ ------------------------------------------------------------------------------------------


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outside_links", ROOT / SITE["hooks"][0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewritten(hook: ModuleType, markdown: str) -> str:
    config = hook.on_config(SimpleNamespace(extra={}))
    text = hook.on_page_markdown(markdown, config=config, page=None, files=None)
    assert isinstance(text, str)
    return text


def test_links_into_the_repository(hook: ModuleType) -> None:
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    markdown = "[a](../CHANGELOG.md#x), [b](../manifests), [c](networks.md#ips), `../x`"
    expected = (
        f"[a]({source}/blob/main/CHANGELOG.md#x), [b]({source}/tree/main/manifests), [c](networks.md#ips), `../x`"
    )
    assert rewritten(hook, markdown) == expected


def test_a_file_that_is_not_in_the_repository(hook: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"a page has a link to .*/no\.md"):
        rewritten(hook, "[a](../no.md)")
