"""The socket's JSON, read into typed requests and written from results and errors. `docs/protocol.md` describes it.

Reading follows Go's encoding/json (`cni.gojson`): upstream's shim and its other clients were written for that.
Everything that is wrong with a request is a `CniError` whose message begins with the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.spec.cni import args as cni_args
from multus_daemon.spec.cni import gojson, names, result, skel, versions
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    from_code,
)
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.nad import requests

STDOUT_TYPE: Final = "application/vnd.multus.cni-stdout"
"""Bodies of this type are for the plugin's stdout as they stand; a client that wants them says so in `Accept`."""
JSON_TYPE: Final = "application/json"

DEFAULT_IFNAME: Final = "eth0"
ERROR_TEXT_MAX: Final = 64 * 1024
_POD_NAME_MAX = 253
_REMEMBERED_MAX_BYTES: Final = 4 * 1024
_LEADS_ELSEWHERE: Final = re.compile(r"[/\\%?# ]")


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """One call that is about no container."""

    verb: Literal["STATUS", "GC"]
    stdin: bytes
    """The network configuration that the runtime gave, byte for byte."""


@dataclass(frozen=True, slots=True)
class Call:
    """One decoded request."""

    request: CniRequest | NodeRequest
    asked_version: str
    """The CNI version that an answer on stdout must have: that of the configuration, one of `versions.SUPPORTED`."""


# --- reading: the variables ------------------------------------------------------------------------------------------


def _container_id(value: str) -> None:
    if problem := names.container_id_problem(value):
        raise InvalidEnvironmentError(problem, value)


def _ifname(value: str) -> None:
    if problem := names.ifname_problem(value):
        raise InvalidEnvironmentError(problem, value)


def _absolute_path(value: str) -> None:
    if not value.startswith("/"):
        raise InvalidEnvironmentError("CNI_NETNS is no absolute path", repr(value))


