"""The annotations and the label that say how a running pod's networks are kept, and the pod condition that reports it.

They are this project's own; the NPWG multi-network SPEC has no such keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

KEEP_ANNOTATION: Final = "multus.io/keep"
"""On a pod or a NetworkAttachmentDefinition: what happens to an attachment that differs from its record."""
HOTPLUG_ANNOTATION: Final = "multus.io/hotplug"
"""On a pod: `false` leaves it alone, `detach-all` allows an empty list of networks."""
HOTPLUG_LABEL: Final = "multus.io/hotplug"
"""On a namespace: `true` has its pods' annotations followed, if the node's setting is `namespaces`."""
NETWORKS_READY: Final = "multus.io/NetworksReady"
"""The type of the pod condition."""

Keep = Literal["repair", "report", "off"]

KEEP_VALUES: Final[Mapping[str, Keep]] = {"repair": "repair", "report": "report", "off": "off"}
HOTPLUG_VALUES: Final = ("true", "false", "detach-all")


def keep_of(pod: Mapping[str, str], network: Mapping[str, str], default: Keep) -> Keep:
    """Return what the annotations of a pod say, else those of its network, else `default`.

    A value that is not known counts as none.
    """
    for owner in (pod, network):
        if keep := KEEP_VALUES.get(owner.get(KEEP_ANNOTATION, "")):
            return keep
    return default


def is_followed(pod: Mapping[str, str]) -> bool:
    """Return False if the annotations of a pod say that its networks are left alone; a value that is not known does."""
    return pod.get(HOTPLUG_ANNOTATION, "true") in ("true", "detach-all")


def allows_none(pod: Mapping[str, str]) -> bool:
    """Return True if the annotations of a pod say that an empty list detaches every network."""
    return pod.get(HOTPLUG_ANNOTATION) == "detach-all"
