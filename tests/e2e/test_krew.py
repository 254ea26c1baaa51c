"""`kubectl multus` as krew and pipx install it: without the shim, beside nothing else of the project, on any system."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from krew import package
from multus_daemon import __version__

# Linux has what macOS has not: names of the standard library, pyroute2's sockets.
ELSEWHERE = """
import os, signal, socket, sys, types
import selectors
sys.platform = "darwin"
absent = {
    os: "setns unshare pidfd_open eventfd sched_getaffinity memfd_create splice posix_fadvise O_TMPFILE O_PATH",
    socket: "AF_NETLINK AF_PACKET AF_VSOCK SO_PEERCRED SO_BINDTODEVICE SO_MARK",
    signal: "pidfd_send_signal",
}
for module, names in absent.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.modules["pyroute2"] = None
proxies = types.ModuleType("_scproxy")
proxies._get_proxy_settings = proxies._get_proxies = dict
sys.modules["_scproxy"] = proxies
from multus_tools.kubectl import main
sys.argv[0] = "kubectl-multus"
sys.exit(main())
"""


@pytest.mark.parametrize("words", [("status",), ("pods",), ("why", "x"), ("networks",), ("leaks",), ("bundle",)])
def test_it_needs_nothing_of_linux(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, *words, "--kubeconfig", "/does/not/exist"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("kubectl-multus: kubeconfig /does/not/exist can't be used: ")


def test_the_first_start_installs_it_beside_its_program(tmp_path: Path) -> None:
    wheels, released, store = (tmp_path / name for name in ("wheels", "released", "store"))
    for folder in (released, store):
        folder.mkdir()
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(wheels),
        str(package.ROOT),
    ]
    environment = {**os.environ, "MULTUS_SHIM_ARCH": "none", "PIP_CONSTRAINT": str(package.ROOT / "constraints.txt")}
    done = subprocess.run(build, capture_output=True, text=True, timeout=200, env=environment, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("pip reaches no package index: configure one, as for `make`")
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.iterdir()
    # No shim inside, so any system takes it.
    assert wheel.name == f"multus_daemon-{__version__}-py3-none-any.whl"
    package.package(wheel, released)
    with tarfile.open(released / f"kubectl-multus-{__version__}.tar.gz") as tar:
        tar.extractall(store, filter="data")
    program = tmp_path / "bin" / "kubectl-multus"
    program.parent.mkdir()
    program.symlink_to(store / "kubectl-multus")
    for first in (True, False):
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=200, check=False)
        assert (done.returncode, done.stdout[:22]) == (0, "usage: kubectl-multus "), done.stderr
        assert ("first start" in done.stderr) is first
    assert not [path for path in store.iterdir() if path.name.startswith(".")]
