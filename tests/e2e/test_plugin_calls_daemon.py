"""A network whose plugin is Multus itself, or calls the daemon that runs it: refused, and other pods do not notice."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import multus_shim
from tests.e2e import build_tools
from tests.e2e.delegate import post
from tests.e2e.node import Answer, Node
from tests.e2e.test_node_verbs import ask
from tests.e2e.test_overload import marks, start_shim

MakeNode = Callable[..., Node]

PORT = 9091
"""Port of the metrics. Nodes can share it: each has its own network namespace."""
PATIENCE = 20.0
"""Seconds for the answer to a pod that is refused; without the refusal it waits for itself."""
AT_ONCE = 30.0
"""Seconds for an ordinary ADD beside other tests; it takes 0.05 s. `tests.soak.isolation` asks for less."""
FROM_PLUGIN = "the request comes from a plugin that this daemon runs"


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    """A node with a ptp cluster network, the shim among its plugins, and an ordinary pod; not started."""
    made = make_node(settings={"metricsPort": PORT, "metricsAddress": "127.0.0.1", "upstreamRecords": False})
    made.ptp("cluster", "10.86.0.0/24")
    shutil.copy(multus_shim.binary(), made.bin_dir / "multus-shim")
    made.pod("ordinary")
    return made


def calling(node: Node, plugin_type: str, **more: Any) -> dict[str, Any]:
    """A configuration with which a shim that gets it calls this node's daemon."""
    keys = ("daemonSocketDir", "socketDir", "cniDir", "clusterNetwork")
    return {
        "cniVersion": "1.0.0",
        "name": "calls",
        "type": plugin_type,
        **{key: node.settings[key] for key in keys},
    } | more


def declare(node: Node, config: dict[str, Any]) -> None:
    """Declare the network `calls`, and a pod that has it."""
    node.network("calls", config, "default")
    node.pod("bad", "calls")


def refused(answer: Answer) -> str:
    """The message of an answer with code 7."""
    assert answer.code == 1, answer.stdout
    assert answer.json["code"] == 7, answer.json
    return str(answer.json["msg"])


def assert_nothing_stays(node: Node) -> None:
    """No request, process or file is left; an ordinary pod is added at once."""
    requests = status(node)["requests"]
    assert (requests["running"], requests["waiting"]) == (0, 0)
    found = [line for line in node.metrics(PORT).splitlines() if line.startswith("multus_cni_requests_")]
    busy = [line for line in found if ("in_flight{" in line or "waiting{" in line) and not line.endswith(" 0.0")]
    assert busy == []
    assert node.leftovers() == []
    netns = node.add_netns()
    added = node.cni("ADD", "ordinary1", netns, "ordinary")
    assert added.code == 0, added.stdout
    assert added.seconds < AT_ONCE
    assert node.links(netns) == ["eth0", "lo"]
    deleted = node.cni("DEL", "ordinary1", netns, "ordinary")
    assert (deleted.code, deleted.stderr) == (0, b"")
    assert node.leftovers() == []


def status(node: Node) -> dict[str, Any]:
    """Return the status that `multusctl status --json` shows."""
    code, body = node.get("/admin/v1/status")
    assert code == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


# --- while planning --------------------------------------------------------------------------------------------------


def by_name(node: Node) -> tuple[str, dict[str, Any]]:
    return "multus-shim", calling(node, "multus-shim")


