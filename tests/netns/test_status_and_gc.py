"""STATUS and GC of every built-in beside the reference's: they say the same, and ours free nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.netns import outcome, reference

pytestmark = reference.needs_new()

MASTERS = ("macvlan", "vlan", "ipvlan")
WITH_IPAM = ("ptp", "bridge", *MASTERS, "dummy", "tap")
TYPES = (*WITH_IPAM, "loopback", "portmap", "tuning", "bandwidth", "host-local", "static")
HOST_LOCAL = {"type": "host-local", "subnet": "10.91.0.0/24"}
SECTIONS = {
    "ready": HOST_LOCAL,
    "static": {"type": "static"},
    "unknown": {"type": "no-such"},
    "full": HOST_LOCAL | {"subnet": "10.91.0.0/30"},
    "none": None,
}


def config(plugin: str, section: dict[str, Any] | None, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"cniVersion": "1.1.0", "name": "testnet", "type": plugin, "master": "lo"}
    if plugin not in MASTERS:
        del found["master"]
    if section is not None:
        own = {"dataDir": str(directory)} if section["type"] == "host-local" else {}
        found["ipam"] = section | own
    return found


def leases(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("10.*"))


@pytest.mark.parametrize(
    ("plugin", "section"),
    [
        *((plugin, section) for plugin in WITH_IPAM for section in SECTIONS),
        *(("host-local", section) for section in ("ready", "full", "none")),
        *((plugin, "none") for plugin in ("loopback", "portmap", "tuning", "bandwidth", "static")),
        ("static", "static"),
    ],
)
def test_status(plugin: str, section: str, host: Any, tmp_path: Path) -> None:
    given = config(plugin, SECTIONS[section], tmp_path / "leases")
    if section == "full":
        reference.run("host-local", "ADD", "/nowhere", given, container="another")
    theirs = outcome.of_reference(plugin, "STATUS", "", given)
    runner = outcome.dispatched("prefer")
    ours = outcome.builtin(plugin, "STATUS", "", given, ipam=runner.recorded)
    assert ours.failed == theirs.failed, (ours.msg, theirs.msg)
    if ours.failed and theirs.code != 999:
        assert ours.code == theirs.code


@pytest.mark.parametrize("plugin", TYPES)
def test_gc_frees_nothing(plugin: str, host: Any, tmp_path: Path) -> None:
    """Neither do main plugins of the reference ask for it. host-local does from v1.10.0 on; the daemon frees by DEL."""
    given = config(plugin, HOST_LOCAL, tmp_path / "leases")
    reference.run("host-local", "ADD", "/nowhere", given, container="another")
    before = leases(tmp_path / "leases")
    assert before == ["10.91.0.2"]
    given |= {"cni.dev/valid-attachments": [], "cni.dev/attachments": []}
    assert outcome.builtin(plugin, "GC", "", given) == outcome.Outcome()
    assert leases(tmp_path / "leases") == before
    assert outcome.of_reference(plugin, "GC", "", given) == outcome.Outcome()
    if plugin != "host-local":
        assert leases(tmp_path / "leases") == before
