"""Say more about a plugin's failure: what to do, and which pod has the address.

A binary's error is only text, so its words choose what is looked at; the answer comes from the kernel, the
configuration and the results of other pods. Each try of the runtime has a new container and namespace, and Kubernetes
counts Events together only if their texts are equal: these names go to the log.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Final

from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin import host_local_config as host_local
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError, from_code

log = logging.getLogger(__name__)

# The kernel's module and option of the links that a plugin makes.
_MODULES: Final = {
    **{kind: (kind, kind.upper()) for kind in ("bridge", "dummy", "ipvlan", "macvlan")},
    "ptp": ("veth", "VETH"),
    "vlan": ("8021q", "VLAN_8021Q"),
    "vrf": ("vrf", "NET_VRF"),
}
_MASTERS: Final = {"host-device": "device", "ipvlan": "master", "macvlan": "master", "vlan": "master"}
_NO_LINK: Final = re.compile("link not found|no such device|no such network interface|no default route interface")
_NOT_WRITABLE: Final = re.compile("read-only file system|no space left on device|permission denied|not permitted")
_ASK: Final = "ask for another in the pod's annotation"
_SHOWN: Final = 200
_LINKS_MAX: Final = 10


def explained(error: CniError, call: Invocation, netns: PodNetns, cache: ResultCache) -> CniError:
    """Return the error with a remedy, if it is an ADD's, and without the names of this try, which are logged."""
    remedy = ""
    try:
        remedy = _remedy(error, call, netns, cache) if call.verb == "ADD" else ""
    except (OSError, ValueError, CniError) as problem:
        log.debug("no remedy is known: %s", problem)
    msg, details = (_without_names(text, call) for text in (error.msg, error.details))
    if (msg, details) != (error.msg, error.details):
        # The request's own line, which has the container, is the one at level error.
        log.info("with the names of this try: %s", error)
    return from_code(error.code, msg, "; ".join(filter(None, (remedy, details))))


def joined(failures: Sequence[CniError], verb: str) -> CniError:
    """Return one error for all `failures`, with the code of the first."""
    if len(failures) == 1:
        return failures[0]
    msg = "; ".join(error.msg for error in failures)
    details = "; ".join(error.details for error in failures if error.details)
    made = from_code(failures[0].code, msg, details)
    # A traceback still shows the single failures with their causes.
    made.__cause__ = ExceptionGroup(verb, failures)
    return made


def _without_names(text: str, call: Invocation) -> str:
    path = re.escape(call.netns.removeprefix("/var") or "\0")
    text = re.sub(rf'(netns )?"?(/var)?{path}(?![\w-])"?', "the pod's network namespace", text)
    text = re.sub(rf'"?(?<![\w.-]){re.escape(call.container_id)}(?![\w.-])"?', "the container", text)
    # The host's end of a pair has a random name.
    return re.sub(r"\bveth[0-9a-f]{8}\b", "veth*", text)


def _remedy(error: CniError, call: Invocation, netns: PodNetns, cache: ResultCache) -> str:
    """Return the cause, if the error lacks it, and what to do; empty if not known. Raises OSError, ValueError."""
    text, ipam = str(error).lower(), gojson.get_object(call.fields, "ipam") or {}
    plugin, ipam_type = gojson.get_str(call.fields, "type") or "", gojson.get_str(ipam, "type")
    if "operation not supported" in text and plugin in _MODULES:
        kind, (module, option) = plugin.replace("ptp", "veth"), _MODULES[plugin]
        load = f"modprobe {module} on the node, or a kernel with CONFIG_{option}"
        # pyroute2 takes 8.5 MiB, which is for a kernel without the module only.
        from multus_daemon.kernel import rare

        return "" if rare.can_make(netns.host, kind) else f"the kernel has no {kind} devices: {load}"
    if plugin in _MASTERS and _NO_LINK.search(text):
        where, kernel = ("pod", netns.pod) if gojson.get_bool(call.fields, "linkInContainer") else ("node", netns.host)
        name, key = gojson.get_str(call.fields, _MASTERS[plugin]) or "", _MASTERS[plugin]
        if kernel.find_link(name) is None if name else "default route" in text:
            wrong = f'there is no "{name}": correct' if name else "set"
            return f"{wrong} {key!r} in the network's configuration: the {where} has {_links(kernel)}"
        return ""
    if "dhcp" in (plugin, ipam_type) and "dial unix" in text:
        start = f"start `{call.served_by.get('dhcp') or '/opt/cni/bin/dhcp'} daemon` on each node, as a systemd unit or"
        stale = "remove its socket, " if "refused" in text else ""
        return f"the DHCP agent is absent: {stale}{start} a DaemonSet with hostNetwork, hostPID, /run/cni, /run/netns"
    directory = gojson.get_str(ipam, "dataDir") or host_local.DEFAULT_DATA_DIR
    if "host-local" in (plugin, ipam_type) and directory in str(error) and _NOT_WRITABLE.search(text):
        return f"check mount, free space and permissions of {directory} on the node, or set ipam.dataDir"
    if "failed to allocate all requested ips" in text:
        sets = host_local.read(call.fields, name="", cni_version=call.cni_version).range_sets
        return f"{_ASK}, in the network's range {', '.join(map(str, sets))[:_SHOWN]}"
    if "not available in range set" in text or "duplicate address" in text:
        for ip in {str(ipaddress.ip_interface(wanted).ip) for wanted in _requested(call, "ips")}:
            for entry in cache.mentioning(f'"{ip}/', other_than=call.container_id) if ip in text else ():
                if entry.network == gojson.get_str(call.fields, "name"):
                    return f"{_pod(entry.cni_args, entry.container_id)} has {ip}: {_ASK}"
        # A duplicate may be anywhere on the segment.
        return "" if "duplicate" in text else f"`multusctl attachments` shows which pod has it: {_ASK}"
    if "not in cidr notation" in text:
        return "write the address with its prefix length, such as 10.1.2.3/24"
    if plugin == "macvlan" and "address already in use" in text:
        mac = next(iter(_requested(call, "mac")), gojson.get_str(call.fields, "mac") or "unknown")
        mac, master = mac.lower().replace("-", ":"), gojson.get_str(call.fields, "master")
        index = netns.host.link(master).index if master else -1
        holders = (pod for pod, link in _with_mac(cache, call, mac, netns) if link.peer == index)
        return f"MAC address {mac} is that of {next(holders, 'another link of the same master')}: {_ASK}"
    return ""


