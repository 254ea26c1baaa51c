"""Images for a node without a registry, as tar files that `ctr images import` reads (the layout of `docker save`)."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import struct
import tarfile
from pathlib import Path
from typing import Any, Final

from tests.programs import path_of

BUSYBOX: Final = "localhost/busybox:1"
"""Sleeps until it is told to end; the sandbox image of the node, and what its workload pods run."""

_PT_INTERP: Final = 3
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}


class ImageError(Exception):
    """An image can't be made; the message says what is missing."""


def busybox(target: Path) -> None:
    """Write the image BUSYBOX. Raises ImageError where there is no busybox that is static."""
    program = path_of("busybox")
    data = Path(program).read_bytes() if program else b""
    if not _is_static(data):
        raise ImageError("needs a static busybox: apt-get install busybox-static")
    files = {"bin/busybox": data}
    links = {f"bin/{name}": "busybox" for name in ("sh", "sleep", "ip", "ping", "cat", "wget", "httpd", "true")}
    # A trap, because the first process of a container is not ended by a signal that it does not handle.
    command = ["/bin/sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait; done"]
    write(target, BUSYBOX, _layer(files, links), {"Cmd": command, "Env": ["PATH=/bin"]})


def with_programs(target: Path, name: str, programs: dict[str, Path]) -> None:
    """Write an image of static programs, by their paths in it, and a shell. Raises ImageError."""
    busybox_program = path_of("busybox")
    data = {path.lstrip("/"): program.read_bytes() for path, program in programs.items()}
    for path, content in data.items():
        if not _is_static(content):
            raise ImageError(f"{path} is not a static program")
    if busybox_program:
        data["bin/busybox"] = Path(busybox_program).read_bytes()
    # What every distribution's image has: who is root, and /var/run, below which runtimes name network namespaces.
    # The PATH is what plugins look for the node's programs in.
    search = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    data["etc/passwd"] = b"root:x:0:0:root:/root:/bin/sh\n"
    write(target, name, _layer(data, {"bin/sh": "busybox", "var/run": "../run"}), {"Env": [f"PATH={search}"]})


def write(target: Path, name: str, layer: bytes, config: dict[str, Any]) -> None:
    """Write an image of one layer (a tar file's bytes)."""
    digest = hashlib.sha256(layer).hexdigest()
    image = {
        "architecture": _MACHINES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as archive:
        _add(archive, "layer.tar", layer)
        _add(archive, "config.json", json.dumps(image).encode())
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _is_static(data: bytes) -> bool:
    """Return True if this is a 64-bit ELF program without an interpreter (elf(5), PT_INTERP)."""
    if data[:5] != b"\x7fELF\x02":
        return False
    order = "<" if data[5] == 1 else ">"
    (start,) = struct.unpack_from(f"{order}Q", data, 32)
    size, count = struct.unpack_from(f"{order}HH", data, 54)
    kinds = [struct.unpack_from(f"{order}I", data, start + number * size)[0] for number in range(count)]
    return _PT_INTERP not in kinds


def _layer(files: dict[str, bytes], links: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for directory in sorted({str(Path(name).parent) for name in files} | {"tmp"}):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, content in files.items():
            _add(archive, name, content, 0o755)
        for name, destination in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, destination
            archive.addfile(entry)
    return data.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
