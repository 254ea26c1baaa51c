"""`multusctl` asks a running daemon."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.spec.cni.names import ContainerId
from multus_tools.ctl.commands import COMMANDS
from tests.e2e.node import Node
from tests.programs import needed, path_of
from tests.unit.tools.kubectl.test_page import keys

OF_NO_NODE = ("completion",)
"""Commands that look at nothing."""


def multusctl(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it with the node's configuration."""
    of_the_node = () if words[0] in OF_NO_NODE else ("--config", str(node.config))
    command = node.contained(sys.executable, "-m", "multus_tools.ctl", *words, *of_the_node)
    # Without `env` a child gets COLUMNS, which readline sets behind Python's back: the sign of a terminal.
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})


def asked(node: Node, *words: str) -> dict[str, Any]:
    """The JSON object of an answer."""
    done = multusctl(node, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        node.ptp("cluster", "10.77.1.0/24")
        node.ptp("other", "10.77.2.0/24", namespace="default")
        node.pod("a", "other")
        node.start()
        yield node


def test_trace_shows_the_steps_of_a_pod_in_order(node: Node) -> None:
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "a").code == 0
    assert node.cni("DEL", "c1", netns, "a").code == 0
    found = asked(node, "trace", "default/a")
    assert found["schema"] == "multusctl.trace/v1"
    added, deleted = found["requests"]
    assert (added["verb"], added["pod"], added["container"], added["error"]) == ("ADD", "default/a", "c1", None)
    steps = [step["what"] for step in added["steps"]]
    expected = [
        "its turn",
        "networks: kube-system/cluster, default/other",
        "planned",
        "plugin host-local",
        "plugin ptp",
    ]
    places = [next(place for place, step in enumerate(steps) if step.startswith(start)) for start in expected]
    assert places == sorted(places)
    assert (
        sum(step["seconds"] for step in added["steps"] if step["what"] == "plugin ptp: ADD success") < added["seconds"]
    )
    assert deleted["verb"] == "DEL"
    shown = multusctl(node, "trace", "default/a").stdout
    assert "ADD" in shown
    assert "plugin ptp: ADD success" in shown


def test_trace_has_the_error_of_a_request_that_failed(node: Node) -> None:
    node.pod("b", "missing")
    assert node.cni("ADD", "c2", node.add_netns(), "b").code != 0
    (failed,) = asked(node, "trace", "default/b")["requests"]
    assert "default/missing" in failed["error"]["text"]


def test_attachments_shows_what_is_attached_and_checks_it(node: Node) -> None:
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "a").code == 0
    (container,) = asked(node, "attachments", "--check")["containers"]
    assert (container["pod"], container["netns"], container["problem"], container["check"]) == (
        "default/a",
        netns,
        "",
        "",
    )
    first, second = container["attachments"]
    assert (first["network"], first["interface"], first["clusterNetwork"]) == ("kube-system/cluster", "eth0", True)
    assert (second["network"], second["interface"], second["addresses"]) == ("default/other", "net1", ["10.77.2.2/24"])
    assert second["mac"] in json.dumps(node.ip("-j", "link", "show", "net1", netns=netns))
    assert {"type": "ptp", "servedBy": "built-in"} in second["plugins"]
    assert "net1" in multusctl(node, "attachments").stdout
    node.pod("b", "other")
    node.wait_until(lambda: multusctl(node, "attachments", "default/b").returncode == 0, "the pod is known")
    assert asked(node, "attachments", "default/b")["containers"] == []
    assert asked(node, "trace", "default/b")["requests"] == []
    node.ip("link", "delete", "net1", netns=netns)
    done = multusctl(node, "attachments", "default/a", "--check", "--json")
    assert done.returncode == 1
    assert "net1" in json.loads(done.stdout)["containers"][0]["check"]


def test_leaks_are_what_nobody_will_delete(node: Node) -> None:
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "a").code == 0
    assert asked(node, "attachments", "--leaks")["containers"] == []
    node.remove_netns(netns)
    (leak,) = asked(node, "attachments", "--leaks")["containers"]
    assert (leak["container"], leak["netnsExists"]) == ("c1", False)
    assert "gone" in leak["problem"]
    node.stop()
    (again,) = json.loads(multusctl(node, "attachments", "--leaks", "--json").stdout)["containers"]
    assert again["container"] == "c1"


