"""Networks whose devices are of ResourceClaims: a real API server, claims and slices made by hand.

The kubelet answers on its socket and knows no claims, as one whose driver makes no CDI devices.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import claims
from tests.claims import Manifest, nic, resource_slice, result
from tests.e2e import audit
from tests.e2e.apiserver import ApiServer
from tests.e2e.kube_client import ApiError, Client
from tests.e2e.node import NAD, Node
from tests.e2e.test_devices import stdin
from tests.e2e.test_kept import ctl
from tests.e2e.test_kubernetes import NETWORKS, USER, Cluster, manifests
from tests.fakes.kubelet import FakeKubelet, container

pytest_plugins = ["tests.e2e.kube_fixtures"]

VF = "vendor.com/vf"
OTHER_VF = "vendor.com/other"
GPU = "gpu.example.com"
RESOURCE_API = f"/apis/{claims.API}"


def asking(limits: dict[str, str]) -> Manifest:
    """A container that asks for extended resources."""
    resources = {"requests": limits, "limits": limits}
    return {"name": "main", "image": "registry.invalid/none", "resources": resources}


class Claimed(Cluster):
    """A cluster with a network of the resource `VF`, `fast`, and one of `OTHER_VF`, `other`."""

    def prepare(self) -> None:
        super().prepare()
        self.node.settings["kubeletDir"] = str(self.node.root / "kubelet")
        calls = self.node.root / "calls"
        calls.mkdir()
        printed = '{"cniVersion":"1.0.0","interfaces":[{"name":"%s","mac":"02:00:00:00:00:01","sandbox":"%s"}],'
        printed += '"ips":[{"address":"192.0.2.7/24","interface":0}]}'
        # Without a device it fails, as the plugin of SR-IOV does.
        failed = '{"cniVersion":"1.0.0","code":100,"msg":"no VF"}'
        self.node.plugin("vf", "")
        (self.node.bin_dir / "vf").write_text(
            f'#!/bin/sh\ncat >"{calls}/$CNI_COMMAND-$CNI_IFNAME"\n'
            f'[ $CNI_COMMAND != ADD ] || grep -q pciBusID "{calls}/ADD-$CNI_IFNAME" ||'
            f" {{ echo '{failed}'; exit 1; }}\n"
            f'printf \'{printed}\' "$CNI_IFNAME" "$CNI_NETNS"\n'
        )
        for name, resource in (("fast", VF), ("other", OTHER_VF)):
            config = {"cniVersion": "1.0.0", "name": name, "type": "vf", "capabilities": {"deviceID": True}}
            annotations = {"k8s.v1.cni.cncf.io/resourceName": resource}
            metadata = {"namespace": self.namespace, "name": name, "annotations": annotations}
            self.server.apply({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config)}})

    def slice(self, name: str, *devices: Manifest, **more: Any) -> None:
        """A slice of this node; names of slices are the cluster's."""
        made = resource_slice(f"{self.namespace}-{name}", *devices, **{"node": self.name, **more})
        self.server.request("POST", f"{RESOURCE_API}/resourceslices", made)

    def claim(self, name: str, *results: Manifest, pods: Sequence[str] = (), is_allocated: bool = True) -> None:
        """A claim that is allocated to the pods, as the scheduler does it before it binds them."""
        path = f"{RESOURCE_API}/namespaces/{self.namespace}/resourceclaims"
        made = claims.claim(name, *results, namespace=self.namespace, is_allocated=False)
        self.server.request("POST", path, made)
        if is_allocated:
            status = claims.claim_status(results, {pod: self.uids[pod] for pod in pods})
            self.server.client.merge(f"{path}/{name}/status", {"status": status})

    def asking_pod(self, name: str, networks: str, *names: str, **spec: Any) -> None:
        """A pod with claims from templates, which has just been bound to the node."""
        wanted, _ = claims.pod_claims(*names)
        pod = self.server.create_pod(
            name, namespace=self.namespace, annotations={NETWORKS: networks}, running=False, **{**wanted, **spec}
        )
        self.uids[name] = pod["metadata"]["uid"]

    def bind(self, name: str, *names: str, **status: Any) -> None:
        """Bind the pod to the node, with its claims."""
        _, made = claims.pod_claims(*names)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        if names or status:
            self.server.client.merge(f"{path}/status", {"status": {**(made if names else {}), **status}})
        target = {"apiVersion": "v1", "kind": "Node", "name": self.name}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.server.request("POST", f"{path}/binding", binding)

    def whole_pod(self, name: str, networks: str, *, limits: Any = None, **allocated: Sequence[Manifest]) -> None:
        """A pod with a claim for each keyword; `limits` are its container's."""
        names = [f"{name}-{key}" for key in allocated]
        self.asking_pod(name, networks, *names, **({"containers": [asking(limits)]} if limits else {}))
        for made, results in zip(names, allocated.values(), strict=True):
            self.claim(made, *results, pods=[name])
        self.bind(name, *names)

    def add(self, name: str) -> list[str]:
        """The devices that the ADD of the pod gives to its networks, in order."""
        netns = self.node.add_netns()
        answer = self.cni("ADD", name, netns)
        assert answer.code == 0, answer.stdout
        # An ADD waits for the status only so long.
        self.node.wait_until(lambda: len(self.status(name)) > 1, "the status is there")
        found = [stdin(self.node, "ADD", item["interface"])["deviceID"] for item in self.status(name)[1:]]
        assert self.cni("DEL", name, netns).code == 0
        return found

    def refusal(self, name: str) -> dict[str, Any]:
        netns = self.node.add_netns()
        answer = self.cni("ADD", name, netns)
        assert answer.code == 1, answer.stdout
        assert (self.node.links(netns), self.node.leftovers()) == (["lo"], [])
        found: dict[str, Any] = answer.json
        return found

    def asked(self, since: int = 0) -> list[tuple[str, str]]:
        """What the daemon has asked about claims and slices."""
        found = self.server.audit(USER, since=since)
        return [(item["verb"], item["resource"]) for item in found if item["uri"].startswith(RESOURCE_API)]


