"""CNI_NETNS_OVERRIDE: a plugin that is started in the namespace that CNI_NETNS names works there, as a binary does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.netns.conftest import Netns
from tests.netns.reference import DIRECTORY, has
from tests.programs import needed

ROOT = Path(__file__).parents[2]
OURS = (sys.executable, "-m", "multus_tools.builtin")
IFNAME = "eth0"


def network(plugin: str, leases: Path) -> dict[str, Any]:
    ipam = {"type": "host-local", "dataDir": str(leases), "subnet": "10.77.0.0/24"}
    own: dict[str, dict[str, Any]] = {
        "bridge": {"bridge": "br-own", "isGateway": True, "ipam": ipam},
        "loopback": {},
        "macvlan": {"master": "up0", "ipam": ipam},
        "ptp": {"ipam": ipam, "ipMasq": False},
        "tuning": {"mtu": 1400, "mac": "02:00:00:00:00:77", "sysctl": {"net.ipv4.conf.eth0.arp_filter": "1"}},
    }
    return {"cniVersion": "1.0.0", "name": "own", "type": plugin, **own[plugin]}


class Own:
    """A namespace, and a plugin that is started in it to work in it."""

    def __init__(self, netns: Netns, plugin: str, program: tuple[str, ...], path: str, fields: dict[str, Any]) -> None:
        self.netns = netns
        self.ifname = "lo" if plugin == "loopback" else IFNAME
        self._program = (*program, plugin) if program == OURS else program
        self._path = path
        self._fields = fields
        if plugin == "macvlan":
            netns.run("ip", "link", "add", "up0", "type", "veth", "peer", "name", "up1")
            netns.run("ip", "link", "set", "up0", "up")
        if plugin == "tuning":
            netns.run("ip", "link", "add", IFNAME, "type", "veth", "peer", "name", "eth1")
            made = {"name": IFNAME, "mac": self.link()["address"], "sandbox": netns.path}
            self._fields = fields | {"prevResult": {"cniVersion": "1.0.0", "interfaces": [made]}}

    def link(self) -> dict[str, Any]:
        (found,) = self.netns.ip("link", "show", self.ifname)
        return dict(found)

    def call(self, verb: str, override: str | None, **more: Any) -> tuple[int, Any]:
        """Exit status and what is on stdout, decoded."""
        variables = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": "own",
            "CNI_NETNS": self.netns.path,
            "CNI_IFNAME": self.ifname,
            "CNI_PATH": self._path,
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            **({"CNI_NETNS_OVERRIDE": override} if override is not None else {}),
        }
        program = [needed("nsenter"), f"--net={self.netns.path}", *self._program]
        done = subprocess.run(
            program,
            input=json.dumps(self._fields | more).encode(),
            env=variables,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else None

    def state(self) -> dict[str, Any]:
        """Links with their addresses, without what is the kernel's choice."""
        chosen = {"eth0", "br-own", "lo", "up0", "up1", "eth1"}
        return {
            link["ifname"] if link["ifname"] in chosen else "veth": (
                sorted(item["local"] for item in link["addr_info"] if item["scope"] != "link"),
                link["mtu"],
            )
            for link in self.netns.ip("address", "show")
        }


PLUGINS = ("bridge", "loopback", "macvlan", "ptp", "tuning")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_builtin_works_in_its_own_namespace(plugin: str, make_netns: Callable[[], Netns], tmp_path: Path) -> None:
    programs: dict[str, tuple[str, ...]] = {"ours": OURS}
    if has(plugin, "host-local"):
        programs["reference"] = (str(DIRECTORY / plugin),)
    seen: dict[str, list[Any]] = {}
    for who, program in programs.items():
        path = str(DIRECTORY) if who == "reference" else str(tmp_path)
        own = Own(make_netns(), plugin, program, path, network(plugin, tmp_path / who))
        before = own.state()
        code, made = own.call("ADD", "1")
        assert code == 0, (who, made)
        attached = own.state()
        assert attached != before
        assert {item.get("sandbox") for item in made["interfaces"]} <= {own.netns.path, None, ""}
        more = {} if plugin == "tuning" else {"prevResult": made}
        checked = own.call("CHECK", "TRUE", **more)
        assert checked == (0, None), (who, checked)
        deleted = own.call("DEL", "true", **more)
        assert deleted == (0, None), (who, deleted)
        seen[who] = [attached, own.state(), sorted(item.get("address", "") for item in made.get("ips", ()))]
        # A bridge stays, and the kernel's address of `lo`.
        if plugin not in ("bridge", "loopback"):
            assert own.state() == before
        assert own.state().keys() - before.keys() <= {"br-own"}
    assert seen["ours"] == seen.get("reference", seen["ours"])


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("override", [None, "", "0", "yes"])
def test_without_it_the_namespace_is_refused_and_left_alone(
    plugin: str, override: str | None, make_netns: Callable[[], Netns], tmp_path: Path
) -> None:
    own = Own(make_netns(), plugin, OURS, str(tmp_path), network(plugin, tmp_path / "leases"))
    before = own.state()
    for verb in ("ADD", "DEL"):
        code, error = own.call(verb, override)
        assert (code, error["code"]) == (1, 8)
        assert "plugin's netns and netns from CNI_NETNS should not be the same" in error["msg"]
    assert own.state() == before
    assert not (tmp_path / "leases").exists()
