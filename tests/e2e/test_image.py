"""The container image, looked at from inside.

`make e2e` builds it, on a base of Debian's packages; the tests find it, and are skipped where it is not there.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import __version__
from tests.e2e.build_tools import ToolError
from tests.e2e.cluster import daemon_image
from tests.programs import needed

MAX_BYTES = 150_000_000
MAX_COMPRESSED_BYTES = 60_000_000
MACHINES = {"x86_64": 62, "aarch64": 183, "armv7l": 40, "ppc64le": 21, "s390x": 22, "riscv64": 243}


@dataclass(frozen=True)
class Image:
    """The built image: its root directory, mounted, and what its configuration says."""

    root: Path
    compressed: int
    """Bytes of its layer as registries get it."""
    config: dict[str, Any]

    def run(self, *command: str, mnt: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in it, with nothing writable but the directory `mnt`, which is at /mnt."""
        bind = 'mount --bind "$2" "$1/mnt";' if mnt else ""
        script = f"""set -e
            mount --bind "$1" "$1"
            mount -o remount,bind,ro "$1"
            mount -t proc proc "$1/proc"
            {bind}
            root=$1; shift 2; exec chroot "$root" "$@" """
        return subprocess.run(
            [
                needed("unshare"),
                "--mount",
                "--pid",
                "--fork",
                "sh",
                "-c",
                script,
                "sh",
                self.root,
                mnt or "",
                *command,
            ],
            env=dict(item.split("=", 1) for item in self.config["Env"]),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def files(self) -> Iterator[Path]:
        """Everything in it that is no directory."""
        for directory, _, names in os.walk(self.root):
            for name in names:
                yield Path(directory, name)

    def inside(self, path: Path) -> str:
        """A path as the container sees it."""
        return "/" + str(path.relative_to(self.root))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    try:
        archive = daemon_image.find()
    except ToolError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("image")
    root = directory / "root"
    root.mkdir()
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", directory], check=True, timeout=120)
    (described,) = json.loads((directory / "manifest.json").read_text())
    # One: what was removed from the base is not in the image, instead of hidden by a later layer.
    (layer,) = described["Layers"]
    unpack = ["tar", "--extract", "--same-permissions", "--numeric-owner", "--file", directory / layer]
    subprocess.run([*unpack, "--directory", root], check=True, timeout=120)
    compress = subprocess.run(["gzip", "-6", "--stdout", directory / layer], capture_output=True, check=False)
    # NB: status 2 is a warning, about the time of the file.
    assert compress.returncode in (0, 2), compress.stderr
    yield Image(root, len(compress.stdout), json.loads((directory / described["Config"]).read_text())["config"])
    subprocess.run(["rm", "-rf", "--one-file-system", directory], check=True)


def test_the_entry_point_runs_where_nothing_can_be_written(image: Image) -> None:
    assert image.config["Entrypoint"] == ["/opt/multus/bin/multus-daemon"]
    assert image.config.get("User") in ("0:0", "0")
    done = image.run(*image.config["Entrypoint"], "version")
    assert (done.stdout, done.stderr, done.returncode) == (f"multus-daemon: version {__version__}\n", "", 0)


@pytest.mark.parametrize("program", ["multus-probe", "multusctl", "multus-builtin", "multus-shim"])
def test_every_program_starts(image: Image, program: str) -> None:
    done = image.run(program, "--help") if program != "multus-shim" else image.run(program, "-v")
    assert "Traceback" not in done.stderr
    assert "ermission denied" not in done.stderr


def test_what_the_extras_bring_is_there(image: Image) -> None:
    # Each in a Python of its own: an import that needs another first must not find it.
    kubernetes = "kubernetes_asyncio.config.kube_config"
    library = f"multus_daemon.cluster.kube.credentials, {kubernetes}"
    tools = "multus_tools.ctl, multus_tools.kubectl, rich.console, rich.progress, rich.table, rich.tree"
    for names in ("cryptography", "google.protobuf", "grpc", "pyroute2", "multus_daemon.daemon", library, tools):
        done = image.run("/opt/multus/bin/python", "-W", "error", "-c", f"import {names}")
        assert (done.returncode, done.stderr) == (0, "")


def test_every_module_of_ours_can_be_imported(image: Image) -> None:
    """And so can what it imports, lazily too, as far as a module names it at its top."""
    code = (
        "import importlib, pkgutil, multus_daemon\n"
        "for found in pkgutil.walk_packages(multus_daemon.__path__, 'multus_daemon.'):\n"
        "    importlib.import_module(found.name)\n"
    )
    done = image.run("/opt/multus/bin/python", "-W", "error", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_program_has_its_libraries(image: Image) -> None:
    (loader,) = [*image.root.glob("lib64/ld-linux*.so.?"), *image.root.glob("lib/ld-linux-aarch64.so.1")][:1]
    native = [file for file in image.files() if file.is_file() and file.read_bytes()[:4] == b"\x7fELF"]
    assert len(native) > 100
    script = 'loader=$1; shift; for file; do echo "$file"; "$loader" --list "$file"; done 2>&1'
    said = image.run("sh", "-c", script, "sh", image.inside(loader), *map(image.inside, native)).stdout
    assert "libc.so.6 => /" in said
    assert "not found" not in said


def test_nothing_is_there_that_installs_or_interprets(image: Image) -> None:
    unwanted = re.compile(r"/(bash|rbash|perl[\d.]*|apt(-\w+)?|dpkg(-\w+)?|debconf|gpgv?|useradd|mount|su|openssl)$")
    found = [image.inside(file) for file in image.files() if unwanted.search(image.inside(file))]
    assert found == []
    # For people who look around in the container, and for the manifest that waits: `sleep`.
    for program in ("sh", "ls", "cat", "grep", "sed", "sleep", "tar"):
        assert image.run("sh", "-c", f"command -v {program}").returncode == 0, program


def test_the_bill_of_materials_names_what_is_there(image: Image) -> None:
    document = json.loads((image.root / "usr/share/sbom/multus-daemon.cdx.json").read_text())
    names = {item["name"] for item in document["components"]}
    assert {"aiohttp", "multus-shim", "coreutils", "libc6"} <= names
    assert not {"bash", "perl-base", "apt", "dpkg", "libgnutls30"} & names
    # Scanners of the image read the same list.
    status = (image.root / "var/lib/dpkg/status").read_text()
    listed = set(re.findall(r"^Package: (\S+)$", status, re.MULTILINE))
    assert listed <= names


def test_the_shim_is_static_and_of_this_machine(image: Image) -> None:
    data = (image.root / "opt/multus/bin/multus-shim").read_bytes()
    order = "<" if data[5] == 1 else ">"
    assert data[:4] == b"\x7fELF"
    assert struct.unpack_from(f"{order}H", data, 18) == (MACHINES[platform.machine()],)
    # Program headers (elf(5)): none of type PT_INTERP, none of type PT_DYNAMIC.
    is_64 = data[4] == 2
    (offset,) = struct.unpack_from(f"{order}{'Q' if is_64 else 'I'}", data, 32 if is_64 else 28)
    size, count = struct.unpack_from(f"{order}HH", data, 54 if is_64 else 42)
    kinds = {struct.unpack_from(f"{order}I", data, offset + number * size)[0] for number in range(count)}
    assert kinds.isdisjoint({2, 3})


def test_the_shim_gets_onto_a_node(image: Image, tmp_path: Path) -> None:
    done = image.run("multus-daemon", "install", "--bin-dir", "/mnt", mnt=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"/mnt/multus-shim: installed, version {__version__}\n")
    shim = tmp_path / "multus-shim"
    assert shim.read_bytes() == (image.root / "opt/multus/bin/multus-shim").read_bytes()
    assert shim.stat().st_mode & 0o777 == 0o755


def test_nothing_of_the_build_is_left(image: Image) -> None:
    unwanted = re.compile(
        r"/(pip3?[\d.]*|gcc[-\d.]*|cc|clang|zig|ld|as|make|apt-get\.log)$|/(pip|setuptools|ziglang|hatchling|ensurepip)/"
        r"|\.whl$|/(tests?|__tests__)/|^/src/|^/etc/pip\.conf$|^/run/secrets/|^/root/\.(cache|config)/"
    )
    assert [path for file in image.files() if unwanted.search(path := image.inside(file))] == []


def test_the_index_that_it_was_made_with_is_not_told(image: Image) -> None:
    assert "pip.conf" not in json.dumps(image.config)
    assert not [image.inside(path) for path in image.root.rglob("direct_url.json") if b"http" in path.read_bytes()]


def test_nobody_can_change_the_program(image: Image) -> None:
    wrong = []
    for directory, _, names in os.walk(image.root / "opt/multus"):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            found = path.lstat()
            if (found.st_uid, found.st_gid) != (0, 0) or (not path.is_symlink() and found.st_mode & 0o222):
                wrong.append(image.inside(path))
    assert wrong == []
    assert [image.inside(file) for file in image.files() if file.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)] == []


def test_everything_has_its_byte_code(image: Image) -> None:
    sources = list((image.root / "opt/multus/lib").rglob("*.py"))
    assert len(sources) > 100
    # What the interpreter looks for with the PYTHONOPTIMIZE of the image.
    env = dict(item.split("=", 1) for item in image.config["Env"])
    suffix = f"opt-{env['PYTHONOPTIMIZE']}.pyc"
    missing = [file for file in sources if not list(file.parent.glob(f"__pycache__/{file.stem}.*.{suffix}"))]
    assert missing == []
    # Flags of PEP 552: by hash, not checked. With file times, a copied layer would be compiled at each start.
    compiled = next((image.root / "opt/multus/lib").rglob("multus_daemon/__pycache__/daemon.*.pyc"))
    assert struct.unpack_from("<I", compiled.read_bytes(), 4) == (0b01,)


def test_labels_and_size(image: Image) -> None:
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    size = sum(file.lstat().st_size for file in image.files())
    print(f"{size / 1e6:.0f} MB, compressed {image.compressed / 1e6:.0f} MB")
    assert size < MAX_BYTES
    assert image.compressed < MAX_COMPRESSED_BYTES