def test_status_says_what_is_wrong_and_how_often(node: Node) -> None:
    node.pod("b", "missing")
    for number in range(3):
        assert node.cni("ADD", f"d{number}", node.add_netns(), "b").code != 0
    assert node.cni("ADD", "c1", node.add_netns(), "a").code == 0
    found = asked(node, "status")
    assert (found["ready"], found["gates"], found["containers"], found["source"]) == (True, {}, 1, "daemon")
    (error,) = found["errors"]
    assert (error["verb"], error["count"], error["pod"]) == ("ADD", 3, "default/b")
    assert "default/missing" in error["cause"]
    assert found["cluster"]["kind"] == "standalone"
    assert {item["resource"]: item["objects"] for item in found["cluster"]["informers"]} == {"pods": 2, "networks": 2}
    assert "ready" in multusctl(node, "status").stdout
    node.stop()
    done = multusctl(node, "status", "--json")
    assert done.returncode == 3
    stopped = json.loads(done.stdout)
    assert (stopped["ready"], stopped["source"], stopped["containers"]) == (False, "store", 1)
    assert stopped.keys() == found.keys()


def test_explain_shows_the_plan_and_touches_nothing(node: Node) -> None:
    before = node.links()
    found = asked(node, "explain", "default/a")
    assert (found["problem"], found["attached"]) == ("", False)
    cluster, other = found["networks"]
    assert (cluster["interface"], cluster["why"]) == ("eth0", "the cluster network, for every pod")
    assert (other["network"], other["interface"]) == ("default/other", "net1")
    assert other["why"] == "the pod's annotation k8s.v1.cni.cncf.io/networks"
    assert [(item["type"], item["servedBy"]) for item in other["plugins"] + other["calls"]] == [
        ("ptp", "built-in"),
        ("host-local", "built-in"),
    ]
    assert other["plugins"][0]["config"]["ipam"]["subnet"] == "10.77.2.0/24"
    assert node.links() == before
    assert not (node.cni_dir / "attachments").exists()
    shown = multusctl(node, "explain", "default/a").stdout
    assert "no ADD since the daemon's start" in shown
    assert node.cni("ADD", "c1", node.add_netns(), "a").code == 0
    found = asked(node, "explain", "default/a")
    assert (found["attached"], found["container"]) == (True, "c1")


def test_explain_names_the_cause_that_an_add_names(node: Node) -> None:
    node.pod("b", "missing")
    failed = node.cni("ADD", "c2", node.add_netns(), "b")
    done = multusctl(node, "explain", "default/b", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["problem"].startswith(failed.json["msg"])
    assert (found["code"], [item["code"] for item in found["errors"]]) == (failed.json["code"], [failed.json["code"]])


@pytest.mark.parametrize("command", ["explain", "attachments", "trace"])
def test_a_pod_that_does_not_exist(node: Node, command: str) -> None:
    for words in (("default/nobody",), ("nobody",), ("nobody", "-n", "default"), ("nobody", "-o", "json")):
        done = multusctl(node, command, *words)
        assert (done.returncode, done.stdout) == (3, ""), words
        (line,) = done.stderr.splitlines()
        assert line.startswith("multusctl: pod default/nobody is not known; no manifest in ")
    # A leftover needs no pod.
    assert multusctl(node, "attachments", "default/nobody", "--leaks").returncode == 0


@pytest.fixture
def two(node: Node) -> Node:
    """A node with an attached pod in each of two namespaces."""
    node.ptp("other", "10.77.3.0/24", namespace="mine")
    node.pod("b", "other", namespace="mine")
    node.wait_until(lambda: asked(node, "status")["cluster"]["informers"][1]["objects"] == 3, "the network is known")
    assert node.cni("ADD", "c1", node.add_netns(), "a").code == 0
    assert node.cni("ADD", "c2", node.add_netns(), "b", namespace="mine").code == 0
    return node


def test_attachments_in_each_format(two: Node) -> None:
    as_json = asked(two, "attachments")
    assert asked(two, "attachments", "-o", "json") == as_json
    assert yaml.safe_load(multusctl(two, "attachments", "-o", "yaml").stdout) == as_json
    assert multusctl(two, "attachments", "-o", "name").stdout == "default/a\nmine/b\n"
    head, *rows = multusctl(two, "attachments").stdout.splitlines()
    assert head.split()[:3] == ["pod", "interface", "network"]
    assert [row.split()[:3] for row in rows] == [
        ["default/a", "eth0", "kube-system/cluster"],
        ["default/a", "net1", "default/other"],
        ["mine/b", "eth0", "kube-system/cluster"],
        ["mine/b", "net1", "mine/other"],
    ]
    cells = [row.split() for row in rows]
    assert [row.split() for row in multusctl(two, "attachments", "--no-headers").stdout.splitlines()] == cells
    wide = [row.split() for row in multusctl(two, "attachments", "-o", "wide", "--no-headers").stdout.splitlines()]
    (host,) = as_json["containers"][0]["attachments"][1]["hostInterfaces"]
    assert wide[1] == [*cells[1], "c1", host]


def test_namespaces(two: Node) -> None:
    for flags, expected in (
        (("-n", "mine"), ["mine/b"]),
        (("-A",), ["default/a", "mine/b"]),
        (("-n", "mine", "-A"), ["default/a", "mine/b"]),
        (("-n", "none"), []),
        (("b", "-n", "mine"), ["mine/b"]),
        (("mine/b",), ["mine/b"]),
    ):
        found = asked(two, "attachments", *flags)["containers"]
        assert [item["pod"] for item in found] == expected, flags
        assert multusctl(two, "attachments", *flags, "-o", "name").stdout.split() == expected
    assert {item["pod"] for item in asked(two, "trace", "-n", "mine")["requests"]} == {"mine/b"}
    assert {item["pod"] for item in asked(two, "trace", "-A")["requests"]} == {"default/a", "mine/b"}
    assert asked(two, "explain", "b", "-n", "mine")["pod"] == "mine/b"


def test_a_pipe_has_a_line_for_each_interface(two: Node) -> None:
    """As `kubectl exec` without -t runs it: standard output is a pipe, TERM may be set."""
    program = f"{sys.executable} -m multus_tools.ctl attachments --config {two.config}"
    environment = {**os.environ, "TERM": "xterm"}
    for command, expected in ((f"{program} | grep -c default/a", "2\n"), (f"{program} | wc -l", "5\n")):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment)
        assert (done.stdout, done.stderr) == (expected, "")


