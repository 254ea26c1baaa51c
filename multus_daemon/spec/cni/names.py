"""Names and CNI_ARGS of the CNI specification, names of Kubernetes objects, and their validity.

Names: containernetworking/cni `pkg/utils`; Kubernetes documentation, "Object Names and IDs". CNI_ARGS:
`KEY=value;KEY2=value2` without escaping (CNI SPEC section 2; containernetworking/cni `pkg/types/args.go`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NewType

from multus_daemon.spec.cni.errors import InvalidEnvironmentError

ContainerId = NewType("ContainerId", str)
IfName = NewType("IfName", str)
NetworkName = NewType("NetworkName", str)
Namespace = NewType("Namespace", str)
PodName = NewType("PodName", str)
PodUid = NewType("PodUid", str)

Pairs = tuple[tuple[str, str], ...]
KUBERNETES_KEYS = ("IgnoreUnknown", "K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID")


_IDENTIFIER = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")
_NOT_IN_IFNAME = re.compile(r"[/:\0\s]")
# Go's net.ParseMAC: pairs with one kind of separator, or groups of four with dots.
_HARDWARE_ADDRESS = re.compile(
    r"[0-9a-f]{2}(:[0-9a-f]{2})+|[0-9a-f]{2}(-[0-9a-f]{2})+|[0-9a-f]{4}(\.[0-9a-f]{4})+", re.ASCII | re.IGNORECASE
)
IFNAME_MAX_BYTES = 15
ALTERNATIVE_NAME_MAX_BYTES = 127
"""Maximum length of an alternative name of a link, by which newer plugins find it (`ip link property`)."""
FILE_NAME_MAX_BYTES = 255
"""NAME_MAX of linux/limits.h, the limit of ext4, xfs, btrfs and tmpfs."""
PATH_MAX_BYTES = 4095 - 2 * (FILE_NAME_MAX_BYTES + 1)
"""PATH_MAX of linux/limits.h, less the room for a directory and a file below the path."""
# The store, the result cache and host-local use it in file names of up to FILE_NAME_MAX_BYTES.
CONTAINER_ID_MAX_BYTES = 128
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_MAX = 63
_SUBDOMAIN_MAX = 253


def label_problem(value: str) -> str:
    """Return the reason why `value` is not a DNS-1123 label, such as a namespace; empty if it is one."""
    if not value:
        return "is empty"
    if len(value) > _LABEL_MAX:
        return f"is longer than {_LABEL_MAX} characters"
    if not _LABEL.fullmatch(value):
        return "must consist of a-z, 0-9 and '-', and begin and end with a letter or digit"
    return ""


def subdomain_problem(value: str) -> str:
    """Return the reason why `value` is not a DNS-1123 subdomain, such as a pod's name; empty if it is one.

    As in Kubernetes, only the whole has a maximum length, not each label.
    """
    if not value:
        return "is empty"
    if len(value) > _SUBDOMAIN_MAX:
        return f"is longer than {_SUBDOMAIN_MAX} characters"
    if not all(_LABEL.fullmatch(part) for part in value.split(".")):
        return "must consist of a-z, 0-9, '-' and '.', and each part begin and end with a letter or digit"
    return ""


def container_id_problem(value: str) -> str:
    """Return the reason why `value` is not a container id, in the Go library's words; empty if it is one."""
    if not value:
        return "missing containerID"
    if not _IDENTIFIER.fullmatch(value):
        return "invalid characters in containerID"
    if len(value) > CONTAINER_ID_MAX_BYTES:
        return f"containerID is longer than {CONTAINER_ID_MAX_BYTES} bytes"
    return ""


NETWORK_NAME_ADVICE = "set 'name' in the network's configuration: letters, digits, '_', '.' and '-'"


def network_name_problem(value: str) -> str:
    """Return the reason why `value` is not a network name, in the Go library's words; empty if it is one."""
    if not value:
        return "missing network name"
    if not _IDENTIFIER.fullmatch(value):
        return "invalid characters found in network name"
    return ""


