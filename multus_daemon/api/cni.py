"""`POST /cni` and `POST /delegate`: one verb for one caller, in a task with a deadline; one function for all errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias, TypeVar

from aiohttp import web

from multus_daemon import deadlines, logs
from multus_daemon.api import callers, wire
from multus_daemon.api import limit as requests
from multus_daemon.metrics import Metrics
from multus_daemon.plugins.limit import RANKS
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.runtime import portal, slots, timeline
from multus_daemon.runtime.aio import SharedCalls, TaskGroupOfRequests
from multus_daemon.runtime.deadline import Deadline, ExpiredError
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni import versions
from multus_daemon.spec.cni.args import KubernetesArgs
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidNetworkConfigError,
    IoFailureError,
    TryAgainLaterError,
    from_code,
)
from multus_daemon.spec.cni.result import Result

T = TypeVar("T")

log = logging.getLogger(__name__)

_DECODED_HERE: Final = 64 * 1024
"""Bytes of a request that take a millisecond to read, at most; that of an ordinary pod has two thousand."""
_RANKS: Final = {**RANKS, "CHECK": RANKS["ADD"]}
"""As for plugins, but CHECK beside ADD: where memory is scarce all wait here, and it would come behind every ADD."""
# How often a drain looks whether the last request has ended, in seconds.
_DRAIN_STEP = 0.02


class Verbs(Protocol):
    """What the socket needs from the engine. Every method raises CniError; anything else is a fault of the program.

    They block, each call in a thread of its own. One whose deadline (`runtime.deadline`) is over, or which is to stop,
    first undoes what it did, then raises Interrupted.
    """

    def add(self, request: CniRequest) -> Result:
        """Attach the pod to its networks, all or none."""
        ...

    def delete(self, request: CniRequest) -> None:
        """Detach the container; what is absent counts as done, can be repeated."""
        ...

    def check(self, request: CniRequest) -> None:
        """Is everything still as ADD left it?"""
        ...

    def add_network(self, request: DelegateRequest) -> Result:
        """Attach one network to a running container."""
        ...

    def remove_network(self, request: DelegateRequest) -> None:
        """Detach one network from a container; what is absent counts as done, can be repeated."""
        ...

    def check_network(self, request: DelegateRequest) -> None:
        """Is one network still as its ADD left it?"""
        ...

    def status(self, stdin: bytes) -> None:
        """Could an ADD be served now?"""
        ...

    def gc(self, stdin: bytes) -> None:
        """Remove what belongs to no attachment that the configuration names as valid."""
        ...


class DeadlineExceededError(TryAgainLaterError):
    """A verb was stopped because it took too long."""


class StoppedError(TryAgainLaterError):
    """The daemon stops, and nothing of the request stays: its successor can be asked at once."""


class ClientGoneError(TryAgainLaterError):
    """The client hung up before its request began, so nothing was done for it."""


@dataclass(frozen=True, slots=True)
class Client:
    """The one that waits for the answer."""

    stdout: bool = False
    """True for the native shim, which prints the body as it is."""
    is_gone: Callable[[], bool] = lambda: False
    plugin_pid: int = 0
    """Process id, if a plugin that this daemon runs has sent the request."""


NO_CLIENT: Final = Client()
"""The requests of the spool have no client that waits."""

Hurry: TypeAlias = Callable[[str], contextlib.AbstractContextManager[None]]
"""Called with a container's id; while the context lives, what runs for the container goes before other work."""


