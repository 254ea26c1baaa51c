"""Links, addresses and routes of one network namespace.

Every method blocks and raises OSError with the kernel's errno and words; who calls says which errno is no failure.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Final

from multus_daemon.kernel import inet, links
from multus_daemon.kernel.inet import TABLE_MAIN, Address, IpInterface, Route
from multus_daemon.kernel.links import IFF_ALLMULTI, IFF_PROMISC, IFF_UP, Link
from multus_daemon.kernel.transport import Request, Socket
from multus_daemon.spec.cni.names import IfName

ANY_LINK: Final = 0


class Rtnl:
    """The requests, over one socket of the namespace that the thread was in when this was made."""

    def __init__(self) -> None:
        self._socket = Socket()

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    @property
    def netns_cookie(self) -> str:
        """The cookie of the namespace; empty before Linux 5.14."""
        return self._socket.netns_cookie

    def batch(self, requests: Sequence[Request]) -> dict[int, OSError]:
        """Several requests at once, as `transport.Socket.batch`: those behind one that fails are done nevertheless."""
        return self._socket.batch(requests)

    # --- links -------------------------------------------------------------------------------------------------------

    def link(self, name: str) -> Link:
        """The link of that name; ENODEV where there is none."""
        return links.decode(self._socket.look_up(links.look_up(name)))

    def link_at(self, index: int) -> Link:
        """The link of that index; ENODEV where there is none."""
        return links.decode(self._socket.look_up(links.look_up_at(index)))

    def find_link(self, name: str) -> Link | None:
        """The link of that name, None where there is none."""
        try:
            return self.link(name)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def existing(self, names: Sequence[IfName]) -> list[IfName]:
        """Those of the names that a link has, in one request."""
        errors = self.batch([links.look_up(name) for name in names])
        for error in errors.values():
            if error.errno != errno.ENODEV:
                raise error
        return [name for position, name in enumerate(names) if position not in errors]

    def add_veth(self, name: str, peer: str, peer_netns: int, *, mtu: int = 0, peer_mac: str = "") -> Link | None:
        """A veth pair: `name` here, up, and `peer` in the namespace of that descriptor, down.

        `mtu`: of both in bytes, 0: default; `peer_mac`: `aa:bb:cc:dd:ee:ff`, a random one where it is empty. EEXIST
        where one of the names is taken. Returns the end that is here, as it was made; None where the kernel does not
        tell (before 6.2).
        """
        told = self._socket.request(links.add_veth(name, peer, peer_netns, mtu=mtu, peer_mac=peer_mac))
        return links.decode(told[0]) if told else None

    def add_bridge(self, name: str, *, mtu: int = 0, vlan_filtering: bool = False) -> None:
        """A bridge; `mtu` in bytes, 0: default. EEXIST where the name is taken."""
        self._socket.request(links.add_bridge(name, mtu=mtu, vlan_filtering=vlan_filtering))

    def add_macvlan(
        self, name: str, master: int, netns: int, *, mode: str, mtu: int = 0, mac: str = "", broadcast_queue: int = 0
    ) -> None:
        """A macvlan of the link with index `master`, `name` in the namespace of that descriptor.

        `mode`: one of `links.MACVLAN_MODES`; `mtu` in bytes, 0: the master's; `mac`: `aa:bb:cc:dd:ee:ff`, empty: a
        random one; `broadcast_queue` in packets, 0: default. EEXIST where the name is taken, in either namespace.
        """
        self._socket.request(
            links.add_macvlan(name, master, netns, mode=mode, mtu=mtu, mac=mac, broadcast_queue=broadcast_queue)
        )

    def rename(self, index: int, name: str) -> None:
        """Give the link, which is down, another name; EEXIST where it is taken."""
        self._socket.request(links.rename(index, name))

    def set_up(self, index: int) -> None:
        """Bring the link up."""
        self._socket.request(links.set_up(index))

    def set_down(self, index: int) -> None:
        """Take the link down."""
        self._socket.request(links.set_flags(index, 0, IFF_UP))

    def set_promiscuous(self, index: int, on: bool = True) -> None:
        """Have the link take in frames for any address, or not."""
        self._socket.request(links.set_flags(index, IFF_PROMISC if on else 0, IFF_PROMISC))

    def set_allmulti(self, index: int, on: bool) -> None:
        """Have the link take in frames for any multicast address, or not."""
        self._socket.request(links.set_flags(index, IFF_ALLMULTI if on else 0, IFF_ALLMULTI))

    def set_mac(self, index: int, mac: str) -> None:
        """Set the link's address. A bridge whose address was set keeps it, whatever ports come and go."""
        self._socket.request(links.set_mac(index, mac))

    def set_mtu(self, index: int, mtu: int) -> None:
        """Set the link's MTU, in bytes."""
        self._socket.request(links.set_mtu(index, mtu))

    def set_tx_queue_length(self, index: int, packets: int) -> None:
        """Set how many packets may wait to be sent."""
        self._socket.request(links.set_tx_queue_length(index, packets))

    def set_master(self, index: int, master: int) -> None:
        """Make the link a port of the bridge with index `master`."""
        self._socket.request(links.set_master(index, master))

    def delete_link(self, index: int) -> None:
        """Remove the link, and the other end where it is a veth; ENODEV where there is none.

        Takes 20 ms and more: see `removal`.
        """
        self._socket.request(links.delete(index))

    # --- ports of a bridge; `vlans` brings pyroute2, which few nodes need --------------------------------------------

    def set_port(self, index: int, *, hairpin: bool, isolated: bool) -> None:
        """Whether a port sends frames back to where they came from, and whether it is cut off from isolated ports."""
        self._socket.request(links.set_port(index, hairpin=hairpin, isolated=isolated))

    def add_vlans(self, index: int, first: int, last: int, *, native: bool = False) -> None:
        """Let a port carry the VLANs `first` to `last`; `native`: frames without a tag belong to it, and leave so."""
        from multus_daemon.kernel import vlans

        self._socket.request(vlans.add(index, first, last, native=native))

    def delete_vlan(self, index: int, vlan: int) -> None:
        """Let a port carry a VLAN no more."""
        from multus_daemon.kernel import vlans

        self._socket.request(vlans.delete(index, vlan))

    def vlans(self, index: int) -> list[int]:
        """The VLANs that a port carries; none where the kernel does not know VLANs of bridges."""
        from multus_daemon.kernel import vlans

        found = map(vlans.decode, self._socket.dump(vlans.list_all()))
        return [vlan for port, carried in found if port == index for vlan in carried]

    # --- addresses ---------------------------------------------------------------------------------------------------

    def addresses(self, index: int, family: int = socket.AF_UNSPEC) -> list[Address]:
        """The link's addresses, or those of ANY_LINK, of one family or of both, IPv4 first."""
        found = map(inet.decode_address, self._socket.dump(inet.list_addresses(index, family)))
        # Kernels before 4.20 do not filter.
        return [address for link, address in found if index in (ANY_LINK, link)]

    def add_address(self, index: int, address: IpInterface, *, broadcast: bool = True) -> None:
        """Add an address of global scope; `broadcast`: with the broadcast address that an IPv4 network has."""
        self._socket.request(inet.add_address(index, address, broadcast=broadcast))

    def delete_address(self, index: int, address: IpInterface) -> None:
        """Take an address away; EADDRNOTAVAIL where the link has none such."""
        self._socket.request(inet.delete_address(index, address))

    # --- routes ------------------------------------------------------------------------------------------------------

    def add_route(self, route: Route, *, exclusive: bool = True) -> None:
        """Add a route; EEXIST where `exclusive` and there is one to `dst`, and for one that is the same in all."""
        self._socket.request(inet.add_route(route, exclusive=exclusive))

    def delete_route(self, route: Route) -> None:
        """Delete the first route that fits; ESRCH where there is none."""
        self._socket.request(inet.delete_route(route))

    def routes(self, family: int, table: int = TABLE_MAIN) -> list[Route]:
        """The routes of one table, or of ANY_TABLE; one for each next hop."""
        try:
            found = self._socket.dump(inet.list_routes(family, table))
        except FileNotFoundError:
            # The kernel makes a table with its first route.
            return []
        return [route for body in found for route in inet.decode_routes(body) if table in (inet.ANY_TABLE, route.table)]
