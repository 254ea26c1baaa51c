"""Requests into types, results and errors into bodies: tables, and upstream's recorded exchanges."""

import base64
import json

import pytest

from multus_daemon.api import wire
from multus_daemon.pod.request import CniRequest
from multus_daemon.spec.cni.errors import CniError, InvalidEnvironmentError
from tests.unit.api.harness import EXCHANGES, STDOUT_TYPE, body, environment, netconf

NOT_FOR_US = {
    "no-cni-args/ADD": "required env variables [CNI_ARGS] missing",
    "args-without-pod/ADD": "missing K8S_POD_NAMESPACE",
}


def container_request(call: wire.Call) -> CniRequest:
    assert isinstance(call.request, CniRequest)
    return call.request


def refusal(data):
    with pytest.raises(CniError) as caught:
        wire.decode(data)
    return caught.value


@pytest.mark.parametrize(("record", "exchange"), EXCHANGES, ids=[record["name"] for record, _ in EXCHANGES])
def test_recorded_requests_decode_to_what_the_runtime_gave(record, exchange):
    data = exchange["request"]["body"].encode()
    scenario = record["name"].partition("/")[2]
    if scenario in NOT_FOR_US:
        assert refusal(data).msg == NOT_FOR_US[scenario]
        return
    call = wire.decode(data)
    env = record["env"]
    assert call.request.verb == env["CNI_COMMAND"]
    assert call.request.stdin == record["stdin"].encode()
    assert call.asked_version == (json.loads(record["stdin"]).get("cniVersion") or "0.1.0")
    if isinstance(call.request, CniRequest):
        assert call.request.container_id == env["CNI_CONTAINERID"]
        assert call.request.netns == env.get("CNI_NETNS", "")
        assert call.request.ifname == env["CNI_IFNAME"]
        assert f"K8S_POD_NAME={call.request.args.name}" in env.get("CNI_ARGS", "") or not call.request.args.has_pod


@pytest.mark.conformance("verbs-7", "verbs-8", "pods-24")
@pytest.mark.parametrize(
    ("data", "code", "start"),
    [
        (b"", 6, "request body: unexpected end of JSON input"),
        (b"{", 6, "request body: "),
        (b"{}{}", 6, "request body: "),
        (b"[]", 6, "request body: a JSON object is needed, not an array"),
        (b"null", 4, "required env variables [CNI_COMMAND] missing"),
        (b"{}", 4, "required env variables [CNI_COMMAND] missing"),
        (b'{"env":null}', 4, "required env variables [CNI_COMMAND] missing"),
        (b'{"env":[]}', 6, "request body: env: an object is needed"),
        (b'{"env":{"CNI_COMMAND":1}}', 6, "request body: env.CNI_COMMAND: a string is needed, not a number"),
        (b'{"env":{"CNI_COMMAND":null}}', 4, "required env variables [CNI_COMMAND] missing"),
        (b'{"env":{"CNI_COMMAND":"STATUS"}}', 6, "network configuration: unexpected end of JSON input"),
        (b'{"config":"%%%"}', 6, "request body: config: standard base64"),
        (b'{"config":"YQ"}', 6, "request body: config: standard base64"),
        (b'{"config":"\xc3\xa9"}', 6, "request body: config: standard base64"),
        (b'{"config":{}}', 6, "request body: config: a string is needed"),
        (b'{"interfaceAttributes":7}', 6, "request body: interfaceAttributes: an object is needed"),
        (b"[" * 100_000, 6, "request body: "),
        (body(CNI_NETNS="/a\0b"), 4, "CNI_NETNS contains a NUL"),
        (body("DEL", CNI_NETNS="/a\0b"), 4, "CNI_NETNS contains a NUL"),
        (body(conf=b""), 6, "network configuration: unexpected end of JSON input"),
        (body(conf=b"nonsense"), 6, "network configuration: "),
        (body("DEL", conf=b"nonsense"), 6, "network configuration: "),
        (body(conf=b"[]"), 6, "network configuration: a JSON object is needed"),
        (body(conf={"name": 7}), 6, "network configuration: name: a string is needed"),
        (body(conf={"cniVersion": "1.0.0"}), 7, "missing network name"),
        (body(conf=netconf(name="a/b")), 7, "invalid characters found in network name"),
        (body(conf=netconf("9.9.9")), 1, "incompatible CNI versions"),
        (body(conf=netconf("1")), 1, "incompatible CNI versions"),
    ],
)
def test_refusals(data, code, start):
    """Bodies and configurations; `tests.spec.requests` has the variables."""
    error = refusal(data)
    assert error.code == code
    assert error.msg.startswith(start)


