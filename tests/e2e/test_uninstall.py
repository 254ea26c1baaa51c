"""`multus-daemon uninstall` after the last daemon: it serves the spool itself, and leaves no more than it names."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import multus_shim
from tests.e2e.node import Node
from tests.e2e.rights import Container, of_folder
from tests.e2e.test_leftovers import del_without_a_daemon, failing_network

PODS = {"c1": ("p1", "storage,fabric"), "c2": ("p2", "storage"), "c3": ("p3", "storage,fabric")}


class Abandoned:
    """A node with pods of additional networks, whose daemon is gone for good."""

    def __init__(self, node: Node, **settings: object) -> None:
        self.node = node
        self._container = Container(node.root, of_folder("uninstall/base", "uninstall"))
        self.broken, self.calls = failing_network(node)
        node.ptp("storage", "10.81.1.0/24", namespace="default")
        for name, networks in PODS.values():
            node.pod(name, networks)
        node.settings |= settings
        node.start()
        self.links = node.links()
        self.spaces = {container: node.add_netns() for container in PODS}
        for container, (name, _) in PODS.items():
            assert node.cni("ADD", container, self.spaces[container], name).code == 0
        assert node.stop() == 0
        self.conf = node.root / "net.d"
        self.conf.mkdir()
        (self.conf / "00-multus.conf").write_text('{"name": "multus-cni-network", "type": "multus-shim"}')
        self.shim = node.bin_dir / "multus-shim"
        self.shim.write_bytes(multus_shim.binary().read_bytes())
        # No API server listens there.
        away = {"apiVersion": "v1", "kind": "Config", "clusters": [{"cluster": {"server": "https://127.0.0.1:1"}}]}
        (node.root / "kubeconfig").write_text(json.dumps(away))
        node.config.write_text(json.dumps(node.settings | {"kubeconfig": str(node.root / "kubeconfig")}))

    def delete(self, *containers: str) -> None:
        """Delete these pods as the runtime does: the DELs go to the spool."""
        for container in containers:
            assert del_without_a_daemon(self.node, container, self.spaces[container], PODS[container][0]) == 0

    @property
    def command(self) -> list[str]:
        """The command line of the uninstaller, on the node."""
        # As in its manifest, the directories above ours are writable: a directory with a mount on it can't be removed.
        contained = self._container.cli("uninstall", writable=[self.node.root])
        places = [f"--bin-dir={self.node.bin_dir}", f"--cni-config-dir={self.conf}"]
        inside = ["ip", "netns", "exec", Path(self.node.host).name]
        return [*inside, *contained, "--config", str(self.node.config), *places]

    def uninstall(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.command, *options], capture_output=True, text=True, timeout=60, check=False)

    def assert_clean(self) -> None:
        """Fail if anything of the pods or of ours is left."""
        assert self.node.leftovers() == []
        assert [self.node.links(netns) for netns in self.spaces.values()] == [["lo"]] * len(PODS)
        assert self.node.links() == self.links
        assert not list(self.conf.iterdir())
        assert not self.shim.exists()


MakeAbandoned = Callable[..., Abandoned]


@pytest.fixture
def abandoned(node: Node) -> MakeAbandoned:
    """Make the node."""
    return lambda **settings: Abandoned(node, **settings)


def test_pods_that_are_deleted_without_a_daemon_are_freed(abandoned: MakeAbandoned) -> None:
    made = abandoned()
    made.delete("c1", "c2")
    done = made.uninstall()
    assert done.returncode == 3
    assert "1 pods have additional networks: default/p3 (2); nothing was removed" in done.stderr
    assert made.shim.exists()
    assert [path.stem for path in (made.node.cni_dir / "attachments").glob("*.json")] == ["c3"]
    made.delete("c3")
    done = made.uninstall()
    assert (done.returncode, "were not done" in done.stdout) == (0, False), done.stderr
    made.assert_clean()
    assert sorted(made.calls.read_text().split()) == ["c1", "c3"]
    assert made.uninstall().stdout == "there was nothing to remove\n"


def test_a_call_that_still_waits_for_a_daemon_is_awaited(abandoned: MakeAbandoned) -> None:
    """The runtime may have begun a DEL before the configuration is removed; the shim spools it after 10 s."""
    made = abandoned()
    made.delete(*PODS)
    made.shim.chmod(0o755)
    # The kubelet asks for a DEL more than once.
    environment = made.node.environment("DEL", "c3", made.spaces["c3"], PODS["c3"][0])
    with subprocess.Popen([made.shim], env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waiting:
        assert waiting.stdin is not None
        waiting.stdin.write(made.node.stdin)
        waiting.stdin.close()
        done = made.uninstall()
        assert (done.returncode, "were not done" in done.stdout) == (0, False), done.stderr
        # The shim has spooled its DEL before the uninstaller ends, which has served it.
        assert waiting.wait(timeout=1) == 0
    made.assert_clean()
    assert list((made.node.cni_dir / "spool").glob("*")) == []


@pytest.mark.parametrize("tries", [5, 1])
def test_a_network_that_can_not_be_freed_is_named_with_its_cause(abandoned: MakeAbandoned, tries: int) -> None:
    """With `deleteTries` 1 the DEL leaves the spool, and the rest is on record only."""
    made = abandoned(deleteTries=tries)
    made.delete(*PODS)
    made.broken.touch()
    for _ in range(2):
        done = made.uninstall()
        assert done.returncode == 3
        said = done.stderr.splitlines()[-1]
        assert said.startswith("multus-daemon uninstall: networks of deleted pods are not freed (2): ")
        assert said.count("the fabric is away") == 2
        assert "default/p1" in said
        assert "default/p3" in said
        assert "default/p2" not in said
        assert "have additional networks" not in said
        assert "--force" in said
    # The others are freed, and nothing of ours is removed.
    assert made.shim.exists()
    assert list(made.conf.iterdir())
    assert [made.node.links(netns) for netns in made.spaces.values()] == [["lo"]] * 3
    assert [path for path in made.node.leftovers() if path.startswith("networks/")] == []
    made.broken.unlink()
    assert made.uninstall().returncode == 0
    made.assert_clean()


def test_a_plugin_that_hangs_is_ended_and_holds_up_its_own_pods_only(abandoned: MakeAbandoned) -> None:
    made = abandoned(delegateTimeoutSeconds=5)
    made.delete(*PODS)
    made.node.plugin("fabric", "exec sleep 300")
    done = made.uninstall()
    assert done.returncode == 3
    said = done.stderr.splitlines()[-1]
    assert "networks of deleted pods are not freed (2): " in said
    assert "default/p1" in said
    assert "default/p3" in said
    left = [path.stem for path in (made.node.cni_dir / "attachments").glob("*.json")]
    assert sorted(left) == ["c1", "c3"]
    made.node.plugin("fabric", "exit 0")
    assert made.uninstall().returncode == 0
    made.assert_clean()


def test_force_removes_all_the_same_and_says_what_stays(abandoned: MakeAbandoned) -> None:
    made = abandoned()
    made.delete("c1", "c2")
    made.broken.touch()
    done = made.uninstall("--force")
    assert done.returncode == 0, done.stderr
    assert f"DELs in {made.node.cni_dir}/spool that were not done: 1; what their pods had stays taken" in done.stdout
    assert not made.shim.exists()
    assert not (made.node.cni_dir / "attachments").exists()


def test_an_uninstaller_that_is_killed_is_started_again(abandoned: MakeAbandoned) -> None:
    made = abandoned()
    made.delete(*PODS)
    hangs = f"while [ -e {made.broken} ]; do sleep 0.1; done"
    made.node.plugin("fabric", f"echo $CNI_CONTAINERID >> {made.calls}\n{hangs}")
    made.broken.touch()
    with subprocess.Popen(made.command, stderr=subprocess.DEVNULL) as killed:
        made.node.wait_until(lambda: "c1" in made.calls.read_text(), "the first DEL runs")
        killed.kill()
    made.broken.unlink()
    assert made.shim.exists()
    done = made.uninstall()
    assert done.returncode == 0, done.stderr
    made.assert_clean()