def in_a_list(node: Node) -> tuple[str, dict[str, Any]]:
    own = calling(node, "multus-shim")
    ptp = {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.86.1.0/24", "dataDir": str(node.networks_dir)}}
    return "multus-shim", {"cniVersion": "1.0.0", "name": "calls", "plugins": [ptp, own]}


def by_copy(node: Node) -> tuple[str, dict[str, Any]]:
    shutil.copy(multus_shim.binary(), node.bin_dir / "vendor-net")
    return "vendor-net", calling(node, "vendor-net")


def by_copy_as_ipam(node: Node) -> tuple[str, dict[str, Any]]:
    shutil.copy(multus_shim.binary(), node.bin_dir / "vendor-ipam")
    return "vendor-ipam", {"cniVersion": "1.0.0", "type": "ptp", "ipam": {"type": "vendor-ipam"}}


def by_copy_of_upstreams(node: Node) -> tuple[str, dict[str, Any]]:
    shutil.copy(upstream_tool("upstream-multus-shim"), node.bin_dir / "vendor-net")
    return "vendor-net", calling(node, "vendor-net")


def upstream_tool(name: str) -> Path:
    try:
        return build_tools.find(name)
    except build_tools.ToolError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("way", [by_name, in_a_list, by_copy, by_copy_as_ipam, by_copy_of_upstreams])
def test_multus_as_a_plugin_is_refused_while_planning(
    node: Node, way: Callable[[Node], tuple[str, dict[str, Any]]]
) -> None:
    name, config = way(node)
    declare(node, config)
    node.start()
    netns = node.add_netns()
    message = refused(node.cni("ADD", "bad1", netns, "bad", timeout=PATIENCE))
    assert message.startswith(f'plugin "{name}" is Multus itself')
    # Nothing was done that a DEL would have to undo.
    assert (node.links(netns), node.leftovers()) == (["lo"], [])
    deleted = node.cni("DEL", "bad1", netns, "bad", timeout=PATIENCE)
    assert (deleted.code, deleted.stderr) == (0, b"")
    assert_nothing_stays(node)


def test_multus_as_the_plugin_of_a_hot_plug(node: Node) -> None:
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    code, error = post(node, "ADD", netns, "net1", calling(node, "multus-shim"))
    assert (code, error["code"]) == (400, 7)
    assert error["msg"].startswith('plugin "multus-shim" is Multus itself')
    assert node.links(netns) == ["eth0", "lo"]
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert_nothing_stays(node)


# --- by the caller ---------------------------------------------------------------------------------------------------

KEPT = ("CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH", "CNI_ARGS")
_CLEANED = "env -i " + " ".join(f'{key}="${key}"' for key in KEPT)
_OTHER = 'CNI_CONTAINERID="x$CNI_CONTAINERID"; export CNI_CONTAINERID; exec'
DONE = """[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0"}'"""

FOREGROUND = {
    "exec": "exec SHIM",
    "child": "SHIM || exit $?",
    "cleaned": f"exec {_CLEANED} SHIM",
    "cleaned child": f"{_CLEANED} SHIM || exit $?",
    "grandchild": "sh -c '(sh -c SHIM)'",
    "session": "setsid --wait SHIM",
    "other container": f"{_OTHER} SHIM",
    "interpreter": f"exec {sys.executable} -IS PROGRAM /cni",
    "delegate": f"exec {sys.executable} -IS PROGRAM /delegate",
}
"""Bodies of scripts; the plugin has the answer of the request that the script makes."""

BACKGROUND = {
    "beside the plugin": "setsid SHIM <INPUT >OUTPUT 2>&1 & sleep 1",
    "after the plugin": "setsid sh -c 'sleep 0.5; exec SHIM' <INPUT >OUTPUT 2>&1 &",
    "for another container": "CNI_CONTAINERID=other CNI_IFNAME=eth0 setsid SHIM <INPUT >OUTPUT 2>&1 &",
}
"""Bodies of scripts that start the request in the background. The plugin itself succeeds."""

_PROGRAM = """
import base64, json, os, socket, sys
config = sys.stdin.buffer.read()
env = {key: value for key, value in os.environ.items() if key.startswith("CNI_")}
body = json.dumps({"env": env, "config": base64.b64encode(config).decode()}).encode()
connection = socket.socket(socket.AF_UNIX)
connection.connect(json.loads(config)["daemonSocketDir"] + "/multus.sock")
head = f"POST {sys.argv[1]} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
connection.sendall(head.encode() + body)
answer = b""
while data := connection.recv(65536):
    answer += data
head, _, body = answer.partition(b"\\r\\n\\r\\n")
sys.stdout.buffer.write(body)
sys.exit(0 if head.startswith(b"HTTP/1.1 200") else 1)
"""


def script(node: Node, name: str, body: str) -> None:
    """A plugin that is a shell script, with its configuration on stdin."""
    program = node.root / "program.py"
    program.write_text(_PROGRAM)
    for word, path in (("SHIM", node.bin_dir / "multus-shim"), ("PROGRAM", program), ("OUTPUT", node.root / "output")):
        body = body.replace(word, str(path))
    (node.bin_dir / name).write_text(f"#!/bin/sh\n{body}\n")
    (node.bin_dir / name).chmod(0o755)


@pytest.mark.parametrize("way", FOREGROUND)
def test_a_request_from_a_plugin_is_refused(node: Node, way: str) -> None:
    script(node, "vendor-net", FOREGROUND[way])
    declare(node, calling(node, "vendor-net"))
    node.start()
    netns = node.add_netns()
    message = refused(node.cni("ADD", "bad1", netns, "bad", timeout=PATIENCE))
    assert FROM_PLUGIN in message
    assert node.links(netns) == ["lo"]
    # The DEL of a plugin that was never attached; the script fails it, too.
    script(node, "vendor-net", "exit 0")
    deleted = node.cni("DEL", "bad1", netns, "bad", timeout=PATIENCE)
    assert (deleted.code, deleted.stderr) == (0, b"")
    assert_nothing_stays(node)


@pytest.mark.parametrize("way", FOREGROUND)
def test_a_delete_from_a_plugin_does_nothing_and_fails_nothing(node: Node, way: str) -> None:
    """Its ADD was refused. With an error, the attachment to which the plugin belongs would stay on record for ever."""
    script(node, "vendor-net", f"cat >/dev/null; {DONE}")
    declare(node, calling(node, "vendor-net"))
    node.start()
    netns = node.add_netns()
    added = node.cni("ADD", "bad1", netns, "bad")
    assert added.code == 0, added.stdout
    script(node, "vendor-net", FOREGROUND[way])
    assert node.cni("DEL", "bad1", netns, "bad", timeout=PATIENCE).code == 0
    node.wait_for_log(f"[error] {FROM_PLUGIN}")
    assert not list((node.cni_dir / "spool").glob("*")), "the plugin's own DEL is not for later"
    assert_nothing_stays(node)


@pytest.mark.parametrize("way", BACKGROUND)
def test_a_request_that_a_plugin_leaves_behind_is_refused(node: Node, way: str) -> None:
    output = node.root / "output"
    # A file: what the plugin leaves behind reads it after the plugin's stdin has gone.
    source = node.root / "input"
    body = f"cat >{source}; {BACKGROUND[way]}; {DONE}".replace("&;", "&\n").replace("INPUT", str(source))
    script(node, "vendor-net", body)
    declare(node, calling(node, "vendor-net"))
    node.start()
    netns = node.add_netns()
    added = node.cni("ADD", "bad1", netns, "bad", timeout=PATIENCE)
    assert added.code == 0, added.stdout
    node.wait_until(lambda: output.exists() and bool(output.read_bytes()), "the request has an answer", PATIENCE)
    error = json.loads(output.read_bytes())
    assert (error["code"], error["msg"].startswith(FROM_PLUGIN)) == (7, True), error
    assert node.links(netns) == ["eth0", "lo"]
    script(node, "vendor-net", "exit 0")
    deleted = node.cni("DEL", "bad1", netns, "bad", timeout=PATIENCE)
    assert (deleted.code, deleted.stderr) == (0, b"")
    assert_nothing_stays(node)


def test_a_status_from_a_plugin_is_refused(node: Node) -> None:
    script(node, "vendor-net", "exec SHIM")
    plugins = [calling(node, "vendor-net")]
    node.network("cluster", {"cniVersion": "1.1.0", "name": "cluster", "plugins": plugins})
    node.start()
    answer = ask(node, "STATUS", cniVersion="1.1.0")
    assert answer.code == 1
    assert FROM_PLUGIN in answer.stdout.decode()
    assert answer.seconds < AT_ONCE
    requests = status(node)["requests"]
    assert (requests["running"], requests["waiting"]) == (0, 0)


@pytest.mark.parametrize("network", ["named", "script"])
def test_eight_such_pods_at_once_beside_ordinary_ones(node: Node, network: str) -> None:
    script(node, "vendor-net", "exec SHIM")
    declare(node, calling(node, "multus-shim" if network == "named" else "vendor-net"))
    node.settings["connectionLimit"] = 20
    node.start()
    bad, ordinary = ([node.add_netns() for _ in range(8)] for _ in range(2))
    with ThreadPoolExecutor(16) as pool:
        attempts = [
            pool.submit(node.cni, "ADD", f"bad{number}", netns, "bad", timeout=PATIENCE)
            for number, netns in enumerate(bad)
        ]
        time.sleep(0.1)
        added = [
            pool.submit(node.cni, "ADD", f"good{number}", netns, "ordinary") for number, netns in enumerate(ordinary)
        ]
        for answer in added:
            assert answer.result().code == 0, answer.result().stdout
            assert answer.result().seconds < AT_ONCE
        for attempt in attempts:
            refused(attempt.result())
        script(node, "vendor-net", "exit 0")
        deleted = [
            pool.submit(node.cni, "DEL", f"{name}{number}", netns, pod, timeout=PATIENCE)
            for name, pod, spaces in (("bad", "bad", bad), ("good", "ordinary", ordinary))
            for number, netns in enumerate(spaces)
        ]
        assert [answer.result().stdout for answer in deleted if answer.result().code] == []
    assert_nothing_stays(node)


# --- a client that hangs up ------------------------------------------------------------------------------------------


@pytest.fixture
def busy(node: Node) -> Node:
    """A node that works on one request at a time, with a plugin that waits for `go` and notes its calls; it runs."""
    log = node.root / "marks"
    node.plugin(
        "slow",
        f'echo "begin $CNI_COMMAND $CNI_CONTAINERID" >>{log}; '
        f'[ "$CNI_COMMAND$CNI_CONTAINERID" != ADDfirst ] || until [ -e {node.root}/go ]; do sleep 0.02; done; {DONE}',
    )
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "slow"})
    node.ptp("storage", "10.86.3.0/24", namespace="default")
    # A comparison by the daemon itself runs CHECK, too.
    node.settings |= {"connectionLimit": 1, "keep": "off"}
    node.pod("hello", "storage")
    node.start()
    return node


