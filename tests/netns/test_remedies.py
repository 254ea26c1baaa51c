"""Each error of a plugin names its cause and what to do, and repeats word for word at the runtime's next try."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel import rare, shaping
from multus_daemon.kernel.links import Rtnl
from multus_daemon.kernel.shaping import Bucket
from multus_daemon.kernel.transport import Request
from multus_daemon.plugins import advice
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from tests import calls
from tests.namespaces import remove_netns
from tests.netns import reference
from tests.netns.conftest import Netns

MAC = "02:00:00:00:77:01"
STATIC = {"type": "static", "addresses": [{"address": "10.88.0.9/24"}]}


@dataclass
class Node:
    """Attaches pods to networks, with built-ins or with binaries only."""

    path: Path
    make_netns: Callable[[], Netns]
    mode: Any = "prefer"
    root: Path = Path("/")
    number: int = 0
    """Of the newest container."""

    @property
    def chain(self) -> ListRunner:
        bin_dirs = [str(self.path / "bin"), str(reference.DIRECTORY)]
        plugins = Plugins(ProcessRunner(bin_dirs), self.mode, host_root=self.root)
        return ListRunner(plugins, ResultCache(self.path / "cni"), ":".join(bin_dirs))

    def pod(
        self, config: dict[str, Any], *, netns: Netns | None = None, name: str = "", **capability_args: Any
    ) -> Sandbox:
        """Attach a new container to the network and keep its result. Raises CniError."""
        self.number += 1
        chain, path = self.chain, (netns or self.make_netns()).path
        sandbox = Sandbox(ContainerId(f"{self.number:064x}"), path)
        whole = replace(self.whole(config, name or f"pod-{self.number}"), capability_args=capability_args)
        result = calls.add(chain, sandbox, whole)
        chain.remember(sandbox, replace(whole, result=result), 1)
        return sandbox

    def whole(self, config: dict[str, Any], name: str) -> Attachment:
        """Return the network of `config` for the pod `web/<name>`."""
        fields = {"cniVersion": "1.0.0", "name": "net", "capabilities": {"ips": True, "mac": True}} | config
        if isinstance(ipam := fields.get("ipam"), dict) and ipam["type"] == "host-local":
            fields["ipam"] = {"dataDir": str(self.path / "leases")} | ipam
        args = (("K8S_POD_NAMESPACE", "web"), ("K8S_POD_NAME", name), ("IgnoreUnknown", "1"))
        return Attachment("web/net", conf.parse(json.dumps(fields).encode()), IfName("net1"), cni_args=args)

    def delete_error(self, sandbox: Sandbox, config: dict[str, Any]) -> str:
        """Return the error of a DEL."""
        with pytest.raises(CniError) as caught:
            calls.delete(self.chain, sandbox, self.whole(config, "pod"))
        return str(caught.value)

    def error(self, config: dict[str, Any], **options: Any) -> str:
        """Return the error of an ADD, and require the next try of the runtime to have the same."""
        texts = set()
        for _ in range(2):
            with pytest.raises(CniError) as caught:
                self.pod(config, **options)
            texts.add(str(caught.value))
        [text] = texts
        return text


@pytest.fixture
def node(tmp_path: Path, make_netns: Callable[[], Netns]) -> Node:
    (tmp_path / "bin").mkdir()
    return Node(tmp_path, make_netns)


@pytest.fixture(params=["built-in", "binary"])
def either(request: pytest.FixtureRequest, node: Node) -> Node:
    """The node with built-ins, then with the reference plugins."""
    if request.param == "binary":
        if not reference.has("macvlan", "bridge", "host-local", "static"):
            pytest.skip(reference.HOW)
        node.mode = "off"
    return node


@pytest.fixture
def up0(host: Netns) -> None:
    host.batch("link add up0 type veth peer name up1", "link set up0 up", "link set up1 up")
    host.batch("link add br7 type bridge")


# --- kernel and links ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "keys", "advice"),
    [
        ("ipvlan", {"master": "up0"}, "ipvlan devices: modprobe ipvlan on the node, or a kernel with CONFIG_IPVLAN"),
        ("vlan", {"master": "up0", "vlanId": 5}, "vlan devices: modprobe 8021q on the node, or a kernel with CONFIG_"),
        ("dummy", {"ipam": STATIC}, "dummy devices: modprobe dummy on the node, or a kernel with CONFIG_DUMMY"),
    ],
)
def test_a_missing_module_is_named(node: Node, up0: None, plugin: str, keys: dict[str, Any], advice: str) -> None:
    if not reference.has(plugin):
        pytest.skip(reference.HOW)
    with contextlib.closing(Rtnl()) as kernel:
        if rare.can_make(kernel, plugin):
            pytest.skip(f"the kernel has {plugin} devices: needs one without")
    assert f"ADD); the kernel has no {advice}" in node.error({"type": plugin} | keys)


def test_kinds_of_links(host: Netns) -> None:
    kinds = ("veth", "bridge", "macvlan", "no-such-kind")
    with contextlib.closing(Rtnl()) as kernel:
        assert [rare.can_make(kernel, kind) for kind in kinds] == [True, True, True, False]
    assert host.links() == set()


def test_a_built_in_without_its_module(node: Node, up0: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel here has macvlan, so the refusal is made up."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(95, "Operation not supported (Unknown device type)")

    monkeypatch.setattr(Rtnl, "add_link", refuse)
    monkeypatch.setattr(rare, "can_make", lambda _, kind: kind != "macvlan")
    text = node.error({"type": "macvlan", "master": "up0"})
    assert text.startswith('failed to create macvlan on "up0": Operation not supported')
    assert "; the kernel has no macvlan devices: modprobe macvlan on the node" in text


@pytest.mark.parametrize("lacking", ["ifb", "tbf"])
def test_limits_without_their_modules(node: Node, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_link = Rtnl.add_link

    def refuse(kernel: Rtnl, name: str, kind: str, *arguments: Any, **options: Any) -> None:
        if kind == "ifb":
            raise OSError(95, "Operation not supported (Unknown device type)")
        add_link(kernel, name, kind, *arguments, **options)

    if lacking == "ifb":
        monkeypatch.setattr(Rtnl, "add_link", refuse)
    else:
        unknown = shaping.add_bucket(1, Bucket.of(8, 8)).body.replace(b"tbf", b"tbx")
        monkeypatch.setattr(shaping, "add_bucket", lambda *_: Request(36, unknown, 0x400))
    limits = {"type": "bandwidth", "egressRate": 8000, "egressBurst": 8000}
    text = node.error({"plugins": [{"type": "bridge", "bridge": "br7", "ipam": STATIC}, limits]})
    assert "; modprobe -a ifb sch_tbf" in text


@pytest.mark.parametrize(
    ("plugin", "keys"),
    [
        ("macvlan", {"master": "gone0"}),
        ("ipvlan", {"master": "gone0"}),
        ("vlan", {"master": "gone0", "vlanId": 5}),
        ("host-device", {"device": "gone0"}),
    ],
)
def test_a_missing_master_names_the_links_of_the_node(
    either: Node, up0: None, plugin: str, keys: dict[str, Any]
) -> None:
    if not reference.has(plugin):
        pytest.skip(reference.HOW)
    key = next(iter(keys))
    advice = f"there is no \"gone0\": correct '{key}' in the network's configuration: the node has br7"
    assert f"ADD); {advice}" in either.error({"type": plugin} | keys)


def test_no_default_route_for_macvlan(either: Node, up0: None) -> None:
    advice = "set 'master' in the network's configuration: the node has br7"
    assert f"ADD); {advice}" in either.error({"type": "macvlan"})


def test_at_most_ten_links_are_named(host: Netns) -> None:
    host.batch(*(f"link add br{number} type bridge" for number in range(12)))
    with contextlib.closing(Rtnl()) as kernel:
        assert advice._links(kernel) == ", ".join(f"br{number}" for number in range(10)) + ", ..."


def test_the_uplink_of_a_node_that_is_a_container_is_named(host: Netns) -> None:
    host.batch("link add eth7 type veth peer name veth12345678")
    with contextlib.closing(Rtnl()) as kernel:
        assert advice._links(kernel) == "eth7"


# --- addresses -------------------------------------------------------------------------------------------------------


IPAM = {"type": "host-local", "subnet": "10.88.0.0/24", "rangeEnd": "10.88.0.20"}
BRIDGE = {"type": "bridge", "bridge": "br7", "ipam": IPAM}


def test_an_address_outside_of_the_range_names_the_range(either: Node) -> None:
    text = either.error(BRIDGE, ips=["10.9.9.9/24"])
    assert text.startswith("failed to allocate all requested IPs: 10.9.9.9 (")
    assert "; ask for another in the pod's annotation, in the network's range 10.88.0.1-10.88.0.20" in text


def test_a_taken_address_names_its_pod(either: Node) -> None:
    either.pod(BRIDGE, ips=["10.88.0.7/24"])
    text = either.error(BRIDGE, ips=["10.88.0.7/24"])
    assert text.startswith("failed to allocate for range 0: requested IP address 10.88.0.7 is not available in range")
    assert "; pod web/pod-1 has 10.88.0.7: ask for another in the pod's annotation" in text


def test_a_taken_address_of_an_unknown_pod(either: Node) -> None:
    either.pod(BRIDGE, ips=["10.88.0.7/24"])
    for path in (either.path / "cni" / "results").iterdir():
        path.unlink()
    text = either.error(BRIDGE, ips=["10.88.0.7/24"])
    assert "; `multusctl attachments` shows which pod has it: ask for another in the pod's annotation" in text
    assert (f"; container {1:064x} has it" in text) is (either.mode == "prefer")


def test_an_address_without_its_prefix_length(either: Node) -> None:
    text = either.error({"type": "bridge", "bridge": "br7", "ipam": {"type": "static"}}, ips=["10.88.0.7"])
    assert "NOT in CIDR notation" in text
    assert "; write the address with its prefix length, such as 10.1.2.3/24" in text


# --- MAC addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(61)
def test_a_mac_address_that_another_pod_has_on_the_bridge(either: Node) -> None:
    either.pod(BRIDGE, mac=MAC)
    with pytest.raises(CniError) as refused:
        either.pod(BRIDGE, mac=MAC)
    assert refused.value.code == 7
    text = either.error(BRIDGE, mac=MAC.upper())
    assert text.startswith(f'MAC address {MAC} is that of pod web/pod-1 on bridge "br7" (plugin type="bridge"')
    assert "ADD); ask for another in the pod's annotation, or delete that pod" in text


@pytest.mark.weak_spot(61)
@pytest.mark.parametrize(
    "why", ["other bridge", "other vlan", "same pod", "same name", "is down", "is gone", "renamed", "other address"]
)
def test_a_mac_address_may_be_used_again(either: Node, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    netns = either.make_netns()
    either.pod(BRIDGE, netns=netns, mac=MAC)
    match why:
        case "other bridge":
            either.pod(BRIDGE | {"bridge": "br8", "name": "other"}, mac=MAC)
        case "other vlan":
            # As a kernel with VLAN filtering says it, which not every machine has.
            monkeypatch.setattr(Rtnl, "vlans", lambda *_: [200])
            either.pod(BRIDGE, mac=MAC)
            monkeypatch.setattr(Rtnl, "vlans", lambda *_: [1, 200])
            assert "is that of pod web/pod-" in either.error(BRIDGE, mac=MAC)
        case "same pod":
            netns.batch("link set net1 down", "link set net1 name net0", "link set net0 up")
            either.number -= 1
            either.pod(BRIDGE | {"name": "second"}, netns=netns, mac=MAC)
        case "same name":
            # An older container of the pod, whose namespace has stayed.
            either.pod(BRIDGE, name="pod-1", mac=MAC)
        case "is down":
            netns.run("ip", "link", "set", "net1", "down")
            either.pod(BRIDGE, mac=MAC)
        case "is gone":
            # A pod whose DEL never came.
            netns.run("ip", "link", "del", "net1")
            either.pod(BRIDGE, mac=MAC)
        case "renamed":
            # As KubeVirt does for its guest, which is not looked into.
            netns.batch("link set net1 down", "link set net1 name guest", "link set guest up")
            either.pod(BRIDGE, mac=MAC)
        case _:
            either.pod(BRIDGE, mac="02:00:00:00:77:02")


def test_a_mac_address_that_another_macvlan_has(either: Node, up0: None) -> None:
    macvlan = {"type": "macvlan", "master": "up0", "ipam": IPAM}
    either.pod(macvlan, mac=MAC)
    text = either.error(macvlan, mac=MAC)
    assert "ddress already in use" in text
    assert f"ADD); MAC address {MAC} is that of pod web/pod-1: ask for another in the pod's annotation" in text


# --- programs, files, names ------------------------------------------------------------------------------------------


def script(node: Node, name: str, text: str) -> None:
    path = node.path / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("status", "how"), [(0, "succeeded, but"), (1, "failed (exit status 1), and")])
def test_garbage_is_shown_with_the_program_and_without_the_configuration(node: Node, status: int, how: str) -> None:
    garbage = "Segmentation\\033 fault hunter2 token 4711 fabric " + "x" * 300
    script(node, "fabric", f'test "$CNI_COMMAND" = ADD || exit 0; printf "{garbage}"; exit {status}')
    text = node.error({"type": "fabric", "password": "hunter2", "nested": [{"pin": 4711}]})
    shown = repr(("Segmentation\033 fault *** token *** fabric " + "x" * 300)[:200])
    path = node.path / "bin" / "fabric"
    assert text.startswith(f'plugin "fabric" {how} {path} printed {shown} instead of CNI\'s JSON (plugin type=')
    assert "ADD); correct or replace the program: all but the result belongs on its stderr; " in text


@pytest.mark.parametrize("kind", ["absent", "stale"])
def test_dhcp_without_its_agent_says_how_to_start_it(either: Node, up0: None, kind: str) -> None:
    if not reference.has("dhcp"):
        pytest.skip(reference.HOW)
    ipam = {"type": "dhcp", "daemonSocketPath": str(either.path / "dhcp.sock")}
    if kind == "stale":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(ipam["daemonSocketPath"])
    text = either.error({"type": "macvlan", "master": "up0", "ipam": ipam})
    stale = "remove its socket, " if kind == "stale" else ""
    assert (
        f"ADD); the DHCP agent is absent: {stale}start `/opt/cni/bin/dhcp daemon` on each node, as a systemd unit"
        in text
    )


@pytest.fixture
def small_disk(node: Node) -> Iterator[Path]:
    """An empty disk at `/leases` of the node, whose root is not the daemon's."""
    node.root = node.path / "hostroot"
    disk = node.root / "leases"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("read-only", "Read-only file system: /leases/net"), ("full", "No space left on device: /leases/net")],
)
def test_a_data_directory_that_cannot_be_written_is_named_as_the_host_has_it(
    node: Node, small_disk: Path, fault: str, message: str
) -> None:
    if fault == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    else:
        (small_disk / "file").write_bytes(bytes(4096))
        (small_disk / "net").mkdir()
        (small_disk / "net" / "lock").write_bytes(bytes(4096))
    text = node.error(BRIDGE | {"ipam": IPAM | {"dataDir": "/leases"}})
    assert text.startswith(f"host-local: {message}")
    assert "ADD); check mount, free space and permissions of /leases on the node, or set ipam.dataDir" in text
    assert "hostroot" not in text


