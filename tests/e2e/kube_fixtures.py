"""Fixtures for tests against a real API server, for modules that say `pytest_plugins = ["tests.e2e.kube_fixtures"]`.

The programs are looked for, never built, by a test: `make e2e` builds them first. Where one is missing the tests are
skipped and say how to get it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError
from tests.e2e.logs import Logs

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def api_server_session(pytestconfig: pytest.Config) -> Iterator[ApiServer]:
    """One API server for all tests of the run; take `api_server` instead."""
    try:
        server = ApiServer()
    except (ToolError, OpensslError) as error:
        pytest.skip(str(error))
    with server:
        logs = Logs("API server", server.logs, "api_server")
        pytestconfig.pluginmanager.register(logs)
        yield server
        pytestconfig.pluginmanager.unregister(logs)


@pytest.fixture
def api_server(api_server_session: ApiServer) -> Iterator[ApiServer]:
    """The API server, running and ready; what a test stopped or froze is started again after it."""
    yield api_server_session
    api_server_session.resume()
    if not api_server_session.server.running:
        api_server_session.start()


@pytest.fixture
def api_namespace(api_server: ApiServer) -> str:
    """A namespace of the test's own."""
    name = f"test-{next(_NUMBERS)}"
    api_server.create_namespace(name)
    return name
