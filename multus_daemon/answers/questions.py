"""The functions behind `/admin/v1`, by name: docs/multusctl.md has the formats of their answers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.answers import attachments, explain, status
from multus_daemon.node import orphans
from multus_daemon.pod import upkeep
from multus_daemon.pod.check import announced, failures
from multus_daemon.pod.delete import forget
from multus_daemon.pod.detach import held_if_free
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import find_pod
from multus_daemon.pod.upkeep import Compared, Finding
from multus_daemon.pod.view import Entry
from multus_daemon.runtime import deadline
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    IoFailureError,
    Origin,
    UnknownContainerError,
)
from multus_daemon.spec.cni.names import ContainerId, KubernetesArgs, Namespace, PodName, PodUid

SHOWN: Final = 40
"""Maximum characters of a wrong value in an error."""


class QuestionError(InvalidEnvironmentError, origin=Origin.CLIENT):
    """A request of `multusctl` is wrong; the message says how."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The parameters of a request of `multusctl` to the daemon."""

    query: Mapping[str, str]
    """Value of each key, the last one if it is repeated."""
    body: bytes = b""

    def flag(self, key: str) -> bool:
        """Return the value of `key`, "true" or "false"; False if absent. Raises QuestionError."""
        text = self.query.get(key, "")
        if text not in ("", "true", "false"):
            raise QuestionError(f"{key} must be true or false, not {text[:SHOWN]!r}")
        return text == "true"

    def pod(self, *, needed: bool = False) -> str:
        """Return the key `pod`, `namespace/name`; empty if absent and not `needed`. Raises QuestionError."""
        text = self.query.get("pod", "")
        if needed and not text:
            raise QuestionError("no pod is named", remedy="add the parameter pod=NAMESPACE/POD")
        if text and (text.count("/") != 1 or not all(text.split("/"))):
            raise QuestionError(f"pod must be NAMESPACE/POD, not {text[:SHOWN]!r}")
        return text

    def number(self, key: str, default: int, *, most: int) -> int:
        """Return the value of `key`, from 1 to `most`. Raises QuestionError."""
        text = self.query.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
            raise QuestionError(f"{key} must be a number from 1 to {most}, not {text[:SHOWN]!r}")
        return int(text)


Answer = Callable[[Asked], Mapping[str, Any]]
"""Returns the answer to a request. Blocks, so it runs in a thread of its own. Raises CniError."""
ByMethod = Mapping[str, Mapping[str, Answer]]
"""Functions by HTTP method (GET for questions, POST for changes), then by name."""


def _listing(answer: Answer) -> Answer:
    """Decorate a function that lists the records: an OSError becomes an IoFailureError."""

    def answered(asked: Asked) -> Mapping[str, Any]:
        try:
            return answer(asked)
        except OSError as error:
            raise IoFailureError(f"records can't be listed: {error}") from error

    return answered


