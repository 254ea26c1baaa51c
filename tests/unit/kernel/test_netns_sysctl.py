"""Names of sysctls; their values are in tests/netns."""

from __future__ import annotations

from pathlib import Path

import pytest

from multus_daemon.kernel import netns as namespaces


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "/"])
def test_no_part_leads_elsewhere(part: str) -> None:
    with pytest.raises(ValueError, match="not the name of a sysctl"):
        namespaces.read_sysctl("ipv4", "conf", part, "forwarding")
    with pytest.raises(ValueError, match="not the name of a sysctl"):
        namespaces.write_sysctl("ipv4", "conf", part, "forwarding", value="1")


def test_a_value_that_holds_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(namespaces, "read_sysctl", lambda *_parts: "1")
    monkeypatch.setattr(namespaces, "write_sysctl", lambda *parts, value: written.append((parts, value)))
    namespaces.ensure_sysctl("ipv4", "ip_forward", value="1")
    assert written == []
    namespaces.ensure_sysctl("ipv4", "ip_forward", value="0")
    assert written == [(("ipv4", "ip_forward"), "0")]


def test_other_mounts_of_proc_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "22 27 0:21 / /proc rw,relatime - proc proc rw",
        "30 22 0:21 /sys /proc/sys ro,relatime - proc proc rw",
        "31 27 8:1 / / rw,relatime shared:1 - ext4 /dev/vda rw",
        "32 31 0:21 / /host\\040root/proc rw,nosuid shared:7 master:2 - proc proc rw",
        "33 31 0:21 / /read-only/proc ro - proc proc rw",
    )
    (tmp_path / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setattr(namespaces, "_MOUNTS", str(tmp_path / "mountinfo"))
    assert list(namespaces._other_mounts()) == ["/host root/proc"]