def test_a_watch_prints_what_changes_until_it_is_interrupted(two: Node) -> None:
    command = [sys.executable, "-m", "multus_tools.ctl", "attachments", "-w", "-n", "default"]
    process = subprocess.Popen(
        [*command, "--config", str(two.config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def row() -> str:
        """The next one, but for what a look into the middle of a request shows."""
        assert process.stdout
        while "begun" in (line := process.stdout.readline()):
            pass
        return line

    try:
        assert process.stdout
        first = [process.stdout.readline().split()[:2] for _ in range(3)]
        two.pod("c")
        two.wait_until(lambda: multusctl(two, "explain", "c").returncode == 0, "the pod is known")
        netns = two.add_netns()
        assert two.cni("ADD", "c3", netns, "c").code == 0
        added = row()
        assert two.cni("DEL", "c3", netns, "c").code == 0
        gone = row()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert first == [["pod", "interface"], ["default/a", "eth0"], ["default/a", "net1"]]
    assert (added.split()[:3], gone.split()) == (
        ["default/c", "eth0", "kube-system/cluster"],
        ["default/c", "eth0", "gone"],
    )
    assert (process.returncode, rest, errors) == (130, "", "")


def test_a_watch_ends_with_the_daemon(two: Node) -> None:
    two.stop()
    done = multusctl(two, "attachments", "--watch")
    assert (done.returncode, done.stdout, "multus-daemon run" in done.stderr) == (3, "", True)


def test_explain_takes_a_manifest_that_is_not_applied(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    networks = json.dumps([{"name": "other", "interface": "blue0", "ips": ["10.77.2.9"]}])
    template = {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": networks}}, "spec": {"containers": []}}
    metadata = {"name": "web", "namespace": "default"}
    path.write_text(json.dumps({"kind": "Deployment", "metadata": metadata, "spec": {"template": template}}))
    found = asked(node, "explain", "--file", str(path))
    assert found["networks"][1]["interface"] == "blue0"
    assert found["networks"][1]["requests"] == {"ips": ["10.77.2.9"]}


def test_without_a_daemon_it_says_so_at_once(node: Node) -> None:
    assert node.stop() == 0
    began = time.monotonic()
    done = multusctl(node, "trace", "default/a")
    assert done.returncode == 3
    assert "multus-daemon run" in done.stderr
    assert time.monotonic() - began < 30


def broken_record(node: Node) -> str:
    """The record of a container `c1`, whose namespace that is, can't be read."""
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "a").code == 0
    # What else tells of it: libcni's results, and what is written for an upstream daemon.
    for path in (*(node.cni_dir / "results").iterdir(), node.cni_dir / "c1"):
        path.unlink()
    (node.cni_dir / "attachments" / "c1.json").write_text("{")
    return netns


def test_a_damaged_record_is_a_leak_that_can_be_forgotten(node: Node) -> None:
    netns = broken_record(node)
    assert node.cni("DEL", "c1", netns, "a").code == 1
    (leak,) = asked(node, "attachments", "--leaks")["containers"]
    assert (leak["container"], leak["advice"]) == (
        "c1",
        "free by hand what it holds, then: multusctl attachments forget c1",
    )
    assert "record can't be read" in leak["problem"]
    assert asked(node, "attachments", "forget", "c1", "--yes") == {
        "schema": "multusctl.forget/v1",
        "container": "c1",
        "pod": "",
        "attachments": [],
    }
    assert asked(node, "attachments", "--leaks")["containers"] == []
    assert node.cni("DEL", "c1", netns, "a").code == 0
    done = multusctl(node, "attachments", "forget", "c1", "--yes")
    assert (done.returncode, "nothing is known of container c1" in done.stderr) == (1, True)


def test_what_was_set_aside_is_listed_with_why_and_since(node: Node) -> None:
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "a").code == 0
    node.stop()
    store = FileStore(node.cni_dir, ResultCache(node.cni_dir))
    record = store.load(ContainerId("c1"))
    assert record
    store.set_aside(record, since=1_700_000_000.0, why="port 7 is locked")
    offline = json.loads(multusctl(node, "attachments", "--leaks", "--json").stdout)["containers"]
    node.start()
    (leak,) = asked(node, "attachments", "--leaks")["containers"]
    assert [leak] == offline
    row = multusctl(node, "attachments", "--leaks", "--no-headers").stdout
    assert (row.count("\n"), row.split()[:2], row.rstrip().endswith("set aside")) == (1, ["default/a", "c1"], True)
    wide = multusctl(node, "attachments", "--leaks", "-o", "wide", "--no-headers").stdout
    assert (wide.count("\n"), "port 7 is locked" in wide, leak["advice"] in wide) == (1, True, True)
    assert multusctl(node, "attachments", "--leaks", "-o", "name").stdout == "c1\n"
    assert (leak["problem"], leak["setAside"]) == ("set aside: port 7 is locked", 1_700_000_000.0)
    assert [item["network"] for item in leak["attachments"]] == ["kube-system/cluster", "default/other"]
    assert asked(node, "attachments")["containers"] == []
    done = multusctl(node, "attachments", "forget", "c1", "--yes")
    assert (done.returncode, netns in done.stderr) == (1, True)
    node.remove_netns(netns)
    forgotten = multusctl(node, "attachments", "forget", "c1", "--yes")
    assert forgotten.returncode == 0, forgotten.stderr
    assert "default/other (net1, 10.77.2.2/24), by ptp, host-local" in forgotten.stdout
    assert asked(node, "attachments", "--leaks")["containers"] == []


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("\n", 1), ("no\n", 1)])
def test_forget_asks_on_a_terminal(node: Node, answer: str, status: int) -> None:
    broken_record(node)
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        "-m",
        "multus_tools.ctl",
        "attachments",
        "forget",
        "c1",
        "--config",
        str(node.config),
    ]
    try:
        os.write(ours, answer.encode())
        done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == status, done.stderr
    assert "The addresses and interfaces of container c1 will not be freed. Forget it? [y/N]" in done.stderr
    assert (node.cni_dir / "attachments" / "c1.json").exists() is bool(status)


