"""Networks as Kubernetes declares them, and the selection of a pod (NPWG multi-network SPEC sections 3 and 4).

A network is the custom resource NetworkAttachmentDefinition, `k8s.cni.cncf.io/v1`. A pod selects it by an annotation,
whose value has the short form (`net1, ns/net2@data0`) or is a JSON list. One invalid element fails the whole: a pod
gets every network that it names, or none and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidAnnotationError,
    Origin,
)
from multus_daemon.spec.cni.names import ifname_problem, label_problem, subdomain_problem
from multus_daemon.spec.nad import requests

GROUP = "k8s.cni.cncf.io"
VERSION = "v1"
PLURAL = "network-attachment-definitions"
KIND = "NetworkAttachmentDefinition"
RESOURCE_NAME_ANNOTATION = "k8s.v1.cni.cncf.io/resourceName"
NETWORKS_ANNOTATION: Final = "k8s.v1.cni.cncf.io/networks"
DEFAULT_NETWORK_ANNOTATION: Final = "v1.multus-cni.io/default-network"

# These five are this project's own.
KEEP_ANNOTATION: Final = "multus.io/keep"
"""On a pod or a NetworkAttachmentDefinition: what the daemon does if an attachment differs from its record."""
HOTPLUG_ANNOTATION: Final = "multus.io/hotplug"
"""On a pod. `false`: its networks do not follow its annotation. `detach-all`: an empty annotation detaches them all."""
STICKY_ANNOTATION: Final = "multus.io/sticky-addresses"
"""On a pod of a StatefulSet. `true`: the addresses that the cluster shares stay with the pod's ordinal."""
HOTPLUG_LABEL: Final = "multus.io/hotplug"
"""On a namespace. `true`: the networks of its pods follow their annotations, if the setting `hotplug` is `namespaces`.
"""
NETWORKS_READY: Final = "multus.io/NetworksReady"
"""Type of the pod condition that says whether a running pod has its networks as recorded."""

Keep = Literal["repair", "report", "off"]
KEEP_VALUES: Final[Mapping[str, Keep]] = {"repair": "repair", "report": "report", "off": "off"}
HOTPLUG_VALUES: Final = ("true", "false", "detach-all")

