"""What the daemon answers itself: the admin paths, by name (`api.admin`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multus_daemon.api.admin import SHOWN, Answer, Asked
from multus_daemon.diagnosis import attachments, explain, status, trace
from multus_daemon.node import orphans
from multus_daemon.pod import quarantine
from multus_daemon.pod.check import announced, failures
from multus_daemon.pod.delete import held_if_free
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import find_pod
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.args import KubernetesArgs
from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, InvalidEnvironmentError, IoFailureError
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid


class Answers:
    """The questions and orders that a running daemon takes. Each blocks and raises CniError."""

    def __init__(
        self,
        engine: Engine,
        timelines: Timelines,
        parts: Callable[[], status.Parts],
        configuration: Callable[[], bytes],
        spool: Path,
    ) -> None:
        """`parts`: what the daemon knows of itself; `configuration`: what the runtime gives the shim, as it is now, or
        raises the CniError that keeps the runtime from having any.

        `spool`: the shim's directory of DELs.
        """
        self._configuration = configuration
        self._engine = engine
        self._timelines = timelines
        self._parts = parts
        self._spool = spool
        self.questions: Mapping[str, Answer] = {
            "attachments": self._attachments,
            "explain": self._explain,
            "status": self._status,
            "trace": self._trace,
        }
        self.orders: Mapping[str, Answer] = {
            # A POST for its body: it touches nothing either.
            "explain-manifest": self._explain_manifest,
            "forget": self._forget,
        }

    def _status(self, _asked: Asked) -> Mapping[str, Any]:
        try:
            containers = len(self._engine.records.store.containers(foreign=False))
        except OSError as error:
            raise IoFailureError(f"records can't be listed: {error}") from error
        return status.of(self._parts(), self._timelines, containers=containers, spooled=status.entries_in(self._spool))

    def _attachments(self, asked: Asked) -> Mapping[str, Any]:
        leaks = asked.flag("leaks")
        try:
            return attachments.of(
                self._engine.records.store,
                self._engine.links,
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
        """Raises OSError."""
        found = orphans.look(self._engine)
        in_use = attachments.Problem(
            "its pod is gone, but processes live in its network namespace",
            "remove the container from the runtime (crictl rmp -f); nothing is touched while they live",
        )
        return {
            **{
                container: attachments.Problem(orphan.reason, attachments.ORPHAN_ADVICE)
                for container, orphan in found.orphans.items()
            },
            **dict.fromkeys(found.in_use, in_use),
        }

    def _last_errors(self) -> dict[str, str]:
        """The last error of a DEL, by container."""
        return {
            item.subject["container"]: item.error[1]
            for item in self._timelines
            if item.error and item.subject.get("verb") == "DEL"
        }

    def _forget(self, asked: Asked) -> Mapping[str, Any]:
        container_id = ContainerId(asked.query.get("container", ""))
        if not container_id:
            raise InvalidEnvironmentError("no container is named", "container=ID")
        if problem := names.container_id_problem(container_id):
            raise InvalidEnvironmentError(f"container is {container_id[:SHOWN]!r}: {problem}")
        record = quarantine.forget(self._engine, container_id)
        return attachments.forgotten(container_id, record)

    def _checked(self, record: ContainerRecord) -> str:
        """What CHECK says; empty: all is as it should be."""
        with held_if_free(self._engine.locks, record.sandbox.container_id) as is_ours:
            if not is_ours:
                return "not checked: another request is at work on it"
            try:
                strict = self._engine.policy.net_conf(b"{}").strict_check
                with self._engine.links.open(record.sandbox.netns) as netns:
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
        named = KubernetesArgs(Namespace(namespace), PodName(name), PodUid(""), "", ())
        return self._explained(lambda: find_pod(self._engine.cluster, named), f"{namespace}/{name}")

    def _explain_manifest(self, asked: Asked) -> Mapping[str, Any]:
        # Here: a standalone daemon has nothing of Kubernetes in memory otherwise.
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
        return trace.of(self._timelines, asked.pod(), asked.number("last", 20, most=1000))
