"""Plugins called as a request calls them: in the namespace of the invocation, opened for the call."""

from __future__ import annotations

from multus_daemon.kernel.ops import PodNetns
from multus_daemon.plugins.plugin import PluginRunner
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.result import Result


def run(runner: PluginRunner, plugin_type: str, invocation: Invocation) -> Result:
    """Call one plugin, and return or raise what it does."""
    with PodNetns(invocation.netns, may_be_own=invocation.netns_override) as netns:
        return runner.run(plugin_type, invocation, netns)
