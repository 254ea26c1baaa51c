"""Decode the JSON of requests to the socket, and encode results and errors (docs/protocol.md).

Bodies are read as Go's encoding/json reads them (`cni.gojson`), as upstream's shim and other clients expect. Each error
of a request is a `CniError` whose message begins with the cause.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from aiohttp import web

from multus_daemon import deadlines
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.runtime import trace
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.runtime.trace import NO_TRACE, TraceContext
from multus_daemon.spec.cni import conf, gojson, names, result, versions
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    IoFailureError,
    Origin,
    TryAgainLaterError,
    UnexpectedError,
    as_on_host,
)
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.nad import requests

STDOUT_TYPE: Final = "application/vnd.multus.cni-stdout"
"""Media type of an answer that our shim prints unchanged, and requests in `Accept`."""
JSON_TYPE: Final = "application/json"

DEFAULT_IFNAME: Final = "eth0"
ERROR_TEXT_MAX: Final = 64 * 1024
_POD_NAME_MAX = 253
_LEADS_ELSEWHERE: Final = re.compile(r"[/\\%?# ]")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request that is about no container: GC or STATUS."""

    verb: Literal["STATUS", "GC"]
    stdin: bytes
    """The network configuration of the runtime, byte for byte."""


@dataclass(frozen=True, slots=True)
class Call:
    """One decoded request."""

    request: CniRequest | NodeRequest
    asked_version: str
    """CNI version of the configuration, one of `versions.SUPPORTED`; an answer that our shim prints has the same."""
    trace: TraceContext = NO_TRACE
    """Trace context that the caller sent."""


def _path_problem(value: str) -> str:
    if not value.startswith("/"):
        raise InvalidEnvironmentError("CNI_NETNS is not an absolute path", repr(value))
    return ""


_ATTACHING = frozenset({"ADD", "CHECK"})
_CONTAINER_VERBS = _ATTACHING | {"DEL"}
# Variable, verbs that need it, verbs that check it, check. The order is that of the Go skeleton (`pkg/skel`), which
# decides the error of a call with several faults. A bad netns must not prevent DEL. CNI_PATH is ignored: the daemon has
# plugin directories of its own.
_VARIABLES: Final[tuple[tuple[str, frozenset[str], frozenset[str], Callable[[str], str]], ...]] = (
    ("CNI_CONTAINERID", _CONTAINER_VERBS, _CONTAINER_VERBS, names.container_id_problem),
    ("CNI_NETNS", _ATTACHING, frozenset({"ADD"}), _path_problem),
    ("CNI_IFNAME", frozenset(), _CONTAINER_VERBS, names.ifname_problem),
    ("CNI_ARGS", _ATTACHING, frozenset(), str),
)


def decode(body: bytes) -> Call:
    """Read the body of `POST /cni`. Raises CniError: 4 (variables), 6 (malformed JSON), 7 and 1 (configuration)."""
    env, stdin, _ = _read(body)
    verb = env.get("CNI_COMMAND", "")
    match verb:
        case "ADD" | "DEL" | "CHECK":
            request: CniRequest | NodeRequest = _container_request(verb, env, stdin)
        case "STATUS" | "GC":
            request = NodeRequest("STATUS" if verb == "STATUS" else "GC", stdin)
        case "":
            raise InvalidEnvironmentError("required env variables [CNI_COMMAND] missing")
        case _:
            raise InvalidEnvironmentError(f"unknown CNI_COMMAND: {verb}", "known are ADD, CHECK, DEL, GC and STATUS")
    # Every CNI plugin checks name and version first.
    _, version = _name_and_version(stdin)
    conf.require_supported(version)
    return Call(request, version, trace.read(env))


def decode_spooled(body: bytes, written: float) -> Call:
    """Read the DEL in a file of the spool; `written`: when the shim wrote it, in Unix seconds.

    Raises CniError as `decode` does, and InvalidEnvironmentError for other verbs.
    """
    call = decode(body)
    if not isinstance(call.request, CniRequest) or call.request.verb != "DEL":
        raise InvalidEnvironmentError(f"the spool has a {call.request.verb}, and the shim spools only DEL")
    return replace(call, request=replace(call.request, spooled=written))