# Kubernetes limits all annotations of an object together to 256 KiB.
ANNOTATION_MAX_BYTES: Final = 256 * 1024
ELEMENTS_MAX: Final = 256
KEYS: Final = (
    *("name", "namespace", "interface", "ips", "mac", "infiniband-guid", "portMappings", "bandwidth", "deviceID"),
    *("cni-args", "default-route", "ipam-claim-reference", "interfaceRequest"),
)
"""All keys of an element. The last, `interfaceRequest`, is an older name of `interface`."""
_MEANT: Final = {
    **dict.fromkeys(("macrequest", "macaddress", "hwaddr"), "mac"),
    **dict.fromkeys(("iprequest", "ip", "ipaddress", "addresses"), "ips"),
    **dict.fromkeys(("gatewayrequest", "gateway", "defaultroute"), "default-route"),
    **dict.fromkeys(("ifname", "iface", "interfacename"), "interface"),
}
"""Keys that users take from other formats, in lower case, and the keys that they mean."""
UNKNOWN_MAX: Final = 8
"""Maximum number of reported unknown keys of an element."""
_KEY_MAX: Final = 64
"""Maximum characters of an unknown key for which a similar key is suggested."""
_SHOWN_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class NetworkAttachmentDefinition:
    """A named network: `config` is the text of a CNI configuration; empty means a file on the node."""

    namespace: str
    name: str
    config: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def resource_name(self) -> str:
        """The device plugin resource that a pod needs for the network; empty if none."""
        return self.annotations.get(RESOURCE_NAME_ANNOTATION, "")

    @property
    def network(self) -> NetworkConfig | None:
        """The parsed `config`; None if it is empty. Raises as `conf.parse` does."""
        if not self.config.strip():
            return None
        # The parser refuses half a surrogate pair, which JSON allows.
        return conf.parse_written(self.config.encode("utf-8", "surrogatepass"), default_name=self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class NetworkSelection:
    """One network that a pod asks for. Absent keys are empty strings, empty tuples or None.

    Addresses have been checked and are kept as the user wrote them.
    """

    namespace: str
    name: str
    interface: str = ""
    ips: tuple[str, ...] = ()
    """Addresses with or without a prefix length."""
    mac: str = ""
    infiniband_guid: str = ""
    port_mappings: tuple[Mapping[str, Any], ...] = ()
    """Each with the keys of the specification."""
    bandwidth: Mapping[str, int] | None = None
    """Bits per second (rates) and bits (bursts), by the keys of the specification. No value is 0. None: no request."""
    device_id: str = ""
    cni_args: Mapping[str, Any] | None = None
    default_route: tuple[str, ...] | None = None
    """Gateways; None if the key is absent, empty for an empty list, which differs."""
    ipam_claim_reference: str = ""
    unknown: tuple[str, ...] = field(default=(), compare=False)
    """A message for each unknown key, at most UNKNOWN_MAX."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def canonical(self) -> str:
        """JSON of the keys that are set, by the names of the SPEC: equal for equal elements."""
        values = {
            "name": self.name,
            "namespace": self.namespace,
            "interface": self.interface or None,
            "infiniband-guid": self.infiniband_guid or None,
            "ips": self.ips or None,
            "mac": self.mac or None,
            "portMappings": self.port_mappings or None,
            "bandwidth": self.bandwidth or None,
            "deviceID": self.device_id or None,
            "cni-args": self.cni_args,
            "default-route": self.default_route,
            "ipam-claim-reference": self.ipam_claim_reference or None,
        }
        return gojson.dumps({key: value for key, value in values.items() if value is not None}).decode()

    def capability_args(self) -> dict[str, Any]:
        """Return the runtimeConfig for plugins that declare the capabilities."""
        values: dict[str, Any] = {
            "ips": list(self.ips),
            "mac": self.mac,
            "infinibandGUID": self.infiniband_guid,
            "portMappings": list(self.port_mappings),
            "bandwidth": dict(self.bandwidth or {}),
            "deviceID": self.device_id,
        }
        return {key: value for key, value in values.items() if value}


def keep_of(pod: Mapping[str, str], network: Mapping[str, str], default: Keep) -> Keep:
    """Return the value of `multus.io/keep` of the pod, else that of its network, else `default`.

    Unknown values are ignored.
    """
    for owner in (pod, network):
        if keep := KEEP_VALUES.get(owner.get(KEEP_ANNOTATION, "")):
            return keep
    return default


def is_followed(pod: Mapping[str, str]) -> bool:
    """Return True unless `multus.io/hotplug` of the pod has another value than `true` and `detach-all`."""
    return pod.get(HOTPLUG_ANNOTATION, "true") in ("true", "detach-all")


def allows_none(pod: Mapping[str, str]) -> bool:
    """Return True if an empty annotation detaches every network of the pod: `multus.io/hotplug` is `detach-all`."""
    return pod.get(HOTPLUG_ANNOTATION) == "detach-all"


def parse(annotation: str, *, pod_namespace: str) -> tuple[NetworkSelection, ...]:
    """Read the value of `k8s.v1.cni.cncf.io/networks`; "" and `[]` are no networks.

    Raises DecodingFailureError (6) for wrong types, InvalidNetworkConfigError (7) for invalid values; the message names
    the element.
    """
    elements = _parse(annotation, pod_namespace, NETWORKS_ANNOTATION)
    _refuse_conflicts(elements)
    return elements


def parse_default_network(annotation: str, *, default_namespace: str) -> NetworkSelection:
    """Read the value of `v1.multus-cni.io/default-network`, one network. Raises as `parse` does."""
    elements = _parse(annotation, default_namespace, DEFAULT_NETWORK_ANNOTATION)
    if len(elements) != 1:
        raise InvalidAnnotationError(
            f"annotation {DEFAULT_NETWORK_ANNOTATION} must name one network, and names {len(elements) or 'none'}",
            "remove the annotation for the cluster's own default network",
        )
    return elements[0]


def _parse(annotation: str, namespace: str, key: str) -> tuple[NetworkSelection, ...]:
    if not annotation:
        return ()
    try:
        if len(annotation.encode("utf-8", "surrogatepass")) > ANNOTATION_MAX_BYTES:
            raise InvalidAnnotationError(f"longer than {ANNOTATION_MAX_BYTES} bytes")
        # Upstream's rule: any of these characters makes it JSON.
        if is_json := any(character in annotation for character in '[{"'):
            items = _json_items(annotation)
        else:
            items = [item.strip() for item in annotation.split(",")]
        if len(items) > ELEMENTS_MAX:
            raise InvalidAnnotationError(f"{len(items)} networks, and at most {ELEMENTS_MAX} are allowed")
        return tuple(_element(index, item, namespace, is_json=is_json) for index, item in enumerate(items))
    except CniError as error:
        raise error.with_context(f"annotation {key}") from error


def _json_items(annotation: str) -> list[Any]:
    try:
        items = gojson.loads(annotation)
    except gojson.JsonError as error:
        raise DecodingFailureError(str(error), origin=Origin.ANNOTATION) from error
    if not isinstance(items, list):
        raise DecodingFailureError(
            f"a JSON list of objects is needed, not {gojson.kind_of(items)}", origin=Origin.ANNOTATION
        )
    return items


def _element(index: int, item: Any, namespace: str, *, is_json: bool) -> NetworkSelection:
    name = gojson.get(item, "name") if isinstance(item, dict) else item
    where = f"element {index} {_shown(name)}" if isinstance(name, str) else f"element {index}"
    try:
        selected = _json_element(item, namespace) if is_json else _short_element(item, namespace)
        _check_names(selected)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"{error} ({where})", remedy=_misspelt(item), origin=Origin.ANNOTATION) from error
    except CniError as error:
        raise error.changed(f"{error.msg} ({where})", remedy=error.remedy or _misspelt(item)) from error
    return selected


def _short_element(item: str, namespace: str) -> NetworkSelection:
    """Read `[<namespace>/]<name>[@<interface>]`, ignoring white space around each part."""
    target, at, interface = (part.strip() for part in item.partition("@"))
    if "@" in interface:
        raise InvalidAnnotationError("more than one '@'")
    if at and not interface:
        raise InvalidAnnotationError("no interface name after '@'")
    if target.count("/") > 1:
        raise InvalidAnnotationError("more than one '/': the form is [namespace/]name[@interface]")
    first, slash, second = (part.strip() for part in target.partition("/"))
    if slash and not first:
        raise InvalidAnnotationError("no namespace before '/'")
    return NetworkSelection(*((first, second) if slash else (namespace, first)), interface)


def _misspelt(item: Any) -> str:
    """Return the unknown keys of an invalid element as a text: one may be misspelt."""
    return "; ".join(_unknown(item)) if isinstance(item, dict) else ""


def _unknown(fields: Mapping[str, Any]) -> tuple[str, ...]:
    known: list[tuple[str, str, tuple[str, ...]]] = [(key, "", KEYS) for key in fields]
    bandwidth, mappings = gojson.get(fields, "bandwidth"), gojson.get(fields, "portMappings")
    if isinstance(bandwidth, dict):
        known += [(key, "bandwidth.", requests.BANDWIDTH_KEYS) for key in bandwidth]
    for mapping in mappings if isinstance(mappings, list) else ():
        if isinstance(mapping, dict):
            known += [(key, "portMappings.", requests.PORT_MAPPING_KEYS) for key in mapping]
    found: dict[str, None] = {}
    for key, prefix, keys in known:
        if len(found) == UNKNOWN_MAX:
            break
        spelling = {name.lower(): name for name in keys}
        if key.lower() not in spelling:
            import difflib  # 0.1 MB, only for misspelt keys

            near = difflib.get_close_matches(key.lower(), spelling, n=1) if len(key) <= _KEY_MAX else []
            name = _MEANT.get(key.lower(), "") if not prefix else ""
            name = name or (spelling[near[0]].replace("interfaceRequest", "interface") if near else "")
            meant = f", is {name} meant?" if name else ""
            found[f"unknown key {prefix}{_shown(key)}{meant}"] = None
    return tuple(found)


def _json_element(fields: Any, namespace: str) -> NetworkSelection:
    if not isinstance(fields, dict):
        raise gojson.JsonError(f"each network must be an object, not {gojson.kind_of(fields)}")
    ips = requests.ips(fields)
    claim = gojson.get_str(fields, "ipam-claim-reference") or ""
    if ips and claim:
        raise InvalidAnnotationError("ips and ipam-claim-reference exclude each other")
    return NetworkSelection(
        namespace=gojson.get_str(fields, "namespace") or namespace,
        name=gojson.get_str(fields, "name") or "",
        interface=gojson.get_str(fields, "interface") or gojson.get_str(fields, "interfaceRequest") or "",
        ips=ips,
        mac=requests.mac(fields),
        infiniband_guid=requests.infiniband_guid(fields),
        port_mappings=requests.port_mappings(fields),
        bandwidth=requests.bandwidth(fields),
        device_id=gojson.get_str(fields, "deviceID") or "",
        cni_args=gojson.get_object(fields, "cni-args"),
        default_route=requests.default_route(fields),
        ipam_claim_reference=claim,
        unknown=_unknown(fields),
    )


def _check_names(selected: NetworkSelection) -> None:
    if not selected.name:
        raise InvalidAnnotationError("a network has no name")
    if problem := subdomain_problem(selected.name):
        raise InvalidAnnotationError(f"name: {_shown(selected.name)} {problem}")
    if problem := label_problem(selected.namespace):
        raise InvalidAnnotationError(f"namespace: {_shown(selected.namespace)} {problem}")
    claim = selected.ipam_claim_reference
    if claim and (problem := subdomain_problem(claim)):
        raise InvalidAnnotationError(f"ipam-claim-reference: {_shown(claim)} {problem}")
    if selected.interface and (problem := ifname_problem(selected.interface)):
        raise InvalidAnnotationError(f"interface: {_shown(selected.interface)}: {problem}")


def _refuse_conflicts(elements: tuple[NetworkSelection, ...]) -> None:
    """Refuse a second element with the same interface name, or with a default route (SPEC 4.1.2.1.5 and .9)."""
    owners: dict[str, int] = {}
    router: int | None = None
    for index, element in enumerate(elements):
        if element.interface:
            other = owners.setdefault(element.interface, index)
            if other != index:
                problem = f"interface {element.interface!r} is asked for twice"
                advice = "give each an interface of its own in the pod's annotation, NETWORK@INTERFACE, or leave it out"
                raise _conflict(problem, elements, other, index, advice)
        if element.default_route:
            if router is not None:
                raise _conflict("default-route is set twice", elements, router, index)
            router = index


def _conflict(
    problem: str, elements: tuple[NetworkSelection, ...], first: int, second: int, advice: str = ""
) -> CniError:
    return InvalidAnnotationError(
        f"{problem}: in element {first} ({elements[first]}) and element {second} ({elements[second]})"
        f" (annotation {NETWORKS_ANNOTATION})",
        advice,
    )


def _shown(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]}...{text[-half:]}")
