"""The verbs of one engine, as the socket calls them (`server.cni_api.Verbs`)."""

from __future__ import annotations

import functools
from collections.abc import Callable

from multus_daemon.cni.result import Result
from multus_daemon.engine.add import add
from multus_daemon.engine.check import check
from multus_daemon.engine.delete import delete
from multus_daemon.engine.engine import Engine
from multus_daemon.engine.gc import gc
from multus_daemon.engine.hotplug import add_network, check_network, remove_network
from multus_daemon.engine.request import CniRequest, DelegateRequest
from multus_daemon.engine.status import status


class Verbs:
    """One function for each verb. Each raises CniError and nothing else that is expected."""

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
