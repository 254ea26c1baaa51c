"""Below a chrootDir links lead where they lead on the host, whatever the daemon's own file system has there."""

from __future__ import annotations

import json

import pytest

from multus_daemon.plugins.builtin import host_local
from multus_daemon.plugins.builtin.host_local_store import Index
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import CniError, IoFailureError
from multus_daemon.spec.cni.result import Dns, Interface, Result
from tests.calls import run
from tests.fakes.runner import FakePluginRunner


@pytest.fixture
def outside(tmp_path):
    """A directory of the daemon's own, to whose path a link of the host leads."""
    outside = tmp_path / "run"
    outside.mkdir()
    return outside


@pytest.fixture
def inside(tmp_path, outside, monkeypatch):
    """The host's directory at the path of `outside`, the target of its /var/run."""
    monkeypatch.setattr(host_local, "_index", Index())
    root = tmp_path / "host"
    inside = root / outside.relative_to("/")
    inside.mkdir(parents=True)
    (root / "var").mkdir()
    (root / "var" / "run").symlink_to(outside)
    (root / "etc").mkdir()
    return inside


def call(tmp_path, plugin, verb, *, runs=None, previous=None, **keys):
    fields = {"cniVersion": "1.0.0", "name": "net", "type": plugin, **keys}
    invocation = Invocation(
        verb, "c1", "", "eth0", "", "/bin", fields, prev_result=previous, raw=json.dumps(fields).encode()
    )
    return run(Builtin(plugin, tmp_path / "host", plugin_for=runs), invocation)


def test_leases(tmp_path, outside, inside):
    ipam = {"type": "host-local", "subnet": "10.0.0.0/24", "dataDir": "/var/run/leases"}
    call(tmp_path, "host-local", "ADD", ipam=ipam)
    assert (inside / "leases" / "net" / "10.0.0.2").exists()
    # One that has been put elsewhere.
    (inside / "leases" / "net").rename(inside / "moved")
    (inside / "leases" / "net").symlink_to(outside / "moved")
    call(tmp_path, "host-local", "DEL", ipam=ipam)
    assert not (inside / "moved" / "10.0.0.2").exists()
    assert list(outside.iterdir()) == []


def test_a_link_to_what_is_not_there_yet(tmp_path, outside, inside):
    inside.rmdir()
    outside.rmdir()
    ipam = {"type": "host-local", "subnet": "10.0.0.0/24", "dataDir": "/var/run/leases"}
    call(tmp_path, "host-local", "ADD", ipam=ipam)
    assert (inside / "leases" / "net" / "10.0.0.2").exists()
    assert not outside.exists()


def test_resolv_conf(tmp_path, outside, inside):
    (tmp_path / "host" / "etc" / "resolv.conf").symlink_to(outside / "resolv.conf")
    (inside / "resolv.conf").write_text("nameserver 10.0.0.53\n")
    (outside / "resolv.conf").write_text("nameserver 192.0.2.1\n")
    ipam = {"type": "host-local", "subnet": "10.0.0.0/24", "dataDir": "/leases", "resolvConf": "/etc/resolv.conf"}
    assert call(tmp_path, "host-local", "ADD", ipam=ipam).dns == Dns(("10.0.0.53",))


def test_flannel(tmp_path, outside, inside):
    text = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.{}.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
    for number, directory in enumerate((outside, inside)):
        (directory / "subnet.env").write_text(text.format(number))
    saved = inside / "data" / "c1"
    saved.parent.mkdir()
    saved.write_text('{"cniVersion":"1.0.0","name":"net","type":"bridge"}')
    delegate = FakePluginRunner()
    keys = {"subnetFile": "/var/run/subnet.env", "dataDir": "/var/run/data"}
    call(tmp_path, "flannel", "DEL", runs=delegate.plugin_for, **keys)
    assert delegate.order == [("bridge", "DEL")]
    assert not saved.exists()
    # An ADD comes as far as the namespace, and has read the file then.
    with pytest.raises(CniError, match="failed to open netns"):
        call(tmp_path, "flannel", "ADD", runs=delegate.plugin_for, **keys)
    (inside / "subnet.env").unlink()
    with pytest.raises(CniError, match=r"open /var/run/subnet.env: No such file"):
        call(tmp_path, "flannel", "ADD", runs=delegate.plugin_for, **keys)


def test_tuning(tmp_path, outside, inside):
    (tmp_path / "host" / "etc" / "cni").symlink_to(outside)
    (inside / "tuning").mkdir()
    (inside / "tuning" / "allowlist.conf").write_text("^net.ipv4.allowed$\n")
    sysctl = {"net.ipv4.other": "1"}
    with pytest.raises(CniError, match=r"^Sysctl net.ipv4.other is not allowed"):
        call(tmp_path, "tuning", "ADD", previous=Result((Interface("eth0"),)), sysctl=sysctl)
    backup = inside / "backup" / "c1_eth0.json"
    backup.parent.mkdir()
    backup.write_text('{"mtu":1400}')
    # The namespace is gone: nothing is left to restore.
    call(tmp_path, "tuning", "DEL", dataDir="/var/run/backup")
    assert not backup.exists()


@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_a_link_to_itself(tmp_path, inside, verb):
    (tmp_path / "host" / "loop").symlink_to("/loop")
    ipam = {"type": "host-local", "subnet": "10.0.0.0/24", "dataDir": "/loop/leases"}
    with pytest.raises(
        IoFailureError, match="^path /loop/leases/net cannot be resolved on the host: Too many levels of"
    ):
        call(tmp_path, "host-local", verb, ipam=ipam)