def path_problem(value: str) -> str:
    """Return the reason why the path `value` is invalid, or too long for a directory with files; empty if it is not."""
    encoded = value.encode("utf-8", "surrogatepass")
    if b"\0" in encoded:
        return "it has a NUL byte"
    if len(encoded) > PATH_MAX_BYTES:
        return f"it has more than {PATH_MAX_BYTES} bytes"
    if any(len(part) > FILE_NAME_MAX_BYTES for part in encoded.split(b"/")):
        return f"a component has more than {FILE_NAME_MAX_BYTES} bytes"
    return ""


def ifname_problem(value: str, *, longest: int = IFNAME_MAX_BYTES) -> str:
    """Return the reason why `value` is not an interface name, in the Go library's words; empty if it is one.

    Unlike the Go library it refuses `%`: the kernel then makes an interface of another name, or none.
    """
    if not value:
        return "interface name is empty"
    if len(value.encode("utf-8", "surrogatepass")) > longest:
        return "interface name is too long"
    if value in (".", ".."):
        return "interface name is . or .."
    if _NOT_IN_IFNAME.search(value):
        return "interface name contains / or : or whitespace characters"
    if "%" in value:
        return "interface name contains %, which the kernel replaces with a number"
    return ""


def mac_address(value: str, size: int = 6) -> str:
    """Return the hardware address `value` in the kernel's spelling; empty if it is not one of `size` bytes."""
    digits = re.sub("[:.-]", "", value)
    is_address = len(digits) == 2 * size and _HARDWARE_ADDRESS.fullmatch(value)
    return bytes.fromhex(digits).hex(":") if is_address else ""


def parse_args(text: str) -> Pairs:
    """Return the KEY=value pairs of CNI_ARGS in order, without white space around them, as upstream's daemon does.

    Unlike in the Go library, empty items (a trailing `;`) and `=` in a value are allowed, so that no DEL fails for
    them. Raises InvalidEnvironmentError for an item without `=` or without a key.
    """
    pairs = []
    for item in text.split(";"):
        if not item.strip():
            continue
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise InvalidEnvironmentError("CNI_ARGS: an item is not of the form KEY=value", repr(item))
        pairs.append((key.strip(), value.strip()))
    return tuple(pairs)


def render_args(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the text of CNI_ARGS."""
    return ";".join(f"{key}={value}" for key, value in pairs)


def netns_override(environ: Mapping[str, str]) -> bool:
    """Return True if CNI_NETNS_OVERRIDE allows CNI_NETNS to be the plugin's own network namespace."""
    return environ.get("CNI_NETNS_OVERRIDE", "").upper() in ("1", "TRUE")


@dataclass(frozen=True, slots=True)
class KubernetesArgs:
    """The pod in CNI_ARGS of a Kubernetes runtime; absent values are empty strings."""

    namespace: Namespace
    name: PodName
    uid: PodUid
    infra_container_id: str
    others: Pairs
    """All other pairs of CNI_ARGS except IgnoreUnknown. The plugins get them."""

    @property
    def has_pod(self) -> bool:
        """True if a pod is named."""
        return bool(self.namespace and self.name)


def kubernetes_args(text: str) -> KubernetesArgs:
    """Return the pod in CNI_ARGS. Raises as `parse_args` does."""
    pairs = parse_args(text)
    found = dict(pairs)
    return KubernetesArgs(
        namespace=Namespace(found.get("K8S_POD_NAMESPACE", "")),
        name=PodName(found.get("K8S_POD_NAME", "")),
        uid=PodUid(found.get("K8S_POD_UID", "")),
        infra_container_id=found.get("K8S_POD_INFRA_CONTAINER_ID", ""),
        others=tuple((key, value) for key, value in pairs if key not in KUBERNETES_KEYS),
    )


def plugin_args(pod: KubernetesArgs, extra: Iterable[tuple[str, str]] = ()) -> Pairs:
    """Return CNI_ARGS for a plugin: upstream's five keys in upstream's order, the other pairs, then `extra`."""
    values = ("true", pod.namespace, pod.name, pod.infra_container_id, pod.uid)
    return (*zip(KUBERNETES_KEYS, values, strict=True), *pod.others, *extra)