@pytest.mark.weak_spot(60)
@pytest.mark.parametrize(
    "args",
    [
        "K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1;",
        "K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1;MAC=a=b",
        " K8S_POD_NAMESPACE = web ;; K8S_POD_NAME = web-1 ",
    ],
)
def test_lenient_arguments(args):
    request = container_request(wire.decode(body(CNI_ARGS=args)))
    assert (request.args.namespace, request.args.name, request.args.uid) == ("web", "web-1", "")


@pytest.mark.weak_spot(60)
@pytest.mark.parametrize("args", [None, "", "nonsense", "K8S_POD_NAME=a", "K8S_POD_NAMESPACE=../a;K8S_POD_NAME=b"])
def test_del_needs_no_pod(args):
    request = container_request(wire.decode(body("DEL", CNI_ARGS=args, CNI_NETNS=None)))
    assert not request.args.has_pod
    assert request.netns == ""


def test_del_takes_any_netns():
    assert container_request(wire.decode(body("DEL", CNI_NETNS="relative"))).netns == "relative"


@pytest.mark.parametrize("value", [None, ""])
def test_interface_name_has_a_default(value):
    assert container_request(wire.decode(body(CNI_IFNAME=value))).ifname == "eth0"


@pytest.mark.conformance("server-5")
@pytest.mark.parametrize("verb", ["STATUS", "GC"])
def test_node_verbs_need_only_the_configuration(verb):
    data = json.dumps({"env": {"CNI_COMMAND": verb}, "config": base64.b64encode(b'{"name":"a"}').decode()}).encode()
    assert wire.decode(data) == wire.Call(wire.NodeRequest(verb, b'{"name":"a"}'), "0.1.0")


def test_bodies_are_read_as_go_reads_them():
    config = base64.b64encode(b'{"NAME":"a","cniversion":"0.4.0"}\n').decode()
    data = json.dumps({"ENV": environment(), "Config": config[:8] + "\r\n" + config[8:], "unknown": [1]}).encode()
    call = wire.decode(data)
    assert call.request.stdin == b'{"NAME":"a","cniversion":"0.4.0"}\n'
    assert call.asked_version == "0.4.0"


def test_the_last_of_two_equal_keys_counts():
    data = b'{"env":{"CNI_COMMAND":"ADD"},' + body("DEL")[1:]
    assert wire.decode(data).request.verb == "DEL"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        (STDOUT_TYPE, True),
        (f"text/plain, {STDOUT_TYPE.upper()};q=1", True),
        (f"{STDOUT_TYPE}x", False),
    ],
)
def test_accept(accept, expected):
    assert wire.wants_stdout([accept]) is expected


def body_of(response):
    assert isinstance(response.body, bytes)
    return response.body


@pytest.mark.parametrize("stdout", [True, False])
def test_an_error_that_quotes_much_is_cut(stdout):
    error = InvalidEnvironmentError("m" * 1_000_000, "d" * 1_000_000)
    answer = wire.encode_error(error, stdout=stdout)
    shown = body_of(answer)
    assert len(shown) < 140_000
    fields = json.loads(shown)
    assert fields["code"] == 4
    assert fields["msg"].endswith("mm... (1000000 characters)")
    assert fields["details"].endswith("dd... (1000000 characters)")


def test_a_spooled_del_has_its_time():
    request = container_request(wire.decode_spooled(body("DEL"), 17.5))
    assert (request.verb, request.spooled) == ("DEL", 17.5)
    assert container_request(wire.decode(body("DEL"))).spooled == 0


@pytest.mark.parametrize("verb", ["ADD", "CHECK", "STATUS", "GC"])
def test_nothing_but_del_is_taken_from_the_spool(verb):
    with pytest.raises(InvalidEnvironmentError, match=f"^the spool has a {verb}"):
        wire.decode_spooled(body(verb), 17.5)
