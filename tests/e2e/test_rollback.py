"""To our daemon, back to upstream's, and to ours again: live pods of every kind, and nothing is left of any of them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.takeover import INTERFACES, PODS, Make, Takeover
from tests.e2e.upstream import OLD

RUNS: Final = ("Multus, thick",)
pytest_plugins = ["tests.e2e.kube_fixtures", "tests.e2e.takeover_fixtures"]

KINDS = tuple(PODS)


def networks(kind: str, number: int) -> str | None:
    """The annotation of a pod of that kind; what must not be twice on a node is the pod's own."""
    if kind != "asked":
        return PODS[kind]
    addressed, ports = json.loads(str(PODS[kind]))
    addressed |= {"ips": [f"10.94.0.{10 + number}/24"], "mac": f"02:00:00:00:01:{number:02}"}
    ports["portMappings"][0] |= {"hostPort": 18100 + number}
    return json.dumps([addressed, ports])


class Turns:
    """The pods of a node on which the daemons take turns; each is named after its kind and who attached it."""

    def __init__(self, made: Takeover, shim: str) -> None:
        self.made = made
        self.by = shim
        self.live: dict[str, str] = {}
        """The kind of each pod."""

    def attach(self, turn: str, *kinds: str) -> None:
        for kind in kinds:
            number = len(self.made.uids) + 1
            pod = f"{kind}-{turn}"
            self.made.pod(pod, networks(kind, number))
            if kind == "alone":
                self.made.host_ports[pod] = [{"hostPort": 18000 + number, "containerPort": 80, "protocol": "tcp"}]
            added = self.made.runtime("ADD", pod, by=self.by)
            assert added.code == 0, f"{pod}: {added.stdout!r} {added.stderr!r}"
            assert [item["address"] for item in added.json["ips"]] == self.made.addresses(pod, "eth0")
            self.live[pod] = kind
        self.assert_live()

    def delete(self, *pods: str) -> None:
        for pod in pods:
            deleted = self.made.runtime("DEL", pod, by=self.by)
            assert (deleted.code, deleted.stdout) == (0, b""), f"{pod}: {deleted.stdout!r}"
            del self.live[pod]
        self.assert_live()

    def lose(self, *pods: str) -> None:
        """Delete pods that upstream's daemon has attached, then remove their namespaces as the runtime does.

        v4.3.0's daemon loses the ranges of a cluster network that is a list. The DEL of this network fails, but the
        daemon reports success: interface and address stay.
        """
        for pod in pods:
            deleted = self.made.runtime("DEL", pod, by=self.by)
            assert (deleted.code, deleted.stdout) == (0, b""), f"{pod}: {deleted.stdout!r}"
            del self.live[pod]
            self.made.die(pod)
        self.assert_live()

    def assert_live(self) -> None:
        """Each pod has its interfaces with addresses, and no other one has any."""
        links = self.made.pod_links()
        assert {pod: links[pod] for pod in self.live} == {pod: INTERFACES[kind] for pod, kind in self.live.items()}
        assert {tuple(links[pod]) for pod in links.keys() - self.live.keys()} <= {("lo",)}
        for pod in self.live:
            assert self.made.addresses(pod, "eth0")

    def leases(self, pod: str) -> list[str]:
        """Addresses that the container still has in the files of host-local."""
        files = [path for path in self.made.node.networks_dir.rglob("*") if path.is_file()]
        return [str(path) for path in files if path.read_text("utf-8", "replace").startswith(f"c-{pod}")]

    def files(self, pod: str) -> list[str]:
        return [path for path in self.made.node.leftovers() if f"c-{pod}" in path]

    def back(self) -> None:
        """Upstream's daemon in the place of ours."""
        assert self.made.node.stop() == 0
        self.made.upstream.start()


