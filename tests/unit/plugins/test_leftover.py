"""Whether a DEL that failed may have left something, by plugin, error and outcome of the ADD."""

from __future__ import annotations

import pytest

from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.plugins.leftover import Progress, may_have_left
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
)

BUSY, VERSION, CONFIG = CniError("busy"), IncompatibleVersionError("1.1.0"), InvalidNetworkConfigError("no range")
MISSING = PluginNotFoundError("no file")
HERE, EARLIER, LATER = Progress(1, "busy"), Progress(0, "x"), Progress(2, "x")
UNKNOWN = Progress()


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
    known = {"position": 1, "progress": progress, "is_added": is_added}
    assert may_have_left(plugin, error, **known, has_netns=True, kept=lambda _: True) is is_left  # type: ignore[arg-type]  # a table


def test_files_decide_where_there_are_some() -> None:
    asked = []

    def kept(plugin_type: str) -> bool:
        asked.append(plugin_type)
        return False

    for plugin in ("flannel", "host-local", "bridge"):
        assert not may_have_left(plugin, BUSY, position=0, progress=UNKNOWN, is_added=True, has_netns=True, kept=kept)
    assert asked == ["flannel", "host-local", "bridge"]


def test_a_device_comes_back_with_the_end_of_its_namespace() -> None:
    for has_netns in (True, False):
        assert has_netns is may_have_left(
            "rdma", BUSY, position=1, progress=UNKNOWN, is_added=True, has_netns=has_netns, kept=lambda _: True
        )
