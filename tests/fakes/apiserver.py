"""A small Kubernetes API server in this process: pods, networks, events, nodes, claims, slices, addresses, leases.

By list, watch, patch, PUT, DELETE and `exec`.

No smarter than the real one: what it answers to a wrong UID, an old resourceVersion or an expired page is what
kube-apiserver answers. There is no RBAC and no validation beyond that.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import ssl
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

PODS = "pods"
NETWORKS = "network-attachment-definitions"
EVENTS = "events"
NODES = "nodes"
CLAIMS = "resourceclaims"
SLICES = "resourceslices"
RESERVATIONS = "overlappingrangeipreservations"
POOLS = "ippools"
LEASES = "leases"
IPAM_CLAIMS = "ipamclaims"
_PREFIXES = {
    PODS: "/api/v1",
    EVENTS: "/api/v1",
    NODES: "/api/v1",
    NETWORKS: "/apis/k8s.cni.cncf.io/v1",
    CLAIMS: "/apis/resource.k8s.io/v1",
    SLICES: "/apis/resource.k8s.io/v1",
    RESERVATIONS: "/apis/whereabouts.cni.cncf.io/v1alpha1",
    POOLS: "/apis/whereabouts.cni.cncf.io/v1alpha1",
    LEASES: "/apis/coordination.k8s.io/v1",
    IPAM_CLAIMS: "/apis/k8s.cni.cncf.io/v1alpha1",
}
_KINDS = {
    PODS: "Pod",
    EVENTS: "Event",
    NODES: "Node",
    NETWORKS: "NetworkAttachmentDefinition",
    CLAIMS: "ResourceClaim",
    SLICES: "ResourceSlice",
    RESERVATIONS: "OverlappingRangeIPReservation",
    POOLS: "IPPool",
    LEASES: "Lease",
    IPAM_CLAIMS: "IPAMClaim",
}
_PATCHES = {"application/merge-patch+json", "application/strategic-merge-patch+json"}
_APPLY = "application/apply-patch+yaml"
_JSON_PATCH = "application/json-patch+json"
_REVIEWS = {"/apis/authentication.k8s.io/v1/tokenreviews", "/apis/authorization.k8s.io/v1/subjectaccessreviews"}

Object = dict[str, Any]
Key = tuple[str, str]


class Execution:
    """A command that runs in a container: what it writes, and how it ends."""

    def __init__(self, websocket: web.WebSocketResponse, container: str, words: list[str]) -> None:
        self.container, self.words = container, words
        self._websocket = websocket

    async def write(self, data: bytes, *, channel: int = 1) -> None:
        """Standard output; channel 2 is standard error."""
        await self._websocket.send_bytes(bytes([channel]) + data)

    async def end(self, status: int = 0) -> None:
        found: Object = {"metadata": {}, "status": "Success"}
        if status:
            message = f"command terminated with non-zero exit code: exit status {status}"
            causes = [{"reason": "ExitCode", "message": str(status)}]
            details = {"causes": causes}
            found |= {"status": "Failure", "message": message, "reason": "NonZeroExitCode", "details": details}
        await self.write(json.dumps(found).encode(), channel=3)

    async def fail(self, message: str) -> None:
        """It can't be run."""
        found = {"metadata": {}, "status": "Failure", "message": message, "reason": "InternalError", "code": 500}
        await self.write(json.dumps(found).encode(), channel=3)

    async def answer(self, found: Object, status: int = 0) -> None:
        """All of a command that prints JSON."""
        await self.write(json.dumps(found).encode())
        await self.end(status)

    async def hang(self) -> None:
        """Until the client goes."""
        async for message in self._websocket:
            assert message.type is not WSMsgType.TEXT


Program = Callable[[Execution], Awaitable[None]]


@dataclass
class Fault:
    """A fault for the next requests that match."""

    status: int
    times: float
    method: str = ""
    contains: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()


