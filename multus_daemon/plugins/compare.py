"""Compare an attachment with the kernel: what its built-ins have made, then what its binaries have made.

If only built-ins made the attachment, they can repair all of it. If the list has a binary, a built-in repairs its part
on the host only: after a new interface, the ADD of the binary would have to run again.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.plugins.plugin import Aspect, Plugin
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Difference, Invocation
from multus_daemon.spec.cni import versions
from multus_daemon.spec.cni.errors import CniError, InvalidNetnsError

log = logging.getLogger(__name__)

NOT_IMPLEMENTED: Final = re.compile(r"not (yet )?implemented|unimplemented|unknown CNI_COMMAND", re.IGNORECASE)
"""Matches the errors of plugins without CHECK, for which CNI has no code: of whereabouts, and of plugin templates."""

_Calls = Sequence[tuple[Plugin, Invocation, Invocation]]
"""For each plugin: itself, a call with the recorded result, and a CHECK with that result in the plugin's CNI version.
"""


def differences(attachment: Attachment, calls: _Calls, netns: PodNetns, *, asks: bool) -> list[Difference]:
    """Return the differences from the recorded result, in the order in which they must be repaired.

    `asks`: if nothing differs, also run the CHECK of binaries. Raises CniError, InvalidNetnsError.
    """
    try:
        netns.require()
    except NamespaceError as error:
        raise InvalidNetnsError(f'failed to open netns "{error.filename}": {error.strerror}') from error
    is_ours = all(call.served_by.get(plugin.type) == BUILT_IN for plugin, call, _ in calls)
    found: list[Difference] = []
    checks: list[tuple[Plugin, Invocation]] = []
    for position, (plugin, call, check) in enumerate(calls):
        later = (after.sets(its) for after, its, _ in calls[position + 1 :])
        compared = plugin.differences(call, netns, frozenset().union(*later) if is_ours else _ALL)
        if compared is None:
            is_ours = False
            checks.append((plugin, check))
            continue
        # A MAC address that `tuning` has set is that of the result, which the plugin before it compares too.
        known = {item.text for item in found}
        found += [item for item in compared if item.text not in known]
    if not is_ours:
        found = [item if item.on_host else dataclasses.replace(item, repair=None) for item in found]
        texts = {item.text for item in found}
        with step(f"look into {netns.path}"):
            found += [item for item in missing(attachment, netns) if item.text not in texts]
    # A CHECK would say the same again, and that of dhcp hangs without the interface.
    if asks and not found and not netns.has_renamed(attachment.observed):
        found = [item for check in checks for item in _check(attachment, *check, netns)]
    return found


_ALL: Final[frozenset[Aspect]] = frozenset(("addresses", "mtu"))


def _check(attachment: Attachment, plugin: Plugin, call: Invocation, netns: PodNetns) -> list[Difference]:
    """Return the error of the plugin's CHECK as a difference; nothing if its CNI version or the list has no CHECK."""
    if attachment.config.disable_check or not versions.allows(attachment.config.cni_version, "CHECK"):
        return []
    try:
        plugin.run(call, netns)
    except InvalidNetnsError:
        raise
    except CniError as error:
        if NOT_IMPLEMENTED.search(error.msg):
            return []
        return [Difference(f'CHECK of plugin "{plugin.type}": {error}', is_certain=False)]
    return []


def missing(attachment: Attachment, netns: PodNetns) -> Iterator[Difference]:
    """Yield each interface, address and route that the namespace had after the ADD and lacks now. Raises OSError.

    Without `Attachment.observed` another daemon, or an older one, ran the ADD. Only the result is known then: plugins
    may have moved its routes on purpose, a device in user space has no interface, and an IPAM plugin alone none either.
    """
    expected, result = attachment.observed, attachment.result
    if expected is None and result is not None:
        has_link = (
            any(item.sandbox for item in result.interfaces) if attachment.is_built_in else not attachment.device_id
        )
        expected = replace(result, routes=()) if has_link else None
    if expected is not None:
        yield from netns.missing(attachment.ifname, expected)
