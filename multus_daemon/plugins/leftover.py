"""Decide whether a plugin whose DEL failed may have left something that a later DEL could free. Pure but for `kept`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni.errors import CniError

IN_NETNS: Final = frozenset(
    {
        *("bond", "dummy", "host-device", "ib-sriov", "ipvlan", "loopback", "macvlan", "passthru", "sbr", "sriov"),
        *("static", "tap", "vlan", "vrf"),
    }
)
"""Types that leave nothing without their interface: what they make or move there goes with it, or with the namespace.

Of an address an IPAM plugin knows.
"""
NEEDING_NETNS: Final = frozenset({"sbr", "vrf"})
"""Types whose DEL fails without the namespace. That of sbr leaves a file at the path, which fails other plugins."""
# A device comes back when its namespace goes.
_ONLY_IN_NETNS: Final = frozenset({"rdma"})
# They read their configuration, or ask their own daemon, before they change anything. So does their DEL.
_ASKING_FIRST: Final = frozenset({"bandwidth", "bridge", "firewall", "portmap", "ptp", "rdma"})
# Its agent keeps leases in memory, and gives back that of an ADD that failed. Its DEL fails only without an agent.
_IN_MEMORY: Final = "dhcp"
# Its files say whether it has given an address, whatever its configuration is now.
_ON_FILE: Final = "host-local"
# Codes of the CNI SPEC that refuse the call itself: version, field, environment, decoding, configuration.
_REFUSALS: Final = frozenset({1, 2, 4, 6, 7})


@dataclass(slots=True)
class Progress:
    """Where the ADD of an attachment failed, for its undo."""

    failed_at: int | None = None
    """Position of the plugin whose ADD failed; the plugins behind it have never run."""
    failure: str = ""
    """The message of that plugin."""


def may_have_left(
    plugin_type: str,
    error: CniError,
    *,
    position: int,
    progress: Progress,
    is_added: bool,
    has_netns: bool,
    kept: Callable[[str], bool],
) -> bool:
    """Return True if the plugin may have left something but an interface, and a later DEL could free it.

    What can be left decides. Each DEL gets the configuration of the ADD, and no namespace comes back. So there is
    nothing to free

    - if the ADD did not get as far as this plugin;
    - of host-local, if it has no file of an address;
    - if the plugin refuses the call, and no ADD has succeeded: it refused the ADD too, and refuses each later DEL;
    - of dhcp, if no ADD has succeeded;
    - of a type that makes or moves something only in the pod's namespace, once that or its interface is gone;
    - if ADD and DEL failed alike, and the plugin is known to change nothing before the step that failed;
    - if flannel has saved no delegate, tuning no attributes, or bridge and ptp were to make no rules (`kept`).

    Rules of firewall and portmap, ifb devices of bandwidth, addresses of other IPAM plugins and whatever an unknown
    plugin makes on the host may be left. `position` and `progress`: of the plugin in the attachment, and of its ADD;
    `is_added`: the attachment has a result. `kept` raises IoFailureError.
    """
    failed_at = progress.failed_at
    if failed_at is not None and position > failed_at:
        return False
    if plugin_type == _ON_FILE:
        return kept(plugin_type)
    has_passed = is_added or (failed_at is not None and position < failed_at)
    # A program that is missing was there when the ADD began.
    is_refused = error.code in _REFUSALS and not isinstance(error, PluginNotFoundError)
    if not has_passed and (is_refused or plugin_type == _IN_MEMORY):
        return False
    if plugin_type in IN_NETNS or (plugin_type in _ONLY_IN_NETNS and not has_netns):
        return False
    if plugin_type in _ASKING_FIRST and position == failed_at and error.msg == progress.failure:
        return False
    return kept(plugin_type)


def may_have_interface(attachment: Attachment, netns: PodNetns) -> bool:
    """Return True if the attachment's interface is in the namespace, or if that cannot be looked into."""
    # An auxiliary chain works on the cluster network's interface.
    if attachment.auxiliary or not netns.path or not netns.exists:
        return False
    try:
        return bool(netns.existing([attachment.ifname]))
    except OSError:
        return netns.exists