@dataclass(eq=False, slots=True)
class Answers:
    """The functions behind `/admin/v1`. Each blocks and raises CniError."""

    engine: Engine
    timelines: Timelines
    parts: Callable[[], status.Parts]
    """Returns the state of the daemon's parts."""
    configuration: Callable[[], bytes]
    """Returns what the runtime passes to the shim now, or raises the CniError that says why there is none."""
    spool: Path
    """Directory of the shim's DELs."""
    metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", "")
    """Returns the text for Prometheus and its content type."""
    repaired: Callable[[str], None] = lambda _: None
    """Called with each pod that `multusctl repair` repaired."""
    lacks: Callable[[Pod], str] = lambda _: ""
    """Returns a text about networks that a running pod lacks."""

    @property
    def by_method(self) -> ByMethod:
        """The functions, by HTTP method and name."""
        return {
            "GET": {
                "attachments": _listing(self._attachments),
                "drift": _listing(self._drift),
                "explain": _listing(self._explain),
                # A port may be absent, closed to this machine, or ask for a token.
                "metrics": lambda _: {"schema": "multusctl.metrics/v1", "text": self.metrics()[0].decode()},
                "status": _listing(self._status),
                "trace": lambda asked: status.trace(self.timelines, asked.pod(), asked.number("last", 20, most=1000)),
            },
            "POST": {
                # A question; POST, as it has a body.
                "explain-manifest": _listing(self._explain_manifest),
                "forget": self._forget,
                "repair": _listing(self._repair),
            },
        }

    def _status(self, _asked: Asked) -> Mapping[str, Any]:
        leaks = self._attachments(Asked({"leaks": "true"}))["containers"]
        return status.of(
            self.parts(),
            self.timelines,
            containers=len(self.engine.records.containers()),
            leftovers=len(leaks),
            spooled=status.entries_in(self.spool),
        )

    def _attachments(self, asked: Asked) -> Mapping[str, Any]:
        leaks = asked.flag("leaks")
        return attachments.of(
            self.engine.records.store,
            self.engine.namespaces,
            source="daemon",
            pod=asked.pod(),
            leaks=leaks,
            problems=self._orphans() if leaks else None,
            last_errors=self._last_errors(),
            check=self._checked if asked.flag("check") else None,
        )

    def _orphans(self) -> dict[str, attachments.Problem]:
        """Return the problem of each orphan, by container id. Raises OSError."""
        seen = orphans.look(self.engine)
        in_use = attachments.Problem(
            "its pod is gone, but processes run in its network namespace",
            "remove the pod from the runtime (crictl rmp -f); the daemon deletes nothing while they run",
        )
        problems: dict[str, attachments.Problem] = {
            container: attachments.Problem(orphan.reason, attachments.ORPHAN_ADVICE)
            for container, orphan in seen.orphans.items()
        }
        return problems | dict.fromkeys(seen.in_use, in_use)

    def _last_errors(self) -> dict[str, str]:
        return {
            item.subject["container"]: item.error[1]
            for item in self.timelines
            if item.error and item.subject.get("verb") == "DEL"
        }

    def _drift(self, asked: Asked) -> Mapping[str, Any]:
        with deadline.within(deadlines.ADMIN_SECONDS / 2):
            return _drift(self.engine, asked.pod())

    def _repair(self, asked: Asked) -> Mapping[str, Any]:
        """Repair a pod's attachments, whatever the setting `keep` is; return the differences before and after."""
        pod, dry_run = asked.pod(needed=True), asked.flag("dryRun")
        results: list[Compared] = []
        gone: UnknownContainerError | None = None
        for entry in _kept(self.engine, pod):
            try:
                results.append(upkeep.compare(self.engine, entry.container_id, repairs=not dry_run))
            except UnknownContainerError as error:
                # An earlier container of the pod, whose DEL has not come yet.
                gone = error
        if gone is not None and not results:
            raise gone
        self.repaired(pod)
        return {
            "schema": "multusctl.repair/v1",
            "pod": pod,
            "dryRun": dry_run,
            "found": [_shown(item.record, finding) for item in results for finding in item.found],
            "left": [_shown(item.record, finding) for item in results for finding in item.left],
            "errors": [str(item.error) for item in results if item.error],
        }

    def _forget(self, asked: Asked) -> Mapping[str, Any]:
        container_id = ContainerId(asked.query.get("container", ""))
        if not container_id:
            raise QuestionError("no container is named", remedy="add the parameter container=ID")
        if problem := names.container_id_problem(container_id):
            raise QuestionError(f"container is {container_id[:SHOWN]!r}: {problem}")
        return attachments.forgotten(container_id, forget(self.engine, container_id))

    def _checked(self, record: ContainerRecord) -> str:
        """Return the error of a CHECK of the container; empty if it succeeds."""
        with held_if_free(self.engine, record.sandbox.container_id) as is_ours:
            if not is_ours:
                return "not checked: another request is at work on it"
            try:
                strict = self.engine.net_conf(b"{}").strict_check
                with self.engine.namespaces.open(record.sandbox.netns) as netns:
                    for failure in failures(self.engine, record, announced(record), netns, strict=strict):
                        if strict or failure.is_certain:
                            return str(failure.error)
            except CniError as error:
                return str(error)
            return ""

    def _explain(self, asked: Asked) -> Mapping[str, Any]:
        namespace, _, name = asked.pod(needed=True).partition("/")
        pod = KubernetesArgs(Namespace(namespace), PodName(name), PodUid(""), "", ())
        find = functools.partial(find_pod, self.engine.cluster, pod)
        answer = explain.of(self.engine, self.configuration, find, asked.pod(), self.timelines, self.lacks)
        leftovers = self._attachments(Asked({**asked.query, "leaks": "true"}))["containers"]
        compared: Mapping[str, Any] = {"compared": 0, "differences": [], "passedOver": []}
        # Its DEL may have come meanwhile.
        with contextlib.suppress(UnknownContainerError):
            compared = self._drift(asked) if answer["attached"] else compared
        return {**compared, **answer, "leftovers": leftovers}

    def _explain_manifest(self, asked: Asked) -> Mapping[str, Any]:
        # Imported here: a standalone daemon does not load Kubernetes otherwise.
        from multus_daemon.cluster.kube import objects

        try:
            pod = objects.decode_pod(asked.body).value
        except objects.DECODE_ERRORS as error:
            raise DecodingFailureError(f"the body is not a pod: {error}", origin=Origin.CLIENT) from error
        if not pod.namespace or not pod.name:
            raise DecodingFailureError(
                "the pod has no name or no namespace", "metadata.name, metadata.namespace", origin=Origin.CLIENT
            )
        return explain.of(self.engine, self.configuration, lambda: pod, str(pod), self.timelines)


