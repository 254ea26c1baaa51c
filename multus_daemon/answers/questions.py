"""The answers of `/admin/v1`: docs/multusctl.md has their formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multus_daemon import deadlines
from multus_daemon.answers import attachments, drift, explain, status
from multus_daemon.answers.asked import SHOWN, Asked, ByMethod
from multus_daemon.node import orphans
from multus_daemon.pod import quarantine
from multus_daemon.pod.check import announced, failures
from multus_daemon.pod.detach import held_if_free
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import find_pod
from multus_daemon.runtime import deadline
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    IoFailureError,
)
from multus_daemon.spec.cni.names import ContainerId, KubernetesArgs, Namespace, PodName, PodUid


class Answers:
    """The questions and orders by name. Each blocks and raises CniError."""

    def __init__(
        self,
        engine: Engine,
        timelines: Timelines,
        parts: Callable[[], status.Parts],
        configuration: Callable[[], bytes],
        spool: Path,
        metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", ""),
        repaired: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`parts` returns the state of the daemon's parts, `configuration` the runtime's present configuration of the
        shim, or raises the CniError that explains why there is none. `spool`: the shim's directory of DELs. `metrics`
        returns them as Prometheus reads them, and their type. `repaired` is called with each pod repaired by hand.
        """
        self._configuration = configuration
        self._engine = engine
        self._metrics = metrics
        self._repaired = repaired
        self._timelines = timelines
        self._parts = parts
        self._spool = spool
        self.by_method: ByMethod = {
            "GET": {
                "attachments": self._attachments,
                "drift": self._drift,
                "explain": self._explain,
                # A port may be absent, closed to this machine, or ask for a token.
                "metrics": lambda _: {"schema": "multusctl.metrics/v1", "text": self._metrics()[0].decode()},
                "status": self._status,
                "trace": self._trace,
            },
            "POST": {
                # A question; POST, as it has a body.
                "explain-manifest": self._explain_manifest,
                "forget": self._forget,
                "repair": self._repair,
            },
        }

    def _status(self, _asked: Asked) -> Mapping[str, Any]:
        try:
            containers = len(self._engine.records.containers())
        except OSError as error:
            raise IoFailureError(f"the records of containers can't be listed: {error}") from error
        return status.of(self._parts(), self._timelines, containers=containers, spooled=status.entries_in(self._spool))

    def _attachments(self, asked: Asked) -> Mapping[str, Any]:
        leaks = asked.flag("leaks")
        try:
            return attachments.of(
                self._engine.records.store,
                self._engine.namespaces,
                source="daemon",
                pod=asked.pod(),
                leaks=leaks,
                problems=self._orphans() if leaks else None,
                last_errors=self._last_errors(),
                check=self._checked if asked.flag("check") else None,
            )
        except OSError as error:
            raise IoFailureError(f"records can't be listed: {error}") from error

    def _orphans(self) -> dict[str, attachments.Problem]:
        """Return the problem of each leaked container. Raises OSError."""
        seen = orphans.look(self._engine)
        in_use = attachments.Problem(
            "its pod is gone, but processes live in its network namespace",
            "remove the container from the runtime (crictl rmp -f); nothing is touched while they live",
        )
        problems: dict[str, attachments.Problem] = {
            container: attachments.Problem(orphan.reason, attachments.ORPHAN_ADVICE)
            for container, orphan in seen.orphans.items()
        }
        return problems | dict.fromkeys(seen.in_use, in_use)

    def _last_errors(self) -> dict[str, str]:
        return {
            item.subject["container"]: item.error[1]
            for item in self._timelines
            if item.error and item.subject.get("verb") == "DEL"
        }

    def _drift(self, asked: Asked) -> Mapping[str, Any]:
        try:
            with deadline.within(deadlines.ADMIN_SECONDS / 2):
                return drift.of(self._engine, asked.pod())
        except OSError as error:
            raise IoFailureError(f"records can't be listed: {error}") from error

    def _repair(self, asked: Asked) -> Mapping[str, Any]:
        if not asked.pod():
            raise InvalidEnvironmentError("no pod is named", "pod=NAMESPACE/POD")
        try:
            answer = drift.repair(self._engine, asked.pod(), dry_run=asked.flag("dryRun"))
        except OSError as error:
            raise IoFailureError(f"records can't be listed: {error}") from error
        self._repaired(asked.pod())
        return answer

    def _forget(self, asked: Asked) -> Mapping[str, Any]:
        container_id = ContainerId(asked.query.get("container", ""))
        if not container_id:
            raise InvalidEnvironmentError("no container is named", "container=ID")
        if problem := names.container_id_problem(container_id):
            raise InvalidEnvironmentError(f"container is {container_id[:SHOWN]!r}: {problem}")
        record = quarantine.forget(self._engine, container_id)
        return attachments.forgotten(container_id, record)

    def _checked(self, record: ContainerRecord) -> str:
        """Return the error that CHECK would have; empty if none."""
        with held_if_free(self._engine, record.sandbox.container_id) as is_ours:
            if not is_ours:
                return "not checked: another request is at work on it"
            try:
                strict = self._engine.policy.net_conf(b"{}").strict_check
                with self._engine.namespaces.open(record.sandbox.netns) as netns:
                    for failure in failures(self._engine, record, announced(record), netns):
                        if strict or failure.is_certain:
                            return str(failure.error)
            except CniError as error:
                return str(error)
            return ""

    def _explain(self, asked: Asked) -> Mapping[str, Any]:
        if not asked.pod():
            raise InvalidEnvironmentError("no pod is named", "pod=NAMESPACE/POD")
        namespace, _, name = asked.pod().partition("/")
        pod = KubernetesArgs(Namespace(namespace), PodName(name), PodUid(""), "", ())
        return self._explained(lambda: find_pod(self._engine.cluster, pod), asked.pod())

    def _explain_manifest(self, asked: Asked) -> Mapping[str, Any]:
        # Imported here: a standalone daemon does not load Kubernetes otherwise.
        from multus_daemon.cluster.kube import objects

        try:
            pod = objects.decode_pod(asked.body).value
        except objects.DECODE_ERRORS as error:
            raise DecodingFailureError(f"the body is not a pod: {error}") from error
        if not pod.namespace or not pod.name:
            raise DecodingFailureError("the pod has no name or no namespace", "metadata.name, metadata.namespace")
        return self._explained(lambda: pod, str(pod))

    def _explained(self, find: Callable[[], Pod], name: str) -> Mapping[str, Any]:
        try:
            return explain.of(self._engine, self._configuration, find, name, self._timelines)
        except OSError as error:
            raise IoFailureError(f"records can't be listed: {error}") from error

    def _trace(self, asked: Asked) -> Mapping[str, Any]:
        return status.trace(self._timelines, asked.pod(), asked.number("last", 20, most=1000))
