"""`loopback`: brings up the container's `lo` (containernetworking/plugins `plugins/main/loopback`)."""

from __future__ import annotations

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import interfaces, restore
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import ignoring_absent_netns, located, step
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni.errors import ChangedError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result

KEYS = ()
_NAME = "lo"
_MAC = "00:00:00:00:00:00"


def add(call: Call, netns: PodNetns) -> Result:
    """Bring `lo` up. Return prevResult if there is one, else `lo` with its first address of each family."""
    with located(call), netns.inside():
        with step(f'set "{_NAME}" up'):
            link = netns.pod.link(_NAME)
            netns.pod.change(link.index, up=True)
        with step(f'read the addresses of "{_NAME}"'):
            addresses = [item.address for item in netns.pod.addresses(link.index)]
        for address in addresses:
            if not address.is_loopback:
                raise ChangedError(f'loopback interface "{_NAME}" has the non-loopback address {address}')
    if call.prev_result is not None:
        return call.prev_result
    firsts = [next((item for item in addresses if item.version == version), None) for version in (4, 6)]
    ips = tuple(IpConfig(str(item), interface=0) for item in firsts if item is not None)
    return Result(interfaces=(Interface(_NAME, _MAC, sandbox=call.invocation.netns),), ips=ips)


def delete(call: Call, netns: PodNetns) -> None:
    """Set `lo` down. It is no error if the namespace is gone."""
    with ignoring_absent_netns(), located(call), netns.inside(), step(f'set "{_NAME}" down'):
        netns.pod.change(netns.pod.link(_NAME).index, up=False)


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return a difference if `lo` is down or lacks a recorded address. Raises CniError."""
    result, _ = restore.recorded(call, _NAME)
    with located(call), netns.inside():
        with step(f'find "{_NAME}"'):
            link = netns.pod.link(_NAME)
        addresses = interfaces.addresses(link, result.ips)
        return [*restore.link(netns.pod, link), *restore.missing(netns, link, addresses)]
