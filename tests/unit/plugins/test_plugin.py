"""Whether a DEL that failed may have left something, by plugin, error and outcome of the ADD."""

from __future__ import annotations

import pytest

from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.plugins.plugin import Progress
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
)
from tests.fakes.runner import FakePluginRunner, PlayedPlugin

BUSY, VERSION, CONFIG = CniError("busy"), IncompatibleVersionError("1.1.0"), InvalidNetworkConfigError("no range")
MISSING = PluginNotFoundError("bridge", ["/a"])
HERE, EARLIER, LATER = Progress(1, "busy"), Progress(0, "x"), Progress(2, "x")
UNKNOWN = Progress()
CALL = Invocation("DEL", "c1", "/run/netns/x", "net1", "", "/bin", {})


class Keeping(PlayedPlugin):
    """A plugin that keeps something on the node, or not."""

    def __init__(self, plugin_type: str, keeps: bool = True) -> None:
        super().__init__(plugin_type, FakePluginRunner().run)
        self._keeps = keeps

    def keeps(self, call: Invocation) -> bool:
        return self._keeps


@pytest.mark.parametrize(
    ("plugin", "error", "progress", "is_added", "is_left"),
    [
        # An unknown plugin: by what it says, and how far the ADD got.
        ("fabric", BUSY, UNKNOWN, False, True),
        ("fabric", BUSY, UNKNOWN, True, True),
        ("fabric", BUSY, HERE, False, True),
        ("fabric", BUSY, EARLIER, False, False),
        ("fabric", VERSION, UNKNOWN, False, False),
        ("fabric", VERSION, HERE, False, False),
        ("fabric", CONFIG, HERE, False, False),
        ("fabric", VERSION, LATER, False, True),
        ("fabric", VERSION, UNKNOWN, True, True),
        ("fabric", TryAgainLaterError("slow"), HERE, False, True),
        # A program that is gone may come back, with what only it can free.
        ("fabric", MISSING, UNKNOWN, False, True),
        ("firewall", VERSION, HERE, False, False),
        ("firewall", VERSION, UNKNOWN, True, True),
        ("firewall", BUSY, UNKNOWN, True, True),
        # One that works in the namespace leaves an interface, or nothing.
        ("macvlan", BUSY, UNKNOWN, True, False),
        ("host-device", MISSING, UNKNOWN, True, False),
        ("rdma", BUSY, UNKNOWN, True, True),
        # The DEL got as far as the ADD, and no further.
        ("portmap", BUSY, HERE, False, False),
        ("dhcp", BUSY, UNKNOWN, False, False),
        ("dhcp", BUSY, UNKNOWN, True, True),
        ("portmap", CniError("other"), HERE, False, True),
        ("portmap", BUSY, LATER, False, True),
        ("whereabouts", BUSY, HERE, False, True),
        # Its files decide, whatever it says.
        ("host-local", CONFIG, UNKNOWN, False, True),
        ("host-local", BUSY, EARLIER, False, False),
    ],
)
def test_by_plugin_error_and_add(
    plugin: str, error: CniError, progress: Progress, is_added: bool, is_left: bool
) -> None:
    assert Keeping(plugin).may_have_left(CALL, error, 1, progress, is_added=is_added, has_netns=True) is is_left


@pytest.mark.parametrize("plugin", ["flannel", "host-local", "bridge"])
def test_files_decide_where_there_are_some(plugin: str) -> None:
    assert not Keeping(plugin, False).may_have_left(CALL, BUSY, 0, UNKNOWN, is_added=True, has_netns=True)


def test_a_device_comes_back_with_the_end_of_its_namespace() -> None:
    for has_netns in (True, False):
        assert has_netns is Keeping("rdma").may_have_left(CALL, BUSY, 1, UNKNOWN, is_added=True, has_netns=has_netns)
