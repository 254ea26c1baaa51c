"""The files of a running daemon have the modes of the table in docs/security.md, whatever umask and earlier modes."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Final

from tests.real_daemon import RealDaemon

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "security.md"
ROWS: Final = re.findall(r"(?m)^\| `([^`]+)` \| (0\d{3})(?:, directory (0\d{3}))? \|", PAGE.read_text())
"""Path, mode, and mode of the directory."""
ELSEWHERE: Final = {
    "<cniDir>/aside/<container>.json",
    "<certDir>/*",
    "/run/k8s.cni.cncf.io/devinfo/cni/*",
    "<cniDir>/addresses/*",
    "<cniDir>/dhcp/*",
}
"""Paths that only other tests can have: a day of failures, a signed certificate, a device, a bridge of the host, a DHCP
server."""


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


def test_every_file_has_the_mode_of_its_row(tmp_path: Path, netns: str) -> None:
    places = {"socketDir": "run", "cniDir": "cni", "cniConfigDir": "net.d", "logFile": "daemon.log"}
    settings = {key: str(tmp_path / name) for key, name in places.items()} | {"multusConfigFile": "auto"}
    for name in ("run", "cni", "cni/attachments", "cni/results", "cni/spool", "net.d"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    (tmp_path / "net.d" / "10-cluster.conf").write_text('{"cniVersion": "1.0.0", "name": "c", "type": "plain"}')
    # A write that a shim has not finished: the daemon leaves it alone for an hour.
    (tmp_path / "cni" / "spool" / ".unfinished").touch(mode=0o600)
    daemon = RealDaemon(tmp_path, settings, umask=0)
    daemon.netns = netns
    daemon.plugin("plain", 'test "$CNI_COMMAND" = DEL || echo \'{"cniVersion":"1.0.0"}\'')
    daemon.network("cluster", "plain")
    daemon.pod("web", "default")
    with daemon:
        assert daemon.cni("ADD", "c0ffee", "web", "default")[0] == 200
        daemon.until((tmp_path / "net.d" / "00-multus.conf").exists, "the configuration is written")
        compared = set()
        for row, wanted, directory in ROWS:
            pattern = re.sub(r"<(\w+Dir)>", lambda match: places[match[1]], row) if row not in ELSEWHERE else ""
            pattern = places.get(pattern, pattern).replace("<container>", "c0ffee")
            for path in tmp_path.glob(pattern) if pattern else ():
                compared.add(row)
                assert mode(path) == wanted, row
                assert not directory or mode(path.parent) == directory, row
    assert {row for row, *_ in ROWS} - compared == ELSEWHERE
    assert stat.S_IMODE((tmp_path / "cni").stat().st_mode) & 0o022 == 0, "`<cniDir>`: not writable by others"
