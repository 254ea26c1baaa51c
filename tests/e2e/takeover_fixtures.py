"""The fixture of the tests in which upstream's daemon and ours take turns; a plugin, so that pytest rewrites it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.node import Node
from tests.e2e.takeover import Make, Takeover
from tests.e2e.upstream import Upstream


@pytest.fixture
def takeover(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node], reference: Path) -> Make:
    """Makes a node where upstream's daemon serves; both daemons are ended after it."""

    @contextlib.contextmanager
    def make(kind: str, **settings: Any) -> Iterator[Takeover]:
        made = Takeover(api_server, make_node(standalone=False), api_namespace)
        made.lay_out(reference, **settings)
        made.cluster_network(kind)
        try:
            made.upstream = Upstream(made.node, made.name)
        except ToolError as error:
            pytest.skip(str(error))
        with api_server.reachable_in(made.node.host):
            try:
                made.upstream.start()
                yield made
            finally:
                made.upstream.stop(signal.SIGKILL)
                made.node.kill()

    return make
