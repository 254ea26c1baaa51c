"""The interface of a built-in plugin: a module with a function for each verb, which takes a parsed call.

Also shared code: undoing an ADD, and reading a configuration (known keys, requests of the pod, CNI_ARGS, addresses).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.plugin import Aspect, HostTools, Plugin
from multus_daemon.runtime import deadline, fs
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import conf, gojson, names, versions
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    IoFailureError,
    Origin,
)
from multus_daemon.spec.cni.result import Result, Route, read_route

if TYPE_CHECKING:
    from multus_daemon.plugins.leases import Leases
    from multus_daemon.spec.ports import AddressBook

log = logging.getLogger(__name__)

_ROOT: Final = Path("/")
COMMON_KEYS: Final = frozenset(
    {
        # The SPEC's keys, and those that remain from a configuration that was written for a list of one plugin.
        *("cniVersion", "cniVersions", "name", "type", "capabilities", "ipam", "dns", "prevResult"),
        *("disableCheck", "disableGC", "loadOnlyInlinedPlugins"),
        # CONVENTIONS: a plugin takes its own keys from these and ignores the rest.
        *("args", "runtimeConfig"),
        *("cni.dev/attachments", "cni.dev/valid-attachments"),
        # Multus gives them to each plugin of a network that has a resource. Only plugins for devices read them.
        *("deviceID", "pciBusID"),
    }
)
SIGNED_MAX: Final = 2**31 - 1
UNSIGNED_MAX: Final = 2**32 - 1
_SHOWN: Final = 60
ASK: Final = "ask for another in the pod's annotation"
WITH_LENGTH: Final = "write the address with its prefix length, such as 10.1.2.3/24"
_BOOLEANS: Final[Mapping[str, bool]] = {"0": False, "false": False, "1": True, "true": True}


class AddressTakenError(InternalError, origin=Origin.ANNOTATION):
    """The requested IP address is used by another machine or pod."""

    def __init__(self, msg: str, details: str = "", *, remedy: str, address: str) -> None:
        super().__init__(msg, details, remedy=remedy)
        self.address = address


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a built-in: the invocation, its checked configuration, and access to the host."""

    invocation: Invocation
    name: str
    """The network's name, which is valid."""
    cni_version: str
    """The configuration's version, one of `versions.SUPPORTED`."""
    prev_result: Result | None
    """`prevResult`, already parsed; None if there is none."""
    host_root: Path
    """Root of the host's files: `/`, or the daemon's chrootDir. Netns paths are not below it."""
    plugin_for: Callable[[str, Invocation], Plugin]
    """Returns the plugin of a type that this plugin calls: its IPAM plugin, or flannel's delegate."""
    netns: PodNetns
    """The pod's network namespace, which is passed to plugins that this one calls."""
    tools: HostTools | None = None
    """Runs programs such as `nft`; None if there is no access to them (see `Module.unsupported`)."""
    leases: Leases | None = None
    """The DHCP leases of the node; None in a program (see `Module.unsupported`)."""
    addresses: AddressBook | None = None
    """The addresses that the cluster shares; None in a program."""
    not_compared: frozenset[Aspect] = frozenset()
    """For `differences`: properties of the pod's interface that later plugins of the list may have set."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The whole configuration object; read with `cni.gojson` (keys in any case)."""
        return self.invocation.fields

    @property
    def host_tools(self) -> HostTools:
        """`tools`, which are there: `unsupported` refuses what needs them."""
        assert self.tools is not None
        return self.tools

    def on_host(self, path: str) -> Path:
        """Return where an absolute path of the host is in the daemon's file system; links stay inside the host's root.

        The path need not exist. Raises IoFailureError.
        """
        if self.host_root == _ROOT:
            return _ROOT / path.lstrip("/")
        try:
            return Path(fs.resolve(str(self.host_root), path, missing=True))
        except OSError as error:
            raise IoFailureError(f"path {path} cannot be resolved on the host: {error.strerror}") from error


