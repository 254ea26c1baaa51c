"""`multus-daemon install` and `uninstall`: the shim and everything else of ours, on a node that is a folder."""

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import multus_shim
from multus_daemon.node import install
from multus_daemon.node.install import InstallError
from multus_daemon.plugins.cache import Entry, ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import fs
from multus_daemon.spec import netconf
from multus_daemon.spec.attachment import Attachment, ContainerRecord, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from tests.programs import needed

OURS = b'{"cniVersion":"1.0.0","name":"multus-cni-network","type":"multus-shim"}'
OURS_AS_LIST = b'{"cniVersion":"1.0.0","name":"multus-cni-network","plugins":[{"type":"multus-shim"}]}'
PRIMARY = b'{"cniVersion":"1.0.0","name":"cluster","plugins":[{"type":"bridge"},{"type":"portmap"}]}'


@pytest.fixture
def node(tmp_path: Path) -> install.Node:
    found = install.Node(
        *(tmp_path / name for name in ("bin", "net.d", "run/multus", "lib/multus", "etc/multus/net.d"))
    )
    for directory in (found.bin_dir, found.conf_dir, found.socket_dir, found.cni_dir):
        directory.mkdir(parents=True)
    return found


def store_of(node: install.Node) -> FileStore:
    return FileStore(node.cni_dir, ResultCache(node.cni_dir))


def attach(node: install.Node, container_id: str, networks: int, store: FileStore | None = None) -> None:
    config = conf.parse(b'{"cniVersion":"1.0.0","name":"n","type":"bridge"}')
    (store or store_of(node)).save(
        ContainerRecord(
            Sandbox(ContainerId(container_id), "/run/netns/x"),
            IfName("eth0"),
            Namespace("web"),
            PodName(f"web-{container_id}"),
            PodUid("u"),
            tuple(
                Attachment("n", config, IfName(f"net{number}"), cluster_network=number == 0)
                for number in range(networks)
            ),
            complete=True,
        )
    )


def elf(machine: int, order: str = "<") -> bytes:
    return b"\x7fELF\x02" + (b"\x01" if order == "<" else b"\x02") + bytes(10) + struct.pack(f"{order}HH", 2, machine)


@pytest.mark.conformance("programs-21")
def test_the_shim_is_put_there_once(node: install.Node) -> None:
    assert install.install_shim(multus_shim.binary(), node.bin_dir) is True
    target = node.bin_dir / "multus-shim"
    assert target.read_bytes() == multus_shim.binary().read_bytes()
    assert target.stat().st_mode & 0o777 == 0o755
    before = target.stat().st_ino
    assert install.install_shim(multus_shim.binary(), node.bin_dir) is False
    assert target.stat().st_ino == before
    assert [path.name for path in node.bin_dir.iterdir()] == ["multus-shim"]


@pytest.mark.conformance("programs-21")
def test_a_file_with_another_mode_is_replaced(node: install.Node) -> None:
    install.install_shim(multus_shim.binary(), node.bin_dir)
    (node.bin_dir / "multus-shim").chmod(0o644)
    assert install.install_shim(multus_shim.binary(), node.bin_dir) is True
    assert (node.bin_dir / "multus-shim").stat().st_mode & 0o777 == 0o755


def test_a_shim_that_runs_can_be_replaced(node: install.Node) -> None:
    # Writing to the file that runs is "text file busy".
    target = node.bin_dir / "multus-shim"
    target.write_bytes(Path("/usr/bin/sleep").read_bytes())
    target.chmod(0o755)
    with subprocess.Popen([target, "60"]) as running:
        try:
            assert install.install_shim(multus_shim.binary(), node.bin_dir) is True
            assert running.poll() is None
        finally:
            running.kill()


@pytest.mark.conformance("programs-21")
def test_there_is_a_whole_shim_at_every_moment(node: install.Node) -> None:
    target = node.bin_dir / "multus-shim"
    install.install_shim(multus_shim.binary(), node.bin_dir)
    # A process of its own, as the runtime is: a thread of this one would inherit what is being written.
    script = 'while [ ! -e "$1" ]; do CNI_COMMAND=VERSION "$0" >/dev/null && echo run || echo failed; done'
    stop = node.cni_dir / "stop"
    with subprocess.Popen(["/bin/sh", "-c", script, target, stop], stdout=subprocess.PIPE, text=True) as runtime:
        try:
            for _ in range(20):
                target.chmod(0o711)
                assert install.install_shim(multus_shim.binary(), node.bin_dir) is True
        finally:
            stop.touch()
        answers, _ = runtime.communicate(timeout=30)
    assert set(answers.split()) == {"run"}


