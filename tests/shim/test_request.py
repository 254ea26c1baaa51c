"""The shim sends these requests to the daemon."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import tempfile
import typing

import pytest

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Shim, Stub

VERBS = ["ADD", "DEL", "CHECK", "STATUS", "GC"]


@pytest.mark.parametrize("verb", VERBS)
def test_one_request_with_these_headers(shim: Shim, daemon: Stub, verb: str) -> None:
    assert shim(verb).code == 0
    (request,) = daemon.requests
    assert request.line == "POST /cni HTTP/1.1"
    headers = dict(request.headers)
    release = shim(None, env={}, command=[str(shim.binary), "--version"]).out.decode().split()[-1]
    assert headers.pop("user-agent") == f"multus-shim/{release}"
    assert headers == {
        "host": "dummy",
        "accept": "application/vnd.multus.cni-stdout",
        "content-type": "application/json",
        "content-length": str(len(request.body)),
        "connection": "close",
    }


def test_body_has_the_cni_variables_and_nothing_else(shim: Shim, daemon: Stub) -> None:
    wanted = shim.environment("ADD", CNI_ODD="x=y;z", CNI_EMPTY="", CNI_NETNS_OVERRIDE="0")
    env = wanted | {"PATH": "/usr/bin", "KUBECONFIG": "/secret", "cni_lower": "no", "XCNI_X": "no", "CNI": "no"}
    assert shim(env=env).code == 0
    body = json.loads(daemon.requests[0].body)
    assert set(body) == {"env", "config"}
    assert body["env"] == wanted


TRACE = {
    "TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "TRACESTATE": "vendor=1",
    "BAGGAGE": "user=a%20b",
}


@pytest.mark.parametrize("verb", VERBS)
def test_body_has_the_trace_of_the_caller(shim: Shim, daemon: Stub, verb: str) -> None:
    """As libcni passes it on: containernetworking/cni 1173."""
    wanted = shim.environment(verb, **TRACE)
    others = {"TRACEPARENTS": "no", "TRACE": "no", "BAGGAGE_": "no", "XBAGGAGE": "no", "tracestate": "no"}
    assert shim(env=wanted | others).code == 0
    assert json.loads(daemon.requests[0].body)["env"] == wanted


@pytest.mark.parametrize("name", TRACE)
def test_a_long_variable_of_a_trace_is_left_out(shim: Shim, daemon: Stub, name: str) -> None:
    for size in (8192, 8193):
        assert shim(env=shim.environment("ADD", **TRACE | {name: "x" * size})).code == 0
    kept, left_out = (json.loads(request.body)["env"] for request in daemon.requests)
    assert kept[name] == "x" * 8192
    assert left_out == {key: value for key, value in kept.items() if key != name}


class Doubled(dict[str, str]):
    """An environment in which some names occur twice; exec(3) takes what keys() and values() say, in that order."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def keys(self) -> list[str]:  # type: ignore[override]  # no view, as names are in it twice
        return [k for k, _ in self.pairs]

    def values(self) -> list[str]:  # type: ignore[override]  # no view, as names are in it twice
        return [v for _, v in self.pairs]