class Module(Protocol):
    """A plugin of the CNI SPEC, as a module with these functions.

    Functions with a parameter `netns` run in the thread of that PodNetns, in the host's namespace. A verb raises
    CniError; any other exception becomes code 999 with its text. A module may also have

    - `KEYS`, the keys of a configuration that it knows besides COMMON_KEYS; without `KEYS`, every key is accepted;
    - `unsupported(call)`, which returns another part of the configuration that it does not support, as `key`, or as
      `key: value` for a key that it knows; empty if none. The answer is cached: it depends only on the configuration
      and on whether there are tools, leases and addresses. May raise JsonError for a configuration that the verbs
      cannot read;
    - `read(call)`, which reads all of the configuration and raises CniError if `add` would refuse it;
    - `check(call, netns)`, else CHECK fails for the first of its `differences`; `status(call)`; without them the verb
      succeeds, as in the reference plugin;
    - `called_by(call)`, like the function below, if it calls other plugins than its IPAM plugin;
    - `keeps(call)`, `sets(fields)`, `differences(call, netns)` and `foresee(call)` for methods of `Builtin`.

    For a plugin that makes the pod's interface, the functions are methods of a `LinkPlugin` object.
    """

    def add(self, call: Call, netns: PodNetns) -> Result:
        """Run ADD; return the result."""

    def delete(self, call: Call, netns: PodNetns) -> None:
        """Run DEL. Absent objects count as removed."""


def called_by(call: Call) -> Mapping[str, Invocation]:
    """Return the call of the IPAM plugin by its type; empty if there is none. Raises DecodingFailureError."""
    plugin_type = ipam_type(call)
    return {plugin_type: call.invocation} if plugin_type else {}


def ipam_type(call: Call) -> str:
    """Return `ipam.type`, empty if there is none. Raises DecodingFailureError."""
    with reading(call.name, "ipam"):
        return conf.once(
            call.fields, ipam_type, lambda: gojson.get_str(gojson.get_object(call.fields, "ipam") or {}, "type") or ""
        )


def required_ipam_type(call: Call) -> str:
    """Return `ipam.type`. Raises DecodingFailureError; InvalidNetworkConfigError if there is none."""
    plugin_type = ipam_type(call)
    if not plugin_type:
        raise InvalidNetworkConfigError(
            "no plugin name provided: ipam.type is empty", remedy="set ipam.type in the network's configuration"
        )
    return plugin_type


def previous(call: Call, problem: str = "Required prevResult missing") -> Result:
    """Return the result of the plugins before this one; without one raise InvalidNetworkConfigError with `problem`."""
    if call.prev_result is None:
        advice = f"network {call.name!r}: {gojson.get_str(call.fields, 'type')} must follow other plugins in a list"
        raise InvalidNetworkConfigError(problem, remedy=advice)
    return call.prev_result


class Undo(contextlib.ExitStack):
    """Run the undo steps in reverse if the `with` block raises; drop them if it succeeds.

    Add a step (`arm`) before the action that it undoes; the step must succeed if there is nothing to undo. Each step
    has a deadline of its own. The failure of a step is logged, and the other steps still run.
    """

    def arm(self, what: str, step: Callable[[], object]) -> None:
        """Add a step; `what` names it in the log."""
        self.callback(self._run, what, step)

    def _run(self, what: str, step: Callable[[], object]) -> None:
        seconds = deadlines.BUILTIN_UNDO_SECONDS
        try:
            with deadline.given(deadline.Deadline()), deadline.within(seconds):
                step()
        except deadline.ExpiredError:
            log.warning("undo of a failed ADD: %s: did not end within %g s", what, seconds)
        except Exception as error:
            log.warning("undo of a failed ADD: %s: %s", what, str(error) or type(error).__name__)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self.pop_all()
        super().__exit__(kind, error, traceback)


