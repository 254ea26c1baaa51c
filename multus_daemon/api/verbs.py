"""The CNI verbs as functions, bound to one engine, for `api.cni`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from multus_daemon import deadlines
from multus_daemon.node.gc import gc
from multus_daemon.pod import publish
from multus_daemon.pod.add import add
from multus_daemon.pod.check import check
from multus_daemon.pod.delete import delete
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.hotplug import add_network, check_network, remove_network
from multus_daemon.pod.networks import Lookup
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.runtime import deadline
from multus_daemon.runtime.timeline import Timeline
from multus_daemon.spec.cni.errors import CniError, PluginNotAvailableError
from multus_daemon.spec.cni.result import Result


class Verbs:
    """One function for each CNI verb. Each raises CniError for expected failures."""

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


def status(engine: Engine, stdin: bytes) -> None:
    """Check that the daemon and each plugin of the cluster network can serve an ADD now.

    Raises PluginNotAvailableError (50), or the CniError of a plugin.
    """
    net_conf = engine.net_conf(stdin)
    if closed := engine.gates.closed:
        raise PluginNotAvailableError(
            "the daemon is not ready: " + ", ".join(f"{name}: {reason}" for name, reason in closed.items())
        )
    try:
        with deadline.within(deadlines.STATUS_PLUGINS_SECONDS):
            try:
                config = Lookup(engine.cluster, engine.files, net_conf).of_every_pod()[0]
            except CniError as error:
                raise PluginNotAvailableError(f"{error.msg} (STATUS)", error.details, remedy=error.remedy) from error
            engine.runner.status(config)
    except deadline.ExpiredError as error:
        raise PluginNotAvailableError(
            f"STATUS of the cluster network did not end within {deadlines.STATUS_PLUGINS_SECONDS:g} s",
            remedy="the metric multus_plugin_duration_seconds shows which of its plugins hangs",
        ) from error
