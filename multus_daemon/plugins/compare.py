"""Compare an attachment with the kernel: the built-ins of its list, then what binaries have made.

If built-ins alone made it, they can bring all of it back. If the list has a binary, a built-in restores its part of the
host's side only: a plugin that is made anew would have to be followed by the binaries' ADD.
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
from multus_daemon.plugins.plugin import BY_POD, Aspect, Difference, Plugin
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Invocation
from multus_daemon.spec.cni import versions
from multus_daemon.spec.cni.errors import CniError, InvalidNetnsError

log = logging.getLogger(__name__)

NOT_IMPLEMENTED: Final = re.compile(r"not (yet )?implemented|unimplemented|unknown CNI_COMMAND", re.IGNORECASE)
"""CNI has no error code for a plugin without CHECK. The words of whereabouts, and of the skeletons of plugins."""

_Calls = Sequence[tuple[Plugin, Invocation, Invocation]]
"""For each plugin: its call with the recorded result, and its CHECK with that result in the plugin's version."""


def differences(attachment: Attachment, calls: _Calls, netns: PodNetns) -> list[Difference]:
    """Return what differs from the recorded result, in the order in which repairs must be made.

    Raises CniError; InvalidNetnsError if the namespace is not there.
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
        found += [item for item in _missing(attachment, netns) if item.text not in texts]
    # A CHECK would say the same again, and that of dhcp hangs without the interface.
    if not found and not netns.has_renamed(attachment.observed):
        found = [item for check in checks for item in _check(attachment, *check, netns)]
    return found


_ALL: Final[frozenset[Aspect]] = frozenset(("addresses", "mtu"))


def _check(attachment: Attachment, plugin: Plugin, call: Invocation, netns: PodNetns) -> list[Difference]:
    """Return the error of the plugin's CHECK as a difference, if its version has one and the list allows it."""
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


def _missing(attachment: Attachment, netns: PodNetns) -> Iterator[Difference]:
    """Yield what the namespace lacks of that which it had after the ADD. Raises InternalError.

    If nobody looked after the ADD, plugins may have moved the routes of the result on purpose, and a device in user
    space has no interface.
    """
    expected, result = attachment.observed, attachment.result
    if expected is None and result is not None and not attachment.device_id:
        if not any(item.sandbox for item in result.interfaces):
            return
        expected = replace(result, routes=())
    if expected is None:
        return
    with step(f"look into {netns.path}"):
        for item in netns.missing(attachment.ifname, expected, observed=attachment.observed is not None):
            yield Difference(item.text + (BY_POD if item.by_pod else ""), by_pod=item.by_pod)