@pytest.fixture
def kubelet(cluster: Claimed) -> Iterator[FakeKubelet]:
    with FakeKubelet(cluster.node.root / "kubelet") as found:
        yield found


@pytest.fixture
def cluster(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node]) -> Iterator[Claimed]:
    made = Claimed(api_server, make_node(standalone=False), api_namespace)
    made.prepare()
    with api_server.reachable_in(made.node.host):
        yield made
        made.node.kill()
        # Thousands take longer than a request may.
        path = f"{RESOURCE_API}/resourceslices"
        while api_server.request("GET", path, limit=1)["items"]:
            with contextlib.suppress(ApiError, OSError):
                api_server.request("DELETE", path)


def test_each_network_gets_the_device_of_its_claim(cluster: Claimed, kubelet: FakeKubelet) -> None:
    cluster.slice("0", nic("a", "0000:03:02.3"), nic("b", "0000:03:02.1"), pool="p", count=2)
    cluster.slice("1", nic("c", "0000:04:00.1", OTHER_VF), nic("d", "0000:03:02.2"), pool="p", count=2)
    cluster.slice("gpu", nic("gpu-0", resource=None), driver=GPU)
    cluster.slice("theirs", nic("a", "of-another-node"), node="elsewhere", pool="p")
    a, b, c, d = (result(name, pool="p") for name in "abcd")
    cluster.node.start()

    cluster.whole_pod("one", "fast", nic=[a])
    cluster.whole_pod("two", "fast,other,fast", nic=[a], more=[b, c])
    cluster.whole_pod("gpu", "fast", gpu=[result("gpu-0", driver=GPU)], nic=[d])
    assert cluster.add("one") == ["0000:03:02.3"]
    assert cluster.add("two") == ["0000:03:02.1", "0000:04:00.1", "0000:03:02.3"]
    assert cluster.add("gpu") == ["0000:03:02.2"]

    # A claim by name, which two pods share, one of them twice.
    for name, references in (("first", ["x", "y"]), ("second", ["x"])):
        shared = [{"name": key, "resourceClaimName": "team"} for key in references]
        cluster.asking_pod(name, "fast", resourceClaims=shared)
    cluster.claim("team", a, pods=["first", "second"])
    cluster.bind("first")
    cluster.bind("second")
    assert (cluster.add("first"), cluster.add("second")) == (["0000:03:02.3"], ["0000:03:02.3"])

    # An extended resource, of which the pod asks for two, beside a claim of its own.
    cluster.asking_pod("extended", "fast,other,fast", "extended-own", containers=[asking({VF: "2"})])
    cluster.claim("extended-own", c, pods=["extended"])
    cluster.claim("extended-made", *(result(name, request="r0", pool="p") for name in "da"), pods=["extended"])
    status = claims.extended("extended-made", ("r0", VF))
    cluster.bind("extended", "extended-own", **status)
    assert cluster.add("extended") == ["0000:03:02.2", "0000:04:00.1", "0000:03:02.3"]

    # A device plugin's device beside a claim's, of one resource.
    cluster.whole_pod("mixed", "fast,fast", nic=[a], limits={VF: "1"})
    kubelet.add("mixed", container("main", {VF: ["0000:03:02.0"]}), namespace=cluster.namespace)
    assert cluster.add("mixed") == ["0000:03:02.0", "0000:03:02.3"]
    assert cluster.node.leftovers() == []


