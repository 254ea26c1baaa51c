"""Add a remedy to a plugin's failure: what to do, and which other pod has the address.

A built-in's error says what failed by its class, or by the kernel's error behind it. A binary's error is only text, so
its words decide what is examined: the kernel, the configuration or the results of other pods. Each attempt of the
runtime has a new container and namespace, and Kubernetes counts Events together only if their texts are equal, so these
names are logged and left out.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Final

from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin import host_local_config as host_local
from multus_daemon.plugins.builtin.contract import ASK
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import CniError, InvalidAnnotationError, Origin, errno_of

log = logging.getLogger(__name__)

# The kernel's module and option of the links that a plugin makes.
_MODULES: Final = {
    **{kind: (kind, kind.upper()) for kind in ("bridge", "dummy", "ipvlan", "macvlan")},
    "ptp": ("veth", "VETH"),
    "vlan": ("8021q", "VLAN_8021Q"),
    "vrf": ("vrf", "NET_VRF"),
}
_MASTERS: Final = {"host-device": "device", "ipvlan": "master", "macvlan": "master", "vlan": "master"}
_NO_LINK: Final = "link not found|no such device|no such network interface|no default route interface"
_NOT_WRITABLE: Final = "read-only file system|no space left on device|permission denied|not permitted"
_LINKS_MAX: Final = 10


def explained(error: CniError, call: Invocation, netns: PodNetns, cache: ResultCache) -> CniError:
    """Return the error without the names of container and namespace, which differ at each attempt of the runtime.

    The error of an ADD gets a remedy. The names are logged.
    """
    remedy = ""
    try:
        remedy = _remedy(error, call, netns, cache) if call.verb == "ADD" else ""
    except (OSError, ValueError, CniError) as problem:
        log.debug("the cause of a plugin's error could not be examined: %s", problem)
    msg, details = (_without_names(text, call) for text in (error.msg, error.details))
    if (msg, details) != (error.msg, error.details):
        # The request's own line, which has the container, is the one at level error.
        log.info("the error with the names of container and namespace: %s", error)
    return error.changed(msg, details, remedy)


def joined(failures: Sequence[CniError], verb: str) -> CniError:
    """Return one error for all `failures`, with the code of the first."""
    if len(failures) == 1:
        return failures[0]
    msg = "; ".join(error.msg for error in failures)
    details = "; ".join(error.details for error in failures if error.details)
    made = failures[0].changed(msg, details)
    # A traceback still shows the single failures with their causes.
    made.__cause__ = ExceptionGroup(verb, failures)
    return made


def _without_names(text: str, call: Invocation) -> str:
    path = re.escape(call.netns.removeprefix("/var") or "\0")
    text = re.sub(rf'(netns )?"?(/var)?{path}(?![\w-])"?', "the pod's network namespace", text)
    text = re.sub(rf'"?(?<![\w.-]){re.escape(call.container_id)}(?![\w.-])"?', "the container", text)
    # The host's end of a pair has a random name, an ifb link one of the container.
    return re.sub(r"\b(veth|bwp)(?:[0-9a-f]{8}|[0-9a-f]{12})\b", r"\1*", text)


def _remedy(error: CniError, call: Invocation, netns: PodNetns, cache: ResultCache) -> str:
    """Return what to do, and the cause if the error lacks it; empty if not known. Raises OSError, ValueError."""
    text, ipam = str(error), gojson.get_object(call.fields, "ipam") or {}

    def says(words: str, *numbers: int) -> bool:
        if error.origin is Origin.PLUGIN:
            return re.search(words, text, re.IGNORECASE) is not None
        return errno_of(error) in numbers

    plugin, ipam_type = gojson.get_str(call.fields, "type") or "", gojson.get_str(ipam, "type")
    if plugin in _MODULES and says("operation not supported", errno.EOPNOTSUPP):
        kind, (module, option) = plugin.replace("ptp", "veth"), _MODULES[plugin]
        load = f"modprobe {module} on the node, or a kernel with CONFIG_{option}"
        # pyroute2 takes 8.5 MiB, which is for a kernel without the module only.
        from multus_daemon.kernel import rare

        return "" if rare.can_make(netns.host, kind) else f"the kernel has no {kind} devices: {load}"
    if plugin == "bandwidth" and says("not supported|qdisc: no such file", errno.EOPNOTSUPP, errno.ENOENT):
        modules = "ifb sch_tbf sch_ingress cls_u32 act_mirred"
        return f"modprobe -a {modules} on the node, or a kernel with them" if "netns" not in text else ""
    if plugin in _MASTERS and says(_NO_LINK, errno.ENODEV):
        where, kernel = ("pod", netns.pod) if gojson.get_bool(call.fields, "linkInContainer") else ("node", netns.host)
        name, key = gojson.get_str(call.fields, _MASTERS[plugin]) or "", _MASTERS[plugin]
        if kernel.find_link(name) is None if name else says("default route", errno.ENODEV):
            wrong = f'there is no "{name}": correct' if name else "set"
            return f"{wrong} {key!r} in the network's configuration: the {where} has {_links(kernel)}"
        return ""
    if "dhcp" in (plugin, ipam_type) and says("dial unix"):
        start = f"start `{call.served_by.get('dhcp') or '/opt/cni/bin/dhcp'} daemon` on each node, as a systemd unit or"
        stale = "remove its socket, " if says("refused") else ""
        return f"the DHCP agent is absent: {stale}{start} a DaemonSet with hostNetwork, hostPID, /run/cni, /run/netns"
    directory = gojson.get_str(ipam, "dataDir") or host_local.DEFAULT_DATA_DIR
    if "host-local" in (plugin, ipam_type) and directory in text and says(_NOT_WRITABLE):
        return host_local.check_directory(directory)
    if says("failed to allocate all requested ips"):
        sets = host_local.read(call.fields, name="", cni_version=call.cni_version).range_sets
        return host_local.ask_in_range(sets)
    if isinstance(error, contract.AddressTakenError) or says("not available in range set|duplicate address"):
        taken = error.address if isinstance(error, contract.AddressTakenError) else text
        for ip in {str(ipaddress.ip_interface(wanted).ip) for wanted in _requested(call, "ips")}:
            for entry in cache.mentioning(f'"{ip}/', other_than=call.container_id) if ip in taken else ():
                if entry.network == gojson.get_str(call.fields, "name"):
                    return f"{_pod(entry.cni_args, entry.container_id)} has {ip}: {ASK}"
        # A duplicate may be anywhere on the segment.
        return host_local.ASK_WHO if says("not available in range set") else ""
    if says("not in cidr notation"):
        return contract.WITH_LENGTH
    if plugin == "macvlan" and says("address already in use", errno.EADDRINUSE):
        mac = next(iter(_requested(call, "mac")), gojson.get_str(call.fields, "mac") or "unknown")
        mac, master = mac.lower().replace("-", ":"), gojson.get_str(call.fields, "master")
        index = netns.host.link(master).index if master else -1
        holders = (pod for pod, link in _with_mac(cache, call, mac, netns) if link.peer == index)
        return f"MAC address {mac} is that of {next(holders, 'another link of the same master')}: {ASK}"
    return ""


def _links(kernel: Rtnl) -> str:
    """Return the names of the host's links, at most 10, without `lo` and veths of pods. Raises OSError."""
    # A node that is a container itself (kind) has a pair as its uplink.
    links = [link for link in kernel.links() if link.kind != "veth" or link.name.startswith("eth")]
    shown = [link.name for link in links if link.name != "lo"]
    return ", ".join(shown[:_LINKS_MAX] + ["..."] * (len(shown) > _LINKS_MAX)) or "only lo and veth pairs"


