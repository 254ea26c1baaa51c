"""Objects of the API server, with the keys that `kubectl multus` needs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from multus_daemon.cluster.kube import objects


class _Reference(msgspec.Struct):
    """A reference by kind and name: to a container, an owner or an Event's object."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class Metadata(objects.Metadata, rename="camel"):
    """meta/v1 ObjectMeta."""

    owner_references: list[_Reference] | None = None
    creation_timestamp: str | None = None


class _Waiting(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct):
    waiting: _Waiting | None = None


class _ContainerStatus(msgspec.Struct):
    name: str = ""
    ready: bool = False
    state: _State | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    host_network: bool = False
    containers: list[_Reference] | None = None


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    container_statuses: list[_ContainerStatus] | None = None


class PodObject(msgspec.Struct):
    """core/v1 Pod."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    def __str__(self) -> str:
        """Return `namespace/name`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def annotations(self) -> Mapping[str, str]:
        """The annotations, empty if there are none."""
        return self.metadata.annotations or {}

    @property
    def finished(self) -> bool:
        """True if none of its containers will run again, so that its networks are detached."""
        return self.status.phase in ("Succeeded", "Failed")

    def state(self) -> str:
        """Return the phase, its reason, and the reason of each container that is waiting."""
        waiting = [item.state.waiting for item in self.status.container_statuses or () if item.state]
        words = [" ".join(filter(None, (item.reason, item.message))) for item in waiting if item]
        return ": ".join(filter(None, (self.status.phase or "Unknown", self.status.reason, ", ".join(words))))


class _Series(msgspec.Struct, rename="camel"):
    last_observed_time: str | None = None


class EventObject(msgspec.Struct, rename="camel"):
    """core/v1 Event."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    involved_object: _Reference = msgspec.field(default_factory=_Reference)
    type: str = ""
    reason: str = ""
    message: str = ""
    source: dict[str, str] | None = None
    reporting_component: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None
    series: _Series | None = None
    count: int | None = None

    @property
    def component(self) -> str:
        """The component that reports the Event."""
        return (self.source or {}).get("component") or self.reporting_component

    @property
    def when(self) -> str:
        """The time of its last occurrence, as the API server writes it; empty if unknown."""
        last = self.series.last_observed_time if self.series else None
        return last or self.last_timestamp or self.event_time or self.metadata.creation_timestamp or ""
