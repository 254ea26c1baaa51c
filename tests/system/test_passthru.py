"""passthru as a command of its own."""

import json
import subprocess
import sys
from pathlib import Path

from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import versions

# Results of CNI SPEC 0.1.0 to 1.1.0 that say nothing: libraries print `dns` in 0.x always, in 1.x never when empty.
EMPTY: dict[str, dict[str, object]] = {
    version: {"cniVersion": version} | ({} if version.startswith("1.") else {"dns": {}})
    for version in versions.SUPPORTED
}


def invocation(verb: str, **fields: object) -> Invocation:
    return Invocation(
        verb, "c1", "/run/netns/none", "eth0", "", "/none", {"name": "chain", "type": "passthru"} | fields
    )


def test_as_a_command(tmp_path: Path) -> None:
    env = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": "/run/netns/none",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "multus_tools.builtin", "passthru"],
        env=env,
        input=invocation("ADD", cniVersion="0.2.0").stdin,
        capture_output=True,
        cwd=Path(__file__).parents[3],
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == EMPTY["0.2.0"]
