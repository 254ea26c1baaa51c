"""The verbs of plugins that make the pod's interface.

The link is made before the IPAM plugin runs, as dhcp needs it. It is removed before the addresses are released, as
another pod may get a free address at once. Only dhcp releases its address first, over the link.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import interfaces, masquerade, restore, veth
from multus_daemon.plugins.builtin.contract import Call, Undo, ipam_type, required_ipam_type
from multus_daemon.plugins.builtin.interfaces import located
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import ChangedError, CniError, InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import Dns, Interface, Result, read_dns

_BY_LINK: Final = "dhcp"
_VETH_MTU_MAX: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """A checked configuration of a plugin."""

    mtu: int = 0
    """MTU in bytes of the pod's link; 0: that of the master, or the kernel's default."""
    mac: str = ""
    """MAC address of the pod's link; empty: that of the master, or a random one."""
    dns: Dns | None = None
    """Replaces the DNS settings of the IPAM plugin, even if it is empty; None: keep those."""


C = TypeVar("C", bound=LinkConfig)


class LinkPlugin(ABC, Generic[C]):
    """The verbs as methods. The functions of a plugin's module are those of an object of a subclass."""

    kind: str
    """The kind of the pod's link."""

    @property
    def functions(self) -> tuple[Any, ...]:
        """The functions of `Module`, as a module assigns them."""
        verbs = (self.add, self.delete, self.check, self.status)
        return self.unsupported, self.read, *verbs, self.keeps, self.differences

    # --- what a subclass says ----------------------------------------------------------------------------------------

    def unsupported(self, call: Call) -> str:
        """See `Module`."""
        return ""

    def keeps(self, call: Call) -> bool:
        """Return True if there may be something besides the link."""
        return True

    @abstractmethod
    def read(self, call: Call) -> C:
        """Read the configuration. Raises CniError."""

    @abstractmethod
    def make(self, call: Call, netns: PodNetns, config: C, undo: Undo, host: Interface | None = None) -> Sequence[Link]:
        """Make the pod's link, down, and what it needs on the host; arm their removal in `undo`. Raises CniError.

        `host`: in a repair, the recorded entry of the veth's end on the host. Returns the links, that of the pod last.
        """

    def given(self, call: Call) -> Result:
        """Return the addresses and routes of a call without an IPAM plugin. Raises CniError."""
        return Result()

    def completed(self, call: Call, config: C, answer: Result) -> Result:
        """Return the IPAM plugin's answer with what the configuration adds, such as gateways. Raises CniError."""
        return answer

    @abstractmethod
    def configure(
        self, call: Call, netns: PodNetns, config: C, made: Sequence[Link], wanted: Result
    ) -> Sequence[Interface]:
        """Give the link of `make` its addresses and routes, and bring it up; return the interfaces of the result.

        Called in the pod's namespace. Raises CniError.
        """

    def protect(self, call: Call, config: C, undo: Undo, answer: Result) -> None:
        """Make firewall rules, and add steps to `undo` that remove them. Raises CniError."""

    def remove(self, call: Call, netns: PodNetns) -> Sequence[Callable[[], object]]:
        """Remove the link; return functions to call after the addresses are released. Raises CniError."""
        veth.remove(call, netns)
        return ()

    @abstractmethod
    def differences(self, call: Call, netns: PodNetns) -> list[Difference]:
        """Return the differences from the recorded result. Raises CniError."""

    # --- the verbs ---------------------------------------------------------------------------------------------------

    def add(self, call: Call, netns: PodNetns) -> Result:
        """Make the link, get addresses from IPAM, configure it. If it raises, it has undone all."""
        config, ipam, is_asked = self.read(call), ipam_type(call), False
        with Undo() as undo:
            interfaces.require_absent(call, netns, kind=self.kind)
            if ipam != _BY_LINK:
                undo.arm("release the addresses", lambda: is_asked and run_ipam(call, "DEL"))
            with located(call):
                netns.require()
                made = self.make(call, netns, config, undo)
            if ipam == _BY_LINK:
                undo.arm("release the addresses", functools.partial(run_ipam, call, "DEL"))
            if ipam:
                is_asked = True
                answer = self.completed(call, config, run_ipam(call, "ADD"))
            else:
                answer = self.given(call)
            with located(call), netns.inside():
                entries = tuple(self.configure(call, netns, config, made, answer))
            self.protect(call, config, undo, answer)
        own = next(position for position, entry in enumerate(entries) if entry.sandbox)
        ips = tuple([replace(ip, interface=own) for ip in answer.ips])
        return replace(answer, interfaces=entries, ips=ips, dns=answer.dns if config.dns is None else config.dns)

    def delete(self, call: Call, netns: PodNetns) -> None:
        """Remove the link, release the addresses, remove the rest. It is no error if something is gone already.

        If the link cannot be removed, the addresses stay reserved; after any other failure the other steps still run.
        """
        ipam = ipam_type(call)
        release = [functools.partial(run_ipam, call, "DEL")] if ipam else []
        failures = _failures(release if ipam == _BY_LINK else ())
        rest = self.remove(call, netns)
        failures += _failures([*(release if ipam != _BY_LINK else ()), *rest])
        if failures:
            first, *others = failures
            raise first.with_context("; then: " + "; ".join(map(str, others))) if others else first

    def check(self, call: Call, netns: PodNetns) -> None:
        """Run the IPAM plugin's CHECK; raise ChangedError for the first difference from prevResult."""
        self.read(call)
        with located(call):
            netns.require()
        if ipam_type(call):
            run_ipam(call, "CHECK")
        if call.prev_result is None:
            raise InvalidNetworkConfigError("Required prevResult missing", f"network {call.name!r}")
        entries, invocation = call.prev_result.interfaces, call.invocation
        if not any((item.name, item.sandbox) == (invocation.ifname, invocation.netns) for item in entries):
            known = ", ".join(f"{item.name} in {item.sandbox or 'the host'}" for item in entries) or "none"
            raise ChangedError(
                f'Sandbox in prevResult doesn\'t match configured netns: "{invocation.netns}"',
                f'no entry for "{invocation.ifname}"; interfaces in prevResult: {known}',
            )
        restore.check(call, netns, self.differences)

    def status(self, call: Call) -> None:
        """Raise CniError if the configuration is not usable, or if the STATUS of its IPAM plugin fails."""
        self.read(call)
        if ipam_type(call):
            run_ipam(call, "STATUS")

    def remake(self, call: Call, netns: PodNetns, config: C, result: Result) -> None:
        """Repair: make the recorded link again; `config` has the recorded MAC address. Raises CniError."""
        with Undo() as undo, located(call):
            netns.require()
            made = self.make(call, netns, config, undo, veth.host_end(result.interfaces))
            with netns.inside():
                self.configure(call, netns, config, made, result)


