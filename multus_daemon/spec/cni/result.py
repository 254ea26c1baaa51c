"""The result of an ADD: one model in the shape of the newest CNI version, read and written in every version.

Formats: CNI SPEC section 5 "Success" of each version; conversions: containernetworking/cni v1.3.0 (`pkg/types/020`,
`040`, `100`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct, to_builtins

from multus_daemon.spec.cni import conf, gojson, versions
from multus_daemon.spec.cni.errors import IncompatibleVersionError, Origin

# `::ffff:0:0/96` has the IPv4 addresses.
_MAPPED_PREFIX = 96
_reads_result = conf.reads("result", Origin.PLUGIN)


# Structs are created and changed in C, and each step changes the result. Keys are those of the newest version.


class Interface(Struct, frozen=True, omit_defaults=True, rename={"socket_path": "socketPath", "pci_id": "pciID"}):
    """A link that the plugin created. `sandbox`: path of its network namespace, empty for the host's. `mtu` in bytes.

    `index`: the kernel's index of the link; 0 if not known. No version of CNI has this key.
    """

    name: str
    mac: str = ""
    mtu: int = 0
    sandbox: str = ""
    socket_path: str = ""
    pci_id: str = ""
    index: int = 0


class IpConfig(Struct, frozen=True, omit_defaults=True):
    """An address in CIDR text with its host bits, its gateway, and the index of its interface (None: unknown)."""

    address: str
    gateway: str = ""
    interface: int | None = None

    @property
    def ip(self) -> str:
        """The address without its prefix length."""
        return self.address.partition("/")[0]

    @property
    def is_ipv4(self) -> bool:
        """True for IPv4, False for IPv6."""
        return ":" not in self.address


class Route(Struct, frozen=True, omit_defaults=True):
    """A route. An absent field is 0, None or empty; in `table` and `scope` 0 is a value, and None is absent."""

    dst: str
    gw: str = ""
    mtu: int = 0
    advmss: int = 0
    priority: int = 0
    table: int | None = None
    scope: int | None = None

    @property
    def is_default(self) -> bool:
        """True for 0.0.0.0/0 and ::/0."""
        return self.dst.endswith("/0") and ipaddress.ip_interface(self.dst).ip.is_unspecified

    @property
    def is_ipv4(self) -> bool:
        """True for IPv4, False for IPv6."""
        return ":" not in self.dst


class Dns(Struct, frozen=True, omit_defaults=True):
    """Resolver settings as resolv.conf(5) names them."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.nameservers or self.domain or self.search or self.options)


class Result(Struct, frozen=True, omit_defaults=True):
    """The result of an ADD. Absent lists are empty tuples."""

    interfaces: tuple[Interface, ...] = ()
    ips: tuple[IpConfig, ...] = ()
    routes: tuple[Route, ...] = ()
    dns: Dns = Dns()


@_reads_result
def decode(data: bytes, implied_version: str) -> Result:
    """Read the result that a plugin printed, by default of CNI version `implied_version`. `null` is an empty result.

    Raises DecodingFailureError and IncompatibleVersionError.
    """
    return from_object(gojson.loads_object(data, nullable=True), implied_version)


@_reads_result
def from_object(fields: Mapping[str, Any], implied_version: str) -> Result:
    """Read a decoded JSON object of any version. Raises as `decode` does."""
    version = gojson.get_str(fields, "cniVersion") or implied_version or versions.IMPLIED
    if not versions.is_supported(version):
        raise IncompatibleVersionError(
            f'unsupported CNI result version "{version}"',
            f"the supported versions are {', '.join(versions.SUPPORTED)}",
            origin=Origin.PLUGIN,
        )
    if version in ("0.1.0", "0.2.0"):
        return _read_020(fields)
    return _read_lists(fields, newest=versions.at_least(version, "1.0.0"))


