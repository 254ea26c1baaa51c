"""Each shim on each daemon, ours and two of upstream's: every verb in every CNI version that runtimes use.

What upstream cannot do is asserted as what it does, and named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import pytest

from multus_daemon.spec.cni import versions
from tests.e2e.node import Answer
from tests.e2e.takeover import Make, Takeover
from tests.e2e.upstream import NEW, OLD, shim_of

RUNS: Final = ("Multus, thick", "Multus, thick, as v4.3.1")
pytest_plugins = ["tests.e2e.kube_fixtures", "tests.e2e.takeover_fixtures"]

SIDES = ("ours", OLD, NEW)
# Upstream's new shim waits a minute for `/readyz`, which its old daemon does not have, and then fails.
PAIRS = [(shim, daemon) for shim in SIDES for daemon in SIDES if (shim, daemon) != (NEW, OLD)]
VERSIONS = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]


class Pair:
    """A runtime that speaks one CNI version."""

    def __init__(self, made: Takeover, shim: str, version: str) -> None:
        self.made = made
        self.shim = shim
        self.version = version

    def call(self, verb: str, pod: str = "", **keys: Any) -> Answer:
        made = self.made
        stdin = made.upstream.stdin(cniVersion=self.version, **keys)
        container = f"c-{pod}" if pod else ""
        netns = made.spaces.setdefault(pod, made.node.add_netns()) if pod else ""
        uid = made.uids.get(pod, "")
        if self.shim == "ours":
            return made.node.cni(verb, container, netns, pod, made.namespace, uid=uid, stdin=stdin)
        return made.upstream.cni(verb, container, netns, pod, made.namespace, uid, stdin, self.shim)

    def succeeds(self, verb: str, pod: str = "", **keys: Any) -> None:
        done = self.call(verb, pod, **keys)
        if verb in versions.FIRST_WITH and not versions.allows(self.version, verb):
            # Neither shim asks its daemon.
            assert (done.code, done.json["code"]) == (1, 1)
            assert done.json["msg"] == f"config version does not allow {verb}"
        else:
            assert (done.code, done.stdout) == (0, b""), f"{verb}: {done.stdout!r}"


@contextlib.contextmanager
def served(takeover_from: Make, shim: str, daemon: str, version: str) -> Iterator[Takeover]:
    """A node on which `daemon` serves; skips the test if `shim` is not there."""
    if shim != "ours":
        shim_of(shim)
    with takeover_from("conf", release=OLD if daemon == "ours" else daemon, cniVersion=version) as made:
        if daemon == "ours":
            made.take_over()
        yield made


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("shim", "daemon"), PAIRS, ids=[f"{shim}-shim-{daemon}-daemon" for shim, daemon in PAIRS])
def test_every_verb(takeover_from: Make, shim: str, daemon: str, version: str) -> None:
    with served(takeover_from, shim, daemon, version) as made:
        links = made.node.links()
        pair = Pair(made, shim, version)
        made.pod("two", "macvlan,ptp@data0")
        pair.succeeds("STATUS")

        added = pair.call("ADD", "two")
        assert added.code == 0, f"{added.stdout!r} {added.stderr!r}"
        assert added.json["cniVersion"] == version
        assert [item["address"] for item in added.json["ips"]] == made.addresses("two", "eth0")
        assert {item.get("version") for item in added.json["ips"]} == {None if version >= "1" else "4"}
        inside = [item for item in added.json["interfaces"] if item.get("sandbox")]
        assert [(item["name"], item["sandbox"]) for item in inside] == [("eth0", made.spaces["two"])]
        assert made.pod_links()["two"] == ["data0", "eth0", "lo", "net1"]

        pair.succeeds("CHECK", "two")
        made.node.ip("link", "delete", "data0", netns=made.spaces["two"])
        if versions.allows(version, "CHECK"):
            checked = pair.call("CHECK", "two")
            if daemon != "ours":
                assert checked.code == 0, "with a clusterNetwork upstream's CHECK looks at nothing"
            else:
                assert checked.code == 1
                assert "data0" in checked.json["msg"]

        valid: dict[str, Any] = {"cni.dev/valid-attachments": [{"containerID": "c-two", "ifname": "eth0"}]}
        pair.succeeds("GC", **valid)
        assert made.addresses("two", "eth0")
        pair.succeeds("DEL", "two")
        pair.succeeds("DEL", "two")
        made.assert_clean(links)
        pair.succeeds("STATUS")


@pytest.mark.parametrize("version", ["0.3.1", "1.1.0"])
@pytest.mark.parametrize(("shim", "daemon"), PAIRS, ids=[f"{shim}-shim-{daemon}-daemon" for shim, daemon in PAIRS])
def test_failures_are_told(takeover_from: Make, shim: str, daemon: str, version: str) -> None:
    with served(takeover_from, shim, daemon, version) as made:
        links = made.node.links()
        pair = Pair(made, shim, version)
        made.pod("missing", "no-such-network")
        refused = pair.call("ADD", "missing")
        assert refused.code == 1
        assert set(refused.json) <= {"cniVersion", "code", "msg", "details"}
        assert "no-such-network" in refused.json["msg"], refused.json
        # Upstream's daemon answers text, and upstream's shim keeps no code.
        assert refused.json["code"] == (7 if (shim, daemon) == ("ours", "ours") else 999)
        pair.succeeds("DEL", "missing")

        made.uids["gone"] = "a-pod-that-nobody-knows"
        unknown = pair.call("ADD", "gone")
        if daemon == "ours":
            assert (unknown.code, unknown.json["code"]) == (1, 11 if shim == "ours" else 999)
            assert "gone" in unknown.json["msg"]
        elif version >= "1":
            # Upstream's daemon answers an empty success, and the pod runs without networks.
            assert unknown.code == 0
            assert [item["address"] for item in unknown.json["ips"]] == ["0.0.0.0/0"]
        else:
            # And falls over itself where it has to convert that.
            assert (unknown.code, unknown.json["code"]) == (1, 999)
        pair.succeeds("DEL", "gone")
        made.assert_clean(links)


@pytest.mark.parametrize(
    ("kind", "networks", "name", "ifname"),
    [("conflist", None, "pods", "eth0"), ("conf", "unversioned", "unversioned", "net1")],
)
def test_a_failed_del_of_upstreams_daemon_is_done_for_either_shim(
    takeover: Make, kind: str, networks: str | None, name: str, ifname: str
) -> None:
    """Upstream's v4.3.0 loses the ranges of a list from a file, and of one without a version, and then the container.

    So nothing could be repeated. v4.3.1 keeps them.
    """
    with takeover(kind) as made:
        release = made.upstream.release
        for shim in ("ours", release):
            pair = Pair(made, shim, "1.0.0")
            # No release in the name of an object.
            pod = shim.replace(".", "-")
            made.pod(pod, networks)
            assert pair.call("ADD", pod).code == 0
            deleted = pair.call("DEL", pod)
            assert (deleted.code, deleted.stdout) == (0, b"")
            assert (b"counts as done" in deleted.stderr) is (shim == "ours" and release == OLD)
            left = made.node.leftovers()
            assert (f"cni/results/{name}-c-{pod}-{ifname}" in left) is (release == OLD)
            assert bool([path for path in left if path.startswith(f"networks/{name}/10.")]) is (release == OLD)


def test_a_pod_in_the_daemons_own_namespace(takeover_from: Make) -> None:
    """CNI_NETNS_OVERRIDE, from the shim to the daemon, its built-ins and its binaries."""
    with takeover_from("conf", builtinPluginsExcept=["ptp"]) as made:
        made.take_over()
        made.pod("two", "unversioned,ptp@data0")
        host = made.node.host
        environment = made.node.environment("ADD", "c-two", host, "two", made.namespace, made.uids["two"])
        refused = made.node.run_shim(environment, made.upstream.stdin())
        assert (refused.code, refused.json["code"]) == (1, 8)
        before = made.node.links()
        for verb in ("ADD", "CHECK", "DEL"):
            done = made.node.run_shim(
                environment | {"CNI_COMMAND": verb, "CNI_NETNS_OVERRIDE": "true"}, made.upstream.stdin()
            )
            assert done.code == 0, f"{verb}: {done.stdout!r}"
            own = {name for name in made.node.links() if not name.startswith(("br-", "veth"))} - set(before)
            assert own == (set() if verb == "DEL" else {"eth0", "net1", "data0"})
        assert made.node.leftovers() == []
