"""`POST /delegate`: what the hot-plug controller sends, and what it can read."""

import asyncio

import pytest

from multus_daemon.api import wire
from multus_daemon.pod.request import DelegateRequest
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result
from tests.unit.api.harness import PLUGGED_CONF, RESULT, delegate_body, exchange, exposition


@pytest.mark.parametrize(
    ("verb", "method"), [("ADD", "add_network"), ("DEL", "remove_network"), ("CHECK", "check_network")]
)
async def test_verbs(server, verbs, verb, method):
    reply = await exchange(server, "POST", "/delegate", delegate_body(verb))
    assert reply.status == 200
    [(called, request)] = verbs.calls
    assert (called, request.verb) == (method, verb)
    assert (request.container_id, request.ifname, request.netns) == ("sandbox123", "net2", "/var/run/netns/cni-xyz")
    assert (request.args.namespace, request.args.name, request.args.uid) == ("ns1", "p1", "uid-1")
    assert (request.stdin, request.network) == (PLUGGED_CONF, "n-b")
    if verb == "ADD":
        assert reply.headers["content-type"] == "application/json"
        assert reply.json["Result"]["interfaces"] == [
            {"mac": "02:00:00:00:00:01", "name": "eth0", "sandbox": "/run/netns/a"}
        ]
    else:
        assert (reply.body, reply.headers["content-length"]) == (b"", "0")


@pytest.mark.weak_spot(25)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("result", [Result(), RESULT])
async def test_an_add_is_never_answered_empty(server, verbs, native, result):
    """The controller reads the result without asking whether there is one, and dies where there is none."""
    verbs.result = result
    reply = await exchange(server, "POST", "/delegate", delegate_body(), native=native)
    assert reply.json["Result"]["cniVersion"] == "1.1.0"


async def test_attributes(server, verbs):
    asked = {"ips": ["10.9.0.2/24"], "mac": "02:00:00:00:00:09", "cni-args": {"a": 1}}
    await exchange(server, "POST", "/delegate", delegate_body(attributes=asked))
    request = verbs.calls[0][1]
    assert (request.ips, request.mac, request.cni_args) == (("10.9.0.2/24",), "02:00:00:00:00:09", {"a": 1})


@pytest.mark.parametrize("asked", [None, {}, {"cni-args": None}, {"ips": None, "mac": None}, {"ips": [], "mac": ""}])
async def test_attributes_that_ask_for_nothing(server, verbs, asked):
    await exchange(server, "POST", "/delegate", delegate_body(attributes=asked))
    request = verbs.calls[0][1]
    assert (request.ips, request.mac, request.cni_args) == ((), "", None)


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_interface_name_stays_empty(value):
    """`eth0` would be the pod's own."""
    request = wire.decode_delegate(delegate_body(CNI_IFNAME=value)).request
    assert isinstance(request, DelegateRequest)
    assert request.ifname == ""


@pytest.mark.parametrize("args", [None, "", "nonsense"])
def test_del_needs_no_pod_and_no_more_of_the_configuration_than_its_name(args):
    body = delegate_body("DEL", b'{"name":"n-b","plugins":7}', {"mac": "zz", "ips": 7}, CNI_ARGS=args, CNI_NETNS="")
    request = wire.decode_delegate(body).request
    assert isinstance(request, DelegateRequest)
    assert (request.network, request.netns, request.args.has_pod, request.ips) == ("n-b", "", False, ())


@pytest.mark.parametrize(
    ("data", "code", "start"),
    [
        (b"", 6, "request body: "),
        (b"null", 4, "required env variables [CNI_COMMAND] missing"),
        (b'{"interfaceAttributes":7}', 6, "request body: interfaceAttributes: an object is needed"),
        (delegate_body("STATUS"), 4, "unknown CNI_COMMAND: STATUS"),
        (delegate_body("GC"), 4, "unknown CNI_COMMAND: GC"),
        (delegate_body("add"), 4, "unknown CNI_COMMAND: add"),
        (delegate_body(CNI_ARGS=None), 4, "required env variables [CNI_ARGS] missing"),
        (delegate_body(CNI_ARGS="K8S_POD_NAME=p1"), 4, "missing K8S_POD_NAMESPACE"),
        (delegate_body(CNI_CONTAINERID="../x"), 4, "invalid characters in containerID"),
        (delegate_body(CNI_NETNS=""), 4, "required env variables [CNI_NETNS] missing"),
        (delegate_body(CNI_IFNAME="a/b"), 4, "interface name contains"),
        (delegate_body("DEL", CNI_IFNAME="a/b"), 4, "interface name contains"),
        (delegate_body(conf=b""), 6, "network configuration: "),
        (delegate_body(conf=b"[]"), 6, "network configuration: a JSON object is needed"),
        (delegate_body(conf=b'{"type":"macvlan"}'), 7, "missing network name"),
        (delegate_body("DEL", conf=b'{"name":"a/b"}'), 7, "invalid characters found in network name"),
        (delegate_body(attributes={"ips": "10.0.0.1"}), 6, "request body: interfaceAttributes: ips"),
        (delegate_body(attributes={"ips": ["x"]}), 7, "ips[0]: 'x' is neither"),
        (delegate_body(attributes={"mac": "zz"}), 7, "mac: 'zz' is not"),
        (delegate_body(attributes={"cni-args": []}), 6, "request body: interfaceAttributes: cni-args"),
    ],
)
@pytest.mark.parametrize("native", [False, True])
async def test_refusals(server, verbs, data, code, start, native):
    reply = await exchange(server, "POST", "/delegate", data, native=native)
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert (reply.json["code"], reply.json["msg"][: len(start)]) == (code, start)
    assert verbs.calls == []


async def test_an_error_is_told_with_its_code(server, verbs):
    verbs.error = CniError("no address left", "pool 10.0.0.0/30", code=101)
    reply = await exchange(server, "POST", "/delegate", delegate_body("DEL"))
    assert (reply.status, reply.json) == (
        400,
        {"code": 101, "msg": "no address left", "details": "pool 10.0.0.0/30"},
    )


async def test_a_wrong_method(server):
    reply = await exchange(server, "GET", "/delegate")
    assert (reply.status, reply.body) == (405, b"Method not allowed\n")


async def test_the_handler_has_its_own_label(server, metrics):
    await exchange(server, "POST", "/delegate", delegate_body())
    assert 'multus_server_request_total{code="200",handler="/delegate",method="post"} 1.0' in await exposition(metrics)


async def test_served_while_draining_and_refused_afterwards(api, verbs):
    verbs.gate.clear()
    running = asyncio.create_task(api.call(delegate_body("DEL"), decode=wire.decode_delegate))
    await verbs.begun()
    drained = asyncio.create_task(api.drain(5))
    await asyncio.sleep(0)
    late = asyncio.create_task(api.call(delegate_body(), decode=wire.decode_delegate))
    await asyncio.sleep(0)
    verbs.gate.set()
    await asyncio.gather(running, late, drained)
    assert [called for called, _ in verbs.calls] == ["remove_network", "add_network"]
    with pytest.raises(CniError, match="shutting down"):
        await api.call(delegate_body("DEL"), decode=wire.decode_delegate)
