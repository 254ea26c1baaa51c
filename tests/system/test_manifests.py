"""The manifests are what the chart renders: after a change of the chart, `make manifests`."""

from __future__ import annotations

import pytest

from tests.e2e import build_tools
from tests.programs import path_of
from tests.repo import manifests


def test_the_manifests_are_current() -> None:
    try:
        helm = path_of("helm") or build_tools.find("helm")
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    made = manifests.made(helm)
    stale = [path for path, text in made.items() if (manifests.MANIFESTS / path).read_text() != text]
    assert stale == [], "make manifests"
