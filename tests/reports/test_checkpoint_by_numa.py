"""Kubernetes 1.21 lists the ids of a pod's devices by NUMA node, and older ones in one list: both are read.

k8snetworkplumbingwg/multus-cni#665; kind: devices of a pod.
"""

import json
from pathlib import Path

import pytest

from multus_daemon.cluster.kubelet.source import read_checkpoint
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid


@pytest.mark.parametrize("ids", [["d1", "d0"], {"0": ["d1"], "1": ["d0"]}, {"-1": ["d0", "d1"], "0": None}])
def test_both_shapes(tmp_path: Path, ids: object) -> None:
    entry = {
        "PodUID": "u1",
        "ContainerName": "c",
        "ResourceName": "intel.com/sriov",
        "DeviceIDs": ids,
        "AllocResp": "Cg==",
    }
    data = {"PodDeviceEntries": [entry], "RegisteredDevices": {"intel.com/sriov": ["d0", "d1"]}}
    path = tmp_path / "kubelet_internal_checkpoint"
    path.write_text(json.dumps({"Data": data, "Checksum": 1}))
    pod = Pod(Namespace("default"), PodName("p"), PodUid("u1"))
    assert sorted(read_checkpoint(path, pod)) == [("intel.com/sriov", "d0"), ("intel.com/sriov", "d1")]