def _drift(engine: Engine, pod: str) -> dict[str, Any]:
    """Return the differences now, of all recorded containers or of those of `pod` (`namespace/name`), sorted by pod.

    Containers with a running request are left out, and those that are not compared at the deadline of the context.
    """
    entries = _kept(engine, pod)
    found, passed_over, compared = [], [], 0
    if not pod:
        damage = "its record is damaged; `multusctl attachments --leaks` says what to do"
        damaged = sorted(engine.records.view.unreadable)
        passed_over += [{"pod": "", "container": container_id, "problem": damage} for container_id in damaged]
    for entry in entries:
        container_id = entry.container_id
        try:
            deadline.check()
            if container_id in engine.at_work:
                problem = "a request is at work on it"
            else:
                result = upkeep.compare(engine, container_id)
                found += [_shown(result.record, item) for item in result.found]
                compared += 1
                continue
        except CniError as error:
            problem = str(error)
        except deadline.Interrupted:
            problem = "there was no time left"
        passed_over.append({"pod": entry.pod, "container": container_id, "problem": problem})
    return {"schema": "multusctl.drift/v1", "compared": compared, "differences": found, "passedOver": passed_over}


def _kept(engine: Engine, pod: str) -> list[Entry]:
    """Return containers with a complete ADD, sorted by pod. Raises OSError, UnknownContainerError if `pod` has none."""
    engine.records.refresh()
    found = [entry for entry in engine.records.view if entry.complete and pod in ("", entry.pod)]
    if pod and not found:
        raise UnknownContainerError(f"pod {pod} has no networks on record on this node")
    return sorted(found, key=lambda entry: (entry.pod, entry.created))


def _shown(record: ContainerRecord, item: Finding) -> dict[str, Any]:
    return {
        "pod": record.pod,
        "container": record.sandbox.container_id,
        "network": item.attachment.name,
        "interface": item.attachment.ifname,
        "difference": item.difference.text,
        "repairable": item.difference.repair is not None,
        "keep": item.keep,
        "certain": item.difference.is_certain,
        "byPod": item.difference.by_pod,
    }
