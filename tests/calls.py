"""Plugins called as a request calls them: in the namespace of the container, opened for the call."""

from __future__ import annotations

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.plugin import Plugin, Progress
from multus_daemon.plugins.run import ListRunner
from multus_daemon.spec.attachment import Attachment, Invocation, Sandbox
from multus_daemon.spec.cni.result import Result


def run(plugin: Plugin, invocation: Invocation) -> Result:
    """Call one plugin, and return or raise what it does."""
    with PodNetns(invocation.netns, may_be_own=invocation.netns_override) as netns:
        return plugin.run(invocation, netns)


def add(runner: ListRunner, sandbox: Sandbox, attachment: Attachment, progress: Progress | None = None) -> Result:
    """ADD of one attachment. Raises CniError."""
    with PodNetns(sandbox.netns) as netns:
        return runner.add(sandbox, attachment, netns, progress)


def delete(runner: ListRunner, sandbox: Sandbox, attachment: Attachment, progress: Progress | None = None) -> None:
    """DEL of one attachment. Raises CniError."""
    with PodNetns(sandbox.netns) as netns:
        runner.delete(sandbox, attachment, netns, progress)


def check(runner: ListRunner, sandbox: Sandbox, attachment: Attachment) -> None:
    """CHECK of one attachment. Raises CniError."""
    with PodNetns(sandbox.netns) as netns:
        runner.check(sandbox, attachment, netns)
