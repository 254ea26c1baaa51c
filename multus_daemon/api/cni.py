"""`POST /cni` and `POST /delegate`: each verb runs in its own task with a deadline; all errors become CNI errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from multus_daemon import deadlines, logs
from multus_daemon.api import callers, wire
from multus_daemon.api.callers import NO_CLIENT, Client
from multus_daemon.api.verbs import Verbs
from multus_daemon.metrics import Metrics
from multus_daemon.metrics.declared import Outcome
from multus_daemon.node import allowances
from multus_daemon.node.spool import UndecodableEntryError
from multus_daemon.plugins.limit import RANKS
from multus_daemon.plugins.plugin import outcome_of
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.runtime import portal, slots, timeline, trace
from multus_daemon.runtime.aio import SharedCalls, TaskGroupOfRequests
from multus_daemon.runtime.deadline import Deadline, ExpiredError
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.runtime.timeline import Timelines
from multus_daemon.spec.cni.errors import MORE, CniError, Origin, TryAgainLaterError, fault
from multus_daemon.spec.cni.names import KubernetesArgs
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)

_DECODED_HERE: Final = 64 * 1024
"""Maximum bytes of a request that the event loop itself decodes, in a millisecond; most have 2,000."""
_RANKS: Final = {**RANKS, "CHECK": RANKS["ADD"]}
"""Ranks of requests: those of plugin calls, but CHECK has that of ADD, or it would always wait if memory is scarce."""
_SLOW_STAGE: Final = 0.1
"""The end line of a request names stages that took at least so many seconds."""
_DRAIN_STEP: Final = 0.02
"""Seconds between two checks of a drain whether the last request has ended."""
_FOR_THE_SUCCESSOR: Final = frozenset({"ADD", "CHECK", "GC"})
"""Verbs that a stopping daemon leaves to the next one. It holds back their answer, as our shim asks again at once."""


class DeadlineExceededError(TryAgainLaterError):
    """A verb was stopped at its deadline."""


class ClientGoneError(TryAgainLaterError):
    """The client hung up while its request waited for its turn, so the request does not begin."""


class CniApi:
    """Serves the CNI verbs over HTTP."""

    def __init__(
        self,
        verbs: Verbs,
        metrics: Metrics,
        *,
        at_once: int = allowances.MOST,
        at_once_reason: str = "connectionLimit",
        hurry: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
        timelines: Timelines | None = None,
        asked_networks: Callable[[KubernetesArgs], str] = lambda _: "",
        explain: str = "multusctl explain",
    ) -> None:
        """`at_once`: maximum number of concurrent verbs; `at_once_reason`: why.

        `hurry`: returns a context in which work for a container id precedes other work; used during a DEL, which waits
        for that work. `timelines`: keeps the steps of each request. `asked_networks`: returns a text that is equal for
        pods with the same networks, without blocking. `explain`: see `Engine`.
        """
        self._routes: Mapping[str, Callable[[Any], Result | None]] = {
            "ADD": verbs.add,
            "DEL": verbs.delete,
            "CHECK": verbs.check,
            "STATUS": verbs.status,
            "GC": verbs.gc,
        }
        self._delegate_routes: Mapping[str, Callable[[Any], Result | None]] = {
            "ADD": verbs.add_network,
            "DEL": verbs.remove_network,
            "CHECK": verbs.check_network,
        }
        self._metrics = metrics
        self._slow = verbs.slow
        kept = allowances.kept(at_once)
        self.slots = slots.Slots(at_once, reserved=kept, kept=kept, name="requests")
        self._at_once_reason = at_once_reason
        self._explain = explain
        self._hurry = hurry
        self._timelines = Timelines() if timelines is None else timelines
        self._asked_networks = asked_networks
        self._requests = TaskGroupOfRequests()
        # Runtimes ask every 5 s, CRI-O at its start every 0.5 s: they share one call of a plugin that hangs.
        self._status = SharedCalls()
        self.is_stopping = False
        self._awaited = 0.0
        self._closed = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        """Serve `POST /cni`. Every failure is a CNI error in the body of a 400."""
        client = callers.client_of(request, stdout=wire.wants_stdout(request.headers.getall("Accept", ())))
        return await self._respond(request, client, wire.decode)

    async def handle_delegate(self, request: web.Request) -> web.Response:
        """Serve `POST /delegate`. The answer is always JSON: its clients are not plugins."""
        return await self._respond(request, callers.client_of(request, stdout=False), wire.decode_delegate)

    async def _respond(
        self, request: web.Request, client: Client, decode: Callable[[bytes], wire.Call]
    ) -> web.Response:
        try:
            try:
                body = await wire.read_body(request, request.client_max_size)
            except CniError as error:
                _log_refused(error)
                raise
            return await self.call(body, client=client, decode=decode)
        except CniError as error:
            # Only the native shim handles 503.
            status = 503 if client.stdout and isinstance(error, wire.StoppedError) else 400
            return wire.encode_error(error, stdout=client.stdout, status=status)

    async def call(
        self, body: bytes, *, client: Client = NO_CLIENT, decode: Callable[[bytes], wire.Call] = wire.decode
    ) -> web.Response:
        """Serve one request body, from a client or from the shim's spool. Raises CniError only.

        A running verb continues if its client hangs up or this call is cancelled; a waiting verb needs its client.
        """
        try:
            # A large body would block the event loop for too long.
            if len(body) <= _DECODED_HERE:
                call = decode(body)
            else:
                call = await portal.run(Deadline(), functools.partial(decode, body), name="decode")
        except (CniError, NoThreadError) as error:
            failure = wire.to_cni_error(error)
            _log_refused(failure)
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
                refusal = callers.plugin_refused(client.plugin_pid)
                _log_refused(refusal)
                # DEL succeeds without any work: its ADD was refused, and an error would make the plugin's own
                # attachment impossible to remove.
                if request.verb != "DEL":
                    raise refusal
                return wire.encode_done(stdout=client.stdout)
            if self.is_stopping and client.stdout and request.verb in _FOR_THE_SUCCESSOR:
                await self._closed.wait()
            if self._closed.is_set():
                log.info("CNI %s refused: the daemon is shutting down", request.verb)
                raise wire.StoppedError("multus daemon is shutting down", "the next daemon will take the request")
            return await self._requests.run(self._serve(call, client, names), name=" ".join(names.values()))

    def container_of(self, body: bytes) -> str:
        """Return the container id in the body of a spooled request. Raises UndecodableEntryError."""
        try:
            request = wire.decode_spooled(body, 0.0).request
        except CniError as error:
            raise UndecodableEntryError(str(error)) from error
        return request.container_id if isinstance(request, CniRequest) else ""

    async def serve(self, body: bytes, written: float) -> None:
        """Serve a DEL of the spool (see `node.spool`). Raises CniError."""
        await self.call(body, decode=functools.partial(wire.decode_spooled, written=written))

    def announce(self) -> None:
        """Expect a request soon: upstream's shim has asked for the daemon's health, on another connection."""
        self._awaited = time.monotonic() + deadlines.ANNOUNCED_SECONDS

    async def settle(self, timeout: float) -> None:
        """Begin to stop: wait up to `timeout` seconds until no request runs, and none is announced.

        Requests that arrive meanwhile are served, but an ADD, CHECK or GC of our shim waits for the end of `drain`.
        """
        self.is_stopping = True
        end = time.monotonic() + timeout
        while (now := time.monotonic()) < end and (self._requests or now < self._awaited):  # noqa: ASYNC110  once in a life
            await asyncio.sleep(_DRAIN_STEP)

    async def drain(self, timeout: float) -> int:
        """Wait as `settle` does, then cancel the running requests; return how many. Later requests are refused."""
        await self.settle(timeout)
        self._closed.set()
        return await self._requests.drain(0)

    async def _serve(self, call: wire.Call, client: Client, names: Mapping[str, str]) -> web.Response:
        """Serve `call` as a task and log its start and end; `names` are its log fields. Raises CniError only."""
        request, verb = call.request, call.request.verb
        started = time.monotonic()
        failure = None
        ended: Outcome = "success"
        is_del = verb == "DEL" and isinstance(request, CniRequest)
        hurried = self._hurry(names["container"]) if is_del else contextlib.nullcontext()
        # Keep timelines of container requests only.
        with (
            self._timelines.of(names, keep="container" in names) as kept,
            trace.of(call.trace),
            logs.fields(request=kept.id, trace_id=call.trace.trace_id, span_id=call.trace.span_id),
        ):
            kept.trace_id = call.trace.trace_id
            log.debug("CNI %s started", verb)
            slow = None
            if verb == "ADD" and type(request) is CniRequest and request.args.has_pod:
                loop = asyncio.get_running_loop()
                slow = loop.call_later(deadlines.SLOW_ADD_SECONDS, self._slow, request, kept)
            try:
                with slots.one_turn(), hurried:
                    return await self._perform(call, client)
            except (Exception, asyncio.CancelledError) as error:
                failure = wire.to_cni_error(error)
                ended = _outcome(failure, error)
                kept.end((failure.code, str(failure)))
                shown = _with_command(failure, request, self._explain, kept.id)
                if shown is error:
                    raise
                raise shown from error
            finally:
                if slow:
                    slow.cancel()
                seconds = time.monotonic() - started
                # The exemplar names the request in the log and in traces.
                exemplar = {"request_id": kept.id} | ({"trace_id": kept.trace_id} if kept.trace_id else {})
                self._metrics.verb(verb, ended, seconds, kept.stages, exemplar)
                slow_ones = {name: spent for name, spent in tuple(kept.stages.items()) if spent >= _SLOW_STAGE}
                code = failure.code if failure else None
                with logs.fields(outcome=ended, seconds=seconds, code=code, stages=slow_ones):
                    if failure is None:
                        log.info("CNI %s finished", verb)
                    else:
                        log.error("%s", failure, exc_info=fault(failure))

    async def _perform(self, call: wire.Call, client: Client) -> web.Response:
        request = call.request
        routes = self._delegate_routes if isinstance(request, DelegateRequest) else self._routes
        argument = request.stdin if isinstance(request, wire.NodeRequest) else request
        made = await self._limited(request, functools.partial(routes[request.verb], argument), client)
        if made is None:
            return wire.encode_done(stdout=client.stdout)
        try:
            return wire.encode_result(made, call.asked_version, stdout=client.stdout)
        except CniError as error:
            # To the runtime the ADD failed, so it is undone.
            assert isinstance(request, CniRequest)
            undo = replace(request, verb="DEL")
            try:
                await self._limited(undo, functools.partial(self._routes["DEL"], undo), NO_CLIENT)
            except CniError as second:
                raise error.with_context(f"and undoing the ADD failed: {second}") from second
            raise

    async def _limited(
        self, request: CniRequest | wire.NodeRequest, work: Callable[[], Result | None], client: Client
    ) -> Result | None:
        """Wait for a slot, then run `work` in a thread of its own, within the deadline of its verb.

        Raises DeadlineExceededError after `work` has undone its part, ClientGoneError if the client hung up before it
        began, TryAgainLaterError if no slot was free in time.
        """
        verb, seconds = request.verb, deadlines.VERB_SECONDS[request.verb]
        end = time.monotonic() + seconds
        key, groups = "", ("", "")
        if isinstance(request, CniRequest):
            network = request.network if isinstance(request, DelegateRequest) else self._asked_networks(request.args)
            key, groups = request.container_id, (request.args.namespace, network)
        try:
            async with asyncio.timeout(seconds):
                with self._metrics.waiting.labels(verb).track_inprogress(), timeline.stage("queue"):
                    slot = await self.slots.take(key, _RANKS[verb], deadlines.REQUEST_WAIT_SECONDS[verb], groups)
                try:
                    timeline.note("its turn has come")
                    if client.is_gone():
                        raise ClientGoneError(f"the client hung up before its {verb} began")
                    with self._metrics.in_flight.labels(verb).track_inprogress():
                        if isinstance(request, wire.NodeRequest) and verb == "STATUS":
                            # Each caller waits within its own deadline; the shared call is stopped with the last.
                            run = functools.partial(portal.run, Deadline(), work, name=verb)
                            return await self._status.of(request.stdin, run)
                        # A waiting request has none: it takes 1.5 KB.
                        return await portal.run(Deadline(end - time.monotonic()), work, name=verb)
                finally:
                    self.slots.give_back(slot)
        except slots.NoSlotError as error:
            raise self._busy(verb, error) from error
        except TimeoutError as error:
            # The run of an earlier STATUS may expire first.
            if time.monotonic() < end and not isinstance(error, ExpiredError):
                raise
            subject = f" of pod {request.args.namespace}/{request.args.name}" if isinstance(request, CniRequest) else ""
            raise DeadlineExceededError(
                f"{verb}{subject} took longer than {seconds:g} s", "the daemon's log has its steps"
            ) from error

    def _busy(self, verb: str, error: slots.NoSlotError) -> TryAgainLaterError:
        share = f"its namespace or networks use all {error.share} slots of their share; " if error.share else ""
        return TryAgainLaterError(
            f"node is busy: {verb} has waited {deadlines.REQUEST_WAIT_SECONDS[verb]:g} s to begin, with "
            f"{error.waiting} requests waiting and at most {self.slots.size} running at once",
            remedy=f"{share}the number comes from {self._at_once_reason}; raise the limits of the daemon's pod, or "
            "connectionLimit",
            origin=Origin.NODE,
        )


def _outcome(failure: CniError, error: BaseException) -> Outcome:
    if isinstance(failure, wire.StoppedError | ClientGoneError):
        return "cancelled"
    return "timeout" if isinstance(failure, DeadlineExceededError) else outcome_of(error)


def _log_refused(error: CniError) -> None:
    """Log the failure of a request that was refused before its start was logged."""
    with logs.fields(outcome="refused", code=error.code):
        log.error("%s", error)


def _with_command(error: CniError, request: CniRequest | wire.NodeRequest, explain: str, request_id: str) -> CniError:
    """Add the command that explains the failure, and the request id, for the kubelet's message about a pod's start.

    Only errors of an ADD get them: Kubernetes counts equal messages together, and those of DEL, STATUS and hot-plug
    must stay equal. Each attempt of an ADD has another sandbox id in its message anyway.
    """
    if request.verb != "ADD" or type(request) is not CniRequest or not request.args.has_pod:
        return error
    if isinstance(error, wire.StoppedError):
        return error
    command = f"{MORE}{explain} {request.args.namespace}/{request.args.name}; request {request_id}"
    return error.changed(details=f"{error.details}{command}".removeprefix("; "))
