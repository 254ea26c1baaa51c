"""Networks that need a device: which one each gets, and the device-info file of each attachment."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Attachment, ClaimedDevice, Pod
from multus_daemon.spec.cni.errors import (
    CniError,
    InternalError,
    InvalidNetworkConfigError,
    IoFailureError,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION
from multus_daemon.spec.ports import DevicesUnavailableError
from tests.unit.pod.conftest import Engine, definition

VF = "vendor.com/vf"
RESOURCE = "k8s.v1.cni.cncf.io/resourceName"
INFO = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:03:02.0"}}


def network(engine: Engine, name: str, resource: str = VF, namespace: str = "web", **config: Any) -> None:
    """Declare a network that needs a device; `config` with a list of plugins, or nothing."""
    text = json.dumps({"cniVersion": "1.0.0", "name": name, **(config or {"type": "fake"})})
    engine.cluster.put_network(definition(namespace, name, text, **{RESOURCE: resource}))


def given(engine: Engine, *devices: str, resource: str = VF) -> None:
    engine.devices.pods.setdefault("web/p1", {})[resource] = list(devices)


def added(engine: Engine) -> list[Attachment]:
    return [call.attachment for call in engine.runner.calls if call.verb == "ADD"]


def devices(engine: Engine, networks: str | None = None, **annotations: str) -> list[tuple[str, str]]:
    """(network, device) of each attachment of an ADD."""
    engine.declare(networks, annotations=annotations)
    engine.verbs.add(engine.request())
    return [(attachment.name, attachment.device_id) for attachment in added(engine)]


@pytest.mark.weak_spot(14)
def test_each_network_gets_a_device_of_its_own_wherever_it_is_named(engine: Engine) -> None:
    engine.overlay["defaultNetworks"] = ["d1", "d2"]
    for name in ("other", "d1", "d2"):
        network(engine, name, namespace="kube-system")
    network(engine, "n1")
    network(engine, "n2", "vendor.com/gpu")
    given(engine, "a", "b", "c", "d", "e")
    given(engine, "a", resource="vendor.com/gpu")
    assert devices(engine, "n1,n2,n1", **{DEFAULT_NETWORK_ANNOTATION: "other"}) == [
        ("kube-system/other", "a"),
        ("kube-system/d1", "b"),
        ("kube-system/d2", "c"),
        ("web/n1", "d"),
        ("web/n2", "a"),
        ("web/n1", "e"),
    ]
    assert engine.devices.calls == ["web/p1"]


def test_the_cluster_network_may_need_one(engine: Engine) -> None:
    network(engine, "cluster", namespace="kube-system")
    network(engine, "n1")
    given(engine, "a", "b")
    assert devices(engine, "n1") == [("kube-system/cluster", "a"), ("web/n1", "b")]


def test_the_kubelet_is_not_asked_where_no_network_needs_it(engine: Engine) -> None:
    engine.devices.fail = DevicesUnavailableError("not to be asked")
    assert devices(engine, '[{"name":"n1","deviceID":"x"}]') == [("kube-system/cluster", ""), ("web/n1", "x")]


@pytest.mark.conformance("config-14")
@pytest.mark.parametrize("in_list", [False, True], ids=["single", "list"])
def test_every_plugin_is_told_the_device(engine: Engine, in_list: bool) -> None:
    plugins: list[dict[str, Any]] = [
        {"type": "a", "capabilities": {"deviceID": True}, "deviceID": "overwritten"},
        {"type": "b"},
    ]
    network(engine, "n1", **({"plugins": plugins} if in_list else plugins[0]))
    given(engine, "0000:03:02.0")
    devices(engine, "n1")
    attachment = added(engine)[-1]
    assert len(attachment.config.plugins) == (2 if in_list else 1)
    for plugin in attachment.config.plugins:
        assert (plugin.fields["deviceID"], plugin.fields["pciBusID"]) == ("0000:03:02.0", "0000:03:02.0")
    assert attachment.capability_args["deviceID"] == "0000:03:02.0"
    assert (attachment.resource_name, attachment.device_id) == (VF, "0000:03:02.0")


# --- not enough of them ----------------------------------------------------------------------------------------------


def test_more_networks_than_devices_fail_before_anything_is_touched(engine: Engine) -> None:
    network(engine, "n1")
    given(engine, "a")
    given(engine, "g", resource="vendor.com/gpu")
    engine.declare("n1,n1")
    words = "not enough devices of vendor.com/vf: the pod has 1 of them, and network web/n1 is number 2 that needs one"
    with pytest.raises(InvalidNetworkConfigError, match=words) as caught:
        engine.verbs.add(engine.request())
    assert "web/p1" in str(caught.value)
    assert "vendor.com/gpu" in caught.value.explanation
    assert (engine.runner.calls, engine.store.saved, engine.device_files.prepared) == ([], [], [])
    assert [reason for reason, _ in engine.warnings] == ["InvalidNetwork"]


def test_a_resource_without_any_device_is_attached_without_one(engine: Engine) -> None:
    """The resource of bridge-marker and of ovs-cni's marker only directs pods to nodes."""
    network(engine, "n1", "bridge.network.kubevirt.io/br1")
    given(engine, "g", resource="vendor.com/gpu")
    assert devices(engine, "n1,n1") == [("kube-system/cluster", ""), ("web/n1", ""), ("web/n1", "")]
    for attachment in added(engine)[1:]:
        assert b"deviceID" not in attachment.config.raw
        assert "deviceID" not in attachment.capability_args
    assert engine.warnings == []