def read_file(path: Path, *, limit: int = fs.DEFAULT_READ_LIMIT) -> bytes | None:
    """Return the content of a file that ADD wrote for DEL; None without a file. Raises OSError."""
    try:
        return fs.read_limited(path, limit=limit)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_file(path: Path, content: bytes | None, *, fsync: bool = True) -> None:
    """Write a file for DEL, and make its directory; remove the file if `content` is None. Raises OSError."""
    if content is None:
        fs.remove(path)
        return
    fs.ensure_directory(path.parent)
    fs.write_atomic(path, content, fsync=fsync)


# --- reading a configuration ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(network: str, step: str = "failed to load netconf") -> Iterator[None]:
    """Turn a JsonError of the block into a DecodingFailureError (6) that names the network, if one is given."""
    try:
        yield
    except gojson.JsonError as error:
        raise DecodingFailureError(
            f"{step}: {error}", f"network {network!r}" if network else "", origin=Origin.NETWORK
        ) from error


@contextlib.contextmanager
def prefixed(words: str) -> Iterator[None]:
    """Begin the message of a CniError of the block with `words`."""
    try:
        yield
    except CniError as error:
        raise error.changed(f"{words}: {error.msg}") from error


class UnknownKey(str):
    """An unknown key of a configuration as text, without its value, which may be a password."""

    within: str
    """The objects around the key, as a prefix of the text."""
    key: str
    known: frozenset[str]
    """The keys that are allowed at this place."""


class LeftToBinary(str):
    """A part of a configuration for which the binary runs if there is one. Without one the built-in serves it."""


def unknown_key(fields: Mapping[str, Any], known: Iterable[str], *, within: str = "") -> str:
    """Return the first key of `fields` that is not in `known` (in any case); empty if there is none.

    A key whose value is null is ignored. The returned key is an UnknownKey.
    """
    lower = {key.lower() for key in known}
    for key, value in fields.items():
        if key.lower() not in lower and value is not None:
            unknown = UnknownKey(f"{within}{key}")
            unknown.within, unknown.key, unknown.known = within, key, frozenset(known)
            return unknown
    return ""


def shown(value: Any) -> str:
    """Return a value of a configuration for a message, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def requests(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return `runtimeConfig` and `args.cni` (CNI CONVENTIONS), each empty if absent. Raises JsonError."""
    runtime = gojson.get_object(fields, "runtimeConfig") or {}
    return runtime, gojson.get_object(gojson.get_object(fields, "args") or {}, "cni") or {}


def own_args(text: str, keys: Iterable[str]) -> dict[str, str]:
    """Return the values of `keys` in CNI_ARGS (containernetworking/cni `pkg/types`, LoadArgs).

    Raises InvalidEnvironmentError for malformed CNI_ARGS, and for other keys unless IgnoreUnknown allows them.
    """
    wanted = {*keys, "IgnoreUnknown"}
    try:
        pairs = names.parse_args(text)
    except InvalidEnvironmentError as error:
        raise InvalidEnvironmentError(f"ARGS: invalid pair {error.details}") from error
    values = {key: value for key, value in pairs if key in wanted}
    unknown = [key for key, _ in pairs if key not in wanted]
    given = values.pop("IgnoreUnknown", "0")
    ignore = _BOOLEANS.get(given.lower())
    if ignore is None:
        raise InvalidEnvironmentError(
            f'ARGS: error parsing value of pair "IgnoreUnknown={given}": boolean unmarshal error: invalid input {given}'
        )
    if unknown and not ignore:
        # The reference shows their values too, which may be passwords.
        quoted = " ".join(json.dumps(key, ensure_ascii=False) for key in unknown)
        raise InvalidEnvironmentError(f"ARGS: unknown args [{quoted}]")
    return values