def decode_delegate(body: bytes) -> Call:
    """Read the body of `POST /delegate`: ADD, DEL or CHECK of one network of a running container.

    Raises CniError as `decode` does. Of the configuration only the name is checked, as a DEL uses the recorded one.
    """
    env, stdin, attributes = _read(body)
    verb = env.get("CNI_COMMAND", "")
    if not verb:
        raise InvalidEnvironmentError("required env variables [CNI_COMMAND] missing")
    if verb not in _CONTAINER_VERBS:
        raise InvalidEnvironmentError(f"unknown CNI_COMMAND: {verb}", "known for /delegate are ADD, CHECK and DEL")
    call = _container_request(verb, env, stdin)
    # Clients without an interface name send it empty; `eth0` would be the pod's own.
    ifname = IfName(env.get("CNI_IFNAME", ""))
    network, _ = _name_and_version(stdin)
    asked = {} if verb == "DEL" else _attributes(attributes)
    request = DelegateRequest(verb, call.container_id, call.netns, ifname, call.args, stdin, network=network, **asked)
    return Call(replace(request, netns_override=call.netns_override), versions.CURRENT, trace.read(env))


@conf.reads("request body", Origin.CALL)
def _read(body: bytes) -> tuple[dict[str, str], bytes, dict[str, Any]]:
    # A Go decoder also reads a null string as an empty one.
    fields = gojson.loads_object(body, nullable=True)
    env = gojson.get_object(fields, "env") or {}
    for key, value in env.items():
        if value is not None and not isinstance(value, str):
            raise gojson.JsonError(f"env.{key}: a string is needed, not {gojson.kind_of(value)}")
    stdin = gojson.get_bytes(fields, "config") or b""
    attributes = gojson.get_object(fields, "interfaceAttributes") or {}
    return {key: value or "" for key, value in env.items()}, stdin, attributes


@conf.reads("request body: interfaceAttributes", Origin.CALL)
def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {
            "ips": requests.ips(fields),
            "mac": requests.mac(fields),
            "cni_args": gojson.get_object(fields, "cni-args"),
        }
    except CniError as error:
        raise error.with_context("interfaceAttributes") from error


def _container_request(verb: str, env: Mapping[str, str], stdin: bytes) -> CniRequest:
    values: dict[str, str] = {}
    missing = []
    for name, needed_by, checked_for, problem_of in _VARIABLES:
        # The Go skeleton treats an empty variable as a missing one.
        value = env.get(name) or (DEFAULT_IFNAME if name == "CNI_IFNAME" else "")
        if not value and verb in needed_by:
            missing.append(name)
        if "\0" in value:
            raise InvalidEnvironmentError(f"{name} contains a NUL byte, which no environment variable can")
        if value and verb in checked_for and (problem := problem_of(value)):
            raise InvalidEnvironmentError(problem, value)
        values[name] = value
    if missing:
        raise InvalidEnvironmentError(f"required env variables [{','.join(missing)}] missing")
    return CniRequest(
        verb=verb,
        container_id=ContainerId(values["CNI_CONTAINERID"]),
        netns=values["CNI_NETNS"],
        ifname=IfName(values["CNI_IFNAME"]),
        args=_pod(verb, values["CNI_ARGS"]),
        stdin=stdin,
        netns_override=names.netns_override(env),
    )


def _pod(verb: str, text: str) -> names.KubernetesArgs:
    """Return the pod in CNI_ARGS, empty for a DEL with invalid ones. Raises InvalidEnvironmentError.

    DEL needs no pod, as it uses the container's record, and the runtime would repeat a refused DEL for ever. Names that
    would change the path of a URL or file are refused.
    """
    try:
        pod = names.kubernetes_args(text)
        for key, value in (("K8S_POD_NAMESPACE", pod.namespace), ("K8S_POD_NAME", pod.name), ("K8S_POD_UID", pod.uid)):
            if not value and key != "K8S_POD_UID":
                raise InvalidEnvironmentError(f"missing {key}", remedy="CNI_ARGS must name the pod")
            # Blanks are the only printable white space.
            is_segment = len(value) <= _POD_NAME_MAX and value not in (".", "..") and value.isprintable()
            if not is_segment or _LEADS_ELSEWHERE.search(value):
                raise InvalidEnvironmentError(f"CNI_ARGS: {key} is not a valid name of Kubernetes", repr(value[:300]))
    except InvalidEnvironmentError:
        if verb != "DEL":
            raise
        return names.KubernetesArgs(Namespace(""), PodName(""), PodUid(""), "", ())
    return pod


