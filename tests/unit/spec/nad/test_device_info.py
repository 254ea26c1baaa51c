"""Device information files."""

import json

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import device_info

GOOD = [
    {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:01:00.1", "rdma-device": "mlx5_0"}},
    {"type": "vdpa", "version": "1.1.0", "vdpa": {"parent-device": "vdpa0", "driver": "vhost", "path": "/dev/v0"}},
    {"type": "vhost-user", "version": "1.0.0", "vhost-user": {"mode": "client", "path": "/run/x"}},
    {"type": "memif", "version": "1.1.0", "memif": {"role": "master", "path": "/run/m", "mode": "ethernet"}},
    {"type": "memif", "version": "1.1.0", "memif": {"role": "slave", "path": "/run/m", "mode": "punt"}},
]


@pytest.mark.npwg("DI 3.1.1-2", "DI 3.1.3", "DI 3.1.4", "DI 3.1.5-6")
@pytest.mark.parametrize("fields", GOOD, ids=lambda fields: fields["type"])
def test_good(fields: dict[str, object]) -> None:
    assert device_info.parse(json.dumps(fields).encode()) == fields


@pytest.mark.npwg("DI 3.1.1-2", "DI 3.1.3", "DI 3.1.4", "DI 3.1.5-6")
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ([], "a JSON object is needed"),
        ({}, "type '' is none of"),
        ({"type": "usb", "version": "1.1.0"}, "type 'usb'"),
        ({"type": "pci", "version": "2.0.0", "pci": {}}, "version '2.0.0'"),
        ({"type": "pci", "version": "1.1.0"}, "the field 'pci' is missing"),
        ({"type": "pci", "version": "1.1.0", "pci": {}}, "pci.pci-address is missing"),
        ({"type": "pci", "version": "1.1.0", "pci": {"pci-address": "01:00.1"}}, "not a PCI address"),
        ({"type": "pci", "version": "1.1.0", "pci": {"pci-address": 1}}, "a string is needed"),
        ({"type": "vdpa", "version": "1.1.0", "vdpa": {"parent-device": "v", "driver": "x", "path": "/"}}, "'x'"),
        ({"type": "vhost-user", "version": "1.1.0", "vhost-user": {"mode": "x", "path": "/"}}, "vhost-user.mode"),
        ({"type": "memif", "version": "1.1.0", "memif": {"role": "x", "path": "/", "mode": "ip"}}, "memif.role"),
    ],
)
def test_refusals(fields: object, problem: str) -> None:
    with pytest.raises(CniError) as caught:
        device_info.parse(json.dumps(fields).encode())
    assert problem in caught.value.msg


@pytest.mark.npwg("DI 4.1")
def test_file_names() -> None:
    assert (
        device_info.device_plugin_file("intel.com/sriov", "0000:01:00.1") == "intel.com-sriov-0000:01:00.1-device.json"
    )
    assert device_info.device_plugin_file("a/b", "c/d") == "a-b-c-d-device.json"
    assert device_info.cni_file("web/net", "c0ffee", "net1") == "web-net-c0ffee_net1"


def test_names_that_are_too_long_for_a_file_stay_apart():
    name = "n" * 253
    names = [device_info.cni_file(f"web/{name}", "c" * 64, ifname) for ifname in ("net1", "net2")]
    assert len(set(names)) == 2
    assert all(len(found) == 255 and found.startswith("web-nnn") for found in names)
    longest = device_info.cni_file("n" * 185, "c" * 64, "net1")
    assert longest == f"{'n' * 185}-{'c' * 64}_net1"
    assert len(longest) == 255
