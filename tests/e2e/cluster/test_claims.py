"""Networks whose devices are of ResourceClaims, on a real node: scheduler, kubelet and a DRA driver do their parts.

`test_claims` of the directory above has the situations that need no kubelet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.claims import API, Manifest, nic
from tests.e2e.cluster.dra_driver import DraDriver
from tests.e2e.cluster.fixtures import started
from tests.e2e.cluster.multus import MultusProcess
from tests.e2e.cluster.real_node import RealNode, pod_spec
from tests.e2e.cluster.workload import status
from tests.e2e.node import NAD

VF: Final = "vendor.com/vf"
OTHER_VF: Final = "vendor.com/other"
NICS: Final = "nic.example.com"
"""Driver of the devices for networks, and the class of those of VF."""
OTHERS: Final = "other.example.com"
"""Driver and class of those of OTHER_VF, which are an extended resource too."""
GPUS: Final = "gpu.example.com"
CALLS: Final = "/var/lib/vf-calls"
PRINTED: Final = '{"cniVersion":"1.0.0","interfaces":[{"name":"%s","mac":"02:00:00:00:00:01","sandbox":"%s"}],"ips":[]}'
DEVICE_STATUS: Final = Path(__file__).parents[3] / "manifests" / "device-status"
# The scheduler takes devices in the order in which they are published; the order of the ids is another one.
IDS: Final = {"vf-0": "0000:03:02.3", "vf-1": "0000:03:02.2", "vf-2": "0000:03:02.1", "vf-3": "0000:03:02.0"}
OTHER_IDS: Final = {"vf-0": "0000:05:00.1", "vf-1": "0000:05:00.0"}


@pytest.fixture(scope="module")
def claims_node(pytestconfig: pytest.Config) -> Iterator[RealNode]:
    """A node with two drivers for networks and one for GPUs, and the daemon."""
    with started(pytestconfig, gates=["DRAExtendedResource"]) as node:
        daemon = MultusProcess(node)
        daemon.install()
        node.kubectl("apply", "-k", str(DEVICE_STATUS))
        node.machine.run("mkdir", CALLS)
        plugin = node.machine.path("/opt/cni/bin/vf")
        # CNI_ARGS: `IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=p0;...`
        plugin.write_text(
            "#!/bin/sh\npod=${CNI_ARGS##*K8S_POD_NAME=}\n"
            f'cat >"{CALLS}/${{pod%%;*}}-$CNI_COMMAND-$CNI_IFNAME"\n'
            f'printf \'{PRINTED}\' "$CNI_IFNAME" "$CNI_NETNS"\n'
        )
        plugin.chmod(0o755)
        for name, resource in (("fast", VF), ("other", OTHER_VF), ("older", "shared")):
            config = {"cniVersion": "1.0.0", "name": name, "type": "vf", "capabilities": {"deviceID": True}}
            annotations = {"k8s.v1.cni.cncf.io/resourceName": resource}
            metadata = {"namespace": "default", "name": name, "annotations": annotations}
            node.server.apply({**NAD, "metadata": metadata, "spec": {"config": json.dumps(config)}})
        daemon.start()
        nics = [nic(name, identifier, VF) for name, identifier in IDS.items()]
        others = [nic(name, identifier, OTHER_VF) for name, identifier in OTHER_IDS.items()]
        with (
            DraDriver(node, NICS, *nics),
            DraDriver(node, OTHERS, *others, extended_resource=OTHER_VF),
            DraDriver(node, GPUS, nic("gpu-0", resource=None)),
        ):
            yield node
            node.remove_pods()
        daemon.stop()


@pytest.fixture
def node(claims_node: RealNode) -> Iterator[RealNode]:
    yield claims_node
    claims_node.remove_pods()
    for path in claims_node.machine.path(CALLS).iterdir():
        path.unlink()
    for kind in ("resourceclaimtemplates", "resourceclaims"):
        objects = f"/apis/{API}/namespaces/default/{kind}"
        claims_node.server.request("DELETE", objects)
        while claims_node.server.request("GET", objects)["items"]:
            time.sleep(0.1)


def requests(**counts: int) -> Manifest:
    """The spec of a claim: so many devices of each class, by the class's name without its domain."""
    exactly = {
        kind: {"deviceClassName": f"{kind}.example.com", "allocationMode": "ExactCount", "count": count}
        for kind, count in counts.items()
    }
    return {"devices": {"requests": [{"name": kind, "exactly": wanted} for kind, wanted in exactly.items()]}}


def template(node: RealNode, name: str, **counts: int) -> Manifest:
    """Make a template; the entry of a pod that claims by it."""
    spec = {"spec": requests(**counts)}
    metadata = {"namespace": "default", "name": name}
    node.server.apply({"apiVersion": API, "kind": "ResourceClaimTemplate", "metadata": metadata, "spec": spec})
    return {"name": name, "resourceClaimTemplateName": name}