def _read_lists(fields: Mapping[str, Any], *, newest: bool) -> Result:
    """Read a result of CNI 0.3.0 to 1.1.0. The key `version` of an address is ignored: `to_object` derives it."""
    return Result(
        interfaces=tuple(
            Interface(
                name=gojson.get_str(item, "name") or "",
                mac=gojson.get_str(item, "mac") or "",
                mtu=(newest and gojson.get_int(item, "mtu")) or 0,
                sandbox=gojson.get_str(item, "sandbox") or "",
                socket_path=(newest and gojson.get_str(item, "socketPath")) or "",
                pci_id=(newest and gojson.get_str(item, "pciID")) or "",
            )
            for item in gojson.get_objects(fields, "interfaces") or ()
        ),
        ips=tuple(
            IpConfig(
                address=cidr(gojson.get_str(item, "address"), "ips.address"),
                gateway=_ip(gojson.get_str(item, "gateway"), "ips.gateway"),
                interface=gojson.get_int(item, "interface"),
            )
            for item in gojson.get_objects(fields, "ips") or ()
        ),
        routes=tuple(read_route(item) for item in gojson.get_objects(fields, "routes") or ()),
        dns=read_dns(gojson.get_object(fields, "dns") or {}),
    )


def _read_020(fields: Mapping[str, Any]) -> Result:
    ips: list[IpConfig] = []
    routes: list[Route] = []
    for key in ("ip4", "ip6"):
        family = gojson.get_object(fields, key)
        if family is None:
            continue
        ips.append(
            IpConfig(
                address=cidr(gojson.get_str(family, "ip"), f"{key}.ip"),
                gateway=_ip(gojson.get_str(family, "gateway"), f"{key}.gateway"),
            )
        )
        routes += [read_route(item) for item in gojson.get_objects(family, "routes") or ()]
    return Result(ips=tuple(ips), routes=tuple(routes), dns=read_dns(gojson.get_object(fields, "dns") or {}))


def read_route(fields: Mapping[str, Any]) -> Route:
    """Read a route of a result or of an IPAM configuration. Raises gojson.JsonError."""
    return Route(
        dst=cidr(gojson.get_str(fields, "dst"), "routes.dst"),
        gw=_ip(gojson.get_str(fields, "gw"), "routes.gw"),
        mtu=gojson.get_int(fields, "mtu") or 0,
        advmss=gojson.get_int(fields, "advmss") or 0,
        priority=gojson.get_int(fields, "priority") or 0,
        table=gojson.get_int(fields, "table"),
        scope=gojson.get_int(fields, "scope"),
    )


def read_dns(fields: Mapping[str, Any]) -> Dns:
    """Read a dns object of a result or a configuration. Raises gojson.JsonError."""
    return Dns(
        nameservers=tuple(gojson.get_strings(fields, "nameservers") or ()),
        domain=gojson.get_str(fields, "domain") or "",
        search=tuple(gojson.get_strings(fields, "search") or ()),
        options=tuple(gojson.get_strings(fields, "options") or ()),
    )


def cidr(text: str | None, where: str) -> str:
    """Normalise an address with its prefix length as Go does; host bits are kept. Raises gojson.JsonError.

    Go's `net.IPNet` prints `::ffff:a.b.c.d/n` as the IPv4 address with n - 96 bits, at least 0.
    """
    if text is None or "/" not in text or "%" in text:
        raise gojson.JsonError(f"{where}: an address with a prefix length is needed, not {text!r}")
    address, _, length = text.partition("/")
    if not (length.isascii() and length.isdigit()):
        raise gojson.JsonError(f"{where}: {text!r} has no prefix length")
    try:
        return _printed_prefix(address, int(length))
    except ValueError as error:
        raise gojson.JsonError(f"{where}: {address!r}/{length} is not an address in CIDR notation") from error


def _ip(text: str | None, where: str) -> str:
    if not text:
        return ""
    try:
        if "%" in text:
            raise ValueError(text)
        return _printed_ip(text)
    except ValueError as error:
        raise gojson.JsonError(f"{where}: {text!r} is not an IP address") from error


# Cached: a result is read several times between the IPAM plugin and the status. Addresses are short, and exceptions are
# not cached.
@lru_cache(maxsize=64)
def _printed_prefix(address: str, bits: int) -> str:
    ip = ipaddress.ip_address(address)
    if bits > ip.max_prefixlen:
        raise ValueError(bits)
    if ip.version == 6 and ip.ipv4_mapped:
        return f"{ip.ipv4_mapped}/{max(bits - _MAPPED_PREFIX, 0)}"
    return f"{ip}/{bits}"