@pytest.mark.parametrize("kind", ["conf", "conflist"])
@pytest.mark.parametrize("shim", ["ours", "upstream"])
@pytest.mark.parametrize("builtins", ["prefer", "off"])
def test_there_and_back_and_there_again(takeover: Make, kind: str, shim: str, builtins: str) -> None:
    with takeover(kind, builtinPlugins=builtins, reconcileSeconds=1) as made:
        links = made.node.links()
        turns = Turns(made, shim)
        turns.attach("old", *KINDS)

        made.take_over()
        turns.attach("ours", *KINDS)
        turns.delete("two-old")
        assert turns.files("two-old") == turns.leases("two-old") == []

        turns.back()
        turns.assert_live()
        turns.attach("back", *KINDS)
        # The pod is there; its object is gone, and its networks; its namespace is gone.
        turns.delete("lan-ours")
        made.server.delete_pod("two-ours", made.namespace)
        turns.delete("two-ours")
        made.die("asked-ours")
        turns.delete("asked-ours")
        for pod in ("lan-ours", "two-ours", "asked-ours"):
            # Better than v4.3.0 to itself, which loses the ranges of a conflist: see below.
            assert turns.leases(pod) == []
            assert turns.files(pod) == [f"cni/attachments/c-{pod}.json"]
        turns.lose("alone-back", "lan-old")
        lost = kind == "conflist" and made.upstream.release == OLD
        assert bool(turns.leases("alone-back")) is lost, "as upstream's own DEL leaves it"
        # The runtime removes the namespaces of what it has deleted.
        for pod in ("lan-ours", "two-ours"):
            made.die(pod)
        made.take_over()
        turns.attach("again", "alone", "two")
        assert len(made.uids) == 14
        for pod in ("lan-ours", "two-ours", "asked-ours"):
            made.node.wait_until(lambda pod=pod: turns.files(pod) == [], f"the record of {pod} goes")  # type: ignore[misc]
        valid = [{"containerID": f"c-{pod}", "ifname": "eth0"} for pod in turns.live]
        assert made.collect(valid).code == 0
        assert turns.leases("alone-back") == turns.leases("lan-old") == []
        turns.assert_live()
        turns.delete(*turns.live)
        # Without a namespace the reference ptp leaves its rules of ipMasq, whoever calls it.
        left = [line for line in made.rules() if "CNI-DN-" not in line] if builtins == "off" else []
        made.assert_clean(links, rules=left)


def test_back_for_good(takeover: Make) -> None:
    """The page's command removes what only our daemon reads; upstream's deletes the pods without it."""
    with takeover("conf") as made:
        turns = Turns(made, "ours")
        turns.attach("old", *KINDS)
        made.take_over()
        turns.attach("ours", *KINDS)
        turns.back()
        turns.delete("lan-ours")
        left = [path for path in made.node.cni_dir.rglob("*") if path.is_file()]
        for place in to_remove():
            subprocess.run(["rm", "-rf", made.node.cni_dir / place.relative_to("/var/lib/cni/multus")], check=True)
        assert {path.parent.name for path in left if not path.exists()} == {"attachments"}
        assert {path.name for path in made.node.cni_dir.iterdir() if path.is_dir()} == {"results"}
        turns.delete(*(pod for pod in list(turns.live) if pod.endswith("-ours")))
        for kind in KINDS:
            assert turns.files(f"{kind}-ours") == turns.leases(f"{kind}-ours") == []


def to_remove() -> list[Path]:
    page = (
        Path(__file__)
        .parents[2]
        .joinpath("docs/migration.md")
        .read_text()
        .partition("\n## Back\n")[2]
        .partition("\n## ")[0]
    )
    (words,) = re.findall(r"^ *rm -rf (.*)$", page, re.MULTILINE)
    return [Path(word) for word in words.split()]


def test_upstreams_file_is_what_upstreams_daemon_would_have_written(takeover: Make) -> None:
    """Whatever its DEL goes by is in it: the bytes of each network, its interface, its requests."""
    with takeover("conflist") as made:
        turns = Turns(made, "upstream")
        turns.attach("theirs", *KINDS)
        theirs = {kind: read(made.node.cni_dir / f"c-{kind}-theirs") for kind in KINDS}
        made.take_over()
        turns.attach("ours", *KINDS)
        for kind in KINDS:
            path = made.node.cni_dir / f"c-{kind}-ours"
            assert path.stat().st_mode & 0o777 == 0o600
            for own, other in zip(read(path), theirs[kind], strict=True):
                assert own["types"] == other["types"]
                assert own["is_list"] == other["is_list"]
                assert own["keys"] >= other["keys"] - {"ipRequest", "macRequest"}
            assert [item["keys"] & {"ipRequest", "macRequest"} for item in read(path)] == [
                item["keys"] & {"ipRequest", "macRequest"} for item in theirs[kind]
            ]
        turns.delete(*turns.live)


def read(path: Path) -> list[dict[str, Any]]:
    return [
        {
            "is_list": bool(item["ConfList"].get("plugins")),
            "types": [plugin["type"] for plugin in item["ConfList"].get("plugins") or [item["Conf"]]],
            "keys": {key for key in item if key.endswith("Request") and key != "ifnameRequest"},
        }
        for item in json.loads(path.read_bytes())
    ]


def test_without_the_setting_nothing_is_written_for_upstream(takeover: Make) -> None:
    with takeover("conf", upstreamRecords=False) as made:
        made.take_over()
        turns = Turns(made, "ours")
        turns.attach("ours", "two")
        assert [path.name for path in made.node.cni_dir.iterdir() if path.is_file()] == []
        turns.delete("two-ours")