class CniApi:
    """The CNI verbs behind HTTP."""

    def __init__(
        self,
        verbs: Verbs,
        metrics: Metrics,
        *,
        verb_seconds: Mapping[str, float] = deadlines.VERB_SECONDS,
        body_timeout: float = deadlines.BODY_SECONDS,
        at_once: int = requests.MOST,
        at_once_reason: str = "connectionLimit",
        hurry: Hurry | None = None,
        timelines: Timelines | None = None,
        asked_networks: Callable[[KubernetesArgs], str] = lambda _: "",
    ) -> None:
        """`verb_seconds`: by CNI_COMMAND; `body_timeout`: seconds for the whole body of a request to arrive.

        `at_once`: how many verbs, and `at_once_reason`, for people; `hurry`: used while a DEL of a container is there,
        since it waits for what runs of it. `asked_networks`: what tells the networks of a pod from those of another, as
        far as that is known; it neither blocks nor raises.
        `timelines`: where each request is kept, for those who ask later.
        """
        self._verbs = verbs
        self._metrics = metrics
        self._verb_seconds = verb_seconds
        self._body_timeout = body_timeout
        kept = requests.kept(at_once)
        self._slots = slots.Slots(at_once, reserved=kept, kept=kept, name="requests")
        self._at_once_reason = at_once_reason
        self._hurry = hurry
        self._timelines = Timelines() if timelines is None else timelines
        self._asked_networks = asked_networks
        self._requests = TaskGroupOfRequests()
        # Runtimes ask every 5 s, CRI-O at its start every 0.5 s: a plugin that hangs does so once.
        self._status = SharedCalls()
        self._closed = False

    @property
    def running(self) -> int:
        """How many verbs are running."""
        return len(self._requests)

    @property
    def load(self) -> dict[str, int]:
        """How many requests are worked on, wait for that, and may be worked on at once."""
        return {"running": self._slots.running, "waiting": self._slots.waiting, "limit": self._slots.size}

    async def handle(self, request: web.Request) -> web.Response:
        """The handler of `POST /cni`. Every failure is a CNI error in the body of a 400."""
        stdout = wire.wants_stdout(",".join(request.headers.getall("Accept", ())))
        try:
            answer = await self.call(await self._body(request), client=_client(request, stdout=stdout))
        except StoppedError as error:
            # Only the native shim knows what to do with this status.
            answer = wire.encode_error(error, stdout=stdout, status=503 if stdout else 400)
        except CniError as error:
            answer = wire.encode_error(error, stdout=stdout)
        return to_response(answer)

    async def handle_delegate(self, request: web.Request) -> web.Response:
        """The handler of `POST /delegate`. Always JSON: its clients are no plugins."""
        try:
            body = await self._body(request)
            answer = await self.call(body, client=_client(request), decode=wire.decode_delegate)
        except CniError as error:
            answer = wire.encode_error(error, stdout=False)
        return to_response(answer)

    async def call(
        self, body: bytes, *, client: Client = NO_CLIENT, decode: Callable[[bytes], wire.Call] = wire.decode
    ) -> wire.Answer:
        """Serve one request body; also the way in for requests that the shim left in its spool.

        A verb that has begun goes on without its client and without the caller; one that waits for its turn does not
        begin once the client is gone. Raises CniError and nothing else.
        """
        try:
            # A large one takes longer to read than others may wait for the loop.
            if len(body) <= _DECODED_HERE:
                call = decode(body)
            else:
                call = await portal.run(Deadline(), functools.partial(decode, body), name="decode")
        except (CniError, NoThreadError) as error:
            failure = to_cni_error(error)
            log.error("CNI request refused: %s", failure)
            raise failure from None
        request = call.request
        names = {"verb": request.verb}
        if isinstance(request, CniRequest):
            pod = f"{request.args.namespace}/{request.args.name}" if request.args.has_pod else ""
            names |= {"container": request.container_id, "ifname": request.ifname, "pod": pod}
        if isinstance(request, DelegateRequest):
            names |= {"network": request.network}
        with logs.fields(**names):
            if client.plugin_pid:
                _refuse_plugin(request.verb, client.plugin_pid)
                return wire.encode_done(stdout=client.stdout)
            self._refuse_when_closed(request.verb)
            return await self._requests.run(self._work(call, client, names), name=" ".join(names.values()))

    async def drain(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for what runs and still comes in, then cancel it; the number of those cancelled.

        Requests that were accepted before the socket went are served as ever; what comes after the wait is refused.
        """
        end = time.monotonic() + timeout
        while self._requests and time.monotonic() < end:  # noqa: ASYNC110  once in a life, and new ones may come in
            await asyncio.sleep(_DRAIN_STEP)
        self._closed = True
        return await self._requests.drain(0)

    def _refuse_when_closed(self, verb: str) -> None:
        if self._closed:
            log.info("CNI %s refused: shutting down", verb)
            raise StoppedError("multus daemon is shutting down", "its successor will take the request")

    async def _body(self, request: web.Request) -> bytes:
        """The whole body. Raises CniError, having logged it, since no request is known yet."""
        try:
            async with asyncio.timeout(self._body_timeout):
                return await request.read()
        except TimeoutError:
            error: CniError = IoFailureError(
                f"the request's body did not arrive within {self._body_timeout:g} s", "does the client still run?"
            )
        except web.HTTPRequestEntityTooLarge:
            error = DecodingFailureError(f"the request's body is larger than {request.client_max_size} bytes")
        except Exception as cause:
            # A cut connection, bad chunks or bad compression: the client's fault, and aiohttp has no one base for it.
            error = IoFailureError(f"the request's body can't be read: {type(cause).__name__}: {cause}")
        log.error("CNI request refused: %s", error)
        raise error

    async def _work(self, call: wire.Call, client: Client, names: Mapping[str, str]) -> wire.Answer:
        """Serve `call` and write its two log lines; the task of the request. Raises CniError and nothing else.

        `names`: what it is about, by the log's fields.
        """
        verb = call.request.verb
        started = time.monotonic()
        log.info("CNI %s started", verb)
        failure: CniError | None = None
        traceback: BaseException | None = None
        # What is of no container nobody asks for later.
        with self._timelines.of(names, keep="container" in names) as kept:
            try:
                with slots.one_turn(), self._hurried(call.request):
                    return await self._perform(call, client)
            except (Exception, asyncio.CancelledError) as error:
                failure = to_cni_error(error)
                kept.end((failure.code, str(failure)))
                traceback = None if isinstance(error, CniError | NoThreadError | asyncio.CancelledError) else error
                if told := _with_command(failure, call.request):
                    raise told from error
                if failure is error:
                    raise
                raise failure from error
            finally:
                self._finish(verb, time.monotonic() - started, failure, traceback)

    def _hurried(self, request: CniRequest | wire.NodeRequest) -> contextlib.AbstractContextManager[None]:
        if self._hurry is not None and request.verb == "DEL" and isinstance(request, CniRequest):
            return self._hurry(request.container_id)
        return contextlib.nullcontext()

    async def _admitted(self, request: CniRequest | wire.NodeRequest) -> slots.Slot:
        """A place among those that are worked on. Raises TryAgainLaterError (11) where none was to be had in time."""
        verb = request.verb
        key, groups = "", ("", "")
        if isinstance(request, CniRequest):
            network = request.network if isinstance(request, DelegateRequest) else self._asked_networks(request.args)
            key, groups = request.container_id, (request.args.namespace, network)
        patience = deadlines.REQUEST_WAIT_SECONDS[verb]
        try:
            with self._metrics.queued(verb):
                slot = await self._slots.take(key, _RANKS[verb], patience, groups)
        except slots.NoSlotError as error:
            share = f"its namespace or networks have the {error.share} that they may have; " if error.share else ""
            raise TryAgainLaterError(
                f"node is busy: {verb} has waited {patience:g} s to begin, with {error.waiting} "
                f"requests waiting and at most {self._slots.size} worked on at once",
                f"{share}the number comes from {self._at_once_reason}; raise the limits of the daemon's pod, or "
                "connectionLimit",
            ) from error
        timeline.note("its turn has come")
        return slot

    def _finish(self, verb: str, seconds: float, failure: CniError | None, traceback: BaseException | None) -> None:
        if failure is None:
            outcome = "success"
        else:
            outcome = "deadline" if isinstance(failure, DeadlineExceededError) else "error"
        self._metrics.verb(verb, outcome, seconds)
        with logs.fields(outcome=outcome, seconds=f"{seconds:.3f}", code=failure.code if failure else None):
            if failure is None:
                log.info("CNI %s finished", verb)
            else:
                log.error("CNI %s failed: %s", verb, failure, exc_info=traceback)

    async def _perform(self, call: wire.Call, client: Client) -> wire.Answer:
        request = call.request
        if isinstance(request, wire.NodeRequest):
            verb = self._verbs.status if request.verb == "STATUS" else self._verbs.gc
            await self._limited(request, functools.partial(verb, request.stdin), client)
        elif isinstance(request, DelegateRequest):
            return await self._plug(request, client)
        elif request.verb == "ADD":
            made = await self._limited(request, functools.partial(self._verbs.add, request), client)
            return await self._tell(request, made, call.asked_version, client.stdout)
        elif request.verb == "DEL":
            await self._limited(request, functools.partial(self._verbs.delete, request), client)
        else:
            await self._limited(request, functools.partial(self._verbs.check, request), client)
        return wire.encode_done(stdout=client.stdout)

    async def _plug(self, request: DelegateRequest, client: Client) -> wire.Answer:
        if request.verb == "ADD":
            made = await self._limited(request, functools.partial(self._verbs.add_network, request), client)
            return wire.encode_result(made, versions.CURRENT, stdout=False)
        verb = self._verbs.remove_network if request.verb == "DEL" else self._verbs.check_network
        await self._limited(request, functools.partial(verb, request), client)
        return wire.encode_done(stdout=False)

    async def _tell(self, request: CniRequest, made: Result, version: str, stdout: bool) -> wire.Answer:
        """The answer to an ADD; where its result can't be told, the ADD is undone, since to the runtime it failed."""
        try:
            return wire.encode_result(made, version, stdout=stdout)
        except CniError as error:
            undo = replace(request, verb="DEL")
            try:
                await self._limited(undo, functools.partial(self._verbs.delete, undo), NO_CLIENT)
            except CniError as second:
                raise error.with_context(f"and undoing the ADD failed: {second}") from second
            raise

    async def _limited(self, request: CniRequest | wire.NodeRequest, work: Callable[[], T], client: Client) -> T:
        """Begin `work` in its turn, in a thread of its own, and wait for it; both as long as its verb may take.

        Raises DeadlineExceededError once it has undone its part, ClientGoneError instead of beginning for nobody.
        """
        seconds = self._verb_seconds[request.verb]
        limit = Deadline(seconds)
        try:
            async with asyncio.timeout(seconds):
                place = await self._admitted(request)
                try:
                    if client.is_gone():
                        raise ClientGoneError(f"the client hung up before its {request.verb} began")
                    with self._metrics.in_flight(request.verb):
                        if request.verb == "STATUS" and isinstance(request, wire.NodeRequest):
                            # Of several that share it, each waits for as long as it may; the run is stopped with the
                            # last.
                            return await self._status.of(
                                request.stdin, lambda: portal.run(Deadline(), work, name="STATUS")
                            )
                        return await portal.run(limit, work, name=request.verb)
                finally:
                    self._slots.give_back(place)
        except TimeoutError as error:
            # A STATUS may share the run of one that came before, whose time is over earlier.
            if not (limit.expired or isinstance(error, ExpiredError)):
                raise
            subject = f" of pod {request.args.namespace}/{request.args.name}" if isinstance(request, CniRequest) else ""
            raise DeadlineExceededError(
                f"{request.verb}{subject} took longer than {seconds:g} s", "the daemon's log has what it was doing"
            ) from error


def _with_command(error: CniError, request: CniRequest | wire.NodeRequest) -> CniError | None:
    """What the kubelet shows of a pod that can't start, with the command that says more; None for all else."""
    if request.verb != "ADD" or type(request) is not CniRequest or not request.args.has_pod:
        return None
    if isinstance(error, StoppedError):
        return None
    command = f"on the node, `multusctl explain {request.args.namespace}/{request.args.name}` says more"
    return from_code(error.code, error.msg, "; ".join(filter(None, (error.details, command))))


def to_cni_error(error: BaseException) -> CniError:
    """Return what the caller is told.

    A CniError is unchanged, a cancelled verb and a lack of threads are "try again", all else is code 999.
    """
    if isinstance(error, CniError):
        return error
    if isinstance(error, NoThreadError):
        return TryAgainLaterError(
            "the daemon can't start a thread for the request: the limit of processes or memory is reached",
            "raise the limits of the daemon's pod or service (pids.max, memory), or see what else uses them up",
        )
    if isinstance(error, asyncio.CancelledError):
        return StoppedError("multus daemon was stopped before the request was done", "what was begun is undone")
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return InternalError(f"internal error: {text}; see the daemon's log")


def _client(request: web.Request, *, stdout: bool = False) -> Client:
    caller = callers.peer(request)
    plugin_pid = caller.pid if caller and callers.is_plugin(caller.pid) else 0
    return Client(stdout, lambda: request.transport is None or request.transport.is_closing(), plugin_pid)


def _refuse_plugin(verb: str, pid: int) -> None:
    """Serve no verb to a plugin of this daemon: it would wait for itself, and take the places of other pods.

    A DEL is answered as done without doing anything, since its ADD was refused: with an error, the attachment to which
    the plugin belongs could never be removed. Raises InvalidNetworkConfigError (7) for the other verbs.
    """
    error = InvalidNetworkConfigError(
        "the request comes from a plugin that this daemon runs",
        f"process {pid}; a network's plugin must not call Multus: correct the network's configuration",
    )
    log.error("CNI %s not served: %s", verb, error)
    if verb != "DEL":
        raise error


def to_response(answer: wire.Answer) -> web.Response:
    """`answer` as aiohttp wants it."""
    headers = {"Content-Type": answer.content_type} if answer.content_type else None
    return web.Response(status=answer.status, body=answer.body or None, headers=headers)
