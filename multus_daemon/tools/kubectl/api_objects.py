"""Objects of the API server, as far as `kubectl multus` needs them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from multus_daemon.cluster.kube import objects


class _Owner(msgspec.Struct):
    kind: str = ""


class Metadata(objects.Metadata, rename="camel"):
    """meta/v1 ObjectMeta, of people's interest."""

    labels: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class _Waiting(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct):
    waiting: _Waiting | None = None


class _ContainerStatus(msgspec.Struct):
    name: str = ""
    ready: bool = False
    state: _State | None = None


class _Container(msgspec.Struct):
    name: str = ""


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    host_network: bool = False
    containers: list[_Container] | None = None


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
        """`namespace/name`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def annotations(self) -> Mapping[str, str]:
        """Those that it has."""
        return self.metadata.annotations or {}

    @property
    def finished(self) -> bool:
        """Whether none of its containers will run again, so that its networks are gone."""
        return self.status.phase in ("Succeeded", "Failed")

    def state(self) -> str:
        """Its phase, and what its containers wait for, as far as it is said."""
        waiting = [item.state.waiting for item in self.status.container_statuses or () if item.state]
        words = [" ".join(filter(None, (item.reason, item.message))) for item in waiting if item]
        return ": ".join(filter(None, (self.status.phase or "Unknown", self.status.reason, ", ".join(words))))


class NodeObject(msgspec.Struct):
    """core/v1 Node."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)

    @property
    def runs_linux(self) -> bool:
        """False where it says that it does not: there is no Multus for it."""
        return (self.metadata.labels or {}).get("kubernetes.io/os", "linux") == "linux"


class _Involved(msgspec.Struct):
    namespace: str = ""
    name: str = ""
    uid: str = ""


class _Source(msgspec.Struct):
    component: str = ""


class _Series(msgspec.Struct, rename="camel"):
    last_observed_time: str | None = None


class EventObject(msgspec.Struct, rename="camel"):
    """core/v1 Event."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    involved_object: _Involved = msgspec.field(default_factory=_Involved)
    type: str = ""
    reason: str = ""
    message: str = ""
    source: _Source | None = None
    reporting_component: str = ""
    first_timestamp: str | None = None
    last_timestamp: str | None = None
    event_time: str | None = None
    series: _Series | None = None
    count: int | None = None

    @property
    def component(self) -> str:
        """Who tells of it."""
        return (self.source.component if self.source else "") or self.reporting_component

    @property
    def when(self) -> str:
        """Its last time, as the API writes times; empty where it has none."""
        last = self.series.last_observed_time if self.series else None
        return last or self.last_timestamp or self.event_time or self.metadata.creation_timestamp or ""
