"""Read objects of the API server, and ask the daemons of the nodes.

Only the needed keys are decoded. An answer that is not of the expected type is treated as no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, GoneError, KubeError
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_tools.command_line import NotThereError
from multus_tools.kubectl import pod_exec
from multus_tools.kubectl.api_objects import EventObject, PodObject

T = TypeVar("T")
Q = TypeVar("Q")
Reply = TypeVar("Reply", bound="NodeReply")

AT_ONCE: Final = 32
"""Maximum number of nodes that are asked concurrently, to limit the load of the API server."""
ANSWER_MAX_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of a node's answer: 250 pods with 16 networks each take about 10 MB."""
PAGE: Final = "500"
_LISTS_MAX: Final = 3
"""How often a list is begun again because its next page has expired."""
_OS: Final = "kubernetes.io/os"
_CONTAINER: Final = "kube-multus"
"""The daemon's container in the manifests."""
_UNINSTALL: Final = "multus-uninstall"
"""`metadata.labels.name` of the pods that remove Multus from the nodes."""
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
_QUOTED: Final = 80
"""Maximum characters of an unexpected answer that an error quotes."""


class NodeReply(msgspec.Struct):
    """The JSON object of `multusctl … --json`; a subclass names its `schema` in SCHEMA."""

    SCHEMA: ClassVar[str]
    schema: str


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon of a node."""

    node: str
    namespace: str = ""
    pod: str = ""
    """Name of the daemon's pod; empty if the node has none."""
    container: str = ""
    problem: str = ""
    """Why the daemon can't be asked; empty if it can."""
    is_ready: bool = False
    """True if the readiness probe of its pod succeeds."""

    def at(self) -> dict[str, str]:
        """Return the keys `node` and `daemon` (`namespace/pod`) for an answer."""
        return {"node": self.node, "daemon": f"{self.namespace}/{self.pod}" if self.pod else ""}

    @property
    def exec(self) -> str:
        """The `kubectl exec` command line, up to `--`, for the daemon's container."""
        return f"kubectl -n {self.namespace} exec {self.pod} -c {self.container} --"


@dataclass(frozen=True, slots=True)
class Answered(Generic[Reply]):
    """The answer of a daemon, or why there is none."""

    daemon: Daemon
    reply: Reply | None
    problem: str = ""


def replies(answers: Iterable[Answered[Reply]]) -> Iterator[tuple[Daemon, Reply]]:
    """Yield the daemons that have answered, and their replies."""
    return ((item.daemon, item.reply) for item in answers if item.reply is not None)


