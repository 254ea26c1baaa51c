"""A local copy of one kind of object, kept by list and watch (Kubernetes documentation, "Kubernetes API Concepts")."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import errors, objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import AnswerTooLongError, ApiUnavailableError, GoneError, KubeError
from multus_daemon.cluster.kube.objects import DECODE_ERRORS, Item, Key, Resource
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.aio import at_most
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.recent import Recent

log = logging.getLogger(__name__)

T = TypeVar("T")

SHORT_SECONDS: Final = 2.0
"""A watch that ends earlier counts as a failure, so that the next one begins after a pause."""
STABLE_SECONDS: Final = 10.0
"""A watch that lasts this long ends a series of failures, in which pauses grow and only one warning is logged."""
RETRY_SECONDS: Final = (0.5, 20.0)  # plus or minus half of it
REFUSALS_BEFORE_LIST: Final = 3  # after a restore of etcd the known resourceVersion is in the future
DELETED_KEPT: Final = 1024
PAGE_SHRINKS: Final = 8
"""Factor by which the pages of a list become smaller after an answer that is too long."""
TURN_SECONDS: Final = 0.005
"""Time for which objects of a list are decoded before the event loop gets a turn."""
_NOT_STARTED: Final = "not started"


class Informer(Generic[T]):
    """The objects of one resource. `run` is a root task; all other methods may be called at any time."""

    def __init__(
        self,
        client: ApiClient,
        resource: Resource[T],
        gates: Gates,
        metrics: Metrics,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        """The gate with the resource's name opens with the first complete list.

        `on_connected` is called when the API server answers again after a failure; it must not block or raise.
        """
        self._client = client
        self._resource = resource
        self._gates = gates
        self._metrics = metrics
        self._on_connected = on_connected
        self._objects: dict[Key, T] = {}
        self._deleted: Recent[Key, str] = Recent(DELETED_KEPT)
        self._waiting: dict[Key, list[tuple[Callable[[T], bool], asyncio.Future[T | None]]]] = {}
        self._version: str | None = None
        self._refusals = 0
        # State of the current round.
        self._answered = False
        self._stable = False
        self._until: asyncio.Timeout | None = None
        """Ends the watch."""
        self._wake = asyncio.Event()
        self._is_away = False
        """True in a pause after a round without an answer."""
        self._is_failing = False
        """True after a failure until a watch has lasted for STABLE_SECONDS."""
        self._is_warned = False
        """True if the log has a warning of this series of failures."""
        self._heard: float | None = None
        self.synced = asyncio.Event()  # set after the first complete list
        self.connected = False
        self.problem = _NOT_STARTED  # the error of the last round; empty after a success
        self.changed: Callable[[T], None] = lambda _: None
        """Called for each object that is new or differs from what was known; it must not block."""
        self.gone: Callable[[T], None] = lambda _: None
        """Called with the last state of each object that was deleted; it must not block."""

    def __len__(self) -> int:
        """Return the number of known objects."""
        return len(self._objects)

    def get(self, key: Key) -> T | None:
        """Return the last known state of the object. Safe in any thread."""
        return self._objects.get(key)

    def known(self) -> dict[Key, T]:
        """Return the last known state of all objects. Safe in any thread."""
        return dict(self._objects)

    @property
    def live(self) -> Mapping[Key, T]:
        """The objects by key, without a copy; a list replaces it."""
        return self._objects

    def deleted_uid(self, key: Key) -> str | None:
        """Return the UID of the last deleted object of this name; None if there is a new one or none was seen."""
        return self._deleted.get(key)

    @property
    def heard_seconds(self) -> float:
        """Seconds since the last message of the API server, infinity before the first. Safe in any thread."""
        return float("inf") if self._heard is None else time.monotonic() - self._heard

    @property
    def stale_seconds(self) -> float:
        """Seconds since the last message of the API server, but 0 while the watch is connected."""
        return 0.0 if self.connected else self.heard_seconds

    async def wait_for(self, key: Key, predicate: Callable[[T], bool], timeout: float) -> T | None:
        """Wait for an object that satisfies `predicate`; None after `timeout` seconds, or when it is deleted."""
        present = self._objects.get(key)
        if present is not None and predicate(present):
            return present
        future: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        waiter = predicate, future
        self._waiting.setdefault(key, []).append(waiter)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            return None
        finally:
            waiters = self._waiting[key]
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]

    def poke(self) -> None:
        """End the pause after an unanswered list or watch, because another request was answered.

        A pause after a bad answer continues: otherwise two informers of a faulty server would end each other's pauses.
        """
        if self._is_away:
            self._wake.set()

    def relist(self) -> None:
        """End the watch, and list: what is known has turned out to be another state. (After a restore of etcd.)"""
        self._version = None
        self._wake.set()
        if self._until is not None:
            self._until.reschedule(0.0)

    async def run(self) -> None:
        """List and watch for ever."""
        # Two backoffs: the long pauses of an absence must not apply to an API server that answers 410 or 429.
        delays = partial(backoff, *RETRY_SECONDS, jitter=0.5)
        away, refused = delays(), delays()
        while True:
            try:
                await self.sync_once()
                refused = delays()
            except KubeError as error:
                self._failed(error)
                answered = self._answered or error.status is not None
                if answered:
                    away = delays()
                if self._stable:
                    refused = delays()
                asked = min(error.retry_after or 0.0, RETRY_SECONDS[1])
                self._is_away = not answered
                self._wake.clear()
                await at_most(max(next(refused if answered else away), asked), self._wake.wait())
                self._is_away = False

    async def sync_once(self) -> None:
        """List if needed, then watch until the server ends the watch. Raises KubeError."""
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
        """Replace the known objects by the listed ones; return the list's resourceVersion."""
        resource, page_size = self._resource, self._resource.page_size
        position: dict[str, str] = {}
        if resource.first_version and not self.synced.is_set():
            position = {"resourceVersion": resource.first_version}
        listed: dict[Key, T] = {}
        while True:
            query = {**resource.query, "limit": str(page_size), **position}
            try:
                page = await self._page(query)
            except AnswerTooLongError:
                if page_size == 1:
                    raise
                page_size = max(1, page_size // PAGE_SHRINKS)
                # From the API server's memory a list may come in one piece, whatever the limit.
                position.pop("resourceVersion", None)
                continue
            async for item in self._items(page):
                present = self._objects.get(item.key)
                # Keep the present copy of an unchanged object, to save memory during a list.
                listed[item.key] = present if present == item.value else item.value
            if not page.metadata.continue_:
                break
            if position.get("continue") == page.metadata.continue_:
                raise ApiUnavailableError(
                    f"the list of {resource.path} does not end: a page names itself as the next page"
                )
            position = {"continue": page.metadata.continue_}
        self._replace(listed)
        self.synced.set()
        self._gates.open(resource.name)
        log.info("%s listed: %d", resource.name, len(listed))
        return page.metadata.resource_version

    async def _page(self, query: Mapping[str, str]) -> objects.Page:
        timeout = deadlines.INFORMER_LIST_SECONDS
        if self._is_failing:
            await self._client.turn()
        body = await self._client.request("GET", self._resource.path, query=query, timeout=timeout)
        self._mark_connected()
        with self._decoding():
            return objects.decode_page(body)

    async def _items(self, page: objects.Page) -> AsyncIterator[Item[T]]:
        """Yield the well-formed objects of a page, which may have megabytes; lets other tasks run in between."""
        until = time.monotonic() + TURN_SECONDS
        for raw in page.items or ():
            if time.monotonic() > until:
                await asyncio.sleep(0)
                until = time.monotonic() + TURN_SECONDS
            if item := self._decode(raw):
                yield item

    async def _watch(self) -> None:
        query = {
            **self._resource.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(random.randint(*deadlines.INFORMER_WATCH_SECONDS)),
        }
        if self._is_failing:
            await self._client.turn()
        began = time.monotonic()
        lines = self._client.lines(
            self._resource.path, query, inactivity=deadlines.INFORMER_INACTIVITY_SECONDS, on_open=self._mark_connected
        )
        try:
            async with asyncio.timeout(None) as self._until, contextlib.aclosing(lines):
                async for line in lines:
                    self._heard = time.monotonic()
                    self._take(line)
                    self._refusals = 0
        except TimeoutError:
            log.info("%s: listed again", self._resource.name)
        finally:
            self._until = None
            lasted = time.monotonic() - began
            if self._answered and lasted >= STABLE_SECONDS:
                self._stable, self._is_failing, self._is_warned = True, False, False
        if lasted < SHORT_SECONDS:
            raise ApiUnavailableError(f"the API server ended the watch of {self._resource.path} at once")

    def _take(self, line: bytes) -> None:
        """Process one line of the watch. Raises KubeError."""
        with self._decoding():
            event = objects.decode_event(line)
        match event.type:
            case "ADDED" | "MODIFIED" | "DELETED":
                item = self._decode(event.object)
                if item is None:
                    return
                if event.type == "DELETED":
                    self._objects.pop(item.key, None)
                    self._forget(item.key, item.value)
                else:
                    self._put(item.key, item.value)
                self._version = item.version or self._version
            case "BOOKMARK":
                with self._decoding():
                    version = objects.decode_versioned(event.object).metadata.resource_version
                self._version = version or self._version
            case "ERROR":
                raise errors.from_watch_event(bytes(event.object), request=f"watch of {self._resource.path}")
            case _:
                log.debug("watch of %s: an event of type %r is ignored", self._resource.path, event.type)

    def _decode(self, raw: msgspec.Raw) -> Item[T] | None:
        """Return the object; None if it is malformed, so that one bad object does not hide the others."""
        try:
            return self._resource.decode(raw)
        except DECODE_ERRORS as error:
            name = ""
            with contextlib.suppress(*DECODE_ERRORS):
                metadata = objects.decode_versioned(raw).metadata
                name = f"{metadata.namespace}/{metadata.name}"
            log.warning("%s: the malformed object %s is ignored: %s", self._resource.name, name, error)
            return None

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except DECODE_ERRORS as error:
            raise ApiUnavailableError(
                f"{self._resource.path}: the answer is not that of a Kubernetes API server: {error}"
            ) from error

    def _replace(self, listed: dict[Key, T]) -> None:
        before, self._objects = self._objects, listed
        for key, value in listed.items():
            if before.get(key) is not value:
                self._report(self.changed, value)
        for key, value in before.items():
            present = listed.get(key)
            if present is None or self._resource.uid(present) != self._resource.uid(value):
                self._forget(key, value)
        for key in list(self._waiting):
            if key in listed:
                self._put(key, listed[key])

    def _put(self, key: Key, value: T) -> None:
        before, self._objects[key] = self._objects.get(key), value
        if before != value:
            self._report(self.changed, value)
        self._deleted.forget(key)
        self._answer_waiters(key, value, value)

    def _report(self, callback: Callable[[T], None], value: T) -> None:
        try:
            callback(value)
        except Exception:
            # A fault in what follows from a change must not end the watch.
            log.exception("%s: a change of %s could not be processed", self._resource.name, value)

    def _forget(self, key: Key, value: T) -> None:
        if key not in self._objects:
            self._deleted[key] = self._resource.uid(value)
            self._report(self.gone, value)
        self._answer_waiters(key, value, None)

    def _answer_waiters(self, key: Key, value: T, answer: T | None) -> None:
        """Give `answer` to the waiters for `key` whose predicate is true for `value`."""
        for predicate, future in self._waiting.get(key, ()):
            if not future.done() and predicate(value):
                future.set_result(answer)

    def _mark_connected(self) -> None:
        self._heard, self.problem, self._answered = time.monotonic(), "", True
        if not self.connected:
            self.connected = True
            self._on_connected()

    def _failed(self, error: KubeError) -> None:
        self.connected, self.problem = False, str(error)
        self._metrics.informer_errors.labels(self._resource.name).inc()
        if not self.synced.is_set():
            self._gates.close(self._resource.name, "; ".join(filter(None, (self.problem, error.advice))))
        # An expired resourceVersion is not an outage.
        is_news = not self._is_warned and not isinstance(error, GoneError)
        self._is_failing, self._is_warned = True, self._is_warned or is_news
        level = logging.WARNING if is_news else logging.DEBUG
        log.log(level, "%s: %s; retrying until it works", self._resource.name, error)
