"""CHECK as CRI-O calls it in every start of a pod: it fails if something is missing, not because a plugin says so."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.check_matrix import (
    CASES,
    THIRD_PARTY,
    Case,
    ClusterLab,
    Lab,
    Pod,
    network,
    our_lab,
    third_party,
    upstream_lab,
)
from tests.e2e.node import Answer, Node
from tests.e2e.test_kubernetes import Cluster
from tests.programs import needed, require

RUNS: Final = ("reference plugins",)
pytest_plugins = ["tests.e2e.kube_fixtures"]

PORT = 9462
METRIC = "multus_check_failures_total"


class Labs:
    """The nodes of this module, each made when it is first asked for."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._stack = ExitStack()
        self._made: dict[str, Lab] = {}

    def get(self, kind: str, *, with_server: bool = False, **settings: Any) -> Lab:
        """The node of `upstream`, or of our daemon with built-in plugins `prefer` or `off`."""
        key = f"{kind} {with_server} {settings}"
        if key not in self._made:
            server: ApiServer | None = None
            if with_server or kind == "upstream":
                server = self._request.getfixturevalue("api_server_session")
            try:
                if kind == "upstream":
                    assert server is not None
                    made = upstream_lab(server, "check-upstream")
                else:
                    made = our_lab(kind, server, **settings)
                self._made[key] = self._stack.enter_context(made)
            except ToolError as error:
                pytest.skip(str(error))
        return self._made[key]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def labs(request: pytest.FixtureRequest) -> Iterator[Labs]:
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urnm`")
    require("ip")
    made = Labs(request)
    yield made
    made.close()


@functools.cache
def kernel_lacks(kind: str) -> bool:
    if kind == "tun":
        return not Path("/dev/net/tun").exists()
    probe = [needed("unshare"), "-n", "ip", "link", "add", "probe", "type", kind]
    done = subprocess.run(probe, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False)
    return "Unknown device type" in done.stderr


def skip_without(case: Case) -> None:
    if case.needs == "busybox":
        require("busybox")
    if case.needs in ("whereabouts", "route-override") and not third_party(case.needs):
        pytest.skip(
            f"needs {case.needs}: build it from github.com/k8snetworkplumbingwg/{case.needs} and set {THIRD_PARTY} to "
            "its directory, with the CRDs of whereabouts as *.yaml"
        )
    if case.kind and kernel_lacks(case.kind):
        pytest.skip(f"needs a kernel with the device kind {case.kind}")


def said(answer: Answer) -> str:
    """Return the words of a failure."""
    text: str = (answer.stdout or answer.stderr).decode(errors="replace")
    with contextlib.suppress(ValueError):
        text = str(json.loads(text)["msg"])
    # Upstream's shim puts its whole call before and behind the cause.
    return text.partition("ERRORED: ")[2].partition("StdinData:")[0].strip() or text.strip()


def succeed(lab: Lab, verb: str, pod: Pod) -> None:
    answer = lab.call(verb, pod)
    assert answer.code == 0, f"{verb} with {pod.case.name}, {pod.version}: {said(answer)}"


class Left:
    """State that ADD created in the pod's namespace. The tests remove each part and restore it."""

    def __init__(self, lab: Lab, pod: Pod) -> None:
        self._node, self._netns = lab.node, pod.netns
        self._ifname = "lo" if "loopback" in pod.case.types else pod.ifname
        self._saved = {family: self._save(family) for family in ("-4", "-6")}

    def take(self, words: str, stdin: bytes = b"") -> bytes:
        """Run `ip` in the pod's namespace."""
        command = [needed("ip"), "-n", Path(self._netns).name, *words.split()]
        # A file: `ip route restore` reads it three times.
        with tempfile.TemporaryFile() as file:
            file.write(stdin)
            file.seek(0)
            return subprocess.run(command, check=True, capture_output=True, stdin=file).stdout

    def _save(self, family: str) -> bytes:
        """Read all routes: netlink messages, behind four bytes of `ip`."""
        saved = bytearray(self.take(f"{family} route save table all"))
        position = 4
        while position < len(saved):
            (length,) = struct.unpack_from("=I", saved, position)
            # Flags of a device without carrier, dead and linkdown, which the kernel does not take back.
            saved[position + 24] &= ~0x11
            position += length + -length % 4
        return bytes(saved)

    def _restore(self) -> None:
        for family, saved in self._saved.items():
            # It passes over routes that are there.
            self.take(f"{family} route restore", saved)

    def things(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield each route and address: how to take it away, as words of `ip`, and a function that puts it back."""
        for family in self._saved:
            for route in self._node.ip(family, "-details", "route", "show", "table", "all", netns=self._netns):
                table = route.get("table", "main")
                # What the kernel makes by itself is no plugin's.
                if route.get("dev") != self._ifname or table == "local" or route["dst"].startswith(("fe80:", "ff00:")):
                    continue
                yield f"{family} route delete {route['dst']} dev {self._ifname} table {table}", self._restore
        (link,) = self._node.ip("address", "show", self._ifname, netns=self._netns)
        for item in link["addr_info"]:
            if not item["local"].startswith("fe80:"):
                words = f"{item['local']}/{item['prefixlen']} dev {self._ifname}"
                options = f"scope {item['scope']}" + (" nodad" if item["family"] == "inet6" else "")
                yield f"address delete {words}", partial(self._put_back, f"address add {words} {options}")

    def _put_back(self, address: str) -> None:
        self.take(address)
        # With an address of IPv6 its routes have lost their source.
        self.take(f"-6 route flush dev {self._ifname} proto boot")
        self._restore()


def require_finds_what_is_missing(lab: Lab, pod: Pod) -> None:
    left = Left(lab, pod)
    unnoticed = []
    for words, put_back in left.things():
        left.take(words)
        if lab.call("CHECK", pod).code == 0:
            unnoticed.append(words)
        put_back()
    assert not unnoticed, f"{pod.case.name}, {pod.version}: CHECK succeeds after `ip {'`, `ip '.join(unnoticed)}`"
    succeed(lab, "CHECK", pod)


def require_finds_that_the_link_is_gone(lab: Lab, pod: Pod) -> None:
    Left(lab, pod).take(f"link delete {pod.ifname}")
    answer = lab.call("CHECK", pod)
    assert answer.code == 1, f"CHECK without the link succeeds with {pod.case.name}, {pod.version}"
    answer = lab.call("DEL", pod)
    # host-device takes the device back.
    assert answer.code == 0 or pod.case.device, f"DEL without the link: {said(answer)}"


# --- the matrix ------------------------------------------------------------------------------------------------------


def life(lab: Lab, case: Case, version: str) -> str:
    """Call all verbs of a pod's life; the first failure, or an empty string. DEL is called in any case."""
    failure = ""
    with lab.pod(case, version) as pod:
        for verb in ("ADD", "CHECK", "CHECK", "DEL"):
            if failure and verb != "DEL":
                continue
            answer = lab.call(verb, pod)
            if answer.code and not failure:
                failure = f"{verb}: {said(answer)}"
        left = lab.leftovers(pod)
        return failure or (f"after DEL there are {left}" if left else "")


@pytest.mark.parametrize("builtins", ["prefer", "off"])
@pytest.mark.parametrize(
    ("case", "version"),
    [pytest.param(case, version, id=f"{case.name}-{version}") for case in CASES.values() for version in case.versions],
)
def test_a_pod_that_starts_under_upstream_starts_here(labs: Labs, case: Case, version: str, builtins: str) -> None:
    skip_without(case)
    lab = labs.get(builtins, with_server=case.needs == "whereabouts")
    if failure := life(lab, case, version):
        upstreams = life(labs.get("upstream"), case, version)
        assert upstreams, f"{case.name}, {version}, built-ins {builtins}: {failure}\nUnder upstream the pod starts.\n"
        assert not case.starts, f"it starts under neither daemon: {failure}\n{upstreams}"
        return
    assert case.starts, f"{case.name} starts: say so in the table, so that the next test looks for what is missing"


@pytest.mark.parametrize("builtins", ["prefer", "off"])
@pytest.mark.parametrize(
    ("case", "version"),
    [
        pytest.param(case, version, id=f"{case.name}-{version}")
        for case in CASES.values()
        if case.starts
        for version in case.versions
    ],
)
def test_what_is_really_missing_is_found(labs: Labs, case: Case, version: str, builtins: str) -> None:
    skip_without(case)
    lab = labs.get(builtins, with_server=case.needs == "whereabouts")
    with lab.pod(case, version) as pod:
        succeed(lab, "ADD", pod)
        if case.has_interface:
            require_finds_what_is_missing(lab, pod)
        if case.has_link:
            require_finds_that_the_link_is_gone(lab, pod)
        else:
            succeed(lab, "DEL", pod)


# --- what a plugin says ----------------------------------------------------------------------------------------------

MOVED = CASES["ptp, sbr"]
"""The CHECK of ptp fails: sbr has moved its routes."""


@pytest.fixture
def cluster_lab(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node]) -> Iterator[ClusterLab]:
    """A node of our daemon in a cluster, with the reference plugins."""
    made = Cluster(
        api_server, make_node(standalone=False, settings={"metricsPort": PORT, "builtinPlugins": "off"}), api_namespace
    )
    made.prepare()
    with api_server.reachable_in(made.node.host):
        try:
            lab = ClusterLab(made)
        except ToolError as error:
            pytest.skip(str(error))
        made.node.start()
        yield lab
        lab.close()
        made.node.kill()


def test_a_plugin_that_fails_is_an_event_a_line_and_a_count(cluster_lab: ClusterLab) -> None:
    """CHECK does not ask it: the loop does that keeps running pods, of an earlier daemon's pod at once."""
    node, cluster = cluster_lab.node, cluster_lab.cluster
    with cluster_lab.pod(MOVED, "1.0.0") as pod:
        succeed(cluster_lab, "ADD", pod)
        succeed(cluster_lab, "CHECK", pod)
        assert f"{METRIC} 0.0" in node.metrics(PORT)
        node.stop()
        node.start()

        def is_asked() -> bool:
            Left(cluster_lab, pod).take("link set eth0 alias changed")
            return f"{METRIC} 1.0" in node.metrics(PORT)

        node.wait_until(is_asked, "the plugin is asked")
        succeed(cluster_lab, "CHECK", pod)
        time.sleep(1)
        assert f"{METRIC} 1.0" in node.metrics(PORT), "once in ten minutes, although the kernel has changed"

        def events() -> list[dict[str, Any]]:
            return [event for event in cluster.events(pod.name) if event["reason"] == "NetworkCheckFailed"]

        node.wait_until(lambda: bool(events()), "the event is there")
        event = events()[0]
        assert event["type"] == "Warning"
        for words in (network(MOVED, "1.0.0"), "eth0", 'plugin "ptp"', "10.150.0.1"):
            assert words in event["message"]
        lines = [line for line in node.log.read_text().splitlines() if "[warning]" in line and 'plugin "ptp"' in line]
        assert len(lines) == 1
        assert pod.name in lines[0]
        succeed(cluster_lab, "DEL", pod)


def test_check_starts_no_program(make_node: Callable[..., Node]) -> None:
    """CRI-O calls it in each pod start. A program that is called writes down its verb."""
    node = make_node(settings={"builtinPlugins": "off"})
    verbs = node.root / "verbs"
    for name, made in (("maker", '{"cniVersion": "1.0.0"}'), ("another", '{"cniVersion": "1.0.0"}')):
        node.plugin(name, f"""echo $CNI_COMMAND {name} >> {verbs}\n[ $CNI_COMMAND != ADD ] || echo '{made}'""")
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "maker"}]})
    node.network("lan", {"cniVersion": "1.0.0", "name": "lan", "plugins": [{"type": "maker"}, {"type": "another"}]})
    node.pod("web", "kube-system/lan,kube-system/lan")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "web").code == 0
    assert len(verbs.read_text().split("\n")) == 1 + 5
    verbs.write_text("")
    for _ in range(3):
        assert node.cni("CHECK", "c1", netns, "web").code == 0
    assert verbs.read_text() == ""
    node.stop()
    node.settings["strictCheck"] = True
    node.start()
    assert node.cni("CHECK", "c1", netns, "web").code == 0
    assert verbs.read_text() == "CHECK maker\n" + 2 * "CHECK maker\nCHECK another\n"
    assert node.cni("DEL", "c1", netns, "web").code == 0


def test_a_network_with_disable_check_is_not_looked_at(labs: Labs) -> None:
    case = replace(CASES["bridge"], name="unchecked", keys={"disableCheck": True})
    lab = labs.get("prefer", strictCheck=True)
    with lab.pod(case, "1.0.0") as pod:
        succeed(lab, "ADD", pod)
        Left(lab, pod).take("link delete eth0")
        succeed(lab, "CHECK", pod)
        succeed(lab, "DEL", pod)
