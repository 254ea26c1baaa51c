"""A plugin of pytest that makes a selection small: emulation is slow.

`--cases N` runs the first N cases of each test. `--beside FILE` runs of a file only the tests that have the reference
plugin beside the built-in: its others say the same in each kernel.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.netns import reference


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="so many cases of each test, with different parameters")
    parser.addoption("--beside", action="append", default=[], help="a file whose tests need the reference plugin")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what the options say, whatever the order is: all workers must decide alike."""
    most, beside = config.getoption("--cases"), config.getoption("--beside")
    seen = Counter[str]()
    kept = set()
    for item in sorted(items, key=lambda item: item.nodeid):
        test = item.nodeid.partition("[")[0]
        if test.partition("::")[0] in beside and not _has_reference(item):
            continue
        seen[test] += 1
        if most is None or seen[test] <= most:
            kept.add(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _has_reference(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("reason", "").endswith(reference.HOW) for mark in item.iter_markers("skipif"))
