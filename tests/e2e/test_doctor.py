"""`multusctl doctor` on a node with something wrong: what it finds, and that it changes nothing."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import multus_shim
from multus_daemon.settings import from_object
from multus_tools.ctl import doctor as module
from multus_tools.ctl import offline
from tests.e2e.node import Node
from tests.programs import needed
from tests.unit.plugins.test_find import go_program


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    conf = tmp_path / "net.d"
    conf.mkdir()
    settings: dict[str, Any] = {"cniConfigDir": str(conf), "multusAutoconfigDir": str(conf), "clusterNetwork": ""}
    # What a test leaves is not deleted before it is found.
    settings["reconcileSeconds"] = 0
    with Node(settings=settings) as node:
        del node.settings["clusterNetwork"]
        ipam = {"type": "host-local", "subnet": "10.77.3.0/24", "dataDir": str(node.networks_dir)}
        cluster = {"cniVersion": "1.0.0", "name": "cluster", "type": "ptp", "ipam": ipam}
        (conf / "10-cluster.conf").write_text(json.dumps(cluster))
        node.pod("a")
        (node.bin_dir / "multus-shim").write_bytes(multus_shim.binary().read_bytes())
        (node.bin_dir / "multus-shim").chmod(0o755)
        node.start()
        yield node


def command(node: Node, *words: str) -> list[str]:
    words = ("doctor", "--json", *words, "--config", str(node.config))
    return node.contained(sys.executable, "-m", "multus_tools.ctl", *words)


def all_findings(node: Node, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and findings."""
    done = subprocess.run(command(node, *words), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "multusctl.doctor/v1"
    return done.returncode, found["findings"]


def doctor(node: Node, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and findings; those about the machine, which is not the test's, aside."""
    _, found = all_findings(node, *words)
    own = [item for item in found if item["check"] not in ("links", "rules", "leases", "others")]
    return int(any(item["severity"] == "error" for item in own)), own


def only(findings: list[dict[str, Any]], check: str) -> dict[str, Any]:
    """The one finding of a check."""
    (found,) = [item for item in findings if item["check"] == check]
    return found


def conf_dir(node: Node) -> Path:
    return Path(node.settings["cniConfigDir"])


def attach(node: Node, netns: str) -> None:
    """Call ADD as the runtime does, with the configuration in its directory."""
    configuration = (conf_dir(node) / "00-multus.conf").read_bytes()
    assert node.cni("ADD", "c1", netns, "a", stdin=configuration).code == 0


def test_a_node_in_order_has_no_findings(node: Node) -> None:
    assert doctor(node) == (0, [])


def test_a_daemon_that_is_not_there(node: Node) -> None:
    node.kill()
    status, _ = all_findings(node)
    assert status == 1
    _, findings = doctor(node)
    assert "no daemon listens" in only(findings, "daemon")["evidence"]


def test_a_file_that_the_runtime_reads_before_ours(node: Node) -> None:
    first = conf_dir(node) / "00-aaa.conf"
    first.write_text(json.dumps({"cniVersion": "1.0.0", "name": "x", "type": "bridge"}))
    _, findings = doctor(node)
    found = only(findings, "configuration")
    assert (found["severity"], found["subject"]) == ("error", str(first))
    assert "comes first" in found["evidence"]
    assert first.exists()


def test_the_thin_plugin_in_front(node: Node) -> None:
    thin = {"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus", "delegates": [{"type": "bridge"}]}
    (conf_dir(node) / "00-a-thin.conf").write_text(json.dumps(thin))
    _, findings = doctor(node)
    evidence = [item["evidence"] for item in findings if item["check"] == "configuration"]
    assert any("another Multus (the thin plugin" in text for text in evidence)


@pytest.mark.parametrize(
    ("wrong", "evidence"),
    [
        ("gone", "is not there"),
        ("not executable", "is not executable"),
        ("another machine", "is a program for s390x"),
        ("cut off", "is damaged or of another release: 1000 bytes, and the shim of this release has "),
    ],
)
def test_the_shim_can_not_be_executed(node: Node, wrong: str, evidence: str) -> None:
    shim = node.bin_dir / "multus-shim"
    if wrong == "gone":
        shim.unlink()
    elif wrong == "not executable":
        shim.chmod(0o644)
    elif wrong == "cut off":
        shim.write_bytes(shim.read_bytes()[:1000])
    else:
        shim.write_bytes(program_for(22))
    _, findings = doctor(node)
    found = only(findings, "shim")
    # No DaemonSet runs this daemon.
    assert (evidence in found["evidence"], found["advice"]) == (True, "multus-daemon install puts it there")


def program_for(machine: int) -> bytes:
    head = bytearray(Path("/bin/true").read_bytes()[:64])
    head[18:20] = machine.to_bytes(2, "little")
    return bytes(head)


def test_a_plugin_of_another_machine(node: Node) -> None:
    (node.bin_dir / "sriov").write_bytes(program_for(183))
    _, findings = doctor(node)
    found = only(findings, "plugins")
    assert (found["severity"], found["evidence"].startswith("is a program for aarch64")) == ("warning", True)


def test_a_plugin_that_is_newer_than_the_built_in(node: Node) -> None:
    package = "github.com/containernetworking/plugins"
    go_program(node.bin_dir / "bridge", f"{package}/plugins/main/bridge", more=f"mod\t{package}\tv99.0.0\n")
    (node.bin_dir / "bridge").chmod(0o755)
    code, findings = doctor(node)
    assert (code, only(findings, "plugins")["severity"]) == (0, "info")
    assert "v99.0.0 is newer" in only(findings, "plugins")["evidence"]


def test_what_is_safe_is_mended_where_it_is_asked_for(node: Node) -> None:
    attach(node, node.add_netns())
    directory = node.cni_dir / "attachments"
    directory.chmod(0o755)
    _, findings = doctor(node)
    assert only(findings, "disk")["fix"] == "chmod 700"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert doctor(node, "--fix") == (0, [])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_records_that_nobody_deletes_or_reads(node: Node) -> None:
    netns = node.add_netns()
    attach(node, netns)
    (node.cni_dir / "attachments" / "c2.json").write_text("{")
    node.remove_netns(netns)
    _, findings = doctor(node)
    records = {item["subject"]: item for item in findings if item["check"] == "records"}
    assert "gone" in records["pod default/a, container c1"]["evidence"]
    assert records["container c2"]["severity"] == "error"


def test_what_belongs_to_no_record_is_told_of(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    leases = root / "var" / "lib" / "cni" / "networks" / "blue"
    leases.mkdir(parents=True)
    for name, content in (("lock", ""), ("last_reserved_ip.0", "10.1.0.2"), ("10.1.0.2", "lost\r\neth0")):
        (leases / name).write_text(content)
    rule = '-A POSTROUTING -s 10.1.0.2/32 -m comment --comment "name: \\"blue\\" id: \\"lost\\"" -j CNI-1234\n'
    nft = 'ip saddr 10.1.0.3 jump masq_checks comment "0123-4567, net: blue, if: eth0, id: lost2"\n'
    printed = {"iptables-save": rule, "nft": nft}
    monkeypatch.setattr(offline, "output_of", lambda _, command, __: printed[command[0]])
    settings = from_object({"cniDir": str(node.cni_dir), "chrootDir": str(root)}, "test")
    examined = module.examine(module.Node(settings, lambda: ("", {})))
    found = [(item.check, item.subject) for item in examined if item.check in ("leases", "rules")]
    assert found == [("leases", "blue: 10.1.0.2"), ("rules", "container lost"), ("rules", "container lost2")]


UPSTREAM = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
sys.stdin.read()
"""


def test_a_second_daemon_is_found(node: Node, make_node: Callable[..., Node], tmp_path: Path) -> None:
    """By its socket, as it listens, in the network namespace that both share; not by words of a command."""
    host = Path(node.host).name

    def daemons() -> list[str]:
        examined = command(node)
        done = subprocess.run(examined, capture_output=True, text=True, timeout=60, check=False)
        return [item["evidence"] for item in json.loads(done.stdout)["findings"] if item["check"] == "others"]

    words = [needed("ip"), "netns", "exec", host, "tail", "-f", "multus-daemon", "/dev/null"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as reader:
        assert daemons() == []
        reader.terminate()
    assert node.daemon is not None
    path = str(tmp_path / "multus.sock")
    upstream = [needed("ip"), "netns", "exec", host, sys.executable, "-c", UPSTREAM, path]
    with subprocess.Popen(upstream, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (found,) = daemons()
        other.communicate()
    assert f"processes: {', '.join(map(str, sorted((node.daemon.pid, other.pid))))}" in found
    second = make_node(wrapper=("nsenter", f"--net={node.host}", "--"))
    second.start()
    assert second.daemon is not None
    (found,) = daemons()
    assert str(second.daemon.pid) in found
    second.stop()
    assert daemons() == []


def test_a_standalone_daemon_that_is_away(node: Node) -> None:
    """Neither a pod of Kubernetes nor another user would help."""
    node.kill()
    _, findings = doctor(node)
    assert only(findings, "daemon")["advice"] == "start it; its log says why it has ended"
    assert not any("kubectl" in item["advice"] or "as root" in item["advice"] for item in findings)
