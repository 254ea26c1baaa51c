"""A cluster as the commands see it: what the API server lists, and what the daemons of the nodes answer.

Of each object only what is needed is decoded. A node's answer is decoded into a type of ours: one that is not what
`multusctl` says of itself counts as none, and can't mislead what comes after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from multus_daemon.cluster.kube import objects, pod_exec
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, GoneError, KubeError
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.tools.kubectl.api_objects import EventObject, NodeObject, PodObject
from multus_daemon.tools.kubectl.progress import Progress

T = TypeVar("T")
Reply = TypeVar("Reply", bound="NodeReply")

AT_ONCE: Final = 32
"""So many nodes are asked side by side: the API server and its way to the nodes serve others, too."""
ANSWER_MAX_BYTES: Final = 16 * 1024 * 1024
"""Of one node: 250 pods with 16 networks each take some 10 MB."""
PAGE: Final = "500"
_LISTS_MAX: Final = 3
"""A list whose next page is gone is begun again, so often in all."""
_CONTAINER: Final = "kube-multus"
"""The daemon's, in the manifests."""
_UNINSTALL: Final = "multus-uninstall"
"""`metadata.labels.name` of what takes the daemon off the nodes."""
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
_QUOTED: Final = 80
"""Characters of what a node says instead of an answer."""


class NodeReply(msgspec.Struct):
    """What `multusctl … --json` prints; `schema` is checked against SCHEMA of the subclass."""

    schema: str = msgspec.field()


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon of a node."""

    node: str
    namespace: str = ""
    pod: str = ""
    """Empty where there is none."""
    container: str = ""
    problem: str = ""
    """Why it can't be asked; empty: it can."""

    def at(self) -> dict[str, str]:
        """`node` and `daemon` (`namespace/pod`) of an answer."""
        return {"node": self.node, "daemon": f"{self.namespace}/{self.pod}" if self.pod else ""}

    @property
    def exec(self) -> str:
        """The words that run a command there."""
        return f"kubectl -n {self.namespace} exec {self.pod} -c {self.container} --"


Question = tuple[Daemon, Sequence[str]]
"""Whom, and the words for `multusctl`."""


@dataclass(frozen=True, slots=True)
class Answered(Generic[Reply]):
    """What a daemon has answered, or why there is no answer."""

    daemon: Daemon
    reply: Reply | None
    problem: str = ""


def unanswered(answers: Iterable[Answered[Any]]) -> list[dict[str, str]]:
    """`[{"node", "daemon", "problem"}]` of an answer."""
    return [{**item.daemon.at(), "problem": item.problem} for item in answers if item.reply is None]