# --- other pods ------------------------------------------------------------------------------------------------------


def refuse_taken_mac(cache: ResultCache, call: Invocation, netns: PodNetns) -> None:
    """Raise InvalidNetworkConfigError if a `bridge` ADD wants a MAC address that another pod has on the same bridge.

    The bridge sends frames to the port that used the address last. An address is taken if the other pod's interface has
    it and is up, and its port is in the same bridge and VLAN. Interfaces of one pod may share an address (bonding).
    """
    if gojson.get(call.fields, "type") != "bridge":
        return
    # The plugin reports a configuration that cannot be read.
    with contextlib.suppress(OSError, gojson.JsonError):
        bridge, vlan = gojson.get_str(call.fields, "bridge") or "cni0", gojson.get_int(call.fields, "vlan") or 1
        for mac in map(contract.mac_address, _requested(call, "mac")[:1]):
            for pod, link in _with_mac(cache, call, mac, netns):
                # Kernels omit the other end's index if it is the same number.
                port = netns.host.link(link.peer or link.index)
                vlans = netns.host.vlans(port.index) if port.master == netns.host.link(bridge).index else [0]
                # Without VLAN filtering there are none.
                if vlan in vlans or not vlans:
                    problem = f'MAC address {mac} is that of {pod} on bridge "{bridge}"'
                    raise InvalidAnnotationError(problem, remedy=f"{ASK}, or delete that pod")


def _requested(call: Invocation, key: str) -> list[str]:
    """Return the requested addresses of runtimeConfig, `args` or CNI_ARGS (IP, MAC); `key`: `ips` or `mac`."""
    found = [value for section in contract.requests(call.fields) if (value := gojson.get(section, key))]
    found += [text.split(",") for name, text in names.parse_args(call.args) if name == key.upper().removesuffix("S")]
    texts = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return [text for text in texts if text and isinstance(text, str)]


def _with_mac(cache: ResultCache, call: Invocation, mac: str, netns: PodNetns) -> Iterator[tuple[str, Link]]:
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
