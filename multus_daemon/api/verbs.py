"""The verbs of one engine, as `api.cni` calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from multus_daemon.node.gc import gc
from multus_daemon.node.status import status
from multus_daemon.pod import publish
from multus_daemon.pod.add import add
from multus_daemon.pod.check import check
from multus_daemon.pod.delete import delete
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.hotplug import add_network, check_network, remove_network
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.runtime.timeline import Timeline
from multus_daemon.spec.cni.result import Result


class Verbs:
    """One function for each verb. Each raises CniError for expected failures."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.add: Callable[[CniRequest], Result] = functools.partial(add, engine)
        self.delete: Callable[[CniRequest], None] = functools.partial(delete, engine)
        self.check: Callable[[CniRequest], None] = functools.partial(check, engine)
        self.add_network: Callable[[DelegateRequest], Result] = functools.partial(add_network, engine)
        self.remove_network: Callable[[DelegateRequest], None] = functools.partial(remove_network, engine)
        self.check_network: Callable[[DelegateRequest], None] = functools.partial(check_network, engine)
        self.status: Callable[[bytes], None] = functools.partial(status, engine)
        self.gc: Callable[[bytes], None] = functools.partial(gc, engine)
        self.slow: Callable[[CniRequest, Timeline], None] = functools.partial(publish.slow, engine)
