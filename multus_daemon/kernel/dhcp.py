"""A DHCPv4 client (RFC 2131) for a pod's interface: pyroute2's state machine, timers and messages.

Imported with the first network of IPAM type `dhcp` only. The client has no socket while it holds a lease: a
socket would keep the pod's namespace alive.

For pyroute2: `AsyncRawSocket` opens more sockets, in the namespace of the loop; a malformed answer, or a link that goes
down, ends `AsyncDHCPClient` silently; it sends no options of the caller's; it arms no timer for a lease that it loads.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from pyroute2.dhcp import leases, messages
from pyroute2.dhcp.client import AsyncDHCPClient, ClientConfig
from pyroute2.dhcp.dhcp4msg import dhcp4msg
from pyroute2.dhcp.dhcp4socket import AsyncDHCP4Socket, listen_udp_port
from pyroute2.dhcp.enums.bootp import Flag
from pyroute2.dhcp.enums.dhcp import MessageType, Option
from pyroute2.dhcp.fsm import State
from pyroute2.dhcp.hooks import Trigger
from pyroute2.ext import bpf

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.runtime import deadline, threads

_ETH_P_IP: Final = 0x0800
_SO_ATTACH_FILTER: Final = 26
_SIZE_MAX: Final = 1500
_LENGTH_MIN: Final = 300
"""Of a BOOTP message (RFC 951): some relays drop shorter ones."""
_KEPT: Final = (
    *("subnet_mask", "router", "static_route", "classless_static_route"),
    *("lease_time", "renewal_time", "rebinding_time", "server_id"),
)
_TIMEOUTS: Final = {State.REQUESTING: 10, State.SELECTING: 900}
"""Seconds after which the client begins again. None of REBOOTING: the lease is valid until it expires."""
_REFUSED_SECONDS: Final = 2.0
_LOST: Final = {Trigger.UNBOUND: "the server takes it back", Trigger.EXPIRED: "no server has renewed it in time"}
# Anyone on the segment can send what it reports.
logging.getLogger("pyroute2.dhcp").setLevel(logging.CRITICAL)


def opened(netns: PodNetns, ifname: str) -> socket.socket:
    """Return a packet socket in the pod's namespace that receives what is for a DHCP client. Raises OSError."""
    with netns.inside():
        # Protocol 0: nothing arrives before the filter and the interface are set.
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0)
    try:
        text, _program = bpf.compile(listen_udp_port())
        made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, text)
        made.bind((ifname, _ETH_P_IP))
    except BaseException:
        made.close()
        raise
    return made


class Lease(leases.Lease):  # type: ignore[misc]
    """A lease; of the ACK what is used."""

    def dump(self) -> None:
        """Do nothing: the owner of the client keeps it."""

    @classmethod
    def load(cls, interface: str) -> None:
        """Do nothing."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Lease:
        """Read `fields`, or those that pyroute2 takes from an ACK. Raises ValueError, LookupError, TypeError."""
        ack = fields["ack"]
        options = {name: ack["options"][name] for name in _KEPT if name in ack["options"]}
        made = cls(**{**fields, "ack": {"yiaddr": ack["yiaddr"], "options": options}})
        if ipaddress.ip_interface(made.address).ip.is_unspecified or not made.lease_time or not made.server_id:
            raise ValueError("no address, lease time or server")
        return made

    @property
    def address(self) -> str:
        """The address with its prefix length. Raises ValueError, LookupError."""
        return str(ipaddress.IPv4Interface(f"{self.ip}/{self.subnet_mask}"))

    def option(self, name: str) -> list[Any]:
        """Return the value of an option that is a list; empty if the server did not set it."""
        value = self.ack["options"].get(name)
        return value if isinstance(value, list) else []


class _Leases:
    """What pyroute2 takes as the class of a client's lease."""

    def __init__(self, known: Lease | None) -> None:
        self._known = known

    def load(self, interface: str) -> Lease | None:
        return self._known

    def __call__(self, **fields: Any) -> Lease:
        return Lease.read(fields)


class _Message(dhcp4msg):  # type: ignore[misc]
    """A message with options of the caller's."""

    buf: bytes
    more = b""

    def encode(self) -> _Message:
        super().encode()
        self.buf = (self.buf[:-1] + self.more + bytes([Option.END])).ljust(_LENGTH_MIN, b"\0")
        return self