def lacking(engine: Engine) -> str:
    """The details of the ADD of a plugin that fails without a device, as that of SR-IOV does."""
    network(engine, "n1")
    engine.declare("n1")
    engine.runner.fail["ADD", "web/n1"] = InternalError("VF pci addr is required")
    with pytest.raises(InternalError, match="VF pci addr is required") as caught:
        engine.verbs.add(engine.request())
    found = caught.value.explanation
    assert found.startswith("the pod has no device of vendor.com/vf: its containers or claims must ask")
    return found


@pytest.mark.parametrize(("kinds", "ending"), [(10, "vendor.com/9"), (11, "vendor.com/8, ...")])
def test_the_error_of_its_plugin_names_the_first_ten_resources_of_the_pod(
    engine: Engine, kinds: int, ending: str
) -> None:
    for number in range(kinds):
        given(engine, "d", resource=f"vendor.com/{number}")
    assert lacking(engine).endswith(ending)


@pytest.mark.conformance("pods-25")
def test_a_kubelet_that_can_not_be_asked_is_try_again_later(engine: Engine) -> None:
    network(engine, "n1")
    engine.devices.fail = DevicesUnavailableError("the kubelet is away")
    engine.declare("n1")
    with pytest.raises(TryAgainLaterError, match="devices cannot be determined: the kubelet is away"):
        engine.verbs.add(engine.request())
    assert engine.runner.calls == []


# --- the selection's own device id -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("has", "expected"), [(["a"], "a"), ([], "mine")])
def test_the_selections_device_counts_where_the_resource_has_none(
    engine: Engine, has: list[str], expected: str
) -> None:
    network(engine, "n1")
    given(engine, *has)
    assert devices(engine, '[{"name":"n1","deviceID":"mine"}]')[-1] == ("web/n1", expected)
    assert added(engine)[-1].config.plugins[0].fields["deviceID"] == expected
    assert added(engine)[-1].capability_args["deviceID"] == expected


def test_the_selections_device_is_never_one_that_another_network_has(engine: Engine) -> None:
    network(engine, "n1")
    given(engine, "a")
    engine.declare('[{"name":"n1"},{"name":"n1","deviceID":"a"}]')
    with pytest.raises(InvalidNetworkConfigError, match="not enough devices"):
        engine.verbs.add(engine.request())


# --- claims (DRA) ----------------------------------------------------------------------------------------------------


def with_claims(engine: Engine, networks: str, claims: dict[str, tuple[str, ...]]) -> None:
    annotations = {NETWORKS_ANNOTATION: networks}
    engine.cluster.put_pod(Pod(Namespace("web"), PodName("p1"), PodUid("u1"), annotations, claims=claims))


@pytest.mark.conformance("e2e-8")
def test_a_claim_from_a_template_goes_by_the_pods_own_name_for_it(engine: Engine) -> None:
    network(engine, "n1", "nic")
    network(engine, "n2", "p1-nic-x7f2")
    given(engine, "nic-0", "nic-1", resource="p1-nic-x7f2")
    with_claims(engine, "n1,n2", {"nic": ("p1-nic-x7f2",)})
    engine.verbs.add(engine.request())
    assert [attachment.device_id for attachment in added(engine)] == ["", "nic-0", "nic-1"]