def _links(kernel: Rtnl) -> str:
    """Return the names of links, at most 10, without lo and the ends of pods' pairs. Raises OSError."""
    # A node that is a container itself (kind) has a pair as its uplink.
    links = [link for link in kernel.links() if link.kind != "veth" or link.name.startswith("eth")]
    shown = [link.name for link in links if link.name != "lo"]
    return ", ".join(shown[:_LINKS_MAX] + ["..."] * (len(shown) > _LINKS_MAX)) or "only lo and veth pairs"


# --- other pods ------------------------------------------------------------------------------------------------------


def refuse_taken_mac(cache: ResultCache, call: Invocation, netns: PodNetns) -> None:
    """Raise InvalidNetworkConfigError if `bridge` is to use a MAC address that another pod has on the same bridge.

    Frames for either would reach whichever spoke last. The kernel decides: the other interface is up with the address,
    and its port is one of the bridge and the VLAN. The interfaces of one pod may share an address (bonding).
    """
    if gojson.get(call.fields, "type") != "bridge":
        return
    # The plugin reports a configuration that cannot be read.
    with contextlib.suppress(OSError, gojson.JsonError):
        bridge, vlan = gojson.get_str(call.fields, "bridge") or "cni0", gojson.get_int(call.fields, "vlan") or 1
        for mac in map(configuration.mac_address, _requested(call, "mac")[:1]):
            for pod, link in _with_mac(cache, call, mac, netns):
                # Kernels omit the other end's index if it is the same number.
                port = netns.host.link_at(link.peer or link.index)
                vlans = netns.host.vlans(port.index) if port.master == netns.host.link(bridge).index else [0]
                # Without VLAN filtering there are none.
                if vlan in vlans or not vlans:
                    problem = f'MAC address {mac} is that of {pod} on bridge "{bridge}"'
                    raise InvalidNetworkConfigError(problem, f"{_ASK}, or delete that pod")


def _requested(call: Invocation, key: str) -> list[str]:
    """Return the addresses that the pod asks for, `ips` or `mac`: of runtimeConfig, args, or IP or MAC of CNI_ARGS."""
    found = [value for section in configuration.requests(call.fields) if (value := gojson.get(section, key))]
    found += [text.split(",") for name, text in names.parse_args(call.args) if name == key.upper().removesuffix("S")]
    texts = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str)]


def _with_mac(cache: ResultCache, call: Invocation, mac: str, netns: PodNetns) -> Iterator[tuple[str, Link]]:
    """Yield other pods of which an interface is up with the MAC address, with its link."""
    for entry in cache.mentioning(mac, other_than=call.container_id):
        pod = _pod(entry.cni_args, entry.container_id)
        # The namespace of a container whose DEL never came may be gone.
        with contextlib.suppress(OSError), netns.at(entry.netns) as other:
            link = other.pod.find_link(entry.ifname)
            if link and link.is_up and link.mac == mac and pod != _pod(names.parse_args(call.args), call.container_id):
                yield pod, link


def _pod(args: names.Pairs, container_id: str) -> str:
    known = dict(args)
    name = f"pod {known.get('K8S_POD_NAMESPACE')}/{known.get('K8S_POD_NAME')}"
    return name if "K8S_POD_NAME" in known else f"container {container_id}"