class _Socket(AsyncDHCP4Socket):  # type: ignore[misc]
    """Opened by each message, closed by `sleep`. A failure ends nothing: the client sends again."""

    def __init__(self, ifname: str, opens: Callable[[], socket.socket], provided: Mapping[int, bytes], ip: str) -> None:
        super().__init__(ifname)
        self._opens, self._provided, self.ip = opens, provided, ip
        self._readable, self._rests = asyncio.Event(), 0
        self.problem = ""
        """Why the last message was not sent."""
        self.bad_answer = ""

    async def __aenter__(self) -> _Socket:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sleep()

    def sleep(self) -> None:
        """Close the socket until the next message; one that is about to be sent is not sent."""
        self._rests += 1
        self._close()

    def _close(self) -> None:
        if self.fileno() >= 0:
            self.loop.remove_reader(self.fileno())
            self.close()
        self._readable.clear()

    async def put(self, msg: messages.SentDHCPMessage) -> messages.SentDHCPMessage:
        try:
            # Another socket for each message, so that the end of the namespace is noticed while no server answers. A
            # thread that ends with this enters the namespace.
            rests = self._rests
            made = await asyncio.wrap_future(threads.start(self._opens, name="dhcp"))
            if rests != self._rests:
                made.close()
                return msg
            self._close()
            socket.socket.__init__(self, fileno=made.detach())
            self.setblocking(False)
            self.loop.add_reader(self.fileno(), self._readable.set)
            # It may have changed.
            msg.eth_src = msg.dhcp["chaddr"] = self.getsockname()[4].hex(":")
            self._complete(msg)
            await super().put(msg)
            self.problem = ""
        except OSError as error:
            self.problem = error.strerror or str(error)
            self._close()
        return msg

    def _complete(self, msg: messages.SentDHCPMessage) -> None:
        """Add the caller's options to the message."""
        kind, options, provided = msg.message_type, msg.dhcp["options"], self._provided
        msg.dhcp = made = _Message(msg.dhcp)
        if Option.CLIENT_ID in provided:
            options.pop("client_id", None)
        if kind == MessageType.RELEASE:
            provided = {code: value for code, value in provided.items() if code == Option.CLIENT_ID}
        else:
            options["max_msg_size"] = _SIZE_MAX
            # Answers to all are read by all clients. ipvlan receives no others, so the second try asks for one.
            made["flags"] = Flag.BROADCAST if made["secs"] and not made["ciaddr"] else Flag.UNICAST
        if kind == MessageType.DISCOVER and self.ip:
            options["requested_ip"] = self.ip
        made.more = b"".join(bytes((code, len(value))) + value for code, value in provided.items() if value)

    async def get(self) -> messages.ReceivedDHCPMessage:
        while True:
            await self._readable.wait()
            self._readable.clear()
            try:
                return self._decode_msg(self.recv(4096))
            except BlockingIOError:
                continue
            except OSError as error:
                self.problem = error.strerror or str(error)
                self._close()
            except Exception as error:
                self.bad_answer = f"an answer cannot be read: {error}"


class Client(AsyncDHCPClient):  # type: ignore[misc]
    """Gets a lease and keeps it."""

    def __init__(
        self,
        ifname: str,
        opens: Callable[[], socket.socket],
        changed: Callable[[str], Awaitable[None]],
        client_id: bytes,
        requested: Sequence[int],
        provided: Mapping[int, bytes],
        *,
        ip: str,
        known: Lease | None,
    ) -> None:
        """`opens` calls `opened`; `changed` is called for each new lease, and with the reason when one is lost.

        `provided`: values of options, by number; `ip`: the address that the pod has; `known`: its lease from before.
        """
        super().__init__(
            ClientConfig(
                interface=ifname,
                lease_type=_Leases(known),
                requested_parameters=tuple(requested),
                timeouts=_TIMEOUTS,
                retransmission=functools.partial(deadline.backoff, 1.0, 60.0, jitter=0.2),
                release=False,
                client_id=client_id,
                handle_signals=False,
                vendor_id=None,
                host_name=None,
            )
        )
        self._sock: _Socket = _Socket(ifname, opens, provided, ip)
        self._changed = changed

    @property
    def problem(self) -> str:
        """Why there is no lease yet."""
        waiting = "the server does not confirm its offer" if self.state is State.REQUESTING else "no offer came"
        return self._sock.problem or self._sock.bad_answer or waiting

    async def start(self) -> None:
        """Ask for a lease, or for the known one again."""
        await self.__aenter__()
        if self.lease:
            self.lease_timers.arm(lease=self.lease, expiration=self._expire_lease)
        await self.bootstrap()

    async def granted(self, seconds: float) -> Lease:
        """Return the first lease. Raises TimeoutError."""
        await self.wait_for_state(State.BOUND, timeout=seconds)
        lease: Lease = self.lease
        return lease

    async def end(self, *, release: bool) -> None:
        """Stop; `release`: tell the server that the lease is not needed any more."""
        if release and self.lease and not self.lease.expired:
            await self._send_message(messages.release(self.lease))
        await self.__aexit__()

    async def _run_hooks(self, trigger: Trigger) -> None:
        reason = _LOST.get(trigger, "")
        if not reason:
            self._sock.sleep()
            self._sock.ip = self._sock.ip or self.lease.ip
        await self._changed(reason)

    async def nak_received(self, msg: messages.ReceivedDHCPMessage) -> None:
        """Begin again, but not at once: a server may refuse for ever."""
        self._sock.bad_answer = f"the server {msg.ip_src} refuses"
        await asyncio.sleep(_REFUSED_SECONDS)
        await super().nak_received(msg)

    async def _process_msg(self, msg: messages.ReceivedDHCPMessage) -> None:
        try:
            await super()._process_msg(msg)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            self._sock.bad_answer = f"the answer of {msg.ip_src} cannot be used: {error}"
