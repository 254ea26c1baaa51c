"""`bandwidth`: limits the traffic of a pod at the host's end of its veth pair.

Packets to the pod wait at the host's end. Packets from the pod are redirected to an ifb link and wait there, as the
kernel limits only what a link sends. Names, numbers and messages are those of the reference plugin
(containernetworking/plugins `plugins/meta/bandwidth`): either can remove what the other made.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from multus_daemon.kernel import links, removal, shaping
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.shaping import Bucket
from multus_daemon.plugins.builtin import contract, interfaces, restore, veth
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import Change, located, step
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import Interface, Result

KEYS: Final = ("ingressRate", "ingressBurst", "egressRate", "egressBurst")
_NOT_CHAINED: Final = "must be called as chained plugin"
_LOWER: Final = frozenset(key.lower() for key in KEYS)
_KIND: Final = "ifb"
_ADVICE: Final = (
    "limits need a plugin before this one that makes a veth pair and reports both ends, such as bridge or ptp"
)
_BITS: Final = 8
_RATE_MAX: Final = 2**64 - 1
_BURST_END: Final = 2**32 - 1
"""The burst in bytes must be below this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The checked limits of a configuration; None: no limit."""

    ingress: Bucket | None = None
    """The limit of packets to the pod; `egress`: of packets from the pod."""
    egress: Bucket | None = None


# --- the configuration -----------------------------------------------------------------------------------------------


def read(call: Call) -> Limits:
    """Read the limits: those of `runtimeConfig` only if the plugin's own object has none. Raises CniError."""
    origin = Origin.NETWORK
    with contract.reading(call.name, "failed to parse network configuration"):
        given: Mapping[str, Any] = call.fields
        if not any(key.lower() in _LOWER for key in given):
            given = gojson.get_object(contract.requests(given)[0], "bandwidth") or {}
            origin = Origin.ANNOTATION
        numbers = [gojson.get_int(given, key) or 0 for key in KEYS]
        for key, number in zip(KEYS, numbers, strict=True):
            if not 0 <= number <= _RATE_MAX:
                raise gojson.JsonError(f"{key}: {number} is out of range")
    return Limits(_limit(origin, "ingress", *numbers[:2]), _limit(origin, "egress", *numbers[2:]))