def test_a_claim_goes_by_the_name_of_its_template_too(engine: Engine) -> None:
    """In upstream's example the network names the template. Each network takes its device from its own claim."""
    for name, resource in (("n1", "nics"), ("n2", "nic-b"), ("n3", "nics")):
        network(engine, name, resource)
    given(engine, "a-0", resource="p1-nic-a")
    given(engine, "b-0", "b-1", resource="p1-nic-b")
    claims = {"nic-a": ("p1-nic-a",), "nic-b": ("p1-nic-b",), "nics": ("p1-nic-a", "p1-nic-b")}
    with_claims(engine, "n1,n2,n3", claims)
    engine.verbs.add(engine.request())
    assert [attachment.device_id for attachment in added(engine)] == ["", "a-0", "b-0", "b-1"]
    with_claims(engine, "n1,n2,n3,n1", claims)
    with pytest.raises(InvalidNetworkConfigError, match=r"of nics: the pod has 3 .* network web/n1 is number 4"):
        engine.verbs.add(engine.request(container="c2"))


def test_a_claim_of_that_very_name_comes_first(engine: Engine) -> None:
    network(engine, "n1", "nic")
    given(engine, "own", resource="nic")
    given(engine, "other", resource="p1-nic-x7f2")
    with_claims(engine, "n1", {"nic": ("p1-nic-x7f2",)})
    engine.verbs.add(engine.request())
    assert added(engine)[-1].device_id == "own"


# --- claims of resource.k8s.io/v1 ------------------------------------------------------------------------------------


def claimed(engine: Engine, *ids: str, claim: str = "c1", left_out: tuple[str, ...] = ()) -> None:
    """Devices of a ResourceClaim, beside those of device plugins; their names are `d-<id>`."""
    devices = {(VF, item): ClaimedDevice(claim, f"uid-{claim}", "nic.example.com", "pool", f"d-{item}") for item in ids}
    allocation = Allocation({VF: sorted(ids)} if ids else {}, devices, left_out=left_out)
    engine.devices.claims["web/p1"] = claims.merged(engine.devices.claims.get("web/p1", Allocation()), allocation)


def reported(engine: Engine) -> dict[str, list[tuple[str, str]]]:
    """Device and interface of each report, by claim."""
    return {
        name: [(entry["device"], entry["networkData"]["interfaceName"]) for entry in report.entries]
        for name, report in engine.cluster.device_reports.items()
    }


def test_devices_of_claims_and_of_device_plugins_are_dealt_in_the_order_of_their_ids(engine: Engine) -> None:
    network(engine, "n1")
    given(engine, "b", "d")
    claimed(engine, "c", "a")
    assert [device for _, device in devices(engine, "n1,n1,n1,n1")] == ["", "a", "b", "c", "d"]
    assert [item.claimed and item.claimed.device for item in added(engine)] == [None, "d-a", None, "d-c", None]


def test_what_is_left_out_of_the_claims_is_in_the_error(engine: Engine) -> None:
    claimed(engine, left_out=tuple(f"device {number} is in no slice" for number in range(12)))
    told = [f"device {number} is in no slice" for number in range(10)]
    assert lacking(engine).endswith(f"they have devices of: nothing; {'; '.join(told)}")
    assert engine.cluster.device_reports == {}


def test_a_claims_devices_are_reported_while_they_are_attached(engine: Engine) -> None:
    claimed(engine, "a", "c")
    claimed(engine, "b", claim="c2")
    for number in (1, 2, 3):
        network(engine, f"n{number}")
        engine.interface(f"net{number}", f"web/n{number}", "10.1.0.2/24")
    devices(engine, "n1,n2,n3")
    assert reported(engine) == {"c1": [("d-a", "net1"), ("d-c", "net3")], "c2": [("d-b", "net2")]}
    # The record alone says what to remove.
    engine.devices.fail = DevicesUnavailableError("not to be asked")
    engine.devices.claims.clear()
    engine.verbs = engine.make_verbs()
    engine.verbs.delete(engine.request("DEL"))
    assert reported(engine) == {"c1": [], "c2": []}


def test_an_add_that_fails_reports_nothing(engine: Engine) -> None:
    network(engine, "n1")
    claimed(engine, "a")
    engine.runner.fail["ADD", "web/n1"] = CniError("no")
    engine.declare("n1")
    with pytest.raises(CniError, match="no"):
        engine.verbs.add(engine.request())
    assert engine.cluster.device_reports == {}


# --- device-info files -----------------------------------------------------------------------------------------------