def shared_claim(node: RealNode) -> Manifest:
    """Make the claim `shared`; the entry of each pod that uses it."""
    metadata = {"namespace": "default", "name": "shared"}
    node.server.apply({"apiVersion": API, "kind": "ResourceClaim", "metadata": metadata, "spec": requests(nic=1)})
    return {"name": "nic", "resourceClaimName": "shared"}


def devices(node: RealNode, pod: str, verb: str = "ADD") -> dict[str, tuple[Any, ...]]:
    """The device of each interface of the pod, by the ways in which its plugin is told."""
    found = {}
    for path in node.machine.path(CALLS).glob(f"{pod}-{verb}-*"):
        told = json.loads(path.read_text())
        found[path.name.rpartition("-")[2]] = (told["deviceID"], told["runtimeConfig"]["deviceID"])
    return found


def run(node: RealNode, name: str, networks: str, *claims: Manifest, **limits: int) -> dict[str, Any]:
    """Run a pod whose container uses these claims, and extended resources; the object."""
    spec = pod_spec()
    resources = {"claims": [{"name": claim["name"]} for claim in claims], "limits": limits}
    spec["containers"][0]["resources"] = resources
    node.pod(name, networks=networks, resourceClaims=list(claims), containers=spec["containers"])
    (pod,) = node.wait_running(name)
    return pod


def both(*identifiers: str) -> dict[str, tuple[str, str]]:
    """The interfaces net1 and so on, with these devices."""
    return {f"net{number}": (device, device) for number, device in enumerate(identifiers, 1)}


def test_one_claim(node: RealNode) -> None:
    pod = run(node, "one", "fast,fast", template(node, "two-nics", nic=2))
    assert [item["name"] for item in status(pod)] == ["primary", "default/fast", "default/fast"]
    assert devices(node, "one") == both(IDS["vf-1"], IDS["vf-0"])
    node.delete_pod("one")
    # The claim was the pod's, and is gone with it.
    assert devices(node, "one", "DEL") == both(IDS["vf-1"], IDS["vf-0"])


def test_two_claims(node: RealNode) -> None:
    nics, other = template(node, "nic", nic=1), template(node, "other", other=1)
    run(node, "two", "other,fast", other, nics)
    assert devices(node, "two") == both(OTHER_IDS["vf-0"], IDS["vf-0"])


def test_two_claims_of_one_resource(node: RealNode) -> None:
    first, second = template(node, "first", nic=1), template(node, "second", nic=2)
    run(node, "three", "fast,fast,fast", first, second)
    assert devices(node, "three") == both(IDS["vf-2"], IDS["vf-1"], IDS["vf-0"])


def test_a_shared_claim(node: RealNode) -> None:
    claim = shared_claim(node)
    run(node, "first", "fast", claim)
    run(node, "second", "fast", claim)
    run(node, "alone", "fast", template(node, "own", nic=1))
    assert devices(node, "first") == devices(node, "second") == both(IDS["vf-0"])
    assert devices(node, "alone") == both(IDS["vf-1"])


def test_the_status_of_a_claims_device(node: RealNode) -> None:
    def reported() -> list[Any]:
        found = node.server.get(API, "ResourceClaim", "shared").get("status", {}).get("devices", [])
        return [(item["device"], item["networkData"]["interfaceName"]) for item in found]

    run(node, "reported", "fast", shared_claim(node))
    node.wait_until(lambda: reported() == [("vf-0", "net1")], "the daemon has reported the device")
    node.delete_pod("reported")
    node.wait_until(lambda: not reported(), "the device is not reported any more")


def test_a_claim_by_its_own_name(node: RealNode) -> None:
    """The older way: the resource name of the network is the claim's name, and the kubelet names the device."""
    claim = shared_claim(node)
    run(node, "both", "older,fast", claim)
    assert devices(node, "both") == {"net1": ("vf-0", "vf-0"), "net2": (IDS["vf-0"], IDS["vf-0"])}


def test_a_gpu_beside_a_networks_device(node: RealNode) -> None:
    run(node, "two", "fast", template(node, "gpu", gpu=1), template(node, "nic", nic=1))
    assert devices(node, "two") == both(IDS["vf-0"])


def test_a_gpu_and_a_networks_device_of_one_claim(node: RealNode) -> None:
    run(node, "one", "fast", template(node, "both", gpu=1, nic=1))
    assert devices(node, "one") == both(IDS["vf-0"])


def test_an_extended_resource(node: RealNode) -> None:
    pod = run(node, "extended", "other,other", **{OTHER_VF: 2})
    assert pod["status"]["extendedResourceClaimStatus"]["requestMappings"][0]["resourceName"] == OTHER_VF
    assert devices(node, "extended") == both(OTHER_IDS["vf-1"], OTHER_IDS["vf-0"])


def test_an_extended_resource_beside_a_claim(node: RealNode) -> None:
    run(node, "mixed", "fast,other", template(node, "nic", nic=1), **{OTHER_VF: 1})
    assert devices(node, "mixed") == both(IDS["vf-0"], OTHER_IDS["vf-0"])
