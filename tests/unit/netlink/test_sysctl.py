"""Names of sysctls; their values are in tests/netns."""

from __future__ import annotations

import pytest

from multus_daemon.netlink import sysctl


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "/"])
def test_no_part_leads_elsewhere(part: str) -> None:
    with pytest.raises(ValueError, match="no name of a sysctl"):
        sysctl.read("ipv4", "conf", part, "forwarding")
    with pytest.raises(ValueError, match="no name of a sysctl"):
        sysctl.write("ipv4", "conf", part, "forwarding", value="1")


def test_a_value_that_holds_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(sysctl, "read", lambda *_parts: "1")
    monkeypatch.setattr(sysctl, "write", lambda *parts, value: written.append((parts, value)))
    sysctl.ensure("ipv4", "ip_forward", value="1")
    assert written == []
    sysctl.ensure("ipv4", "ip_forward", value="0")
    assert written == [(("ipv4", "ip_forward"), "0")]
