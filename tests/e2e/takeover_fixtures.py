"""The fixture of the tests in which upstream's daemon and ours take turns; a plugin, so that pytest rewrites it."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.node import Node
from tests.e2e.takeover import Make, Takeover
from tests.e2e.upstream import NEW, OLD, Upstream, daemon_of


@pytest.fixture
def takeover_from(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node], reference: Path) -> Make:
    """Makes a node where upstream's daemon of `release` serves; both daemons are ended after it."""

    @contextlib.contextmanager
    def make(kind: str, *, release: str = OLD, **settings: Any) -> Iterator[Takeover]:
        try:
            daemon_of(release)
        except ToolError as error:
            pytest.skip(str(error))
        made = Takeover(api_server, make_node(standalone=False), api_namespace)
        made.lay_out(reference, **settings)
        made.cluster_network(kind)
        made.upstream = Upstream(made.node, made.name, release)
        with api_server.reachable_in(made.node.host):
            try:
                made.upstream.start()
                yield made
            finally:
                made.upstream.stop(signal.SIGKILL)
                made.node.kill()

    return make


@pytest.fixture(params=[OLD, NEW])
def takeover(takeover_from: Make, request: pytest.FixtureRequest) -> Make:
    """Like `takeover_from`, with each release of upstream."""
    return functools.partial(takeover_from, release=request.param)