class Cluster:
    """Questions to the API server, and to daemons. All raise KubeError."""

    def __init__(
        self, client: ApiClient, *, selector: str, node_seconds: float, progress: Progress, at_once: int = AT_ONCE
    ) -> None:
        """`selector`: label of the daemons' pods; `node_seconds`: for one node's answer."""
        self._client = client
        self.selector = selector
        self._seconds = node_seconds
        self._progress = progress
        self._at_once = at_once
        self.notes: list[str] = []
        """What could not be looked at, and what follows from it."""

    async def pods(self, namespace: str = "") -> list[PodObject]:
        """Those of a namespace, or all."""
        return await self._list(_core(namespace, "pods"), _as(PodObject))

    async def pod(self, namespace: str, name: str) -> PodObject:
        """One pod. Raises ApiError, its status 404 where there is none."""
        path = objects.pod_path(namespace, name)
        return _decoded(await self._client.request("GET", path), _as(PodObject), path)

    async def networks(self, namespace: str = "") -> list[NetworkAttachmentDefinition]:
        """NetworkAttachmentDefinitions of a namespace, or all."""
        group, _, plural = objects.networks().path.rpartition("/")
        path = f"{group}/namespaces/{quote(namespace, safe='')}/{plural}" if namespace else f"{group}/{plural}"
        try:
            found = await self._list(path, objects.decode_network)
        except ApiError as error:
            if error.status != 404:
                raise
            raise ApiUnavailableError(
                "the cluster does not know NetworkAttachmentDefinitions: Multus is not installed; apply its manifests"
            ) from error
        return [item.value for item in found]

    async def events(self, namespace: str = "", *, pod: str = "", uid: str = "") -> list[EventObject]:
        """Warnings about pods of a namespace, or all; `pod`: all Events about that one. The oldest first."""
        wanted = {"involvedObject.kind": "Pod"}
        wanted |= {"involvedObject.name": pod, "involvedObject.uid": uid} if pod else {"type": "Warning"}
        selector = ",".join(f"{key}={value}" for key, value in wanted.items())
        found = await self._list(_core(namespace, "events"), _as(EventObject), fieldSelector=selector)
        return sorted(found, key=lambda event: event.when)

    async def daemons(self) -> list[Daemon]:
        """One for each Linux node, by name; also for a node without a daemon, or whose daemon can't be asked now."""
        pods = await self._list(_core("", "pods"), _as(PodObject), labelSelector=self.selector)
        nodes = await self._nodes()
        by_node: dict[str, list[PodObject]] = {node: [] for node in nodes}
        for pod in pods:
            node = pod.spec.node_name
            if _is_daemons(pod) and node and (not nodes or node in nodes):
                by_node.setdefault(node, []).append(pod)
        return [self._daemon(node, found) for node, found in sorted(by_node.items())]

    async def daemons_of(self, nodes: Iterable[str]) -> dict[str, Daemon]:
        """By node."""
        wanted = dict.fromkeys(nodes)
        known = {daemon.node: daemon for daemon in (await self.daemons() if wanted else ())}
        return {node: known.get(node, Daemon(node, problem="is no Linux node of this cluster")) for node in wanted}

    async def _nodes(self) -> set[str]:
        """Names of the Linux nodes; empty where they can't be listed."""
        try:
            found = await self._list(_core("", "nodes"), _as(NodeObject))
        except ApiError as error:
            if error.status != 403:
                raise
            self.notes.append(f"nodes without a daemon are not shown: {error.message}")
            return set()
        return {node.metadata.name for node in found if node.runs_linux}

    def _daemon(self, node: str, pods: Sequence[PodObject]) -> Daemon:
        if not pods:
            return Daemon(
                node, problem=f"no daemon: no pod of a DaemonSet with the label {self.selector} is on the node"
            )
        pod = max(pods, key=_usable)
        container = _container_of(pod)
        made = Daemon(node, pod.metadata.namespace, pod.metadata.name, container)
        if not _usable(pod)[0]:
            gone = "is being deleted" if pod.metadata.deletion_timestamp else f"is {pod.state()}"
            return replace(made, problem=f"the daemon's pod {pod} {gone}")
        return made

    async def ask(self, questions: Iterable[Question], kind: type[Reply], schema: str) -> list[Answered[Reply]]:
        """Run `multusctl WORDS --json` in each daemon's pod, side by side; in the order of `questions`.

        Raises nothing for a daemon that can't be asked, does not answer in time, or answers something else.
        """
        asked = list(questions)
        turns = asyncio.Semaphore(self._at_once)
        self._progress.expect(len(asked))

        async def one(daemon: Daemon, words: Sequence[str]) -> Answered[Reply]:
            try:
                if daemon.problem:
                    return Answered(daemon, None, daemon.problem)
                async with turns:
                    return await self._answer(daemon, words, kind, schema)
            finally:
                self._progress.one_done()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*question)) for question in asked]
        return [task.result() for task in tasks]

    async def ask_all(self, *words: str, kind: type[Reply], schema: str) -> list[Answered[Reply]]:
        """`ask` the daemon of each node the same."""
        return await self.ask([(daemon, words) for daemon in await self.daemons()], kind, schema)

    async def _answer(self, daemon: Daemon, words: Sequence[str], kind: type[Reply], schema: str) -> Answered[Reply]:
        command = ["multusctl", *words, "--json"]
        try:
            async with asyncio.timeout(self._seconds):
                ended = await pod_exec.run(
                    self._client,
                    *(daemon.namespace, daemon.pod, daemon.container, command),
                    stdout_max=ANSWER_MAX_BYTES,
                )
        except TimeoutError:
            return Answered(daemon, None, f"no answer within {self._seconds:g} s")
        except KubeError as error:
            return Answered(daemon, None, str(error))
        try:
            reply = msgspec.json.decode(ended.stdout, type=kind)
        except objects.DECODE_ERRORS:
            return Answered(daemon, None, _no_answer(ended, schema))
        if reply.schema != schema:
            return Answered(daemon, None, f"answers {reply.schema[:_QUOTED]!r}, not {schema}: another version?")
        return Answered(daemon, reply)

    async def _list(self, path: str, decode: Callable[[msgspec.Raw], T], **query: str) -> list[T]:
        """The items of all pages."""
        for attempt in range(1, _LISTS_MAX + 1):
            found: list[T] = []
            more: dict[str, str] = {}
            try:
                while True:
                    body = await self._client.request("GET", path, query={**query, "limit": PAGE, **more})
                    page = _decoded(body, _as(objects.Page), path)
                    found += [_decoded(item, decode, path) for item in page.items or ()]
                    if not page.metadata.continue_:
                        return found
                    more = {"continue": page.metadata.continue_}
            except GoneError:
                if attempt == _LISTS_MAX:
                    raise
        raise AssertionError("the loop returns or raises")