@pytest.mark.parametrize("machine", [183, 22])
def test_another_architecture_is_refused_before_anything_changes(node: install.Node, machine: int) -> None:
    (node.bin_dir / "multus-shim").write_bytes(b"old")
    source = node.cni_dir / "shim"
    source.write_bytes(elf(machine, ">" if machine == 22 else "<"))
    with pytest.raises(InstallError, match=r"is for (aarch64|s390x), and this node is x86_64"):
        install.install_shim(source, node.bin_dir, machine="x86_64")
    assert (node.bin_dir / "multus-shim").read_bytes() == b"old"


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\nexit 0\n", b"\x7fELF" + bytes(40)])
def test_what_is_no_program_is_refused(node: install.Node, content: bytes) -> None:
    source = node.cni_dir / "shim"
    source.write_bytes(content)
    with pytest.raises(InstallError, match="this image is broken"):
        install.install_shim(source, node.bin_dir)
    assert not list(node.bin_dir.iterdir())


def test_a_program_that_does_not_run_leaves_the_old_one(node: install.Node) -> None:
    (node.bin_dir / "multus-shim").write_bytes(b"old")
    source = node.cni_dir / "shim"
    source.write_bytes(Path("/usr/bin/false").read_bytes())
    with pytest.raises(InstallError, match="does not run on this node: exit status 1"):
        install.install_shim(source, node.bin_dir)
    assert (node.bin_dir / "multus-shim").read_bytes() == b"old"
    assert [path.name for path in node.bin_dir.iterdir()] == ["multus-shim"]


def test_a_missing_directory_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="mount the node's plugin directory there"):
        install.install_shim(multus_shim.binary(), tmp_path / "nowhere")


def test_what_a_killed_install_left_is_swept(node: install.Node) -> None:
    (node.bin_dir / ".multus-shim.new").write_bytes(b"half")
    stale = node.bin_dir / ".multus-shim.999999999-0123456789ab"
    stale.write_bytes(b"half")
    install.install_shim(multus_shim.binary(), node.bin_dir)
    assert [path.name for path in node.bin_dir.iterdir()] == ["multus-shim"]


def test_uninstall_takes_what_is_ours_and_nothing_else(node: install.Node) -> None:
    (node.conf_dir / "00-multus.conf").write_bytes(OURS)
    (node.conf_dir / "01-multus.conflist").write_bytes(OURS_AS_LIST)
    (node.conf_dir / "02-waiting.conf").write_bytes(netconf.PLACEHOLDER)
    (node.conf_dir / "03-without-type.conf").write_bytes(b'{"name":"multus-cni-network"}')
    (node.conf_dir / "10-cluster.conflist").write_bytes(PRIMARY)
    (node.conf_dir / "00-multus.conf.bak").write_bytes(OURS)
    (node.conf_dir / "50-broken.conf").write_bytes(b"{")
    for name in ("multus-shim", "bridge"):
        (node.bin_dir / name).write_bytes(b"x")
    for name in ("multus.sock", "kubeconfig"):
        (node.socket_dir / name).write_bytes(b"")
    attach(node, "c1", 1)
    done = install.uninstall(node, store_of(node), force=False, purge=False)
    assert sorted(path.name for path in node.conf_dir.iterdir()) == [
        "00-multus.conf.bak", "03-without-type.conf", "10-cluster.conflist", "50-broken.conf",
    ]  # fmt: skip
    assert [path.name for path in node.bin_dir.iterdir()] == ["bridge"]
    assert [path.name for path in node.socket_dir.iterdir()] == ["kubeconfig"]
    # The configuration goes first: the runtime must not look for a shim that is gone.
    assert done[0] == f"removed {node.conf_dir / '00-multus.conf'}"
    assert install.uninstall(node, store_of(node), force=False, purge=False) == []


def test_pods_with_additional_networks_hold_it_up(node: install.Node) -> None:
    (node.conf_dir / "00-multus.conf").write_bytes(OURS)
    attach(node, "c1", 1)
    attach(node, "c2", 3)
    with pytest.raises(InstallError, match=r"1 pods have additional networks: web/web-c2 \(2\); nothing was removed"):
        install.uninstall(node, store_of(node), force=False, purge=True)
    assert (node.conf_dir / "00-multus.conf").exists()
    assert install.uninstall(node, store_of(node), force=True, purge=True) == [
        f"removed {node.conf_dir / '00-multus.conf'}",
        f"removed {node.cni_dir}",
        f"removed {node.socket_dir}",
    ]


