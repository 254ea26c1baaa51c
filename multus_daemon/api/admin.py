"""`/admin/v1/<name>`: questions (GET) and orders (POST) of a person to the daemon, for root only.

The answer is a JSON object, or a CNI error. The runtime uses none of it, so it does not count as CNI requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from multus_daemon import deadlines
from multus_daemon.api.cni import to_cni_error
from multus_daemon.diagnosis import attachments, drift, explain, status
from multus_daemon.node import orphans
from multus_daemon.pod import quarantine
from multus_daemon.pod.check import announced, failures
from multus_daemon.pod.delete import held_if_free
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.gather import find_pod
from multus_daemon.runtime import deadline, portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    IoFailureError,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.names import ContainerId, KubernetesArgs, Namespace, PodName, PodUid

ROOT: Final = "/admin"
PATH: Final = ROOT + "/{path:.*}"
_VERSION: Final = "v1/"
BODY_LIMIT: Final = 2 * 1024 * 1024
"""Maximum bytes of a body, a pod's manifest."""
SHOWN: Final = 40
"""Maximum characters of a wrong value in an error."""
AT_ONCE: Final = 2
"""Maximum number of concurrent answers: pods have priority."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """The parameters of a question or an order."""

    query: Mapping[str, str]
    """Value of each key, the last one if it is repeated."""
    body: bytes = b""

    def flag(self, key: str) -> bool:
        """Return True if `key` is "true". Raises InvalidEnvironmentError for other values than "true" and "false"."""
        text = self.query.get(key, "")
        if text not in ("", "true", "false"):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: true or false is needed")
        return text == "true"

    def pod(self) -> str:
        """Return the key `pod`, `namespace/name`; empty if absent. Raises InvalidEnvironmentError."""
        text = self.query.get("pod", "")
        if text and (text.count("/") != 1 or not all(text.split("/"))):
            raise InvalidEnvironmentError(f"pod is {text[:SHOWN]!r}: NAMESPACE/POD is needed")
        return text

    def number(self, key: str, default: int, *, most: int) -> int:
        """Return the value of `key`, from 1 to `most`. Raises InvalidEnvironmentError."""
        text = self.query.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
            raise InvalidEnvironmentError(f"{key} is {text[:SHOWN]!r}: a number from 1 to {most} is needed")
        return int(text)


Answer = Callable[[Asked], Mapping[str, Any]]
"""Returns the answer. Blocks, in a thread of its own. Raises CniError."""


class AdminApi:
    """The answers of `/admin`, by name."""

    def __init__(
        self, questions: Mapping[str, Answer], orders: Mapping[str, Answer], *, seconds: float = deadlines.ADMIN_SECONDS
    ) -> None:
        """`seconds`: limit for one answer, including the wait for its turn."""
        self._answers = {"GET": dict(questions), "POST": dict(orders)}
        self._seconds = seconds
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def handle(self, request: web.Request) -> web.Response:
        """Serve every method."""
        path = request.match_info["path"]
        name = path.removeprefix(_VERSION)
        answer = self._answers.get(request.method, {}).get(name) if path != name else None
        if answer is None:
            return self._unknown(request.method, path)
        try:
            async with asyncio.timeout(self._seconds):
                asked = Asked(dict(request.query), await _body(request))
                async with self._turns:
                    work = functools.partial(answer, asked)
                    result = await portal.run(Deadline(self._seconds), work, name=f"admin {name}")
        except TimeoutError:
            return _error(TryAgainLaterError(f"no answer to {name} within {self._seconds:g} s"), 504)
        except (CniError, NoThreadError) as error:
            return _error(to_cni_error(error), 400)
        if request.method == "POST":
            log.info("admin %s: done", name)
        return web.Response(body=gojson.dumps(result, sort_keys=False), content_type="application/json")

    def _unknown(self, method: str, path: str) -> web.Response:
        for other, answers in self._answers.items():
            if path in {_VERSION + name for name in answers}:
                response = _error(InvalidEnvironmentError(f"{path} is asked by {other}, not by {method[:SHOWN]}"), 405)
                response.headers["Allow"] = other
                return response
        known = ", ".join(sorted(_VERSION + name for answers in self._answers.values() for name in answers))
        error = InvalidEnvironmentError(f"{path[:SHOWN]!r} is not known to this daemon", f"it knows {known}")
        return _error(error, 404)


async def _body(request: web.Request) -> bytes:
    try:
        if (size := request.content_length or 0) > BODY_LIMIT:
            raise web.HTTPRequestEntityTooLarge(BODY_LIMIT, size)
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise DecodingFailureError(f"the body is larger than {BODY_LIMIT} bytes") from error
    except Exception as error:
        # A cut connection, bad chunks or bad compression, for which aiohttp has no common base class.
        raise IoFailureError(f"the body can't be read: {type(error).__name__}: {error}") from error


def _error(error: CniError, status: int) -> web.Response:
    return web.Response(status=status, body=error.to_json(), content_type="application/json")


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
        self.questions: Mapping[str, Answer] = {
            "attachments": self._attachments,
            "drift": self._drift,
            "explain": self._explain,
            # A port may be absent, closed to this machine, or ask for a token.
            "metrics": lambda _: {"schema": "multusctl.metrics/v1", "text": self._metrics()[0].decode()},
            "status": self._status,
            "trace": self._trace,
        }
        self.orders: Mapping[str, Answer] = {
            # A question; POST, as it has a body.
            "explain-manifest": self._explain_manifest,
            "forget": self._forget,
            "repair": self._repair,
        }

    def _status(self, _asked: Asked) -> Mapping[str, Any]:
        try:
            containers = len(self._engine.records.store.containers(foreign=False))
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