@lru_cache(maxsize=64)
def _printed_ip(text: str) -> str:
    ip = ipaddress.ip_address(text)
    return str(ip.ipv4_mapped if ip.version == 6 and ip.ipv4_mapped else ip)


def to_object(result: Result, version: str) -> dict[str, Any]:
    """Return the result as a JSON object of `version`, keys in the order of the Go library's structs.

    Raises IncompatibleVersionError for an unknown version, and for 0.1.0 and 0.2.0 without an address.
    """
    version = version or versions.IMPLIED
    if not versions.is_supported(version):
        raise IncompatibleVersionError(f"no converter for CNI result version {versions.CURRENT} to {version}")
    if version in ("0.1.0", "0.2.0"):
        return _write_020(result, version)
    newest = versions.at_least(version, "1.0.0")
    fields: dict[str, Any] = {"cniVersion": version}
    if result.interfaces:
        fields["interfaces"] = [_write_interface(item, newest) for item in result.interfaces]
    if result.ips:
        fields["ips"] = [_write_ip(item, newest) for item in result.ips]
    if result.routes:
        fields["routes"] = [write_route(item) for item in result.routes]
    if result.dns or not newest:
        fields["dns"] = write_dns(result.dns)
    return fields


def to_stdout(result: Result, version: str) -> bytes:
    """Return a plugin's stdout, indented; 1.x sorted by key, older ones in struct order. Raises as `to_object` does."""
    fields = to_object(result, version)
    return gojson.dumps_indented(fields, sort_keys=versions.at_least(fields["cniVersion"], "1.0.0"))


def empty_stdout(version: str) -> bytes:
    """Return the stdout of an empty result, also in 0.1.0 and 0.2.0, unlike `to_stdout`. Raises
    IncompatibleVersionError.
    """
    if version in ("0.1.0", "0.2.0"):
        return gojson.dumps_indented({"cniVersion": version, "dns": {}}, sort_keys=False)
    return to_stdout(Result(), version)


def in_version(result: Result, version: str) -> Result:
    """Return the part of the result that `version` can express, or an empty result. Raises as `to_object` does."""
    if versions.is_supported(version) and (versions.at_least(version, "1.0.0") or result == Result()):
        return result
    return from_object(to_object(result, version), version)


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not empty. 0 is a value, as the Go library uses pointers; None is its nil pointer."""
    return {key: value for key, value in fields.items() if value not in ("", None, ())}


def _write_interface(item: Interface, newest: bool) -> dict[str, Any]:
    fields: dict[str, Any] = to_builtins(item)
    fields.pop("index", None)
    return fields if newest else {key: fields[key] for key in ("name", "mac", "sandbox") if key in fields}


def _write_ip(item: IpConfig, newest: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {} if newest else {"version": "4" if item.is_ipv4 else "6"}
    return fields | _present(interface=item.interface, address=item.address, gateway=item.gateway)


def write_route(item: Route) -> dict[str, Any]:
    """Return a route as every version has it; old versions keep the newer keys, as in the Go library."""
    fields: dict[str, Any] = to_builtins(item)
    return fields


def write_dns(dns: Dns) -> dict[str, Any]:
    """Return a dns object, `{}` if nothing is set."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in to_builtins(dns).items()}


def _write_020(result: Result, version: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"cniVersion": version}
    for key, ipv4 in (("ip4", True), ("ip6", False)):
        address = next((item for item in result.ips if item.is_ipv4 is ipv4), None)
        if address is None:
            continue
        routes = [_present(dst=item.dst, gw=item.gw) for item in result.routes if item.is_ipv4 is ipv4]
        fields[key] = {"ip": address.address} | _present(gateway=address.gateway)
        if routes:
            fields[key]["routes"] = routes
    if len(fields) == 1:
        raise IncompatibleVersionError(
            "cannot convert: no valid IP addresses", f"a result of version {version} must have one"
        )
    fields["dns"] = write_dns(result.dns)
    return fields