@dataclass(slots=True)
class Cluster:
    """Requests to the API server and to daemons. All methods raise KubeError."""

    client: ApiClient
    selector: str
    """Label of the daemons' pods."""
    node_seconds: float
    """Deadline for the answer of a node."""
    on_progress: Callable[[int, int], None]
    """Called with the number of daemons that have answered, and that were asked."""
    notes: list[str] = field(default_factory=list)
    """Texts about facts that could not be read, and what follows."""

    def answer(self, command: str, answers: Sequence[Answered[Any]], **found: Any) -> dict[str, Any]:
        """Return the JSON object of a command, with its own keys `found` and those of all commands.

        `daemons`: how many answered; `unanswered`: `node`, `daemon`, `problem` and `podReady` of each that did not,
        without duplicates; `notes`: what could not be read.
        """
        problems = dict.fromkeys((item.daemon, item.problem) for item in answers if item.reply is None)
        return {
            "schema": f"kubectl-multus.{command}/v1",
            "daemons": len({daemon for daemon, _ in replies(answers)}),
            **found,
            "unanswered": [
                {**daemon.at(), "problem": problem, "podReady": daemon.is_ready} for daemon, problem in problems
            ],
            "notes": self.notes,
        }

    async def pods(self, namespace: str = "") -> list[PodObject]:
        """Return the pods of a namespace, or all."""
        return await self._list(_path(namespace, "pods"), _as(PodObject))

    async def pod(self, namespace: str, name: str) -> PodObject:
        """Return a pod. Raises NotThereError."""
        path = objects.pod_path(namespace, name)
        return _decoded(await self._require(path, f"pod {namespace}/{name}"), _as(PodObject), path)

    async def require_namespace(self, name: str) -> None:
        """Raise NotThereError if there is no such namespace. If the user may not read it, it counts as present."""
        try:
            if name:
                await self._require(f"/api/v1/namespaces/{quote(name, safe='')}", f"namespace {name}")
        except ApiError as error:
            if error.status != 403:
                raise

    async def _require(self, path: str, what: str) -> bytes:
        try:
            return await self.client.request("GET", path)
        except ApiError as error:
            if error.status != 404:
                raise
            raise NotThereError(f"there is no {what}") from error

    async def networks(self, namespace: str = "") -> list[NetworkAttachmentDefinition]:
        """Return the NetworkAttachmentDefinitions of a namespace; of all if it is empty."""
        try:
            found = await self._list(networks_path(namespace), objects.decode_network)
        except ApiError as error:
            if error.status != 404:
                raise
            raise ApiUnavailableError(
                "the cluster does not know NetworkAttachmentDefinitions: Multus is not installed; apply its manifests"
            ) from error
        return [item.value for item in found]

    async def events(self, namespace: str = "", *, pod: str = "", uid: str = "") -> list[EventObject]:
        """Return the Events about `pod`, with `uid` if given; for an empty `pod` all pods' Warnings. Oldest first."""
        wanted = {"involvedObject.kind": "Pod"}
        wanted |= {"involvedObject.name": pod, "involvedObject.uid": uid} if pod else {"type": "Warning"}
        selector = ",".join(f"{key}={value}" for key, value in wanted.items())
        found = await self._list(_path(namespace, "events"), _as(EventObject), fieldSelector=selector)
        return sorted(found, key=lambda event: event.when)

    async def daemons(self) -> list[Daemon]:
        """Return a Daemon for each Linux node, sorted by name, also for nodes without one."""
        pods = await self._list(_path("", "pods"), _as(PodObject), labelSelector=self.selector)
        nodes = await self._nodes()
        by_node: dict[str, list[PodObject]] = {node: [] for node in nodes}
        for pod in filter(_is_daemons, pods):
            node = pod.spec.node_name
            if node and (not nodes or node in nodes):
                by_node.setdefault(node, []).append(pod)
        return [self._daemon(node, found) for node, found in sorted(by_node.items())]

    async def _nodes(self) -> set[str]:
        """Return the names of the Linux nodes; empty if they can't be listed."""
        try:
            found = await self._list(_path("", "nodes"), _as(objects.Versioned))
        except ApiError as error:
            if error.status != 403:
                raise
            self.notes.append(f"nodes without a daemon are not shown: {error.message}")
            return set()
        return {node.metadata.name for node in found if (node.metadata.labels or {}).get(_OS, "linux") == "linux"}

    def _daemon(self, node: str, pods: Sequence[PodObject]) -> Daemon:
        if not pods:
            problem = f"no daemon: no pod of a DaemonSet with the label {self.selector} is on the node"
            return Daemon(node, problem=problem)
        pod = max(pods, key=_usable)
        problem = ""
        if not _usable(pod)[0]:
            state = "being deleted" if pod.metadata.deletion_timestamp else pod.state()
            problem = f"the daemon's pod {pod} is {state}"
        names = (pod.metadata.namespace, pod.metadata.name, _container_of(pod))
        return Daemon(node, *names, problem, is_ready=not problem and _usable(pod)[1])

    async def ask(self, questions: Sequence[tuple[Daemon, Sequence[str]]], kind: type[Reply]) -> list[Answered[Reply]]:
        """Run `multusctl WORDS --json` in each daemon's pod, concurrently; one answer for each question, in order.

        The answer of a daemon that can't be asked, is late or says something else has a `problem`.
        """
        return await self.each(questions, lambda question: self._ask_daemon(*question, kind), AT_ONCE)

    async def each(self, questions: Sequence[Q], ask: Callable[[Q], Coroutine[Any, Any, T]], at_once: int) -> list[T]:
        """Return the answers to all questions; `at_once` are asked concurrently. Shows the progress."""
        turns = asyncio.Semaphore(at_once)
        answered = 0

        async def one(question: Q) -> T:
            nonlocal answered
            async with turns:
                answer = await ask(question)
            answered += 1
            self.on_progress(answered, len(questions))
            return answer

        self.on_progress(0, len(questions))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(question)) for question in questions]
        return [task.result() for task in tasks]

    async def ask_all(self, *words: str, kind: type[Reply]) -> list[Answered[Reply]]:
        """Run `multusctl WORDS --json` in the daemon's pod of each node."""
        return await self.ask([(daemon, words) for daemon in await self.daemons()], kind)

    async def _ask_daemon(self, daemon: Daemon, words: Sequence[str], kind: type[Reply]) -> Answered[Reply]:
        ended = await self.run(daemon, [*words, "--json"])
        if isinstance(ended, str):
            return Answered(daemon, None, ended)
        try:
            reply = msgspec.json.decode(ended.stdout, type=kind)
        except objects.DECODE_ERRORS:
            return Answered(daemon, None, no_answer(ended, kind.SCHEMA))
        if reply.schema != kind.SCHEMA:
            problem = f"answers {reply.schema[:_QUOTED]!r}, not {kind.SCHEMA}: another version?"
            return Answered(daemon, None, problem)
        return Answered(daemon, reply)

    async def run(self, daemon: Daemon, words: Sequence[str]) -> pod_exec.Ended | str:
        """Run `multusctl WORDS` in the daemon's pod; return its output and end, or a text: why it did not run."""
        if daemon.problem:
            return daemon.problem
        pod = (daemon.namespace, daemon.pod, daemon.container)
        try:
            async with asyncio.timeout(self.node_seconds):
                return await pod_exec.run(self.client, *pod, ["multusctl", *words], stdout_max=ANSWER_MAX_BYTES)
        except TimeoutError:
            return f"no answer within {self.node_seconds:g} s"
        except KubeError as error:
            return str(error)

    async def json(self, path: str, **query: str) -> dict[str, Any]:
        """Return an object with all its keys."""
        return _decoded(await self.client.request("GET", path, query=query), _as(dict[str, Any]), path)

    async def objects(self, path: str, **query: str) -> list[dict[str, Any]]:
        """Return the objects of a list with all their keys."""
        return await self._list(path, _as(dict[str, Any]), **query)

    async def _list(self, path: str, decode: Callable[[msgspec.Raw], T], **query: str) -> list[T]:
        """Return the items of all pages."""
        lists = 1
        items: list[T] = []
        more: dict[str, str] = {}
        while True:
            try:
                body = await self.client.request("GET", path, query={"limit": PAGE, **query, **more})
            except GoneError:
                if lists == _LISTS_MAX:
                    raise
                lists, items, more = lists + 1, [], {}
                continue
            page = _decoded(body, _as(objects.Page), path)
            items += [_decoded(item, decode, path) for item in page.items or ()]
            if not page.metadata.continue_:
                return items
            more = {"continue": page.metadata.continue_}


