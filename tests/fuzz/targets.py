"""Every reader of bytes from outside, as a function of one byte string: for fuzzing, and for the corpus.

A reader may refuse its input by the exceptions that its docstring names, and by no other. What it accepts must also
pass the next step that the daemon takes with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multus_daemon.api import wire
from multus_daemon.cluster.devices import read_checkpoint
from multus_daemon.cluster.kube import claims as kube_claims
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.errors import KubeError
from multus_daemon.metrics import Metrics
from multus_daemon.node.spool import SpoolReplay, UndecodableEntryError
from multus_daemon.plugins import cache, child, failure
from multus_daemon.pod import record_format, upstream
from multus_daemon.pod.request import CniRequest
from multus_daemon.spec.attachment import Invocation, Pod
from multus_daemon.spec.claims import Pools, allocation, unknown_pools
from multus_daemon.spec.cni import conf, gojson, names, result, versions
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.nad import device_info, network_status, selection
from multus_daemon.spec.netconf import load
from multus_daemon.spec.ports import DevicesUnavailableError
from tests import claims
from tests.counted import counted
from tests.following import followed_store

TURN_SECONDS = 0.05
"""Longest turn of the event loop."""
CONTAINER = ContainerId("c0ffee")
POD = Pod(Namespace("web"), PodName("web-1"), PodUid("u1"), {}, False, {})


@dataclass(frozen=True)
class Target:
    """One reader. `read` raises one of `declared` for what it refuses."""

    read: Callable[[bytes], object]
    declared: tuple[type[Exception], ...]


def _text(data: bytes) -> str:
    # The API server and our decoders let no other text through.
    return data.decode("utf-8", "replace")


# --- the socket and the spool ----------------------------------------------------------------------------------------


def _cni_body(data: bytes) -> None:
    for decode in (wire.decode, wire.decode_delegate):
        try:
            call = decode(data)
        except CniError as error:
            wire.encode_error(error, stdout=True)
            continue
        if isinstance(call.request, CniRequest):
            names.plugin_args(call.request.args)
        load(call.request.stdin, {"clusterNetwork": "cluster"})
        load(call.request.stdin, {})


def _cni_config(data: bytes) -> None:
    """The bytes as what the runtime gave to the shim on stdin."""
    _cni_body(json.dumps({**_call("ADD", {}), "config": base64.b64encode(data).decode()}).encode())


class _Spooled:
    """Everything that the replay of the spool needs; DELs that can be served are."""

    def container_of(self, body: bytes) -> str:
        try:
            request = wire.decode_spooled(body, 0.0).request
        except CniError as error:
            raise UndecodableEntryError(str(error)) from error
        return request.container_id if isinstance(request, CniRequest) else ""

    async def serve(self, body: bytes, written: float) -> None:
        wire.decode_spooled(body, written)

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        raise AssertionError("an entry is about no pod")

    def node_event(self, kind: str, reason: str, message: str) -> None:
        assert len(message) <= 1000


def _spool_entry(data: bytes) -> None:
    """The whole replay of a file: it ends served or set aside, and is never looked at again."""
    spooled, metrics = _Spooled(), Metrics()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        directory = Path(folder)
        (directory / "00000000000000000001-1.json").write_bytes(data)
        served = asyncio.run(SpoolReplay(directory, spooled.container_of, spooled.serve, spooled, metrics).replay())
        left = [path.name for path in directory.iterdir()]
        if left != ([] if served else ["rejected"]):
            raise AssertionError(f"served {served}, and there is {left}")
        assert counted(metrics.replays, outcome="error") == 0


# --- what the API server says ----------------------------------------------------------------------------------------


def _annotation(data: bytes) -> None:
    text = _text(data)
    for element in selection.parse(text, pod_namespace="web"):
        gojson.dumps(element.capability_args())
    selection.parse_default_network(text, default_namespace="kube-system")


def _network_status(data: bytes) -> None:
    entries = network_status.parse(_text(data))
    if len(data) < selection.ANNOTATION_MAX_BYTES:
        network_status.render(entries)


def _nad_config(data: bytes) -> None:
    config = conf.parse(data, default_name="web")
    for plugin in config.plugins:
        fields = conf.plugin_fields(config, plugin, capability_args={"mac": "00:00:5e:00:53:01"})
        if gojson.loads_object(conf.plugin_stdin(fields, None)) != fields:
            raise AssertionError("a process reads something else than a built-in is given")
        gojson.loads_object(conf.plugin_stdin(fields, {}))
    again = conf.with_plugin_fields(config, {}, {"a": 1})
    if [plugin.type for plugin in again.plugins] != [plugin.type for plugin in config.plugins]:
        raise AssertionError("cni-args have changed the plugins")


def _api_object(data: bytes) -> None:
    for decode in (objects.decode_pod, objects.decode_network, kube_claims.decode_slice, kube_claims.decode_claim):
        try:
            decode(data)
        except objects.DECODE_ERRORS:
            continue


async def _taken(data: bytes) -> None:
    store = await followed_store()
    for informer in (store.pods, store.networks):
        began = time.process_time()
        try:
            informer._take(data)
        except KubeError:
            continue
        finally:
            # The bytes of others stop nothing: each takes at most this, or as long as it takes to be decoded.
            took, began = time.process_time() - began, time.process_time()
            with contextlib.suppress(ValueError, RecursionError):
                json.loads(data)
            if took > max(TURN_SECONDS, 20 * (time.process_time() - began)):
                raise AssertionError(f"{len(data)} bytes stop the event loop for {took:.3f} s")


def _watch(data: bytes) -> None:
    """The bytes as a line of a watch, with all who follow the objects."""
    asyncio.run(_taken(data))


def _claims(data: bytes) -> None:
    """A claim and a slice, one a line, and what a pod gets by them."""
    first, _, second = data.partition(b"\n")
    try:
        claim = kube_claims.decode_claim(first)
        pools = Pools([kube_claims.decode_slice(second)] if second else [])
    except objects.DECODE_ERRORS:
        return
    if claim is not None:
        unknown_pools([claim], pools)
        allocation(POD, [claim], pools)


# --- files of the node -----------------------------------------------------------------------------------------------


def _store_record(data: bytes) -> None:
    """The file as it is, and its bytes as a record whose sum is right."""
    try:
        record_format.decode(data)
    except record_format.RecordFormatError:
        pass
    total = hashlib.sha256(data).hexdigest()
    found = record_format.decode(b'{"format":1,"sha256":"%s","record":%s}' % (total.encode(), data))
    if record_format.decode(record_format.encode(found)) != found:
        raise AssertionError("a record that was read is another when it has been written")


def _upstream_cache(data: bytes) -> None:
    record_format.encode(upstream.from_delegates(CONTAINER, data, (), 0.0))


def _result_cache(data: bytes) -> None:
    entry = cache.decode(data)
    cache.decode(entry.encode())
    for found in (upstream.from_entries(CONTAINER, [entry]), upstream.from_delegates(CONTAINER, b"[]", [entry], 0.0)):
        if found is not None:
            record_format.encode(found)


def _device_info(data: bytes) -> None:
    gojson.dumps(device_info.parse(data))


def _checkpoint(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(data)
        file.flush()
        read_checkpoint(Path(file.name), POD)


# --- plugins ---------------------------------------------------------------------------------------------------------


def _cni_result(data: bytes) -> None:
    call = Invocation("ADD", "c1", "/run/netns/x", "net1", "", "/opt/cni/bin", {"name": "net", "keys": [1, {"a": "b"}]})
    failure.of_exit("ptp", call, "/opt/cni/bin/ptp", child.Exit(1, data, data[:100])).to_stdout()
    made = result.decode(data, "1.0.0")
    for version in versions.SUPPORTED:
        try:
            printed = result.to_stdout(made, version)
        except CniError:
            continue
        if result.in_version(made, version) != result.decode(printed, version):
            raise AssertionError(f"in {version} a process prints something else than a built-in returns")
    network_status.entries_for("web/n", "net1", made, cluster_network=True)


TARGETS: dict[str, Target] = {
    "cni_body": Target(_cni_body, (CniError,)),
    "cni_config": Target(_cni_config, (CniError,)),
    "spool_entry": Target(_spool_entry, ()),
    "annotation": Target(_annotation, (CniError,)),
    "network_status": Target(_network_status, (CniError,)),
    "nad_config": Target(_nad_config, (CniError,)),
    "api_object": Target(_api_object, ()),
    "watch": Target(_watch, ()),
    "claims": Target(_claims, ()),
    "store_record": Target(_store_record, (record_format.RecordFormatError,)),
    "upstream_cache": Target(_upstream_cache, (gojson.JsonError,)),
    "result_cache": Target(_result_cache, (gojson.JsonError,)),
    "device_info": Target(_device_info, (CniError,)),
    "checkpoint": Target(_checkpoint, (DevicesUnavailableError,)),
    "cni_result": Target(_cni_result, (CniError,)),
}


def run(name: str, data: bytes) -> bool:
    """Give `data` to a target; False where it was refused as declared. Anything else that is raised is a fault."""
    target = TARGETS[name]
    try:
        target.read(data)
    except target.declared:
        return False
    return True


# --- where a corpus begins -------------------------------------------------------------------------------------------

_CONF = {"cniVersion": "1.0.0", "name": "n", "type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}
_LIST = {
    "cniVersion": "1.1.0", "cniVersions": ["1.0.0", "1.1.0"], "name": "n", "disableCheck": "true", "disableGC": False,
    "plugins": [{**_CONF, "capabilities": {"mac": True, "ips": True}, "args": {"cni": {"a": 1}}}, {"type": "tuning"}],
}  # fmt: skip
_RESULT = {
    "cniVersion": "1.1.0",
    "interfaces": [{"name": "eth0", "mac": "00:00:5e:00:53:01", "mtu": 1500, "sandbox": "/run/netns/a"}],
    "ips": [{"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 0}, {"address": "fd00::2/64"}],
    "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1", "mtu": 9000, "table": 7, "scope": 0}],
    "dns": {"nameservers": ["10.1.0.1"], "domain": "a", "search": ["b"], "options": ["c"]},
}
_OLD_RESULT = {
    "cniVersion": "0.2.0",
    "ip4": {"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
    "dns": {},
}
_ELEMENT = {
    "name": "n1", "namespace": "web", "interface": "net1", "ips": ["10.1.0.9/24", "fd00::9"],
    "mac": "00:00:5e:00:53:01", "infiniband-guid": "00:00:5e:00:53:01:02:03", "default-route": ["10.1.0.1"],
    "portMappings": [{"hostPort": 80, "containerPort": 8080, "protocol": "TCP", "hostIP": "10.0.0.1"}],
    "bandwidth": {"ingressRate": 1000, "ingressBurst": 2000}, "deviceID": "d", "cni-args": {"a": {"b": [1.5e3]}},
}  # fmt: skip


def _call(verb: str, config: object) -> dict[str, object]:
    env = {
        "CNI_COMMAND": verb, "CNI_CONTAINERID": CONTAINER, "CNI_NETNS": "/run/netns/a", "CNI_IFNAME": "eth0",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1;K8S_POD_UID=u1",
    }  # fmt: skip
    packed = base64.b64encode(json.dumps(config).encode()).decode()
    return {"env": env, "config": packed, "interfaceAttributes": {"ips": ["10.1.0.9"], "mac": "", "cni-args": {}}}


def _ours() -> object:
    return {
        "cniVersion": "1.1.0", "name": "multus", "type": "multus-shim", "clusterNetwork": "cluster",
        "delegates": [_CONF, _LIST], "defaultNetworks": ["a"], "systemNamespaces": ["kube-system"],
        "globalNamespaces": "default, x", "namespaceIsolation": True, "runtimeConfig": {"portMappings": []},
        "cni.dev/valid-attachments": [{"containerID": "c", "ifname": "eth0"}],
    }  # fmt: skip


def _calls() -> list[object]:
    return [_call(verb, _ours()) for verb in ("ADD", "DEL", "CHECK", "STATUS", "GC")]


def _cache_entry() -> object:
    return {
        "kind": "cniCacheV1", "containerId": CONTAINER, "config": base64.b64encode(json.dumps(_CONF).encode()).decode(),
        "ifName": "eth0", "networkName": "n", "netns": "/run/netns/a", "cniArgs": [["K8S_POD_NAME", "web-1"]],
        "capabilityArgs": {"mac": "00:00:5e:00:53:01"}, "result": _RESULT,
    }  # fmt: skip


def _upstream_elements() -> object:
    def packed(value: object) -> str:
        return base64.b64encode(json.dumps(value).encode()).decode()

    listed = {
        "Name": "n", "CNIVersion": "1.0.0", "DisableCheck": False, "Bytes": packed(_LIST),
        "Plugins": [{"Network": {}, "Bytes": packed(_CONF)}],
    }  # fmt: skip
    single = {
        "Conf": _CONF, "ConfList": {}, "CNINetworkConfigList": {}, "Name": "web/n1", "Bytes": packed(_CONF),
        "ifnameRequest": "net1", "macRequest": "00:00:5e:00:53:01", "ipRequest": ["10.1.0.9"],
    }  # fmt: skip
    return [{"Conf": {}, "CNINetworkConfigList": listed, "Bytes": packed(_LIST), "masterPlugin": True}, single]


def _record_body() -> object:
    attachment = {
        "name": "web/n", "config": base64.b64encode(json.dumps(_CONF).encode()).decode(), "ifname": "eth0",
        "cniVersion": "1.0.0", "clusterNetwork": True, "capabilityArgs": {"mac": ""}, "cniArgs": [["a", "b"]],
        "result": _RESULT, "defaultRoute": ["10.1.0.1"], "resourceName": "r", "deviceId": "d",
    }  # fmt: skip
    return {
        "containerId": CONTAINER, "netns": "/run/netns/a", "ifname": "eth0", "podNamespace": "web",
        "podName": "web-1", "podUid": "u1", "complete": True, "created": 1.5, "attachments": [attachment],
    }  # fmt: skip


def _api_objects() -> list[object]:
    meta = {"name": "web-1", "namespace": "web", "uid": "u1", "resourceVersion": "7", "annotations": {"a": "b"}}
    named = {"name": "a", "resourceClaimName": "b"}
    status = claims.extended("c", ("r0", "vendor.com/vf"))
    pod = {"metadata": meta, "spec": {"hostNetwork": True, "resourceClaims": [named]}, "status": status}
    network = {"metadata": meta, "spec": {"config": json.dumps(_CONF)}}
    claim = claims.claim("c", claims.result("a"), pods={"web-1": "u1"})
    return [pod, network, claim, claims.resource_slice("s", claims.nic("a"))]


def seeds(name: str) -> list[bytes]:
    """Inputs that a target accepts, to begin with."""
    devices = [
        {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:01:00.0"}},
        {"type": "vdpa", "version": "1.1.0", "vdpa": {"parent-device": "a", "driver": "vhost", "path": "/dev/a"}},
        {"type": "memif", "version": "1.0.0", "memif": {"role": "master", "path": "/a", "mode": "ethernet"}},
    ]
    entries = [
        {"PodUID": "u1", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": {"-1": ["a"], "0": None}},
        {"PodUID": "u1", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": ["a"], "AllocResp": "Cg=="},
    ]
    state = {"name": "web/n", "interface": "eth0", "ips": ["10.1.0.2"], "default": True, "dns": {}}
    values: dict[str, list[object]] = {
        "cni_body": _calls(),
        "cni_config": [_ours()],
        "spool_entry": _calls()[1:2],
        "annotation": [[_ELEMENT]],
        "network_status": [[state]],
        "nad_config": [_CONF, _LIST],
        "api_object": _api_objects(),
        "watch": [
            *({"type": "ADDED", "object": item} for item in _api_objects()),
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
            {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}},
        ],
        "claims": _api_objects()[2:3],
        "store_record": [_record_body()],
        "upstream_cache": [_upstream_elements()],
        "result_cache": [_cache_entry()],
        "device_info": list(devices),
        "checkpoint": [{"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}],
        "cni_result": [_RESULT, _OLD_RESULT, {"code": 11, "msg": "a", "details": "b"}],
    }
    found = [json.dumps(value).encode() for value in values[name]]
    if name == "claims":
        found.append(b"\n".join(json.dumps(item).encode() for item in _api_objects()[2:]))
    return [*found, b"web/n1@net1, n2"] if name == "annotation" else found