def test_records_go_and_what_upstream_deletes_the_pods_by_stays(node: install.Node) -> None:
    """No other program reads them; after a roll-back upstream's daemon reads its own files and libcni's results."""
    cache = ResultCache(node.cni_dir)
    store = FileStore(node.cni_dir, cache, upstream_too=True)
    attach(node, "c1", 1, store)
    attach(node, "c2", 3, store)
    cache.write(Entry("c2", b"{}", "net1", "n"))
    kept = {path: path.read_bytes() for path in node.cni_dir.rglob("*") if path.is_file() and path.suffix != ".json"}
    assert sorted(path.name for path in kept) == ["c1", "c2", "n-c2-net1"]
    # A writer that was killed.
    (node.cni_dir / "attachments" / f".c3.json.1-{fs.boot()}-0123456789ab").write_bytes(b"{")
    with pytest.raises(InstallError, match="nothing was removed"):
        install.uninstall(node, store, force=False, purge=False)
    assert store.load(ContainerId("c2")) is not None
    assert install.uninstall(node, store, force=True, purge=False) == [
        f"removed {node.cni_dir / 'attachments'}",
        f"removed {node.socket_dir}",
    ]
    assert {path: path.read_bytes() for path in node.cni_dir.rglob("*") if path.is_file()} == kept
    assert install.uninstall(node, store_of(node), force=True, purge=False) == []


def test_deletions_that_are_not_done_hold_it_up(node: install.Node) -> None:
    (node.cni_dir / "spool").mkdir()
    for name in ("1-1.json", "2-1.json", ".3-1.json"):
        (node.cni_dir / "spool" / name).write_bytes(b"{}")
    with pytest.raises(
        InstallError, match=f"DELs in {node.cni_dir}/spool that are not served: 2; nothing was removed: repeat"
    ):
        install.uninstall(node, store_of(node), force=False, purge=True)
    done = install.uninstall(node, store_of(node), force=True, purge=True)
    assert done[0] == f"DELs in {node.cni_dir}/spool that were not done: 2; what their pods had stays taken"
    assert not node.cni_dir.exists()


def test_deleted_pods_are_freed_first_and_told_from_those_that_live(node: install.Node) -> None:
    for container in ("c1", "c2", "c3"):
        attach(node, container, 2)
    (node.conf_dir / "00-multus.conf").write_bytes(OURS)

    def free() -> dict[str, str]:
        store_of(node).remove(ContainerId("c1"))
        return {"c2": "the fabric is away (pod web/web-c2)"}

    with pytest.raises(InstallError) as refused:
        install.uninstall(node, store_of(node), free, force=False, purge=False)
    assert str(refused.value) == (
        "networks of deleted pods are not freed (1): the fabric is away (pod web/web-c2); 1 pods have additional "
        "networks: web/web-c3 (1); nothing was removed: correct these errors, drain the node, repeat; with "
        "--force their networks stay taken, and the pods that live need a restart"
    )
    assert (node.conf_dir / "00-multus.conf").exists()
    assert store_of(node).load(ContainerId("c1")) is None


def test_containers_that_were_set_aside_are_named(node: install.Node) -> None:
    attach(node, "c1", 2)
    record = store_of(node).load(ContainerId("c1"))
    assert record is not None
    store_of(node).set_aside(record, since=1.0, why="the fabric is away")
    said = "containers that were set aside keep what they had: c1"
    assert said in install.uninstall(node, store_of(node), force=False, purge=False)


def test_a_pod_that_is_left_with_an_additional_network_alone_counts(node: install.Node) -> None:
    attach(node, "c1", 2)
    record = store_of(node).load(ContainerId("c1"))
    assert record is not None
    store_of(node).save(replace(record, attachments=record.attachments[1:]))
    with pytest.raises(InstallError, match=r"1 pods have additional networks: web/web-c1 \(1\)"):
        install.uninstall(node, store_of(node), force=False, purge=False)


def test_directories_of_ours_go_with_what_was_in_them(node: install.Node) -> None:
    (node.socket_dir / "multus.sock").write_bytes(b"")
    for name in ("attachments", "results", "spool/rejected"):
        (node.cni_dir / name).mkdir(parents=True)
    node.networks_dir.mkdir(parents=True)
    assert install.uninstall(node, store_of(node), force=False, purge=False) == [
        f"removed {node.socket_dir / 'multus.sock'}",
        f"removed {node.socket_dir}",
        f"removed {node.cni_dir}",
        f"removed {node.networks_dir.parent}",
    ]
    assert not any(each.exists() for each in (node.socket_dir, node.cni_dir, node.networks_dir.parent))
    assert all(each.parent.exists() for each in (node.socket_dir, node.cni_dir, node.networks_dir.parent))


