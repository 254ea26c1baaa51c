"""Collect the parts of a cluster's archive for a bug report (`bundle_file`): docs/kubectl-multus.md lists its files.

What the user may not see, and nodes that do not answer, are missing, and the index says why. Of objects only the keys
that matter for networks are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.errors import ApiError, KubeError, NoAnswerError
from multus_tools import bundle_file
from multus_tools.bundle_file import Archive, BundleError
from multus_tools.kubectl.cluster import Answered, Cluster, Daemon, NodeReply, no_answer
from multus_tools.kubectl.pods import lacking

T = TypeVar("T")
Object = dict[str, Any]
Asked = Awaitable[Any]
"""A request to the API server that is under way."""

AT_ONCE: Final = 8
"""Maximum number of nodes that are asked concurrently: each answer is kept in memory."""
PODS_MAX: Final = 100
"""Maximum number of pods that lack networks and are taken as objects."""
ITEMS_MAX: Final = 500
"""Maximum number of objects in a file; further ones are in a next file."""
EXPLAINED_MAX: Final = 16
"""Maximum number of pods that a node explains."""
LOG_LINES: Final = "2000"
LOG_BYTES: Final = str(2 * 1024 * 1024)
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
"""An annotation with the whole object again."""
_METADATA: Final = ("namespace", "name", "uid", "labels", "annotations", "ownerReferences", "creationTimestamp")
_DELETION: Final = ("deletionTimestamp", "finalizers", "generation")
_OF_POD: Final = ("nodeName", "hostNetwork", "runtimeClassName", "restartPolicy", "serviceAccountName", "dnsPolicy")
_OF_CONTAINER: Final = ("name", "image", "resources", "ports")
_OF_NODE: Final = ("nodeInfo", "conditions", "addresses", "allocatable", "capacity")
_TAKEN: Final = NodeReply(bundle_file.SCHEMA)


class Bundle:
    """Collects one archive."""

    def __init__(self, cluster: Cluster, archive: Archive) -> None:
        self._cluster, self._archive = cluster, archive
        self._merging = asyncio.Lock()

    async def collect(self, *, nodes: Sequence[str], pod: str, namespace: str) -> Object:
        """Fill the archive and close it; return the keys of all answers, and `missing`: the number of missing parts.

        `nodes`: only these. `pod` (`namespace/name`): only its node. `namespace`: what is listed if the user may not
        list all. Raises NoAnswerError if the API server does not answer, NotThereError if there is no such pod.
        """
        wanted = set(nodes)
        concerned: list[Object] = []
        if pod:
            space, _, name = pod.partition("/")
            await self._cluster.pod(space, name)
            concerned = [await self._cluster.json(objects.pod_path(space, name))]
            wanted = {_at(concerned[0], "spec").get("nodeName", "")} - {""}
        await self._objects(namespace, concerned[0] if pod else None)
        if not pod:
            concerned = await self._lacking(namespace)
        self._archive.json("cluster/pods.json", [_pod(item) for item in concerned])
        daemons = await self._daemons(wanted, is_limited=bool(nodes or pod))
        answers = await self._nodes(daemons, concerned)
        found = self._cluster.answer("bundle", answers, nodes=[daemon.at() for daemon in daemons])
        await asyncio.to_thread(self._archive.close, found)
        return {**found, "missing": len(self._archive.missing)}

    async def _objects(self, namespace: str, pod: Object | None) -> None:
        """Take what the API server has of Multus, the networks first: their secrets are under keys."""
        cluster = self._cluster
        group, _, plural = objects.networks().path.rpartition("/")
        metadata = _at(pod or {}, "metadata")
        own = str(metadata.get("namespace", "")) or namespace
        in_namespace = f"{group}/namespaces/{quote(own, safe='')}/{plural}"
        await self._take("networks", _network, cluster.objects(f"{group}/{plural}"), cluster.objects(in_namespace))
        await self._take("version", None, cluster.json("/version"))
        await self._take("nodes", _node, cluster.objects("/api/v1/nodes"))
        await self._take("daemons", _pod, cluster.objects("/api/v1/pods", labelSelector=cluster.selector))
        if pod:
            events = cluster.events(own, pod=str(metadata.get("name", "")), uid=str(metadata.get("uid", "")))
            await self._take("events", msgspec.to_builtins, events)
        else:
            await self._take("events", msgspec.to_builtins, cluster.events(), cluster.events(own))

    async def _take(
        self, name: str, shown: Callable[[Any], Any] | None, look: Asked, otherwise: Asked | None = None
    ) -> None:
        """Add an answer, a list with each item as it is `shown`; without the right to it, that of `otherwise`."""
        file = f"cluster/{name}.json"
        try:
            found = await self._allowed(name, look, otherwise)
        except NoAnswerError:
            raise
        except KubeError as error:
            self._archive.lacks(file, str(error))
            return
        if shown is None:
            await asyncio.to_thread(self._archive.json, file, found)
            return
        items = list(map(shown, found))
        for number, start in enumerate(range(0, max(len(items), 1), ITEMS_MAX), 1):
            file = f"cluster/{name}{number if number > 1 else ''}.json"
            await asyncio.to_thread(self._archive.json, file, items[start : start + ITEMS_MAX])

    async def _allowed(self, name: str, look: Awaitable[T], otherwise: Awaitable[T] | None) -> T:
        """Return the answer of `look`; without the right to it, that of `otherwise`. Raises KubeError."""
        with contextlib.ExitStack() as stack:
            if isinstance(otherwise, Coroutine):
                # Not awaited is a warning.
                stack.callback(otherwise.close)
            try:
                return await look
            except ApiError as error:
                if error.status != 403 or otherwise is None:
                    raise
                self._cluster.notes.append(f"{name} of one namespace only: {error.message}")
                return await otherwise

    async def _lacking(self, namespace: str) -> list[Object]:
        """Return pods that lack networks."""
        try:
            names = await self._allowed("pods", lacking(self._cluster, ""), lacking(self._cluster, namespace))
        except NoAnswerError:
            raise
        except KubeError as error:
            self._archive.lacks("cluster/pods.json", str(error))
            return []
        if len(names) > PODS_MAX:
            self._cluster.notes.append(f"{len(names)} pods lack networks, {PODS_MAX} of them are in cluster/pods.json")
        found = []
        for space, name in names[:PODS_MAX]:
            # Deleted meanwhile.
            with contextlib.suppress(ApiError):
                found.append(await self._cluster.json(objects.pod_path(space, name)))
        return found

    async def _daemons(self, wanted: Collection[str], *, is_limited: bool) -> list[Daemon]:
        try:
            found = await self._cluster.daemons()
        except NoAnswerError:
            raise
        except KubeError as error:
            problem = f"you may not look for its daemon: {error}"
            self._archive.lacks("nodes", problem)
            return [Daemon(name, problem=problem) for name in sorted(wanted)]
        known = {daemon.node for daemon in found}
        unknown = [Daemon(name, problem="is not a Linux node of this cluster") for name in sorted(set(wanted) - known)]
        return [daemon for daemon in found if daemon.node in wanted or not is_limited] + unknown

    async def _nodes(self, daemons: Sequence[Daemon], concerned: Sequence[Object]) -> list[Answered[NodeReply]]:
        """Ask the daemons, and take their logs."""
        of_node: dict[str, list[str]] = {}
        for item in concerned:
            metadata = _at(item, "metadata")
            name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
            of_node.setdefault(_at(item, "spec").get("nodeName", ""), []).append(name)
        late = f"no answer within {deadlines.KUBECTL_BUNDLE_SECONDS:g} s, the time for all nodes"
        answers: dict[Daemon, Answered[NodeReply]] = {daemon: Answered(daemon, None, late) for daemon in daemons}
        turns = asyncio.Semaphore(AT_ONCE)
        answered = 0

        async def one(daemon: Daemon) -> None:
            nonlocal answered
            async with turns:
                answers[daemon] = await self._node(daemon, of_node.get(daemon.node, [])[:EXPLAINED_MAX])
            answered += 1
            self._cluster.on_progress(answered, len(daemons))

        self._cluster.on_progress(0, len(daemons))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadlines.KUBECTL_BUNDLE_SECONDS), asyncio.TaskGroup() as group:
                for daemon in daemons:
                    group.create_task(one(daemon))
        return list(answers.values())

    async def _node(self, daemon: Daemon, pods: Sequence[str]) -> Answered[NodeReply]:
        place = f"nodes/{daemon.node}"
        # The log is worth most if the daemon does not answer.
        for previous in (False, True) if daemon.pod else ():
            await self._log(daemon, f"{place}/{'previous' if previous else 'pod'}.log", previous=previous)
        words = ["bundle", "--output", "-", *(word for pod in pods for word in ("--pod", pod))]
        ended = await self._cluster.run(daemon, words)
        if isinstance(ended, str):
            return Answered(daemon, None, ended)
        async with self._merging:
            try:
                unpacked = await asyncio.to_thread(bundle_file.unpack, ended.stdout)
            except BundleError as error:
                problem = str(error) if ended.stdout else no_answer(ended, bundle_file.SCHEMA)
                return Answered(daemon, None, problem)
            await asyncio.to_thread(self._archive.take, unpacked, place)
        return Answered(daemon, None, unpacked.daemon) if unpacked.daemon else Answered(daemon, _TAKEN)

    async def _log(self, daemon: Daemon, name: str, *, previous: bool) -> None:
        path = f"{objects.pod_path(daemon.namespace, daemon.pod)}/log"
        query = {"container": daemon.container, "tailLines": LOG_LINES, "limitBytes": LOG_BYTES}
        if previous:
            query["previous"] = "true"
        try:
            data = await self._cluster.client.request("GET", path, query=query)
        except KubeError as error:
            # Without a container before, there is no such log.
            if not previous:
                self._archive.lacks(name, str(error))
            return
        async with self._merging:
            await asyncio.to_thread(self._archive.text, name, data.decode("utf-8", "replace"))


def _at(item: Mapping[str, Any], key: str) -> Object:
    found = item.get(key)
    return found if isinstance(found, dict) else {}


def _some(item: Mapping[str, Any], keys: Sequence[str]) -> Object:
    return {key: item[key] for key in keys if key in item}


def _metadata(item: Mapping[str, Any]) -> Object:
    found = _some(_at(item, "metadata"), (*_METADATA, *_DELETION))
    annotations = _at(found, "annotations")
    if _LAST_APPLIED in annotations:
        found["annotations"] = {key: value for key, value in annotations.items() if key != _LAST_APPLIED}
    return found


def _network(item: Object) -> Object:
    return {"metadata": _metadata(item), "spec": item.get("spec")}


def _pod(item: Object) -> Object:
    spec = _at(item, "spec")
    containers = {
        key: [_some(each, _OF_CONTAINER) for each in _objects_in(spec, key)] for key in ("initContainers", "containers")
    }
    return {"metadata": _metadata(item), "spec": _some(spec, _OF_POD) | containers, "status": item.get("status")}


def _node(item: Object) -> Object:
    # `key` would be taken for that of a secret.
    taints = [f"{each.get('key')}:{each.get('effect')}" for each in _objects_in(_at(item, "spec"), "taints")]
    return {"metadata": _metadata(item), "taints": taints, "status": _some(_at(item, "status"), _OF_NODE)}


def _objects_in(item: Mapping[str, Any], key: str) -> Iterator[Object]:
    found = item.get(key)
    return (each for each in found if isinstance(each, dict)) if isinstance(found, list) else iter(())
