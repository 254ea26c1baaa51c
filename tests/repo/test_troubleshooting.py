"""`docs/troubleshooting.md` has a section for each situation that is tested, in the tests' own words, and no other."""

from __future__ import annotations

import ast

from tests.e2e import troubleshooting


def beginnings() -> list[str]:
    """Return the first words of each section, from the docstrings of the tests that show something."""
    tree = ast.parse(troubleshooting.MODULE.read_text())
    tests = [item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")]
    return [troubleshooting.heading(ast.get_docstring(item) or "") for item in tests]


def test_there_is_a_section_for_each_situation() -> None:
    found = troubleshooting.sections(troubleshooting.PAGE.read_text())
    expected = beginnings()
    assert list(found) == [text.partition("\n")[0] for text in expected]
    for text, section in zip(expected, found.values(), strict=True):
        assert section.startswith(f"{text}\n"), "make troubleshooting"


def test_the_page_is_made_of_its_introduction_and_these() -> None:
    text = troubleshooting.PAGE.read_text()
    assert text == troubleshooting.page(troubleshooting.sections(text).values()), "make troubleshooting"


def test_the_page_has_the_cause_and_the_advice_of_an_output_only() -> None:
    output = """\
a/web on node n: bad
  -> correct it
  lacks a/storage
  left over of container c: its DEL failed
    -> remove the cause
  ok pod: found
  no networks: bad
  2026-01-01 12:00:00 ADD: bad
  2026-01-01T12:00:00Z Event InvalidNetwork: bad
"""
    assert troubleshooting.shortened(output).splitlines() == output.splitlines()[:5]
