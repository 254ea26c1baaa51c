"""The logs of a server or a node, in the reports of tests that fail."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest


class Logs:
    """Adds the ends of logs to the report of a failed test that used one of the fixtures."""

    def __init__(self, title: str, logs: Callable[[], str], *fixtures: str) -> None:
        self._title, self._logs, self._fixtures = title, logs, fixtures

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and set(self._fixtures).intersection(getattr(item, "fixturenames", ())):
            report.sections.append((self._title, self._logs()))
        return report