def test_a_warm_add_with_two_claims_reads_nothing_beside_5000_slices_of_other_nodes(
    cluster: Claimed, kubelet: FakeKubelet
) -> None:
    made = [
        resource_slice(f"{cluster.namespace}-far-{number}", nic("a"), node=f"far-{number}", pool=f"far-{number}")
        for number in range(5000)
    ]

    def create(some: Sequence[Manifest]) -> None:
        client = Client(cluster.server.url, cluster.server.ca_file, pair=admin)
        try:
            for item in some:
                client.request("POST", f"{RESOURCE_API}/resourceslices", item)
        finally:
            client.close()

    admin = cluster.server.authority.client("slices", "slices", ("system:masters",))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(create, [made[start::4] for start in range(4)]))
    cluster.slice("0", nic("a"), nic("b"), pool="p")
    cluster.node.start()
    mark = cluster.server.audit_mark()
    cluster.whole_pod("two", "fast,fast", nic=[result("b", pool="p")], more=[result("a", pool="p")])
    wanted = [("get", "resourceclaims")] * 2 + [("list", "resourceslices")]
    cluster.node.wait_until(lambda: sorted(cluster.asked(mark)) == wanted, "claims and slices are read")
    selector = "fieldSelector=spec.nodeName%3D"
    assert all(
        selector in item["uri"]
        for item in cluster.server.audit(USER, since=mark)
        if item["resource"] == "resourceslices"
    )
    mark = cluster.server.audit_mark()
    assert cluster.add("two") == ["id-a", "id-b"]

    def requests() -> list[audit.Request]:
        return [item for item in cluster.server.audit(USER, since=mark) if item["verb"] != "watch"]

    sent = {"events", "pods", "resourceclaims"}
    cluster.node.wait_until(lambda: {item["resource"] for item in requests()} >= sent, "Event, status and device")
    asked = requests()
    # One attempt to report a device, which the role does not allow.
    told = {(item["verb"], item["resource"]): item["code"] for item in asked}
    assert told == {("create", "events"): 201, ("patch", "pods"): 200, ("patch", "resourceclaims"): 403}
    assert sum(item["resource"] == "resourceclaims" for item in asked) == 1


@pytest.fixture
def may_report(cluster: Claimed) -> Iterator[None]:
    """The right to report devices, which the role does not have."""
    items = manifests("../device-status/rbac.yaml")
    cluster.server.apply(*items)
    yield
    for item in items:
        cluster.server.delete(item["apiVersion"], item["kind"], item["metadata"]["name"])