def test_a_request_whose_client_has_gone_does_not_begin(busy: Node) -> None:
    node = busy
    first, second = node.add_netns(), node.add_netns()
    shim = start_shim(node, "ADD", "first", first)
    node.wait_until(lambda: marks(node, "marks") == ["begin ADD first"], "the plugin begins")
    waiting = start_shim(node, "ADD", "gone", second)
    node.wait_until(lambda: status(node)["requests"]["waiting"] == 1, "the second request waits")
    waiting.kill()
    waiting.communicate(timeout=PATIENCE)
    (node.root / "go").touch()
    assert shim.wait(timeout=PATIENCE) == 0
    shim.communicate()
    node.wait_until(lambda: status(node)["requests"] == {"running": 0, "waiting": 0, "limit": 1}, "no request is left")
    # What would begin now, behind the first, begins within milliseconds.
    third = node.add_netns()
    assert node.cni("ADD", "third", third, "hello").code == 0
    assert marks(node, "marks") == ["begin ADD first", "begin ADD third"]
    assert sorted(path.stem for path in (node.cni_dir / "attachments").glob("*.json")) == ["first", "third"]
    owners = {path.read_text().split()[0] for path in node.networks_dir.rglob("10.*")}
    assert owners == {"first", "third"}
    assert node.links(second) == ["lo"]
    # The runtime deletes what it has given up.
    for container, netns in (("gone", second), ("first", first), ("third", third)):
        assert node.cni("DEL", container, netns, "hello").code == 0
    assert node.leftovers() == []