def networks_path(namespace: str) -> str:
    """Return the path of the NetworkAttachmentDefinitions of a namespace; of all if it is empty."""
    group, _, plural = objects.networks().path.rpartition("/")
    return _path(namespace, plural, group)


def _path(namespace: str, resource: str, group: str = "/api/v1") -> str:
    return f"{group}/namespaces/{quote(namespace, safe='')}/{resource}" if namespace else f"{group}/{resource}"


def _as(kind: type[T]) -> Callable[[bytes | msgspec.Raw], T]:
    return lambda data: msgspec.json.decode(data, type=kind)


def _decoded(data: Any, decode: Callable[[Any], T], path: str) -> T:
    try:
        return decode(data)
    except objects.DECODE_ERRORS as error:
        raise ApiUnavailableError(f"GET {path}: the answer is not that of a Kubernetes API server: {error}") from error


def _is_daemons(pod: PodObject) -> bool:
    """Return True if the pod is of a DaemonSet, but not of the one that removes Multus from the nodes."""
    owners = {owner.kind for owner in pod.metadata.owner_references or ()}
    return owners == {"DaemonSet"} and (pod.metadata.labels or {}).get("name") != _UNINSTALL


def _usable(pod: PodObject) -> tuple[bool, bool, str]:
    """Return a sort key: pods in which a command can run, then ready ones, then newer ones are preferred."""
    container = _container_of(pod)
    own = [item for item in pod.status.container_statuses or () if item.name == container]
    waiting = any(item.state is not None and item.state.waiting is not None for item in own)
    running = pod.status.phase == "Running" and not pod.metadata.deletion_timestamp and not waiting
    return running, any(item.ready for item in own), pod.metadata.creation_timestamp or ""


def _container_of(pod: PodObject) -> str:
    names = [container.name for container in pod.spec.containers or ()]
    return _CONTAINER if _CONTAINER in names else pod.annotations.get(_DEFAULT_CONTAINER) or (names or [_CONTAINER])[0]


def no_answer(ended: pod_exec.Ended, schema: str) -> str:
    """Return why the output is no answer with this `schema`: from standard error, else with a quote of it."""
    if ended.status == -1:
        return f"multusctl can't be run there (is it another Multus?): {ended.message}"
    if lines := ended.stderr.strip().splitlines():
        return lines[-1][:500]
    if ended.stdout.strip():
        return f"the answer is not {schema}: {ended.stdout[:_QUOTED].decode('utf-8', 'replace')!r}"
    return ended.message or "multusctl printed nothing"
