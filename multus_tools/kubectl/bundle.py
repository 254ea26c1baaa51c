"""Collect the parts of a cluster's archive for a bug report (`bundle_file`): docs/kubectl-multus.md lists its files.

Objects that the user may not read, and nodes that do not answer, are left out, and the index says why. Of objects only
the keys that matter for networks are archived.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.errors import ApiError, KubeError, NoAnswerError
from multus_tools import bundle_file, deadlines
from multus_tools.bundle_file import Archive, BundleError
from multus_tools.kubectl.cluster import Answered, Cluster, Daemon, NodeReply, networks_path, no_answer
from multus_tools.kubectl.pods import Lacking, all_lacking

T = TypeVar("T")
Object = dict[str, Any]
Look = Callable[[str], Awaitable[list[T]]]
"""Lists objects of a namespace; empty: of all namespaces."""

AT_ONCE: Final = 8
"""Maximum number of nodes that are asked concurrently: each answer is kept in memory."""
PODS_MAX: Final = 100
"""Maximum number of pods that lack networks whose objects are archived."""
ITEMS_MAX: Final = 500
"""Maximum number of objects in a file; further ones are in another file."""
EXPLAINED_MAX: Final = 16
"""Maximum number of pods that a node explains."""
LOG_LINES: Final = "2000"
LOG_BYTES: Final = str(2 * 1024 * 1024)
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
"""An annotation that contains the whole object once more."""
_METADATA: Final = ("namespace", "name", "uid", "labels", "annotations", "ownerReferences", "creationTimestamp")
_DELETION: Final = ("deletionTimestamp", "finalizers", "generation")
_OF_POD: Final = ("nodeName", "hostNetwork", "runtimeClassName", "restartPolicy", "serviceAccountName", "dnsPolicy")
_OF_CONTAINER: Final = ("name", "image", "resources", "ports")
_OF_NODE: Final = ("nodeInfo", "conditions", "addresses", "allocatable", "capacity")
_TAKEN: Final = NodeReply(bundle_file.SCHEMA)


class Bundle:
    """Collects one archive of a cluster."""

    def __init__(self, cluster: Cluster, archive: Archive) -> None:
        self._cluster, self._archive = cluster, archive
        self._merging = asyncio.Lock()

    async def collect(self, *, nodes: Sequence[str], pod: str, namespace: str) -> Object:
        """Fill the archive and close it; return the answer of the command, with `missing`: the number of missing parts.

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
        """Add the objects of the API server, networks first: their secrets are under known keys."""
        cluster = self._cluster
        metadata = _at(pod or {}, "metadata")
        own = str(metadata.get("namespace", "")) or namespace
        await self._take("networks", _network, lambda space: cluster.objects(networks_path(space)), own)
        with self._or_missing("cluster/version.json"):
            await asyncio.to_thread(self._archive.json, "cluster/version.json", await cluster.json("/version"))
        await self._take("nodes", _node, lambda _: cluster.objects("/api/v1/nodes"))
        await self._take("daemons", _pod, lambda _: cluster.objects("/api/v1/pods", labelSelector=cluster.selector))
        if pod:
            names = {"pod": str(metadata.get("name", "")), "uid": str(metadata.get("uid", ""))}
            await self._take("events", msgspec.to_builtins, lambda _: cluster.events(own, **names))
        else:
            await self._take("events", msgspec.to_builtins, cluster.events, own)

    @contextlib.contextmanager
    def _or_missing(self, file: str) -> Iterator[None]:
        """If the block raises KubeError (but not NoAnswerError), note in the index that `file` is missing."""
        try:
            yield
        except NoAnswerError:
            raise
        except KubeError as error:
            self._archive.lacks(file, str(error))

    async def _take(self, name: str, shown: Callable[[Any], Any], look: Look[Any], own: str = "") -> None:
        """Add a list of objects, each converted by `shown`; if the user may not list all, those of namespace `own`."""
        with self._or_missing(f"cluster/{name}.json"):
            items = list(map(shown, await self._allowed(name, look, own)))
            for number, start in enumerate(range(0, max(len(items), 1), ITEMS_MAX), 1):
                file = f"cluster/{name}{number if number > 1 else ''}.json"
                await asyncio.to_thread(self._archive.json, file, items[start : start + ITEMS_MAX])

    async def _allowed(self, name: str, look: Look[T], own: str) -> list[T]:
        """Return what `look` lists in all namespaces; if the user may not, in the namespace `own`. Raises KubeError."""
        try:
            return await look("")
        except ApiError as error:
            if error.status != 403 or not own:
                raise
            self._cluster.notes.append(f"{name} of one namespace only: {error.message}")
            return await look(own)

    async def _lacking(self, namespace: str) -> list[Object]:
        """Return the objects of pods that lack networks."""
        found: list[Lacking] = []
        with self._or_missing("cluster/pods.json"):
            found = await self._allowed("pods", partial(all_lacking, self._cluster), namespace)
        if len(found) > PODS_MAX:
            self._cluster.notes.append(f"{len(found)} pods lack networks, {PODS_MAX} of them are in cluster/pods.json")
        taken = []
        for item in found[:PODS_MAX]:
            metadata = item.pod.metadata
            # Deleted meanwhile.
            with contextlib.suppress(ApiError):
                taken.append(await self._cluster.json(objects.pod_path(metadata.namespace, metadata.name)))
        return taken

    async def _daemons(self, wanted: Collection[str], *, is_limited: bool) -> list[Daemon]:
        problem = "is not a Linux node of this cluster"
        found: list[Daemon] = []
        try:
            found = await self._cluster.daemons()
        except NoAnswerError:
            raise
        except KubeError as error:
            problem = f"you may not look for its daemon: {error}"
            self._archive.lacks("nodes", problem)
        known = {daemon.node for daemon in found}
        unknown = [Daemon(name, problem=problem) for name in sorted(set(wanted) - known)]
        return [daemon for daemon in found if daemon.node in wanted or not is_limited] + unknown

    async def _nodes(self, daemons: Sequence[Daemon], concerned: Sequence[Object]) -> list[Answered[NodeReply]]:
        """Add the archives of the nodes and the logs of the daemons."""
        of_node: dict[str, list[str]] = {}
        for item in concerned:
            metadata = _at(item, "metadata")
            name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
            of_node.setdefault(_at(item, "spec").get("nodeName", ""), []).append(name)
        late = f"no answer within {deadlines.KUBECTL_BUNDLE_SECONDS:g} s, the time for all nodes"
        answers: dict[Daemon, Answered[NodeReply]] = {daemon: Answered(daemon, None, late) for daemon in daemons}

        async def ask(daemon: Daemon) -> None:
            answers[daemon] = await self._node(daemon, of_node.get(daemon.node, [])[:EXPLAINED_MAX])

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadlines.KUBECTL_BUNDLE_SECONDS):
                await self._cluster.each(daemons, ask, AT_ONCE)
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
        problem = unpacked.known.daemon
        return Answered(daemon, None if problem else _TAKEN, problem)

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