def _core(namespace: str, resource: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/{resource}" if namespace else f"/api/v1/{resource}"


def _as(kind: type[T]) -> Callable[[bytes | msgspec.Raw], T]:
    return lambda data: msgspec.json.decode(data, type=kind)


def _decoded(data: Any, decode: Callable[[Any], T], path: str) -> T:
    try:
        return decode(data)
    except objects.DECODE_ERRORS as error:
        raise ApiUnavailableError(f"GET {path}: that is not what a Kubernetes API server answers: {error}") from error


def _is_daemons(pod: PodObject) -> bool:
    """Whether it is of a DaemonSet, and not of the one that takes Multus off the nodes."""
    owners = {owner.kind for owner in pod.metadata.owner_references or ()}
    return owners == {"DaemonSet"} and (pod.metadata.labels or {}).get("name") != _UNINSTALL


def _usable(pod: PodObject) -> tuple[bool, bool, str]:
    """Whether a command can run in it, and how likely it does well; the newest of equals."""
    container = _container_of(pod)
    own = [item for item in pod.status.container_statuses or () if item.name == container]
    waiting = any(item.state is not None and item.state.waiting is not None for item in own)
    running = pod.status.phase == "Running" and not pod.metadata.deletion_timestamp and not waiting
    return running, any(item.ready for item in own), pod.metadata.creation_timestamp or ""


def _container_of(pod: PodObject) -> str:
    names = [container.name for container in pod.spec.containers or ()]
    return _CONTAINER if _CONTAINER in names else pod.annotations.get(_DEFAULT_CONTAINER) or (names or [_CONTAINER])[0]


def _no_answer(ended: pod_exec.Ended, schema: str) -> str:
    """Why what was printed is no answer: what the command said, else what it printed."""
    if ended.status == -1:
        return f"multusctl can't be run there (is it another Multus?): {ended.message}"
    said = ended.stderr.strip().splitlines()
    if said:
        return said[-1][:500]
    if ended.stdout.strip():
        return f"answers what is no {schema}: {ended.stdout[:_QUOTED].decode('utf-8', 'replace')!r}"
    return ended.message or "multusctl printed nothing"
