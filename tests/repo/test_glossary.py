"""Each page links the first use of a term to the glossary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo import glossary


@pytest.mark.parametrize("page", glossary.PAGES, ids=lambda page: page.stem)
def test_the_first_use_of_a_term_is_a_link(page: Path) -> None:
    missing = [use.term for use in glossary.first_uses(page.read_text()) if not use.linked]
    assert missing == [], f"run: python -m tests.repo.glossary {page.relative_to(glossary.DOCS.parent)}"


def test_a_first_use_without_a_link_is_found() -> None:
    text = "# The record\n\nOf records.\n\n`record` [record](x.md)\nA record, and another record.\n"
    [use] = (use for use in glossary.first_uses(text) if not use.linked)
    assert (use.term, use.start) == ("Record", text.index("A record") + 2)
    linked = text.replace("A record", "A [record](glossary.md#record)")
    assert all(use.linked for use in glossary.first_uses(linked))