def test_devices_are_reported_in_the_claims_while_they_are_attached(
    cluster: Claimed, kubelet: FakeKubelet, may_report: None
) -> None:
    cluster.slice("0", nic("a"), nic("b"), nic("c"), pool="p")
    cluster.node.start()
    a, b, c = (result(name, pool="p") for name in "abc")
    cluster.whole_pod("one", "fast,fast,fast", nic=[a, c], more=[b])

    def reported(name: str) -> dict[str, Manifest]:
        status = cluster.server.get(claims.API, "ResourceClaim", name, cluster.namespace)["status"]
        return {item["device"]: item for item in status.get("devices", [])}

    netns = cluster.node.add_netns()
    mark = cluster.server.audit_mark()
    assert cluster.cni("ADD", "one", netns).code == 0
    cluster.node.wait_until(lambda: list(reported("one-more")) == ["b"], "the second claim is reported")
    found = reported("one-nic")
    assert {name: item["networkData"]["interfaceName"] for name, item in found.items()} == {"a": "net1", "c": "net3"}
    assert found["a"]["networkData"] == {
        "interfaceName": "net1",
        "hardwareAddress": "02:00:00:00:00:01",
        "ips": ["192.0.2.7/24"],
    }
    (condition,) = found["a"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "True", "NetworkDeviceReady")

    def patches() -> list[int]:
        found = cluster.server.audit(USER, since=mark)
        return [item["code"] for item in found if (item["verb"], item["resource"]) == ("patch", "resourceclaims")]

    assert patches() == [200, 200]
    # A daemon that has just started knows no more than the record.
    cluster.node.kill()
    cluster.node.start()
    assert cluster.cni("DEL", "one", netns).code == 0
    cluster.node.wait_until(lambda: reported("one-nic") == reported("one-more") == {}, "the reports are gone")
    assert patches() == [200] * 4

    # A claim that two pods share, and one whose driver reports the device itself.
    for name in ("first", "second"):
        cluster.asking_pod(name, "fast", resourceClaims=[{"name": "x", "resourceClaimName": "team"}])
    cluster.claim("team", a, pods=["first", "second"])
    spaces = {}
    for name in ("first", "second"):
        cluster.bind(name)
        spaces[name] = cluster.node.add_netns()
        assert cluster.cni("ADD", name, spaces[name]).code == 0
    cluster.node.wait_until(lambda: list(reported("team")) == ["a"], "the shared claim is reported")
    for name in ("second", "first"):
        assert cluster.cni("DEL", name, spaces[name]).code == 0
    cluster.node.wait_until(lambda: reported("team") == {}, "the report is gone")
    cluster.whole_pod("own", "fast", nic=[b])
    path = f"{RESOURCE_API}/namespaces/{cluster.namespace}/resourceclaims/own-nic/status"
    entry = {"driver": claims.DRIVER, "pool": "p", "device": "b", "networkData": {"interfaceName": "the-drivers"}}
    cluster.server.client.merge(path, {"status": {"devices": [entry]}})
    assert cluster.add("own") == ["id-b"]
    cluster.node.wait_for_log("is left alone")
    assert reported("own-nic")["b"]["networkData"] == {"interfaceName": "the-drivers"}


def test_hot_plug_and_explain_see_the_same_devices(cluster: Claimed, kubelet: FakeKubelet) -> None:
    cluster.node.settings["hotplug"] = "on"
    cluster.slice("0", nic("a"), nic("b"), pool="p")
    cluster.node.start()
    cluster.whole_pod("one", "fast", nic=[result("b", pool="p"), result("a", pool="p")])
    netns = cluster.node.add_netns()
    assert cluster.cni("ADD", "one", netns).code == 0
    assert stdin(cluster.node, "ADD", "net1")["deviceID"] == "id-a"
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/one"
    cluster.server.client.merge(path, {"metadata": {"annotations": {NETWORKS: "fast,fast"}}})
    cluster.node.wait_until(lambda: len(cluster.status("one")) == 3, "the second network is attached")
    assert stdin(cluster.node, "ADD", "net2")["deviceID"] == "id-b"
    _, explained = ctl(cluster.node, "explain", f"{cluster.namespace}/one")
    assert "id-a" in explained
    assert "id-b" in explained
    assert cluster.cni("DEL", "one", netns).code == 0


def test_a_role_from_before_there_were_claims(cluster: Claimed, kubelet: FakeKubelet) -> None:
    """A device plugin's networks work as before, and the log has one line."""
    role = next(item for item in manifests("rbac.yaml") if item["kind"] == "ClusterRole")
    older = [rule for rule in role["rules"] if rule["apiGroups"] != ["resource.k8s.io"]]
    cluster.server.apply({**role, "rules": older})
    try:
        cluster.slice("0", nic("a"), pool="p")
        cluster.node.start()
        cluster.whole_pod("one", "fast", nic=[result("a", pool="p")])
        assert "grant the daemon's ClusterRole the verb get on resourceclaims" in cluster.refusal("one")["details"]
        cluster.whole_pod("two", "fast", gpu=[result("gpu-0", driver=GPU)])
        kubelet.add("two", container("main", {VF: ["0000:03:02.0"]}), namespace=cluster.namespace)
        assert cluster.add("two") == ["0000:03:02.0"]
        said = cluster.node.log.read_text
        cluster.node.wait_until(
            lambda: said().count("the verb get on resourceclaims") == 2, "the line, and the refusal"
        )
        assert cluster.node.get("/readyz")[0] == 200
    finally:
        cluster.server.apply(role)
