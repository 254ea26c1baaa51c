"""Import the metrics of the process and the negotiation of the format from prometheus_client, and little else.

The whole library takes 0.7 MiB more: its own metrics, and servers and clients of HTTP, whose base classes `exposition`
needs when it is imported. `sys.modules` does not keep what is imported here, so a later import gets the whole library.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

_UNUSED = ("gzip", "http.server", "prometheus_client.asgi", "socketserver", "wsgiref.simple_server")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type:
        return type(name, (), {})


@contextlib.contextmanager
def _reduced() -> Iterator[None]:
    before, package = sys.modules.copy(), ModuleType("prometheus_client")
    package.__path__ = find_spec(package.__name__).submodule_search_locations  # type: ignore[assignment,union-attr]
    sys.modules.update({name: _StandIn(name) for name in _UNUSED}, prometheus_client=package)
    yield
    for name in [name for name in sys.modules if name in _UNUSED or name.startswith("prometheus_client")]:
        del sys.modules[name]
    sys.modules.update(before)


with _reduced():
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
    from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.process_collector import ProcessCollector

__all__ = ["CONTENT_TYPE_LATEST", "CONTENT_TYPE_PLAIN_0_0_4", "ProcessCollector", "choose_encoder"]