def requested_mac(call: Call) -> str:
    """Return the MAC address of runtimeConfig, else of CNI_ARGS, else `mac`, as it is written; empty if there is none.

    Raises JsonError, InvalidEnvironmentError.
    """
    by_args = own_args(call.invocation.args, ("MAC",)).get("MAC")
    return gojson.get_str(requests(call.fields)[0], "mac") or by_args or gojson.get_str(call.fields, "mac") or ""


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """Check that an item of an array is an object, and return it; null is an empty object. Raises JsonError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise gojson.JsonError(f"{where}: an object is needed, not {gojson.kind_of(value)}")
    return value


def ipam_routes(ipam: Mapping[str, Any]) -> tuple[Route, ...]:
    """Return `routes` of the section `ipam`. Raises JsonError."""
    return tuple([read_route(as_object(item, "routes")) for item in gojson.get_list(ipam, "routes") or ()])


def require_one_per_family(are_ipv4: Sequence[bool], cni_version: str) -> None:
    """Raise InvalidNetworkConfigError for two addresses of a family if the CNI version's results can have only one."""
    if max(are_ipv4.count(True), are_ipv4.count(False)) > 1 and not versions.at_least(cni_version, "0.3.0"):
        raise InvalidNetworkConfigError(f"CNI version {cni_version} does not support more than 1 address per family")


def path(fields: Mapping[str, Any], key: str, default: str = "") -> str:
    """Return the path `key`, `default` if it is absent. Raises JsonError, InvalidNetworkConfigError."""
    text = gojson.get_str(fields, key)
    if text and (problem := names.path_problem(text)):
        raise InvalidNetworkConfigError(f"{key}: {shown(text)} is not a path: {problem}")
    return default if text is None else text


def number(fields: Mapping[str, Any], key: str) -> int | None:
    """Return an unsigned number of 32 bits; None if it is absent. Raises JsonError."""
    value = gojson.get_int(fields, key)
    if value is not None and not 0 <= value <= UNSIGNED_MAX:
        raise gojson.JsonError(f"{key}: a number from 0 to {UNSIGNED_MAX} is needed, not {value}")
    return value


def ifname(fields: Mapping[str, Any], key: str, *, longest: int = names.IFNAME_MAX_BYTES) -> str:
    """Return the name of an interface; empty if it is absent. Raises JsonError, InvalidNetworkConfigError."""
    text = gojson.get_str(fields, key) or ""
    if text and (problem := names.ifname_problem(text, longest=longest)):
        raise InvalidNetworkConfigError(f"{key}: {shown(text)}: {problem}")
    return text


def in_range(key: str, value: int, most: int) -> int:
    """Return `value` if it is between 0 and `most`. Raises InvalidNetworkConfigError."""
    if not 0 <= value <= most:
        raise InvalidNetworkConfigError(f"{key}: {value} is out of range", f"0 to {most}")
    return value


def mac_address(text: str | None) -> str:
    """Return an Ethernet address in the kernel's spelling, empty for none. Raises InvalidNetworkConfigError."""
    if not text:
        return ""
    if address := names.mac_address(text):
        return address
    raise InvalidNetworkConfigError(
        f"address {text[:_SHOWN]}: invalid MAC address", "six bytes are needed, e.g. 02:00:5e:10:00:01"
    )


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address as Go's net.ParseIP does: `::ffff:a.b.c.d` is IPv4, a zone is an error. Raises ValueError."""
    if "%" in text:
        raise ValueError(text)
    address = ipaddress.ip_address(text)
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def ip_prefix(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Read an address and its prefix length as Go's net.ParseCIDR does. Raises ValueError."""
    address, _, length = text.partition("/")
    # ipaddress also accepts a netmask there, and a missing length.
    if "%" in text or not (length.isascii() and length.isdigit()):
        raise ValueError(text)
    ip = ipaddress.ip_address(address)
    if int(length) > ip.max_prefixlen:
        raise ValueError(text)
    return ip, int(length)