@conf.reads("network configuration", Origin.SETTINGS)
def _name_and_version(stdin: bytes) -> tuple[str, str]:
    """Return the name, which is valid, and the unchecked version of a configuration. Raises codes 6 and 7."""
    fields = gojson.loads_object(stdin)
    name = gojson.get_str(fields, "name") or ""
    version = gojson.get_str(fields, "cniVersion") or versions.IMPLIED
    if problem := names.network_name_problem(name):
        raise InvalidNetworkConfigError(problem, name, origin=Origin.SETTINGS)
    return name, version


async def read_body(request: web.Request, most: int) -> bytes:
    """Return the whole body. Raises DecodingFailureError if it is larger than `most` bytes, IoFailureError."""
    seconds = deadlines.BODY_SECONDS
    try:
        if (size := request.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(most, size)
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError as error:
        raise IoFailureError(
            f"the request's body did not arrive within {seconds:g} s", remedy="check that the client still runs"
        ) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise DecodingFailureError(f"the request's body is larger than {most} bytes", origin=Origin.CALL) from error
    except Exception as error:
        # A cut connection or bad chunks, for which aiohttp has no common base class.
        raise IoFailureError(
            f"the request's body can't be read: {type(error).__name__}: {error}", origin=Origin.CALL
        ) from error


def wants_stdout(accept: Iterable[str]) -> bool:
    """Return True if an `Accept` header names STDOUT_TYPE, which only our shim requests."""
    return any(item.partition(";")[0].strip().lower() == STDOUT_TYPE for value in accept for item in value.split(","))


def encode_result(made: result.Result, version: str, *, stdout: bool) -> web.Response:
    """Return the answer to an ADD. Raises IncompatibleVersionError if `version` can't express the result.

    `stdout`: for our shim. Other clients convert results themselves, and get the newest version.
    """
    if stdout:
        return web.Response(body=result.to_stdout(made, version), content_type=STDOUT_TYPE)
    answer = gojson.dumps({"Result": result.to_object(made, versions.CURRENT)})
    return web.Response(body=answer, content_type=JSON_TYPE)


def encode_done(*, stdout: bool) -> web.Response:
    """Return the answer to a verb without a result; `stdout`: the body is what the shim is to print."""
    return web.Response(content_type=STDOUT_TYPE if stdout else None)


def encode_error(error: CniError, *, stdout: bool = False, status: int = 400) -> web.Response:
    """Return the answer with an error; upstream's clients handle only status 400.

    Message and details quote input from outside, so each is cut after `ERROR_TEXT_MAX` characters.
    """
    error = error.changed(*map(_cut, (error.msg, error.details, error.advice)))
    if stdout:
        return web.Response(status=status, body=error.to_stdout(), content_type=STDOUT_TYPE)
    return web.Response(status=status, body=error.to_json(), content_type=JSON_TYPE)


def _cut(text: str) -> str:
    text = as_on_host(text)
    return text if len(text) <= ERROR_TEXT_MAX else f"{text[:ERROR_TEXT_MAX]}... ({len(text)} characters)"


class StoppedError(TryAgainLaterError):
    """The daemon stops, and the request has changed nothing: the caller can ask the next daemon at once."""


def to_cni_error(error: BaseException) -> CniError:
    """Return a CniError unchanged, "try again" for a cancelled verb or a lack of threads, else code 999."""
    if isinstance(error, CniError):
        return error
    if isinstance(error, NoThreadError):
        return TryAgainLaterError(
            "the daemon can't start a thread for the request: the limit of processes or memory is reached",
            remedy="raise the limits of the daemon's pod or service (pids.max, memory), or find what uses them up",
            origin=Origin.NODE,
        )
    if isinstance(error, asyncio.CancelledError):
        return StoppedError("multus daemon was stopped before the request was done", "its changes are undone")
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    unexpected = UnexpectedError(f"internal error: {text}; see the daemon's log")
    unexpected.__cause__ = error
    return unexpected