def test_forget_asks_nobody_where_there_is_no_terminal(node: Node) -> None:
    broken_record(node)
    done = multusctl(node, "attachments", "forget", "c1")
    assert (done.returncode, "--yes" in done.stderr) == (1, True)
    assert (node.cni_dir / "attachments" / "c1.json").exists()
    assert multusctl(node, "attachments", "forget").returncode == 1
    assert multusctl(node, "attachments", "default/a", "b").returncode == 1


READ_ONLY = (
    ("status",),
    ("attachments",),
    ("attachments", "default/a", "--check"),
    ("attachments", "--leaks"),
    ("drift",),
    ("drift", "default/a"),
    ("repair", "default/a", "--dry-run"),
    ("explain", "default/a"),
    ("explain", "default/b"),
    ("explain", "--file", "MANIFEST"),
    ("trace",),
    ("trace", "default/a", "--last", "5"),
    ("doctor",),
    ("plugins",),
    ("validate", "MANIFEST"),
    ("completion", "bash"),
)
"""Every command but for those whose name says that they change something."""
NOTHING_DIFFERS = {("drift",), ("drift", "default/a")}
"""Those with a remark only, on standard error."""


def commands(node: Node) -> Iterator[tuple[str, ...]]:
    """They, as text and as JSON; two of them fail."""
    manifest = node.root / "pod.yaml"
    if not manifest.exists():
        manifest.write_text("{apiVersion: v1, kind: Pod, metadata: {name: x}, spec: {}}")
    for words in READ_ONLY:
        named = tuple(str(manifest) if word == "MANIFEST" else word for word in words)
        yield named
        if words[0] not in OF_NO_NODE:
            yield (*named, "--json")