@pytest.mark.npwg("DI 6.1.1")
def test_the_device_info_comes_into_the_status_and_goes_with_the_attachment(engine: Engine) -> None:
    network(engine, "n1")
    given(engine, "0000:03:02.0")
    engine.device_files.written[VF, "0000:03:02.0"] = json.dumps(INFO).encode()
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    devices(engine, "n1")
    path = added(engine)[-1].capability_args["CNIDeviceInfoFile"]
    assert path == "/devinfo/web-n1-c1_net1"
    assert list(engine.device_files.files) == [path]
    (entry,) = [item for item in json.loads(engine.cluster.statuses["web/p1"]) if item["name"] == "web/n1"]
    assert entry["device-info"] == INFO
    engine.verbs.delete(engine.request("DEL"))
    assert engine.device_files.files == {}


@pytest.mark.npwg("DI 5.1")
@pytest.mark.parametrize("declared", [True, False])
def test_a_plugin_that_declares_the_capability_gets_a_path_without_any_device(engine: Engine, declared: bool) -> None:
    config = {"cniVersion": "1.0.0", "name": "n1", "type": "fake", "capabilities": {"CNIDeviceInfoFile": declared}}
    engine.cluster.put_network(definition("web", "n1", json.dumps(config)))
    devices(engine, "n1")
    assert ("CNIDeviceInfoFile" in added(engine)[-1].capability_args) is declared
    assert engine.device_files.prepared == (["/devinfo/web-n1-c1_net1"] if declared else [])


def test_a_path_of_the_runtime_is_not_taken(engine: Engine) -> None:
    engine.stdin = {"runtimeConfig": {"CNIDeviceInfoFile": "/etc/passwd"}}
    devices(engine)
    assert added(engine)[0].capability_args == {}


@pytest.mark.npwg("DI 4.2-4.2.1")
def test_a_failed_add_takes_the_file_with_it(engine: Engine) -> None:
    network(engine, "n1")
    given(engine, "a")
    engine.device_files.written[VF, "a"] = json.dumps(INFO).encode()
    engine.runner.fail["ADD", "web/n1"] = CniError("no")
    engine.declare("n1")
    with pytest.raises(CniError, match="no"):
        engine.verbs.add(engine.request())
    assert engine.device_files.prepared == ["/devinfo/web-n1-c1_net1"]
    assert engine.device_files.files == {}


def test_a_file_that_can_not_be_prepared_fails_the_add(engine: Engine) -> None:
    network(engine, "n1")
    given(engine, "a")
    engine.device_files.fail["prepare"] = OSError(errno.EROFS, "Read-only file system")
    engine.declare("n1")
    with pytest.raises(IoFailureError, match=r"device-info file can't be prepared.*Read-only.*web/n1"):
        engine.verbs.add(engine.request())
    assert engine.runner.attached == set()


@pytest.mark.npwg("5.3.7")
@pytest.mark.parametrize("how", ["garbage", "unreadable"])
def test_device_info_that_can_not_be_used_is_left_out_of_the_status(
    engine: Engine, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    network(engine, "n1")
    given(engine, "a")
    engine.interface("net1", "web/n1", "10.1.0.2/24")
    engine.device_files.written[VF, "a"] = b"{}"
    if how == "unreadable":
        engine.device_files.fail["read"] = OSError(errno.EIO, "Input/output error")
    devices(engine, "n1")
    assert "device-info" not in engine.cluster.statuses["web/p1"]
    assert "network web/n1: its device-info is left out" in caplog.text


def test_a_file_that_can_not_be_removed_does_not_keep_the_network_attached(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    network(engine, "n1")
    given(engine, "a")
    devices(engine, "n1")
    engine.device_files.fail["remove"] = OSError(errno.EIO, "Input/output error")
    engine.verbs.delete(engine.request("DEL"))
    assert engine.store.records == {}
    assert "device-info file can't be removed" in caplog.text


def test_a_file_stays_until_the_plugins_are_through(engine: Engine) -> None:
    network(engine, "n1")
    given(engine, "a")
    engine.device_files.written[VF, "a"] = json.dumps(INFO).encode()
    devices(engine, "n1")
    engine.runner.fail["DEL", "web/n1"] = CniError("not yet")
    with pytest.raises(CniError, match="not yet"):
        engine.verbs.delete(engine.request("DEL"))
    assert engine.device_files.files
    del engine.runner.fail["DEL", "web/n1"]
    engine.verbs.delete(engine.request("DEL"))
    assert engine.device_files.files == {}
