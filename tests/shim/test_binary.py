"""The binary runs on any host: it is static, small and light."""

from __future__ import annotations

import os
import pathlib
import socket
import struct
import subprocess
import time
import typing

import pytest

import multus_shim

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Request, Shim, Stub

PT_DYNAMIC, PT_INTERP = 2, 3
SHT_SYMTAB = 2


def headers(image: bytes) -> tuple[list[int], list[int]]:
    """The types of the program headers and of the section headers of a 64-bit ELF file in this machine's byte order."""
    assert image[:5] == b"\x7fELF\x02"
    phoff, shoff = struct.unpack_from("=QQ", image, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("=HHHH", image, 54)
    programs = [struct.unpack_from("=I", image, phoff + i * phentsize)[0] for i in range(phnum)]
    sections = [struct.unpack_from("=I", image, shoff + i * shentsize + 4)[0] for i in range(shnum)]
    return programs, sections


def test_static_and_stripped(binary: pathlib.Path) -> None:
    image = binary.read_bytes()
    if image[4] != 2:
        pytest.skip("a 32-bit machine: run on a 64-bit one")
    programs, sections = headers(image)
    assert programs
    assert PT_INTERP not in programs
    assert PT_DYNAMIC not in programs
    assert SHT_SYMTAB not in sections


def test_the_header_parser_knows_a_dynamic_program() -> None:
    for path in ("/bin/sh", "/bin/ls", "/usr/bin/env"):
        image = pathlib.Path(path).read_bytes() if os.path.exists(path) else b""
        if image[:5] == b"\x7fELF\x02":
            programs, _ = headers(image)
            if PT_INTERP in programs:
                return
    pytest.skip("no dynamically linked 64-bit program: run where /bin/sh is one")


def test_size(binary: pathlib.Path) -> None:
    assert binary.stat().st_size <= 200 * 1024


def test_executable_needs_nothing_around_it(binary: pathlib.Path) -> None:
    """The host may have an empty environment and a foreign working directory."""
    done = subprocess.run(
        [binary], env={"CNI_COMMAND": "VERSION"}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith(b'{"cniVersion"')


def peak_kib(pid: int) -> int:
    """Peak resident memory of a living process.

    NB: not ru_maxrss of wait4(2): that counts the memory of the Python that the child was forked from.
    """
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


@pytest.mark.parametrize("size", [2_000, 300_000])
def test_memory(shim: Shim, daemon: Stub, size: int) -> None:
    """Measured while the shim waits for the reply, and while it waits for stdout to be taken."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("no /proc: mount proc")
    peaks: list[int] = []
    body = b"r" * size

    def behave(conn: socket.socket, request: Request) -> None:
        peaks.append(peak_kib(request.pid))
        conn.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.multus.cni-stdout\r\nContent-Length: %d\r\n\r\n%s"
            % (size, body)
        )

    daemon.behaviour = behave
    reader, writer = os.pipe()
    process = subprocess.Popen([shim.binary], stdin=subprocess.PIPE, stdout=writer, env=shim.environment("ADD"))
    with process, open(reader, "rb") as out:
        assert process.stdin is not None
        if size < 65536:
            os.write(writer, b"#" * 65536)  # fill the pipe, so that the shim is still there to be measured
        os.close(writer)
        process.stdin.write(shim.config())
        process.stdin.close()
        # The shim sleeps in poll(2) for stdout once it has the whole reply.
        deadline = time.monotonic() + 20
        while not peaks or b"poll" not in wait_channel(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        peaks.append(peak_kib(process.pid))
        assert out.read().lstrip(b"#") == body
        assert process.wait(10) == 0
    assert max(peaks) <= 2048, peaks


def wait_channel(pid: int) -> bytes:
    """Name of the kernel function that the process sleeps in; "poll" where the kernel does not tell."""
    try:
        name = pathlib.Path(f"/proc/{pid}/wchan").read_bytes()
    except OSError:
        return b"poll"
    return b"poll" if name in (b"0", b"") else name


class TestPathOfTheBinary:
    def test_variable_wins(self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
        other = tmp_path / "other"
        other.touch()
        monkeypatch.setenv("MULTUS_SHIM_BINARY", str(other))
        assert multus_shim.binary() == other

    def test_variable_that_names_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
        monkeypatch.setenv("MULTUS_SHIM_BINARY", str(tmp_path / "none"))
        with pytest.raises(FileNotFoundError, match="MULTUS_SHIM_BINARY"):
            multus_shim.binary()

    def test_environment_then_path(self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
        monkeypatch.delenv("MULTUS_SHIM_BINARY", raising=False)
        scripts, path = tmp_path / "scripts", tmp_path / "path"
        for folder in (scripts, path):
            folder.mkdir()
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(scripts))
        monkeypatch.setenv("PATH", str(path))
        with pytest.raises(FileNotFoundError, match="pip"):
            multus_shim.binary()
        for folder in (path, scripts):
            (folder / "multus-shim").touch(0o755)
            assert multus_shim.binary() == folder / "multus-shim"