def everything(node: Node, netns: str) -> dict[str, Any]:
    """All that a command could change: files, links, addresses, routes and rules, on the host and in the pod."""
    files = {}
    for path in sorted(node.root.rglob("*")):
        if path == node.log:
            continue
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        files[str(path)] = (status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns, content)
    found: dict[str, Any] = {"files": files}
    for place in ("", netns):
        for words in (("link",), ("addr",), ("route", "show", "table", "all"), ("rule",), ("neigh",)):
            shown = node.ip(*words, netns=place)
            for item in shown:
                item.pop("ifi_flags", None)
            found[f"{place} {words[0]}"] = shown
        inside = [needed("ip"), "netns", "exec", Path(place or node.host).name]
        for tool in (["iptables-save"], ["nft", "list", "ruleset"]):
            if path_of(tool[0]):
                text = subprocess.run([*inside, *tool], capture_output=True, text=True, check=False).stdout
                found[f"{place} {tool[0]}"] = [line for line in text.splitlines() if line[:1] not in "#:"]
    return found


def test_every_command_that_changes_nothing_is_among_them() -> None:
    names = {command.name for command in COMMANDS}
    # `tests/e2e/test_bundle.py` has the one that writes a file.
    assert {words[0] for words in READ_ONLY} == names - {"sandbox", "bundle"}


def tentative(node: Node, netns: str) -> bool:
    """Return True while a link has no link-local address that is finished. Routes appear with it."""
    found = [link["addr_info"] for link in node.ip("-6", "addr", netns=netns) if link["ifname"] != "lo"]
    return not found or any(
        any("tentative" in item for item in addresses) or not any(item["scope"] == "link" for item in addresses)
        for addresses in found
    )


def test_no_command_changes_anything_unless_its_name_says_so(node: Node) -> None:
    node.pod("b", "missing")
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "a").code == 0
    (node.cni_dir / "attachments" / "c9.json").write_text("{")
    gone = node.add_netns()
    assert node.cni("ADD", "c2", gone, "a").code == 0
    node.remove_netns_and_links(gone)
    node.wait_until(lambda: multusctl(node, "status").returncode == 0, "the daemon knows all")
    node.wait_until(lambda: not any(tentative(node, place) for place in ("", netns)), "the kernel has its addresses")
    done = list(commands(node))
    before = everything(node, netns)
    shown = {words: multusctl(node, *words) for words in done}
    assert everything(node, netns) == before
    assert {words for words, each in shown.items() if not each.stdout} == NOTHING_DIFFERS
    node.stop()
    before = everything(node, netns)
    for words in done:
        multusctl(node, *words)
    assert everything(node, netns) == before


FREE = ("gates", "config")
"""Objects whose keys are not those of the format."""


def test_the_page_names_every_key_of_every_answer(node: Node) -> None:
    """Users may rely only on keys that the page describes."""
    node.pod("b", "missing")
    assert node.cni("ADD", "c1", node.add_netns(), "a").code == 0
    node.cni("ADD", "c2", node.add_netns(), "b")
    page = (Path(__file__).parents[2] / "docs/multusctl.md").read_text()
    for words in commands(node):
        if words[-1] == "--json":
            answer = json.loads(multusctl(node, *words).stdout)
            # The formats that come after it begin with a schema, too.
            described = page.partition(f'"{answer["schema"]}"')[2].partition("multusctl.")[0]
            assert {key for key in keys(answer, FREE) if f'"{key}":' not in described} <= {"schema"}, words


def test_plugins_are_those_of_the_node(node: Node) -> None:
    done = multusctl(node, "plugins", "--json")
    found = {item["type"]: item["servedBy"] for item in json.loads(done.stdout)["plugins"]}
    assert found["ptp"] == "built-in"
    assert "built-in" in multusctl(node, "plugins").stdout
    rows = multusctl(node, "plugins", "--no-headers").stdout.splitlines()
    names = multusctl(node, "plugins", "-o", "name").stdout.split()
    assert [row.split()[0] for row in rows] == names == list(found)
    assert multusctl(node, "plugins", "-o", "wide", "--no-headers").stdout.splitlines() == rows
    assert yaml.safe_load(multusctl(node, "plugins", "-o", "yaml").stdout) == json.loads(done.stdout)
