"""Device-info files on the node, below the root that the plugins see."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from multus_daemon.cluster import devices
from multus_daemon.cluster.devices import NodeDeviceFiles
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName

INFO = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:03:02.0"}}
ATTACHMENT = Attachment(
    "web/sriov",
    conf.parse(b'{"cniVersion":"1.0.0","name":"sriov","type":"sriov"}'),
    IfName("net1"),
    resource_name="vendor.com/vf",
    device_id="0000:03:02.0",
)
PATH = "/var/run/k8s.cni.cncf.io/devinfo/cni/web-sriov-c1_net1"


class Host:
    """A host's root with `/var/run` an absolute link to `/run`, as it is on most hosts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "run").mkdir()
        (root / "var").mkdir()
        (root / "var" / "run").symlink_to("/run")
        self.base = root / "run" / "k8s.cni.cncf.io" / "devinfo"
        self.files = NodeDeviceFiles(root)

    def device_plugin(self, content: str, device: str = "0000:03:02.0") -> Path:
        """Write the file of a device plugin."""
        (self.base / "dp").mkdir(parents=True, exist_ok=True)
        path = self.base / "dp" / f"vendor.com-vf-{device}-device.json"
        path.write_text(content)
        return path

    @property
    def file(self) -> Path:
        return self.base / "cni" / "web-sriov-c1_net1"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture(autouse=True)
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.npwg("DI 4.1", "DI 4.2-4.2.1")
def test_the_device_plugins_file_is_copied_read_and_removed(host: Host) -> None:
    assert host.files.path(ATTACHMENT, ContainerId("c1")) == PATH
    host.device_plugin(json.dumps(INFO))
    host.files.prepare(ATTACHMENT, PATH)
    assert json.loads(host.file.read_text()) == INFO
    assert mode(host.file) == 0o444
    assert host.files.read(PATH) == INFO
    host.files.remove(PATH)
    assert os.listdir(host.file.parent) == []
    host.files.remove(PATH)


@pytest.mark.weak_spot(58)
def test_the_directory_can_be_looked_into_by_others(host: Host) -> None:
    host.files.prepare(ATTACHMENT, PATH)
    assert [mode(path) for path in (host.base.parent, host.base, host.base / "cni")] == [0o755] * 3


@pytest.mark.weak_spot(58)
def test_a_directory_that_upstream_made_without_any_permission_is_mended(host: Host) -> None:
    (host.base / "cni").mkdir(parents=True)
    # The innermost first: who is not root does not get past a closed one.
    for path in (host.base / "cni", host.base, host.base.parent):
        path.chmod(0)
    host.files.prepare(ATTACHMENT, PATH)
    assert [mode(path) for path in (host.base.parent, host.base, host.base / "cni")] == [0o755] * 3


def test_the_mode_that_an_administrator_chose_stays(host: Host) -> None:
    (host.base / "cni").mkdir(parents=True)
    (host.base / "cni").chmod(0o750)
    host.files.prepare(ATTACHMENT, PATH)
    assert mode(host.base / "cni") == 0o750


@pytest.mark.npwg("DI 5.1")
def test_without_a_device_plugins_file_the_plugins_write_one(host: Host) -> None:
    host.files.prepare(ATTACHMENT, PATH)
    assert host.files.read(PATH) is None
    host.file.write_text(json.dumps(INFO))
    assert host.files.read(PATH) is not None


@pytest.mark.parametrize("content", [json.dumps(INFO), None])
def test_what_a_crash_has_left_is_replaced(host: Host, content: str | None) -> None:
    host.file.parent.mkdir(parents=True)
    host.file.write_text("stale")
    if content is not None:
        host.device_plugin(content)
    host.files.prepare(ATTACHMENT, PATH)
    assert (host.file.read_text() if host.file.exists() else None) == content


def test_nothing_was_ever_written(host: Host) -> None:
    assert host.files.read(PATH) is None
    host.files.remove(PATH)
    assert not host.base.exists()


@pytest.mark.parametrize("where", ["dp", "cni"])
def test_no_link_is_followed_to_a_file_outside(host: Host, tmp_path: Path, where: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(INFO))
    path = host.base / where / ("vendor.com-vf-0000:03:02.0-device.json" if where == "dp" else host.file.name)
    path.parent.mkdir(parents=True)
    path.symlink_to(secret)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        (host.files.prepare(ATTACHMENT, PATH) if where == "dp" else host.files.read(PATH))
    if where == "cni":
        host.files.prepare(ATTACHMENT, PATH)
        host.files.remove(PATH)
    assert secret.exists()


@pytest.mark.parametrize("where", ["dp", "cni"])
def test_a_file_that_is_too_large(host: Host, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(devices, "MAX_BYTES", 100)
    host.file.parent.mkdir(parents=True)
    (host.device_plugin("") if where == "dp" else host.file).write_text(" " * 101)
    with pytest.raises(OSError, match="larger than 100 bytes"):
        (host.files.prepare(ATTACHMENT, PATH) if where == "dp" else host.files.read(PATH))


def test_a_file_that_is_no_device_info(host: Host) -> None:
    host.device_plugin("{}")
    host.files.prepare(ATTACHMENT, PATH)
    with pytest.raises(CniError, match="device-info: type"):
        host.files.read(PATH)


@pytest.mark.parametrize("device", ["../../secret", "a\0b", "d" * 300])
def test_a_device_id_of_the_pods_author_leads_nowhere(host: Host, device: str) -> None:
    (host.base / "dp").mkdir(parents=True)
    (host.base / "secret-device.json").write_text(json.dumps(INFO))
    attachment = Attachment("web/x", ATTACHMENT.config, IfName("net1"), resource_name="r", device_id=device)
    host.files.prepare(attachment, PATH)
    assert host.files.read(PATH) is None


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "/var/run/k8s.cni.cncf.io/devinfo/cni/..", "/var/run/k8s.cni.cncf.io/devinfo/dp/x"]
)
def test_only_files_of_attachments_are_touched(host: Host, path: str) -> None:
    for work in (host.files.read, host.files.remove, partial(host.files.prepare, ATTACHMENT)):
        with pytest.raises(PermissionError):
            work(path)


def test_a_host_whose_run_directory_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NodeDeviceFiles(tmp_path).prepare(ATTACHMENT, PATH)
