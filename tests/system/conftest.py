"""A network namespace for the tests of programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.namespaces import named


@pytest.fixture
def netns() -> Iterator[str]:
    """Path of a pod's namespace."""
    with named("pod") as path:
        yield path