def _limit(origin: Origin, direction: str, rate: int, burst: int) -> Bucket | None:
    """Return the limit for a rate in bits per second and a burst in bits. Raises InvalidNetworkConfigError."""
    if not rate and not burst:
        return None
    problem = ""
    if not burst:
        problem = "if rate is set, burst must also be set"
    elif not rate:
        problem = "if burst is set, rate must also be set"
    elif burst // _BITS >= _BURST_END:
        problem = "burst cannot be more than 4GB"
    elif rate < _BITS:
        problem = "rate is below one byte per second"
    if problem:
        raise InvalidNetworkConfigError(problem, f"{direction}Rate {rate}, {direction}Burst {burst}", origin=origin)
    return Bucket.of(rate // _BITS, burst // _BITS)


def _ifb_name(call: Call) -> str:
    """Return the name of the ifb link; it is the same for all interfaces of a container on the network."""
    text = f"{call.name}{call.invocation.container_id}"
    return f"bwp{hashlib.sha512(text.encode()).hexdigest()[:12]}"


# --- the verbs -------------------------------------------------------------------------------------------------------


def add(call: Call, netns: PodNetns) -> Result:
    """Set the limits; return prevResult, with the ifb link if one was made. If it raises, it leaves nothing."""
    limits, previous = read(call), contract.previous(call, _NOT_CHAINED)
    if limits == Limits():
        return previous
    name = _ifb_name(call)
    with located(call), Undo() as undo:
        netns.require()
        end = _host_end(call, netns, previous)
        with step(f'create qdisc on "{end.name}"'):
            found = shaping.read(netns.host, end.index)
            if (limits.ingress and found.has_root) or (limits.egress and found.has_ingress):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        with step(f'add link "{name}"'):
            if limits.egress and netns.host.find_link(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if limits.ingress:
            undo.arm("remove the limit", functools.partial(netns.host.batch, [shaping.remove_root(end.index)]))
        if limits.egress:
            undo.arm(f"remove {name}", functools.partial(_remove_ifb, netns, name))
            undo.arm("remove the filter", functools.partial(netns.host.batch, [shaping.remove_ingress(end.index)]))
        made = _shape(call, netns, end, limits)
    return structs.replace(previous, interfaces=(*previous.interfaces, *made))


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the ifb link. The other limits end with the veth pair."""
    if keeps(call):
        with located(call), step(f'remove "{_ifb_name(call)}"'):
            _remove_ifb(netns, _ifb_name(call))


def keeps(call: Call) -> bool:
    """Return True if there may be an ifb link."""
    return read(call).egress is not None


def _remove_ifb(netns: PodNetns, name: str) -> None:
    link = netns.host.find_link(name)
    if link and link.kind == _KIND:
        for error in removal.remove(netns.host, [link.index]).values():
            raise error


def _shape(call: Call, netns: PodNetns, end: Link, limits: Limits) -> Sequence[Interface]:
    """Set the limits, replacing others; return the result's entry of the ifb link, if any. Raises InternalError."""
    name, changes, made = _ifb_name(call), list[Change](), list[Interface]()
    if limits.ingress:
        changes.append(_limited(end, limits.ingress))
    if limits.egress:
        with step(f'add link "{name}"'):
            if (ifb := netns.host.find_link(name)) is None:
                recorded = (item.mac for item in contract.previous(call, _NOT_CHAINED).interfaces if item.name == name)
                mac = next(recorded, "") or veth.random_mac()
                netns.host.add_link(name, _KIND, mtu=end.mtu, mac=mac, up=True)
                ifb = netns.host.link(name)
        made.append(Interface(name, ifb.mac))
        changes += [
            Change(f'set "{name}" up', links.change(ifb.index, up=True)),
            _limited(ifb, limits.egress),
            Change(f'create qdisc ingress on "{end.name}"', shaping.add_ingress(end.index), tolerated=errno.EEXIST),
            Change("remove the redirection", shaping.remove_redirect(end.index), tolerated=errno.ENOENT),
            Change(f'redirect what "{end.name}" receives', shaping.add_redirect(end.index, ifb.index)),
        ]
    interfaces.apply(netns.host, changes)
    return made


def _limited(link: Link, bucket: Bucket) -> Change:
    return Change(f'create qdisc tbf on "{link.name}"', shaping.add_bucket(link.index, bucket))


def _host_end(call: Call, netns: PodNetns, previous: Result) -> Link:
    """Return the host's end of the pod's veth pair, which must be in `previous`. Raises CniError."""
    ifname, on_host = call.invocation.ifname, {item.name for item in previous.interfaces if not item.sandbox}
    if not previous.interfaces:
        raise InvalidNetworkConfigError("no interfaces provided", f"network {call.name!r}", remedy=_ADVICE)
    with step(f'find the veth peer of container interface "{ifname}"'):
        pod = netns.pod.link(ifname)
        end = restore.other_end(netns, pod)
    if pod.kind != "veth":
        problem = f'container interface {ifname} has no veth peer: interface "{ifname}" was not a veth interface'
        raise InvalidNetworkConfigError(problem, f"it is of kind {pod.kind!r}", remedy=_ADVICE)
    if end is None or end.name not in on_host:
        known = ", ".join(sorted(on_host)) or "none"
        problem = "no veth peer of container interface found in host ns"
        raise InvalidNetworkConfigError(problem, f"interfaces of the host in prevResult: {known}", remedy=_ADVICE)
    return end


# --- drift -----------------------------------------------------------------------------------------------------------


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return the limits that are not as configured. Raises CniError."""
    contract.previous(call, _NOT_CHAINED)
    limits = read(call)
    if limits == Limits():
        return []
    with located(call):
        netns.require()
        with step("read the limits"):
            texts = list(_differing(call, netns, limits))
    return [Difference(text, functools.partial(_restore, call, netns), on_host=True) for text in texts]


def _differing(call: Call, netns: PodNetns, limits: Limits) -> Iterator[str]:
    end, name = _present_end(call, netns), _ifb_name(call)
    if end is None:
        yield f'the host\'s end of "{call.invocation.ifname}" is not there, nor its limits'
        return
    found = shaping.read(netns.host, end.index)
    yield from _compared(end.name, limits.ingress, found.bucket)
    if limits.egress is None:
        return
    ifb = netns.host.find_link(name)
    if ifb is None:
        yield f'interface "{name}" is not there'
        return
    if not ifb.is_up:
        yield f'"{name}" is down'
    yield from _compared(name, limits.egress, shaping.read(netns.host, ifb.index).bucket)
    if found.redirected_to != ifb.index:
        yield f'what "{end.name}" receives is not redirected to "{name}"'


def _compared(name: str, wanted: Bucket | None, present: Bucket | None) -> Iterator[str]:
    if wanted and wanted != present:
        yield f'the limit of "{name}" is {present or "none"}, not {wanted}'


def _present_end(call: Call, netns: PodNetns) -> Link | None:
    """Return the host's end of the pod's veth pair, even if both were renamed; None if it is gone. Raises OSError."""
    result, own = restore.recorded(call)
    named = netns.pod.find_link(own.name)
    pod = interfaces.find_renamed(netns, own, named, result.interfaces) or named
    return restore.other_end(netns, pod) if pod else None


def _restore(call: Call, netns: PodNetns) -> None:
    """Set all limits again. Raises CniError."""
    with located(call):
        netns.require()
        with step("find the host's end"):
            end = _present_end(call, netns)
        if end is None:
            raise InternalError(f'the host\'s end of "{call.invocation.ifname}" is gone', origin=Origin.POD)
        _shape(call, netns, end, read(call))
