"""A local copy of one kind of object, kept by list and watch (Kubernetes documentation, "Kubernetes API Concepts").

`sync_once` is one round and holds the logic; `run` only repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import errors, objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiUnavailableError, GoneError, KubeError
from multus_daemon.cluster.kube.objects import DECODE_ERRORS, Found, Key, Resource
from multus_daemon.metrics import ClusterMetrics
from multus_daemon.runtime.backoff import backoff
from multus_daemon.runtime.gates import Gates

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE_SIZE: Final = 500
SHORT_SECONDS: Final = 1.0
"""A watch that ends sooner, and without a word, is a failure: else it would be begun again without a rest."""
STABLE_SECONDS: Final = 10.0
"""A watch that has lasted so long, or told of anything, was a good one."""
RETRY_SECONDS: Final = (0.5, 20.0)
"""Before the jitter, which is half of it: 30 s at most."""
REFUSALS_BEFORE_LIST: Final = 3
"""So often the server may refuse to watch before all is listed again: after etcd was restored from a backup the
resourceVersion is one of the future."""
DELETED_KEPT: Final = 1024
NOT_STARTED: Final = "not started"


class Informer(Generic[T]):
    """The objects of one resource. `run` is a root task; everything else may be called at any time."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource[T],
        gates: Gates,
        *,
        metrics: ClusterMetrics | None = None,
        on_connected: Callable[[], None] = lambda: None,
        inactivity: float = deadlines.INFORMER_INACTIVITY_SECONDS,
        retry: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """`gates`: the gate of the resource's name opens with the first complete list, and stays open.

        `on_connected`: called whenever the API server answers again after it did not; must not block or raise.
        """
        self._client = client
        self._resource = resource
        self._gates = gates
        self._metrics = metrics or ClusterMetrics()
        self._on_connected = on_connected
        self._inactivity = inactivity
        self._retry = retry
        self._objects: dict[Key, T] = {}
        self._deleted: OrderedDict[Key, str] = OrderedDict()
        self._waiting: dict[Key, list[_Waiter[T]]] = {}
        self._version: str | None = None
        self._first = True
        self._refusals = 0
        # Of the present round.
        self._answered = False
        self._stable = False
        self._wake = asyncio.Event()
        # On the clock that needs no event loop: metrics are rendered in a thread.
        self._heard: float | None = None
        self.synced = asyncio.Event()
        """Set once everything has been listed."""
        self.connected = False
        """Whether the API server answered last, that is, whether changes are heard of."""
        self.problem = NOT_STARTED
        """Why the last round failed; empty where it did not."""

    def __len__(self) -> int:
        """How many objects are known."""
        return len(self._objects)

    def get(self, key: Key) -> T | None:
        """The object as it was last heard of."""
        return self._objects.get(key)

    def values(self) -> list[T]:
        """All objects as they were last heard of."""
        return list(self._objects.values())

    def known(self) -> dict[Key, T]:
        """All objects as they were last heard of, by namespace and name. From any thread, as `names`."""
        return dict(self._objects)

    def names(self) -> list[Key]:
        """Namespace and name of all objects. From any thread: one step of the interpreter."""
        return list(self._objects)

    def deleted_uid(self, key: Key) -> str | None:
        """The UID of the object of this name that was deleted last, None if there is one now or none was seen."""
        return self._deleted.get(key)

    @property
    def stale_seconds(self) -> float:
        """How long ago the API server was last heard of; 0 while connected, infinity where it never was.

        May be read in any thread.
        """
        if self.connected:
            return 0.0
        return float("inf") if self._heard is None else time.monotonic() - self._heard

    async def wait_for(self, key: Key, predicate: Callable[[T], bool], timeout: float) -> T | None:
        """The object of that name as soon as it satisfies `predicate`; None after `timeout` seconds.

        None at once when an object that satisfies it is deleted.
        """
        present = self._objects.get(key)
        if present is not None and predicate(present):
            return present
        waiter = _Waiter(predicate)
        self._waiting.setdefault(key, []).append(waiter)
        try:
            async with asyncio.timeout(timeout):
                return await waiter.answer
        except TimeoutError:
            return None
        finally:
            waiters = self._waiting[key]
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]

    def poke(self) -> None:
        """The API server is back, as somebody else has noticed: the next round begins now."""
        if not self.connected:
            self._wake.set()

    # --- the rounds ---

    async def run(self) -> None:
        """List and watch for ever."""
        # Apart: how long the API server was away is no reason to ask it slowly when it is back, and says 410 or 429.
        away, refused = self._delays(), self._delays()
        while True:
            try:
                await self.sync_once()
                refused = self._delays()
            except KubeError as error:
                self._failed(error)
                answered = self._answered or error.status is not None
                if answered:
                    away = self._delays()
                if self._stable:
                    refused = self._delays()
                asked = error.retry_after if isinstance(error, ApiUnavailableError) else None
                await self._pause(max(next(refused if answered else away), min(asked or 0.0, self._retry[1])))

    def _delays(self) -> Iterator[float]:
        return backoff(*self._retry, jitter=0.5)

    async def sync_once(self) -> None:
        """List where that is needed, then watch until the server ends it. Raises KubeError."""
        self._answered = self._stable = False
        if self._version is None:
            self._version = await self._list()
            self._refusals = 0
        try:
            await self._watch()
        except GoneError:
            self._version = None
            raise
        except KubeError as error:
            self._refusals += error.status is not None
            if self._refusals >= REFUSALS_BEFORE_LIST:
                self._version = None
            raise

    async def _list(self) -> str:
        """Replace what is known by what there is; the list's resourceVersion."""
        query = {**self._resource.query, "limit": str(PAGE_SIZE)}
        if self._first and self._resource.first_version:
            query["resourceVersion"] = self._resource.first_version
        found: dict[Key, T] = {}
        while True:
            body = await self._client.request(
                "GET", self._resource.path, query=query, timeout=deadlines.INFORMER_LIST_SECONDS
            )
            self._mark_connected()
            with self._decoding():
                page = objects.decode_page(body)
            for raw in page.items or ():
                if item := self._decode(raw):
                    present = self._objects.get(item.key)
                    # Two copies of everything are not needed, not even for the length of a list.
                    found[item.key] = item.value if present != item.value or present is None else present
            if not page.metadata.continue_:
                break
            query = {**self._resource.query, "limit": str(PAGE_SIZE), "continue": page.metadata.continue_}
        self._replace(found)
        self._first = False
        self.synced.set()
        self._gates.open(self._resource.name)
        log.info("%s listed: %d", self._resource.name, len(found))
        return page.metadata.resource_version

    async def _watch(self) -> None:
        query = {
            **self._resource.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(random.randint(*deadlines.INFORMER_WATCH_SECONDS)),
        }
        began = _now()
        lines = self._client.lines(
            self._resource.path, query, inactivity=self._inactivity, on_open=self._mark_connected
        )
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    self._heard = time.monotonic()
                    self._take(line)
                    self._stable, self._refusals = True, 0
        finally:
            lasted = _now() - began
            self._stable = self._stable or (self._answered and lasted >= STABLE_SECONDS)
        if not self._stable and lasted < SHORT_SECONDS:
            raise ApiUnavailableError(f"watch of {self._resource.path}: ended at once")

    def _take(self, line: bytes) -> None:
        """One line of the watch. Raises KubeError."""
        with self._decoding():
            event = objects.decode_event(line)
        match event.type:
            case "ADDED" | "MODIFIED" | "DELETED":
                item = self._decode(event.object)
                if item is None:
                    return
                if event.type == "DELETED":
                    self._delete(item.key, item.value)
                else:
                    self._put(item.key, item.value)
                self._version = item.version or self._version
                self._metrics.changes.labels(self._resource.name).inc()
            case "BOOKMARK":
                with self._decoding():
                    version = objects.decode_versioned(event.object).metadata.resource_version
                self._version = version or self._version
            case "ERROR":
                raise errors.from_watch_event(bytes(event.object), request=f"watch of {self._resource.path}")
            case _:
                log.debug("watch of %s: an event of type %r is passed over", self._resource.path, event.type)

    def _decode(self, raw: msgspec.Raw) -> Found[T] | None:
        """The object; None where it is none: one bad object must not keep the others from being known."""
        try:
            return self._resource.decode(raw)
        except DECODE_ERRORS as error:
            name = ""
            with contextlib.suppress(*DECODE_ERRORS):
                metadata = objects.decode_versioned(raw).metadata
                name = f"{metadata.namespace}/{metadata.name}"
            log.warning("one of %s is passed over: %s: %s", self._resource.name, name, error)
            return None

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except DECODE_ERRORS as error:
            raise ApiUnavailableError(f"{self._resource.path}: the answer is not the API's: {error}") from error

    # --- what is known ---

    def _replace(self, found: dict[Key, T]) -> None:
        before, self._objects = self._objects, found
        for key, value in before.items():
            present = found.get(key)
            if present is None or self._resource.uid(present) != self._resource.uid(value):
                self._forget(key, value)
        for key in list(self._waiting):
            if key in found:
                self._put(key, found[key])

    def _put(self, key: Key, value: T) -> None:
        self._objects[key] = value
        self._deleted.pop(key, None)
        for waiter in self._waiting.get(key, ()):
            waiter.offer(value)

    def _delete(self, key: Key, value: T) -> None:
        self._objects.pop(key, None)
        self._forget(key, value)

    def _forget(self, key: Key, value: T) -> None:
        if key not in self._objects:
            self._deleted[key] = self._resource.uid(value)
            self._deleted.move_to_end(key)
            if len(self._deleted) > DELETED_KEPT:
                self._deleted.popitem(last=False)
        for waiter in self._waiting.get(key, ()):
            waiter.withdraw(value)

    # --- the state of the connection ---

    def _mark_connected(self) -> None:
        self._heard, self.problem, self._answered = time.monotonic(), "", True
        if not self.connected:
            self.connected = True
            self._on_connected()

    def _failed(self, error: KubeError) -> None:
        new = self.connected or (self._heard is None and self.problem == NOT_STARTED)
        self.connected, self.problem = False, str(error)
        self._metrics.errors.labels(self._resource.name).inc()
        if not self.synced.is_set():
            self._gates.close(self._resource.name, self.problem)
        # Once per outage; a resourceVersion that is gone is none.
        level = logging.WARNING if new and not isinstance(error, GoneError) else logging.DEBUG
        log.log(level, "%s: %s; tried again until it works", self._resource.name, error)

    async def _pause(self, seconds: float) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()


class _Waiter(Generic[T]):
    """Somebody waits for an object."""

    def __init__(self, predicate: Callable[[T], bool]) -> None:
        self._predicate = predicate
        self.answer: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()

    def offer(self, value: T) -> None:
        if not self.answer.done() and self._predicate(value):
            self.answer.set_result(value)

    def withdraw(self, value: T) -> None:
        if not self.answer.done() and self._predicate(value):
            self.answer.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