def _anything(value: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Variable:
    name: str
    needed_by: frozenset[str]
    check: Callable[[str], None]
    """Raises InvalidEnvironmentError. Not called for an empty value, nor for a verb outside of `checked_for`."""
    checked_for: frozenset[str]
    default: str = ""


_ATTACHING = frozenset({"ADD", "CHECK"})
_CONTAINER_VERBS = _ATTACHING | {"DEL"}
# Variable x verb x validator, in the order in which the Go skeleton (`pkg/skel`) looks at them: it decides which error
# a call with several faults gets. A netns that is no path must not keep DEL from cleaning up. CNI_PATH is not read: the
# daemon has plugin directories of its own.
_VARIABLES: Final = (
    _Variable("CNI_CONTAINERID", _CONTAINER_VERBS, _container_id, _CONTAINER_VERBS),
    _Variable("CNI_NETNS", _ATTACHING, _absolute_path, frozenset({"ADD"})),
    _Variable("CNI_IFNAME", frozenset(), _ifname, _CONTAINER_VERBS, DEFAULT_IFNAME),
    _Variable("CNI_ARGS", _ATTACHING, _anything, frozenset()),
)


def decode(body: bytes) -> Call:
    """The call in the body of `POST /cni`.

    Raises CniError: 4 for the variables, 6 for what is no JSON of the right shape, 7 and 1 for the configuration.
    """
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
    return Call(request, asked_version(stdin))


def decode_spooled(body: bytes, written: float) -> Call:
    """The DEL in a file of the shim's spool, written at that Unix time in seconds.

    Raises CniError as `decode` does, and InvalidEnvironmentError for another verb: nothing else belongs there.
    """
    call = decode(body)
    if not isinstance(call.request, CniRequest) or call.request.verb != "DEL":
        raise InvalidEnvironmentError(f"a spooled {call.request.verb}", "the shim spools nothing but DEL")
    return replace(call, request=replace(call.request, spooled=written))


def decode_delegate(body: bytes) -> Call:
    """The call in the body of `POST /delegate`: ADD, DEL or CHECK of one network of a running container.

    Raises CniError as `decode` does. Of the configuration only the name is looked at: a DEL goes by what was stored,
    whatever has become of the configuration since.
    """
    env, stdin, attributes = _read(body)
    verb = env.get("CNI_COMMAND", "")
    if not verb:
        raise InvalidEnvironmentError("required env variables [CNI_COMMAND] missing")
    if verb not in _CONTAINER_VERBS:
        raise InvalidEnvironmentError(f"unknown CNI_COMMAND: {verb}", "known for /delegate are ADD, CHECK and DEL")
    call = _container_request(verb, env, stdin)
    # Clients that have no interface name send it empty; `eth0` would be the pod's own.
    ifname = IfName(env.get("CNI_IFNAME", ""))
    network, _ = _name_and_version(stdin)
    asked = {} if verb == "DEL" else _attributes(attributes)
    request = DelegateRequest(verb, call.container_id, call.netns, ifname, call.args, stdin, network=network, **asked)
    return Call(replace(request, netns_override=call.netns_override), versions.CURRENT)


def _read(body: bytes) -> tuple[dict[str, str], bytes, dict[str, Any]]:
    """The three keys of a request's body. Raises DecodingFailureError."""
    try:
        fields = gojson.loads(body)
        # `null` and a missing object are the same to a Go decoder.
        fields = {} if fields is None else fields
        if not isinstance(fields, dict):
            raise gojson.JsonError(f"a JSON object is needed, not {gojson.kind_of(fields)}")
        env = _strings(gojson.get_object(fields, "env") or {})
        stdin = gojson.get_bytes(fields, "config") or b""
        return env, stdin, gojson.get_object(fields, "interfaceAttributes") or {}
    except gojson.JsonError as error:
        raise DecodingFailureError(f"request body: {error}") from error


def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `interfaceAttributes` asks for. Raises DecodingFailureError, InvalidNetworkConfigError."""
    try:
        return {
            "ips": requests.ips(fields),
            "mac": requests.mac(fields),
            "cni_args": gojson.get_object(fields, "cni-args"),
        }
    except gojson.JsonError as error:
        raise DecodingFailureError(f"request body: interfaceAttributes: {error}") from error
    except CniError as error:
        raise error.with_context("interfaceAttributes") from error


def _strings(fields: Mapping[str, object]) -> dict[str, str]:
    """An object of strings as a Go map takes it: keys as they are, null is the empty string. Raises JsonError."""
    strings = {}
    for key, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise gojson.JsonError(f"env.{key}: a string is needed, not {gojson.kind_of(value)}")
        strings[key] = value or ""
    return strings


def _container_request(verb: str, env: Mapping[str, str], stdin: bytes) -> CniRequest:
    values: dict[str, str] = {}
    missing = []
    for variable in _VARIABLES:
        # An empty variable counts as a missing one, as in the Go skeleton.
        value = env.get(variable.name) or variable.default
        if not value and verb in variable.needed_by:
            missing.append(variable.name)
        if "\0" in value:
            raise InvalidEnvironmentError(f"{variable.name} holds a NUL, which no environment variable can")
        if value and verb in variable.checked_for:
            variable.check(value)
        values[variable.name] = value
    if missing:
        raise InvalidEnvironmentError(f"required env variables [{','.join(missing)}] missing")
    return CniRequest(
        verb=verb,
        container_id=ContainerId(values["CNI_CONTAINERID"]),
        netns=values["CNI_NETNS"],
        ifname=IfName(values["CNI_IFNAME"]),
        args=_pod(verb, values["CNI_ARGS"]),
        stdin=stdin,
        netns_override=skel.netns_override(env),
    )


def _pod(verb: str, text: str) -> cni_args.KubernetesArgs:
    """The pod that CNI_ARGS names.

    DEL needs none: the container's record says what to undo, and the runtime repeats a refused DEL for as long as the
    pod exists. Raises InvalidEnvironmentError for the other verbs.
    """
    try:
        pod = cni_args.kubernetes(text)
        for key, value in (
            ("K8S_POD_NAMESPACE", pod.namespace),
            ("K8S_POD_NAME", pod.name),
            ("K8S_POD_UID", pod.uid),
        ):
            if not value and key != "K8S_POD_UID":
                raise InvalidEnvironmentError(f"missing {key}", "CNI_ARGS must name the pod")
            if not _is_path_segment(value):
                raise InvalidEnvironmentError(f"CNI_ARGS: {key} is no name that Kubernetes gives", repr(value[:300]))
    except InvalidEnvironmentError:
        if verb != "DEL":
            raise
        return cni_args.KubernetesArgs(Namespace(""), PodName(""), PodUid(""), "", ())
    return pod


def _is_path_segment(value: str) -> bool:
    """False for what would lead elsewhere in the path of a URL or a file; kinder than Kubernetes' own rule."""
    return (
        len(value) <= _POD_NAME_MAX
        and value not in (".", "..")
        # Of what is white space only the blank is printable.
        and value.isprintable()
        and not _LEADS_ELSEWHERE.search(value)
    )


def asked_version(stdin: bytes) -> str:
    """The CNI version that the configuration asks for, "0.1.0" where it says none.

    Checks what every CNI plugin checks first. Raises DecodingFailureError (6), InvalidNetworkConfigError (7) for the
    name and IncompatibleVersionError (1).
    """
    _, version = _name_and_version(stdin)
    if not versions.is_supported(version):
        supported = " ".join(f'"{known}"' for known in versions.SUPPORTED)
        raise IncompatibleVersionError(
            "incompatible CNI versions", f'config is "{version}", plugin supports [{supported}]'
        )
    return version


def _name_and_version(stdin: bytes) -> tuple[str, str]:
    """Name, checked, and version, unchecked, of a configuration. Raises codes 6 and 7."""
    return (_read_before if len(stdin) <= _REMEMBERED_MAX_BYTES else _read_name_and_version)(stdin)


def _read_name_and_version(stdin: bytes) -> tuple[str, str]:
    try:
        fields = gojson.loads_object(stdin)
        name = gojson.get_str(fields, "name") or ""
        version = gojson.get_str(fields, "cniVersion") or versions.IMPLIED
    except gojson.JsonError as error:
        raise DecodingFailureError(f"network configuration: {error}") from error
    if problem := names.network_name_problem(name):
        raise InvalidNetworkConfigError(problem, name)
    return name, version


# The node's own configuration, for every pod.
_read_before = lru_cache(maxsize=16)(_read_name_and_version)


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, Content-Type (empty: none) and body of a reply."""

    status: int
    content_type: str
    body: bytes


def wants_stdout(accept: str) -> bool:
    """True where the `Accept` header names the type of the native shim; no other client does."""
    return any(item.partition(";")[0].strip().lower() == STDOUT_TYPE for item in accept.split(","))


def encode_result(made: result.Result, version: str, *, stdout: bool) -> Answer:
    """The answer to an ADD. Raises IncompatibleVersionError where the result can't be told in `version`.

    Clients other than the native shim convert by themselves: they get the newest version, whatever was asked.
    """
    if stdout:
        return Answer(200, STDOUT_TYPE, result.to_stdout(made, version))
    return Answer(200, JSON_TYPE, gojson.dumps({"Result": result.to_object(made, versions.CURRENT)}))


def encode_done(*, stdout: bool) -> Answer:
    """The answer to a verb that has no result."""
    return Answer(200, STDOUT_TYPE if stdout else "", b"")


def encode_error(error: CniError, *, stdout: bool, status: int = 400) -> Answer:
    """The answer to any verb that failed; upstream's clients know no status but 400.

    Message and details quote what came from outside: each is cut after `ERROR_TEXT_MAX` characters.
    """
    error = from_code(error.code, _cut(error.msg), _cut(error.details))
    if stdout:
        return Answer(status, STDOUT_TYPE, error.to_stdout())
    return Answer(status, JSON_TYPE, error.to_json())


def _cut(text: str) -> str:
    return text if len(text) <= ERROR_TEXT_MAX else f"{text[:ERROR_TEXT_MAX]}... ({len(text)} characters)"