def test_of_equal_variables_the_first_is_checked_and_sent(shim: Shim, daemon: Stub) -> None:
    """getenv(3) returns the first; JSON readers would take the last, so only one may be in the body."""
    first = list(shim.environment("ADD").items())
    env = Doubled([("CNI_IFNAMES", "a b"), *first, ("CNI_COMMAND", "DEL"), ("CNI_IFNAME", "a b"), ("CNI_PATH", "")])
    with tempfile.TemporaryFile() as stdin:
        stdin.write(shim.config())
        stdin.seek(0)
        redirect = [(os.POSIX_SPAWN_DUP2, stdin.fileno(), 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        pid = os.posix_spawn(shim.binary, [str(shim.binary)], env, file_actions=redirect)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    body = daemon.requests[0].body
    assert json.loads(body)["env"] == {"CNI_IFNAMES": "a b"} | dict(first)
    assert body.count(b'"CNI_COMMAND"') == 1


@pytest.mark.parametrize(
    "tail", [b"", b"\n", b"\n\n", b" ", b"\t\r\n \n", pytest.param(b" " * 70_001, id="70 KB"), b"  \n"], ids=repr
)
def test_config_is_the_exact_stdin(shim: Shim, daemon: Stub, tail: bytes) -> None:
    stdin = b"\n " + shim.config(text='<&>"\\é\u2028') + tail
    assert shim(stdin=stdin).code == 0
    config = json.loads(daemon.requests[0].body)["config"]
    assert base64.b64decode(config, validate=True) == stdin


def test_invalid_utf8_in_stdin_is_passed_on_untouched(shim: Shim, daemon: Stub) -> None:
    stdin = shim.config()[:-1] + b',"x":"\xff\xed\xa0\x80"}'
    assert shim(stdin=stdin).code == 0
    assert base64.b64decode(json.loads(daemon.requests[0].body)["config"]) == stdin


@pytest.mark.parametrize(
    ("raw", "decoded"),
    [
        (b"\xff", "\ufffd"),
        (b"a\xc3", "a\ufffd"),
        (b"\xc3(", "\ufffd("),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate
        (b"\xc0\xaf", "\ufffd\ufffd"),  # an overlong form
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),  # past U+10FFFF
        ("é😀\u2028".encode(), "é😀\u2028"),
        (bytes(range(1, 32)) + b'"\\/<&>\x7f', "".join(map(chr, range(1, 32))) + '"\\/<&>\x7f'),
    ],
)
def test_any_bytes_in_a_value_stay_valid_json(shim: Shim, daemon: Stub, raw: bytes, decoded: str) -> None:
    env = {os.fsencode(k): os.fsencode(v) for k, v in shim.environment("ADD").items()} | {b"CNI_ARGS": raw}
    done = subprocess.run([shim.binary], input=shim.config(), env=env, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0
    assert json.loads(daemon.requests[0].body.decode("utf-8"))["env"]["CNI_ARGS"] == decoded


def test_large_stdin_and_environment(shim: Shim, daemon: Stub) -> None:
    stdin = shim.config(padding="x" * 5_000_000)
    assert shim(stdin=stdin, env=shim.environment("ADD", CNI_ARGS="<" * 100_000)).code == 0
    body = json.loads(daemon.requests[0].body)
    assert base64.b64decode(body["config"]) == stdin
    assert body["env"]["CNI_ARGS"] == "<" * 100_000


def test_stdin_at_and_past_its_limit(shim: Shim, daemon: Stub) -> None:
    limit = 16 * 1024 * 1024
    exact = shim.config().ljust(limit)
    assert shim(stdin=exact).code == 0
    error = shim(stdin=exact + b" ").error
    assert error["code"] == 5
    assert error["msg"] == f"error reading from stdin: the network configuration is longer than {limit} bytes"
    assert len(daemon.requests) == 1


@pytest.mark.parametrize("slashes", ["", "/", "///"])
def test_socket_directory_may_end_in_slashes(shim: Shim, daemon: Stub, slashes: str) -> None:
    assert shim(conf={"daemonSocketDir": f"{shim.socket_dir}{slashes}"}).code == 0


def test_closed_standard_descriptors_do_not_become_the_socket(shim: Shim, daemon: Stub) -> None:
    script = f'exec 1>&- 2>&-; exec "{shim.binary}"'
    result = shim(command=["/bin/sh", "-c", script])
    assert (result.code, result.out) == (1, b"")
    (request,) = daemon.requests
    assert re.match(rb'\{"env":\{"CNI_', request.body)
    assert shim(command=["/bin/sh", "-c", f'exec 0<&-; exec "{shim.binary}"']).error["code"] == 5