def test_directories_with_something_in_them_stay(node: install.Node) -> None:
    node.networks_dir.mkdir(parents=True)
    kept = [node.socket_dir / "kubeconfig", node.cni_dir / "aside" / "c1", node.networks_dir / "macvlan.conf"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    (node.cni_dir / "results").mkdir()
    assert install.uninstall(node, store_of(node), force=False, purge=False) == []
    assert all(path.exists() for path in kept)
    for path in kept:
        path.unlink()
        path.symlink_to("/")
    assert install.uninstall(node, store_of(node), force=False, purge=False) == []


def test_a_directory_of_another_name_stays(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("bin", "net.d", "run", "cni", "networks")]
    for directory in places:
        directory.mkdir()
    node = install.Node(*places)
    assert install.uninstall(node, store_of(node), force=False, purge=False) == []
    assert all(directory.exists() for directory in places)


@pytest.mark.parametrize("purge", [False, True])
def test_a_directory_that_is_mounted_by_itself_is_emptied(tmp_path: Path, purge: bool) -> None:
    """The kernel does not remove a mount point, as in a container; the uninstaller would never end."""
    places = [tmp_path / name for name in ("bin", "net.d", "run", "lib/multus", "networks")]
    for directory in places:
        directory.mkdir(parents=True)
    (places[3] / "results").mkdir()
    flags = ("--bin-dir", "--cni-config-dir", "--socket-dir", "--cni-dir", "--conf-dir")
    command = [sys.executable, "-m", "multus_daemon.cli", "uninstall", *(["--purge"] if purge else [])]
    command += [f"{flag}={place}" for flag, place in zip(flags, places, strict=True)]
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    script = 'mount --bind "$0" "$0" && exec "$@"'
    done = subprocess.run(
        [needed("unshare"), *namespaces, "sh", "-c", script, str(places[3]), *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(places[3].iterdir()) == []


def test_uninstall_of_a_node_that_has_nothing(tmp_path: Path) -> None:
    nothing = install.Node(
        *(tmp_path / name for name in ("bin", "net.d", "run/multus", "lib/multus", "etc/multus/net.d"))
    )
    assert install.uninstall(nothing, store_of(nothing), force=False, purge=True) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; run the tests as another user for this one")
def test_what_can_not_be_removed_is_said(node: install.Node) -> None:
    (node.conf_dir / "00-multus.conf").write_bytes(OURS)
    node.conf_dir.chmod(0o500)
    with pytest.raises(InstallError, match="Permission denied"):
        install.uninstall(node, store_of(node), force=False, purge=False)


def test_passthru_goes_where_it_is_ours(node: install.Node) -> None:
    for name in (install.SHIM, install.PASSTHRU):
        assert install.install_shim(multus_shim.binary(), node.bin_dir, name=name) is True
    done = install.uninstall(node, store_of(node), force=False, purge=False)
    assert done[:2] == [f"removed {node.bin_dir}/passthru", f"removed {node.bin_dir}/multus-shim"]
    assert not any(node.bin_dir.iterdir())


def test_passthru_of_somebody_else_stays(node: install.Node) -> None:
    install.install_shim(multus_shim.binary(), node.bin_dir)
    (node.bin_dir / "passthru").write_bytes(b"upstream's")
    install.uninstall(node, store_of(node), force=False, purge=False)
    assert [path.name for path in node.bin_dir.iterdir()] == ["passthru"]


THIN = (
    b'{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus","kubeconfig":"/k","delegates":[{"type":"x"}]}'
)


def test_the_thin_plugins_place_goes_with_what_calls_it(node: install.Node) -> None:
    """The shim has its name: a configuration that calls it would call nothing."""
    for name in (install.SHIM, install.THIN):
        assert install.install_shim(multus_shim.binary(), node.bin_dir, name=name) is True
    (node.conf_dir / "00-multus.conflist").write_bytes(THIN)
    (node.conf_dir / "10-cluster.conflist").write_bytes(PRIMARY)
    install.uninstall(node, store_of(node), force=False, purge=False)
    assert not any(node.bin_dir.iterdir())
    assert [path.name for path in node.conf_dir.iterdir()] == ["10-cluster.conflist"]


def test_a_thin_plugin_that_is_back_stays(node: install.Node) -> None:
    install.install_shim(multus_shim.binary(), node.bin_dir)
    (node.bin_dir / "multus").write_bytes(b"upstream's")
    (node.conf_dir / "00-multus.conf").write_bytes(OURS)
    (node.conf_dir / "00-multus.conflist").write_bytes(THIN)
    install.uninstall(node, store_of(node), force=False, purge=False)
    assert [path.name for path in node.bin_dir.iterdir()] == ["multus"]
    assert [path.name for path in node.conf_dir.iterdir()] == ["00-multus.conflist"]
