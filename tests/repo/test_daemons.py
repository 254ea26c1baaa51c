"""End-to-end tests start daemons with the rights of the manifest: the check that says so, and what it relies on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rights import of_container
from tests.repo import daemons

TESTS = Path(__file__).resolve().parents[1]


def test_no_test_starts_a_daemon_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert daemons.main() == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        'Popen([sys.executable, "-m", "multus_daemon.cli", "run"])',
        'run(f"{sys.executable} -m multus_daemon.cli run")',
        "from multus_daemon import cli",
        "from multus_daemon.cli import main",
        "import multus_daemon.cli",
        "from tests.real_daemon import RealDaemon",
    ],
)
def test_each_other_way_is_found(line: str) -> None:
    assert list(daemons.faults(f"import sys\n{line}\n")) == [2]


@pytest.mark.parametrize("line", ["from multus_daemon import settings", "node.start()", "# multus_daemon.cli"])
def test_what_starts_no_daemon_is_not(line: str) -> None:
    assert list(daemons.faults(line)) == []


def test_every_exception_is_one() -> None:
    assert [name for name in daemons.MAY if not list(daemons.faults((TESTS / name).read_text()))] == []


def test_the_profile_is_that_of_the_pinned_containerd() -> None:
    """After a change of the pin: `go run ./defaults`, as its source says."""
    recorded = json.loads((TESTS / "data" / "runtime-default.json").read_bytes())["containerd"]
    pins = (TESTS / "e2e" / "tools" / "containerd" / "go.mod").read_text()
    assert re.findall(r"(?m)^\s*github.com/containerd/containerd/v2 (v\S+)", pins) == [recorded]


# --- reading the manifest ------------------------------------------------------------------------------------------


def pod() -> tuple[dict[str, Any], dict[str, Any]]:
    """The spec of a pod with one container, and the container."""
    security = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    mounts = [{"mountPath": "/var/lib/cni"}, {"mountPath": "/etc/cni", "readOnly": True}]
    container = {
        "name": "main",
        "securityContext": security,
        "resources": {"limits": {"memory": "512Mi"}},
        "volumeMounts": mounts,
    }
    return {"containers": [container]}, container


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("securityContext", "privileged", True),
        ("securityContext", "procMount", "Unmasked"),
        ("securityContext", "seccompProfile", {"type": "Localhost", "localhostProfile": "ours.json"}),
        ("securityContext", "capabilities", {"drop": ["NET_RAW"], "add": ["NET_ADMIN"]}),
        ("resources", "limits", {"memory": "512Mi", "cpu": "1"}),
    ],
)
def test_what_is_unknown_fails(place: str, key: str, value: object) -> None:
    spec, container = pod()
    container[place][key] = value
    with pytest.raises(AssertionError):
        of_container(spec, "main")
