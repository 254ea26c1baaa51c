"""Serve STATUS."""

from __future__ import annotations

from multus_daemon import deadlines
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.networks import Lookup
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni.errors import CniError, PluginNotAvailableError


def status(engine: Engine, stdin: bytes) -> None:
    """Check that the daemon and each plugin of the cluster network can serve an ADD now.

    Raises CniError: 50 (PluginNotAvailableError), or that of a plugin.
    """
    net_conf = engine.policy.net_conf(stdin)
    if closed := engine.gates.closed:
        raise PluginNotAvailableError(
            "the daemon is not ready: " + ", ".join(f"{name}: {reason}" for name, reason in closed.items())
        )
    try:
        with deadline.within(deadlines.STATUS_PLUGINS_SECONDS):
            try:
                config = Lookup(engine.cluster, engine.files, net_conf).of_every_pod()[0]
            except CniError as error:
                raise PluginNotAvailableError(f"{error.msg} (STATUS)", error.details) from error
            engine.runner.status(config)
    except deadline.ExpiredError as error:
        raise PluginNotAvailableError(
            f"STATUS of the cluster network did not end within {deadlines.STATUS_PLUGINS_SECONDS:g} s",
            "the metric multus_plugin_duration_seconds shows which of its plugins hangs",
        ) from error