@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_names_of_one_try_go_to_the_log(node: Node, verb: str, caplog: pytest.LogCaptureFixture) -> None:
    names = "$CNI_NETNS of $CNI_CONTAINERID: vethdeadbeef in '$CNI_NETNS'"
    answer = f'cat <<EOF\n{{"msg": "{names}"}}\nEOF\nexit 1'
    script(node, "fabric", f'if test "$CNI_COMMAND" != {verb}; then echo {{}}; exit 0; fi\n{answer}')
    with caplog.at_level(logging.INFO):
        if verb == "ADD":
            text = node.error({"type": "fabric"})
        else:
            pods = [node.pod({"type": "fabric"}) for _ in range(2)]
            [text] = {node.delete_error(pod, {"type": "fabric"}) for pod in pods}
    shown = "the pod's network namespace of the container: veth* in 'the pod's network namespace'"
    assert text.startswith(f'{shown} (plugin type="fabric" network="web/net" interface="net1", {verb})')
    assert [record.getMessage() for record in caplog.records if f"{node.number:064x}: vethdeadbeef" in record.message]


def test_a_namespace_that_is_gone(either: Node) -> None:
    netns = either.make_netns()
    remove_netns(Path(netns.path))
    with pytest.raises(CniError) as caught:
        either.pod(BRIDGE, netns=netns)
    assert caught.value.msg.startswith("failed to open the pod's network namespace: ")
    assert netns.path not in str(caught.value)
