"""The shim on upstream's daemon: its results in every version, its errors with their own words."""

from __future__ import annotations

import json
import pathlib
import typing

import pytest

from multus_daemon.spec.cni import result, versions

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Shim, Stub

VERBS = ["ADD", "CHECK", "STATUS", "GC"]
TEXT = "text/plain; charset=utf-8"


def http(body: bytes, status: str = "200 OK", content_type: str = TEXT) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


NETNS = "/run/netns/x"
RESULTS: dict[str, dict[str, typing.Any]] = {
    "usual": {
        "interfaces": [
            {"name": "veth1", "mac": "02:00:00:00:00:01", "mtu": 1400},
            {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": NETNS, "socketPath": "/s", "pciID": "0000:01:00.0"},
        ],
        "ips": [{"interface": 1, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.9", "mtu": 1300, "table": 0}],
    },
    "dual stack": {
        "interfaces": [{"name": "eth0", "sandbox": NETNS}],
        "ips": [
            {"interface": 0, "address": "fd00::2/64", "gateway": "fd00::1"},
            {"interface": 0, "address": "10.1.0.2/24"},
            {"interface": 0, "address": "10.2.0.2/24"},
        ],
        "routes": [{"dst": "::/0", "gw": "fd00::1"}, {"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "fd01::/64"}],
        "dns": {"nameservers": ["10.1.0.1", "fd00::1"], "domain": "web.example", "search": ["a", "b"]},
    },
    "only IPv6": {"ips": [{"address": "fd00::2/64"}]},
    "no address": {"interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": NETNS}]},
    "escaped": {"interfaces": [{"name": 'e\u2028"\\', "sandbox": "/n/é"}], "ips": [{"address": "10.1.0.2/24"}]},
    "nothing": {},
}


@pytest.mark.parametrize("asked", [*versions.SUPPORTED, ""])
@pytest.mark.parametrize("said", ["1.1.0", "1.0.0", None])
@pytest.mark.parametrize("name", RESULTS)
def test_result_in_the_version_that_was_asked_for(
    shim: Shim, daemon: Stub, name: str, said: str | None, asked: str
) -> None:
    fields = RESULTS[name] | ({"cniVersion": said} if said else {})
    daemon.answer(http(json.dumps({"Result": fields}).encode()))
    done = shim(conf={"cniVersion": asked or None})
    wanted_version = asked or "0.1.0"
    model = result.from_object(fields, "1.1.0")
    if not versions.at_least(wanted_version, "0.3.0") and not model.ips:
        assert done.error["code"] == 1
        assert done.error["msg"].startswith("cannot convert: no valid IP addresses")
        return
    wanted = result.to_object(model, wanted_version)
    assert (done.code, done.err) == (0, b""), done
    # An empty dns may be there or not.
    assert json.loads(done.out) | {"dns": fields.get("dns", {})} == wanted | {"dns": fields.get("dns", {})}
    if not versions.at_least(wanted_version, "1.0.0"):
        assert "dns" in json.loads(done.out)


@pytest.mark.parametrize("key", ["Result", "result", "RESULT"])
def test_case_of_the_key_does_not_matter(shim: Shim, daemon: Stub, key: str) -> None:
    daemon.answer(http(b' { "%s" : {"cniVersion":"1.1.0", "ips" : [ ] } } \n' % key.encode()))
    assert json.loads(shim().out) == {"cniVersion": "1.1.0", "ips": []}


def test_a_result_as_long_as_a_reply_may_be(shim: Shim, daemon: Stub) -> None:
    routes = [{"dst": f"10.{n >> 8 & 255}.{n & 255}.0/24", "gw": "10.0.0.1"} for n in range(65536)]
    fields = {"cniVersion": "1.1.0", "ips": [{"address": "10.0.0.2/8"}], "routes": routes}
    daemon.answer(http(json.dumps({"Result": fields}).encode()))
    assert json.loads(shim(conf={"cniVersion": "0.2.0"}).out)["ip4"]["routes"] == routes


def test_result_of_a_version_that_upstreams_daemon_never_answers(shim: Shim, daemon: Stub) -> None:
    daemon.answer(http(b'{"Result":{"cniVersion":"2.0.0"}}'))
    error = shim().error
    assert error["code"] == 1
    assert 'CNI version "2.0.0"' in error["msg"]


@pytest.mark.parametrize("verb", VERBS)
def test_plain_text_is_the_message(shim: Shim, daemon: Stub, verb: str) -> None:
    words = 'ContainerID:"c0ffee" ERRORED: error configuring pod [web/web-1] networking: no "lan"'
    daemon.answer(http(words.encode() + b"\n", "400 Bad Request"))
    assert shim(verb).error == {"code": 999, "msg": words}


@pytest.mark.parametrize("verb", VERBS)
def test_cni_error_keeps_code_and_details(shim: Shim, daemon: Stub, verb: str) -> None:
    body = b'{"code":50,"msg":"status \\"failed\\"","details":"d"}'
    daemon.answer(http(body, "400 Bad Request", "application/json"))
    assert shim(verb).error == {"code": 50, "msg": 'status "failed"', "details": "d"}


@pytest.mark.parametrize("content_type", [TEXT, "application/json"])
def test_del_that_failed_is_done_as_with_upstreams_shim(
    shim: Shim, daemon: Stub, content_type: str, tmp_path: pathlib.Path
) -> None:
    """Repeated it would fail for ever: that daemon forgets the container with its first DEL."""
    log = tmp_path / "shim.log"
    body = b"no IP\nranges" if content_type == TEXT else b'{"code":7,"msg":"no IP\\nranges"}'
    daemon.answer(http(body, "400 Bad Request", content_type))
    done = shim("DEL", conf={"logFile": str(log)})
    assert (done.code, done.out) == (0, b"")
    assert done.err.count(b"\n") == 1
    for text in (done.err, log.read_bytes()):
        assert b"counts as done" in text
        assert b"no IP\\nranges" in text
    assert not shim.spool.exists()
    assert shim("DEL", conf={"logToStderr": True}).err.count(b"\n") == 1


@pytest.mark.parametrize("code", ["", '"code":"7",', '"code":-7,', '"code":1e3,', '"code":99999999999,'])
def test_cni_error_whose_code_is_none(shim: Shim, daemon: Stub, code: str) -> None:
    daemon.answer(http(b'{%s"msg":"x"}' % code.encode(), "400 Bad Request", "application/json"))
    assert shim().error == {"code": 999, "msg": "x"}


def test_long_text_is_cut(shim: Shim, daemon: Stub) -> None:
    daemon.answer(http(b"x" * 1_000_000, "400 Bad Request"))
    assert shim().error["msg"] == "x" * 64 * 1024