class PairPlugin(LinkPlugin[C]):
    """A plugin whose link is a veth, and which may make firewall rules for `ipMasq` and `macspoofchk`."""

    kind = "veth"

    def protect(self, call: Call, config: C, undo: Undo, answer: Result) -> None:
        """Make the rules that masquerade the addresses (`ipMasq`)."""
        if answer.ips and masquerade.is_wanted(call):
            addresses = [inet.interface_of(ip.address) for ip in answer.ips]
            undo.arm("stop masquerading", functools.partial(masquerade.remove, call, addresses))
            masquerade.add(call, addresses)

    def remove(self, call: Call, netns: PodNetns) -> Sequence[Callable[[], object]]:
        """Remove the veth pair; return the functions that remove its rules."""
        return masquerade.remove_link(call, netns)

    def unsupported(self, call: Call) -> str:
        """Name `ipMasq` without the host's programs, or an unknown backend."""
        return masquerade.unsupported(call)

    def keeps(self, call: Call) -> bool:
        """Return True if there may be rules."""
        return masquerade.makes_rules(call.fields)


def run_ipam(call: Call, verb: str) -> Result:
    """Run a verb of the IPAM plugin (CNI SPEC section 4); an ADD must return between 1 and ADDRESSES_MAX addresses.

    Raises CniError, the IPAM plugin's own unchanged.
    """
    plugin_type = required_ipam_type(call)
    # Only an undo has another verb than its call.
    invocation = call.invocation if call.invocation.verb == verb else dataclasses.replace(call.invocation, verb=verb)
    answer = call.plugin_for(plugin_type, invocation).run(invocation, call.netns)
    if verb == "ADD" and not 0 < len(answer.ips) <= conf.ADDRESSES_MAX:
        if answer.ips:
            problem, remedy = f"{len(answer.ips)} addresses, and at most {conf.ADDRESSES_MAX} are taken", ""
        else:
            problem = f"missing IP config: {plugin_type} gives no address"
            remedy = "name an address in the network's configuration (ipam), or ask for ips in the pod's annotation"
        raise InternalError(f"IPAM plugin returned {problem}", remedy=remedy, origin=Origin.NETWORK)
    return answer


def veth_mtu(fields: Mapping[str, Any]) -> int:
    """Return `mtu` in bytes; 0 if it is absent, or negative as in the reference plugins.

    Raises JsonError, InvalidNetworkConfigError.
    """
    value = max(gojson.get_int(fields, "mtu") or 0, 0)
    if value > _VETH_MTU_MAX:
        raise InvalidNetworkConfigError(
            f"invalid MTU {value}, must be [0, veth MTU({_VETH_MTU_MAX})]",
            remedy="the pod's interface is a veth: lower 'mtu' in the network's configuration",
        )
    return value


def own_dns(fields: Mapping[str, Any]) -> Dns | None:
    """Return `dns`, which replaces the DNS settings of the IPAM plugin; None if it sets nothing. Raises JsonError."""
    dns = gojson.get_object(fields, "dns")
    if not dns:
        return None
    lists = [gojson.get_list(dns, key) for key in ("nameservers", "search", "options")]
    return read_dns(dns) if gojson.get_str(dns, "domain") or any(item is not None for item in lists) else None


def _failures(steps: Sequence[Callable[[], object]]) -> list[CniError]:
    failures: list[CniError] = []
    for step in steps:
        try:
            step()
        except CniError as error:
            failures.append(error)
    return failures