@dataclass(eq=False)
class _Watcher:
    resource: str
    node: str
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class FakeApiServer:
    """`requests` has method and path with query of everything that came in; `tokens` those that are valid, if any."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[Key, Object]] = {name: {} for name in _PREFIXES}
        self.requests: list[tuple[str, str]] = []
        self.agents: set[str] = set()
        self.peers: list[str] = []
        """Common names of client certificates, by request, over TLS."""
        self.tokens: set[str] = set()
        self.scrapers: dict[str, Object] = {}
        """Users (`userInfo`) by the tokens that a TokenReview accepts."""
        self.granted: set[tuple[str, str, str]] = set()
        """User, non-resource URL and verb that a SubjectAccessReview allows."""
        self.reviews: list[Object] = []
        """The `spec` of each review."""
        self.faults: list[Fault] = []
        self.applied: dict[Key, dict[str, list[Object]]] = {}
        """Entries of `status.devices` by the key of the claim and their field manager."""
        self.delay = 0.0
        self.silent = False
        """Watches are accepted and nothing is sent on them."""
        self.labels: dict[str, dict[str, str]] = {}
        """Labels of namespaces; each one of an object exists without."""
        self.programs: dict[Key, Program] = {}
        """Programs that run in pods, by namespace and name of the pod."""
        self.logs: dict[Key, str] = {}
        """Logs of containers, by namespace and name of the pod; of the one before, with `-previous` after the name."""
        self.protocols = ("v5.channel.k8s.io", "v4.channel.k8s.io")
        self.executing = 0
        self.most_executing = 0
        self.port = 0
        self._version = 100
        self._oldest = 0
        self._history: list[tuple[int, str, str, Object, Object | None]] = []
        self._watchers: list[_Watcher] = []
        self._runner: web.AppRunner | None = None
        self._tls: ssl.SSLContext | None = None

    # --- what tests do to it ---

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, on the same port as before."""
        self._tls = tls or self._tls
        app = web.Application(client_max_size=4 * 1024 * 1024)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections, cut those that there are."""
        if self._runner:
            for watcher in self._watchers:
                watcher.queue.put_nowait(None)
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def put(self, resource: str, item: Object) -> Object:
        """Create or replace."""
        item = copy.deepcopy(item)
        metadata = item.setdefault("metadata", {})
        key = (metadata.get("namespace", ""), metadata["name"])
        before = self.objects[resource].get(key)
        if before and metadata.get("uid") not in (None, before["metadata"]["uid"]):
            self.delete(resource, *key)
            before = None
        metadata.setdefault("uid", before["metadata"]["uid"] if before else str(uuid.uuid4()))
        self._record("MODIFIED" if before else "ADDED", resource, item, before)
        self.objects[resource][key] = item
        was_kept = before is not None and before["metadata"].get("finalizers") and not metadata.get("finalizers")
        if was_kept and metadata.get("deletionTimestamp"):
            self.delete(resource, *key)
        return item

    def delete(self, resource: str, namespace: str, name: str) -> None:
        before = self.objects[resource].pop((namespace, name))
        self._record("DELETED", resource, copy.deepcopy(before), before)

    def get(self, resource: str, namespace: str, name: str) -> Object:
        return self.objects[resource][namespace, name]

    def add_pod(self, name: str = "web-1", *, namespace: str = "web", node: str = "node-a", **metadata: Any) -> Object:
        spec = {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}
        return self.put(PODS, {"metadata": {"namespace": namespace, "name": name, **metadata}, "spec": spec})

    def add_network(self, name: str = "net1", *, namespace: str = "web", config: str = '{"type":"ptp"}') -> Object:
        return self.put(NETWORKS, {"metadata": {"namespace": namespace, "name": name}, "spec": {"config": config}})

    def fail(self, status: int, times: float = 1, **match: Any) -> None:
        """Answer the next `times` matching requests with `status`; `method`, `contains`, `headers`, `fields`."""
        self.faults.append(Fault(status, times, **match))

    def compact(self) -> None:
        """Forget all history: watches from before now get 410."""
        self._oldest = self._version
        self._history.clear()

    def cut_watches(self, rest: bytes = b"") -> None:
        """End all watches, `rest` being the last that is sent."""
        for watcher in self._watchers:
            watcher.queue.put_nowait(rest)
            watcher.queue.put_nowait(None)

    def bookmark(self) -> None:
        for watcher in self._watchers:
            item = {"kind": _KINDS[watcher.resource], "metadata": {"resourceVersion": str(self._version)}}
            watcher.queue.put_nowait(_line("BOOKMARK", item))

    def send_on_watches(self, line: bytes) -> None:
        for watcher in self._watchers:
            watcher.queue.put_nowait(line)

    def skip_versions(self, number: int) -> None:
        """Advance the version as if other objects had changed; a negative number simulates a restored backup."""
        self._version += number

    @property
    def watches(self) -> int:
        return len(self._watchers)

    def count(self, method: str, contains: str = "", *, without: str = "\0") -> int:
        """Count the matching requests."""
        return sum(found == method and contains in path and without not in path for found, path in self.requests)

    def kubeconfig(self, path: Path, **user: Any) -> Path:
        """Write a kubeconfig for it."""
        cluster: Object = {"server": self.url}
        if "ca" in user:
            cluster["certificate-authority"] = str(user.pop("ca"))
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": user}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path

    # --- what it does ---

    def _record(self, kind: str, resource: str, item: Object, before: Object | None) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, resource, kind, item, before))
        for watcher in self._watchers:
            self._tell(watcher, resource, kind, item, before)

    def _tell(self, watcher: _Watcher, resource: str, kind: str, item: Object, before: Object | None) -> None:
        if resource != watcher.resource or self.silent:
            return
        now, then = _selected(item, watcher.node), before is not None and _selected(before, watcher.node)
        if kind == "DELETED" or (then and not now):
            if then:
                watcher.queue.put_nowait(_line("DELETED", item))
        elif now:
            watcher.queue.put_nowait(_line("MODIFIED" if then else "ADDED", item))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        self.agents.add(request.headers.get("User-Agent", ""))
        transport = request.transport
        if transport is not None and (peer := transport.get_extra_info("peercert")):
            self.peers.append(dict(item[0] for item in peer["subject"])["commonName"])
        if self.delay:
            await asyncio.sleep(self.delay)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if self.tokens and (scheme != "Bearer" or token not in self.tokens):
            return _status(401, "Unauthorized", "Unauthorized")
        for fault in self.faults:
            if fault.times and request.method.startswith(fault.method) and fault.contains in request.path_qs:
                fault.times -= 1
                return _status(fault.status, "Injected", "as the test wants", fault.fields, fault.headers)
        if request.method == "POST" and request.path in _REVIEWS:
            return self._review(await request.json())
        if request.path == "/version":
            return web.json_response({"gitVersion": "v1.34.0"})
        for resource, prefix in _PREFIXES.items():
            parts = request.path.removeprefix(prefix + "/").split("/") if request.path.startswith(prefix + "/") else []
            namespace = parts[1] if parts[:1] == ["namespaces"] else ""
            parts = parts[2:] if namespace else parts
            if namespace and not parts and resource == PODS:
                known = {"default", *self.labels, *(key[0] for found in self.objects.values() for key in found)}
                if namespace in known:
                    metadata = {"name": namespace, "labels": self.labels.get(namespace, {})}
                    return web.json_response({"kind": "Namespace", "metadata": metadata})
            if parts[:1] == [resource]:
                return await self._serve(request, resource, namespace, *parts[1:])
        return _status(404, "NotFound", "the server could not find the requested resource")

    def _review(self, review: Object) -> web.Response:
        spec: Object = review["spec"]
        status: Object
        self.reviews.append(spec)
        if review["kind"] == "TokenReview":
            user = self.scrapers.get(spec["token"])
            status = {"authenticated": True, "user": user} if user else {"user": {}, "error": "invalid bearer token"}
        else:
            asked = spec["nonResourceAttributes"]
            status = {"allowed": (spec["user"], asked["path"], asked["verb"]) in self.granted}
        return web.json_response(review | {"status": status}, status=201)

    async def _serve(
        self, request: web.Request, resource: str, namespace: str, name: str = "", subresource: str = ""
    ) -> web.StreamResponse:
        if request.method == "POST":
            item = await request.json()
            if (namespace, item["metadata"]["name"]) in self.objects[resource]:
                return _status(409, "AlreadyExists", "already exists")
            item["metadata"].setdefault("namespace", namespace)
            return web.json_response(self.put(resource, item), status=201)
        if not name:
            if request.query.get("watch") in ("1", "true"):
                return await self._watch(request, resource)
            return self._list(request, resource)
        found = self.objects[resource].get((namespace, name))
        if found is None:
            return _status(404, "NotFound", f'{resource} "{name}" not found')
        if request.method == "GET" and subresource == "log":
            text = self.logs.get((namespace, name + ("-previous" if request.query.get("previous") else "")))
            return _status(400, "BadRequest", "no such container") if text is None else web.Response(text=text)
        if request.method == "GET" and subresource == "exec":
            return await self._exec(request, (namespace, name))
        if request.method == "GET":
            return web.json_response(found)
        if request.method == "PATCH" and request.content_type in _PATCHES:
            patch = await request.json()
            if "strategic" in request.content_type:
                patch = _with_conditions(found, patch)
            if patch.get("metadata", {}).get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
                return _status(422, "Invalid", "metadata.uid: field is immutable", ("metadata.uid",))
            return web.json_response(self.put(resource, _merged(found, patch)))
        if request.method == "PATCH" and (request.content_type, resource, subresource) == (_APPLY, CLAIMS, "status"):
            return self._apply_devices(request.query["fieldManager"], found, json.loads(await request.text()))
        if request.method == "PUT":
            item = await request.json()
            for field in ("uid", "resourceVersion"):
                if item["metadata"].get(field) != found["metadata"][field]:
                    return _status(409, "Conflict", f"the object has been modified: {field}")
            return web.json_response(self.put(resource, item))
        if request.method == "PATCH" and request.content_type == _JSON_PATCH:
            try:
                return web.json_response(self.put(resource, _patched(found, await request.json())))
            except LookupError as error:
                return _status(422, "Invalid", f"the server rejected our request: {error}")
        if request.method == "DELETE":
            wanted = (json.loads(await request.text() or "{}").get("preconditions") or {}).get("uid")
            if wanted not in (None, found["metadata"]["uid"]):
                return _status(409, "Conflict", f"the UID in the precondition ({wanted}) does not match")
            if found["metadata"].get("finalizers"):
                # Somebody is to take them away first.
                marked = copy.deepcopy(found)
                marked["metadata"].setdefault("deletionTimestamp", "2026-11-22T10:00:00Z")
                return web.json_response(self.put(resource, marked))
            self.delete(resource, namespace, name)
            return web.json_response({"kind": "Status", "status": "Success"})
        return _status(405, "MethodNotAllowed", request.method)

    def _apply_devices(self, manager: str, found: Object, item: Object) -> web.Response:
        """Server-side apply of `status.devices`, a list of entries with a key."""
        if item["metadata"]["uid"] != found["metadata"]["uid"]:
            return _status(409, "Conflict", "uid mismatch")
        key = (found["metadata"]["namespace"], found["metadata"]["name"])
        managers = self.applied.setdefault(key, {})

        def named(entry: Object) -> tuple[Any, ...]:
            return entry["driver"], entry["pool"], entry["device"], entry.get("shareID")

        entries = item["status"].get("devices", [])
        others = {named(entry): entry for name, of in managers.items() if name != manager for entry in of}
        if any(others.get(named(entry), entry) != entry for entry in entries):
            return _status(409, "Conflict", "Apply failed with 1 conflict")
        managers[manager] = entries
        every = {named(entry): entry for of in managers.values() for entry in of}
        return web.json_response(self.put(CLAIMS, _merged(found, {"status": {"devices": list(every.values())}})))

    async def _exec(self, request: web.Request, pod: Key) -> web.StreamResponse:
        if "upgrade" not in request.headers.get("Connection", "").lower():
            return _status(400, "BadRequest", "Upgrade request required")
        websocket = web.WebSocketResponse(protocols=self.protocols)
        await websocket.prepare(request)
        self.executing += 1
        self.most_executing = max(self.most_executing, self.executing)
        try:
            with contextlib.suppress(ConnectionError):
                words = request.query.getall("command")
                await self.programs[pod](Execution(websocket, request.query["container"], words))
                await websocket.close()
        finally:
            self.executing -= 1
        return websocket

    def _list(self, request: web.Request, resource: str) -> web.Response:
        namespace = request.path.partition("/namespaces/")[2].partition("/")[0]
        items = [
            item
            for key, item in sorted(self.objects[resource].items())
            if namespace in ("", key[0]) and _matches(item, request)
        ]
        metadata = {"resourceVersion": str(self._version)}
        # From memory (resourceVersion 0) everything comes at once.
        limit = int(request.query.get("limit", "0")) if request.query.get("resourceVersion") != "0" else 0
        start = 0
        if token := request.query.get("continue"):
            version, start = json.loads(base64.b64decode(token))
            metadata["resourceVersion"] = str(version)
            if version < self._oldest:
                return _status(410, "Expired", "the continue parameter is too old")
        if limit and start + limit < len(items):
            position = json.dumps([int(metadata["resourceVersion"]), start + limit])
            metadata["continue"] = base64.b64encode(position.encode()).decode()
            items = items[start : start + limit]
        else:
            items = items[start:]
        return web.json_response({"kind": f"{_KINDS[resource]}List", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        since = int(request.query.get("resourceVersion") or 0)
        watcher = _Watcher(resource, _node_of(request))
        if since > self._version:
            gone = {"kind": "Status", "code": 504, "reason": "Timeout", "message": "Too large resource version"}
            await response.write(_line("ERROR", gone))
            return response
        if since < self._oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(_line("ERROR", gone))
            return response
        for version, changed, kind, item, before in self._history:
            if version > since:
                self._tell(watcher, changed, kind, item, before)
        self._watchers.append(watcher)
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(float(request.query.get("timeoutSeconds", "300"))):
                    while (line := await watcher.queue.get()) is not None:
                        await response.write(line)
        finally:
            self._watchers.remove(watcher)
        return response


def _node_of(request: web.Request) -> str:
    return request.query.get("fieldSelector", "").partition("spec.nodeName=")[2].partition(",")[0]


def _selected(item: Object, node: str) -> bool:
    return not node or item.get("spec", {}).get("nodeName") == node


def _matches(item: Object, request: web.Request) -> bool:
    """`labelSelector` and `fieldSelector` of equalities."""
    labels = item["metadata"].get("labels", {})
    for pair in filter(None, request.query.get("labelSelector", "").split(",")):
        key, _, value = pair.partition("=")
        if labels.get(key) != value:
            return False
    for pair in filter(None, request.query.get("fieldSelector", "").split(",")):
        path, _, value = pair.partition("=")
        found: Any = item
        for key in path.split("."):
            found = found.get(key, {}) if isinstance(found, dict) else {}
        if found != value:
            return False
    return True


def _with_conditions(target: Object, patch: Object) -> Object:
    """The strategic merge patch as one of RFC 7396: `status.conditions` is merged by `type`."""
    changed = {item["type"]: item for item in patch["status"]["conditions"]}
    before = target.get("status", {}).get("conditions", [])
    conditions = [item | changed.pop(item["type"], {}) for item in before] + list(changed.values())
    return patch | {"status": patch["status"] | {"conditions": conditions}}


def _merged(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return copy.deepcopy(result)


def _patched(target: Object, operations: list[Object]) -> Object:
    """RFC 6902: test, add, replace and remove in objects. Raises LookupError if one can't be done."""
    result = copy.deepcopy(target)
    for item in operations:
        *path, key = [part.replace("~1", "/").replace("~0", "~") for part in item["path"].split("/")[1:]]
        place: Any = result
        for part in path:
            place = place[part]
        # The patches of kube-apiserver compare what is missing as null.
        if item["op"] == "test" and place.get(key) != item.get("value"):
            raise LookupError(f"testing value {item['path']} failed")
        if item["op"] == "remove" or (item["op"] == "replace" and key not in place):
            del place[key]
        elif item["op"] in ("add", "replace"):
            place[key] = item["value"]
    return result


def _line(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _status(
    code: int, reason: str, message: str, fields: tuple[str, ...] = (), headers: dict[str, str] | None = None
) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": {"causes": [{"reason": "FieldValueInvalid", "field": name} for name in fields]},
    }
    return web.json_response(body, status=code, headers=headers)
