"""Facts about a node's links that explain a failure. Format: rtnetlink(7), struct ifinfomsg, linux/if_link.h."""

from __future__ import annotations

import errno
from typing import Final

from multus_daemon.kernel.links import RTM_GETLINK, RTM_NEWLINK, Rtnl, decode
from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_EXCL, Request, attribute

_ANY_LINK: Final = bytes(16)
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 1, 3, 18, 1
_SHOWN_MAX: Final = 10


def links(kernel: Rtnl) -> str:
    """Return the names of links for a message, at most 10, without lo and the ends of pods' pairs. Raises OSError."""
    found = map(decode, kernel.dump(Request(RTM_GETLINK, _ANY_LINK)))
    # A node that is a container itself (kind) has a pair as its uplink.
    names = [link.name for link in found if link.name != "lo" and (link.kind != "veth" or link.name.startswith("eth"))]
    return ", ".join(names[:_SHOWN_MAX] + ["..."] * (len(names) > _SHOWN_MAX)) or "only lo and veth pairs"


def can_make(kernel: Rtnl, kind: str) -> bool:
    """Report whether the kernel knows the kind of link, such as `vlan`; it may load the module. Makes no link."""
    # The module refuses an address of five bytes. Without a module the kernel refuses the kind.
    attrs = attribute(_IFLA_IFNAME, "multus-probe") + attribute(_IFLA_ADDRESS, bytes(5))
    attrs += attribute(_IFLA_LINKINFO, attribute(_IFLA_INFO_KIND, kind))
    try:
        kernel.request(Request(RTM_NEWLINK, _ANY_LINK + attrs, NLM_F_CREATE | NLM_F_EXCL))
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP
    return True
