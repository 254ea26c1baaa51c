"""The documentation's site: its list of pages, the start page, and links that leave docs/."""

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


def test_the_front_page_leads_to_every_other() -> None:
    linked = set(re.findall(r"\]\((?:\.\./)?(\w[\w-]*\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert linked - {"README.md"} == set(pages(SITE["nav"])) - {"README.md"}


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
