"""The tests of `make e2e` are where most of these begin; what asserts there is rewritten as if it stood in a test."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.e2e.cluster.fixtures")
