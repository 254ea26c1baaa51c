from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path

import pytest

from multus_daemon.plugins.find import Build, PluginIsMultusError, build, builds, refuse_multus

OUR_SHIM = Path(sys.executable).parent / "multus-shim"


def go_program(
    path: Path, main_package: str, *, is_64: bool = True, order: str = "<", more: str = "mod\tx\tv1\n"
) -> Path:
    """An ELF file that has the section with the build information of a Go program, and nothing else."""
    info = b"\xff Go buildinf:" + f"go1.25\npath\t{main_package}\n{more}".encode()
    names = b"\0.shstrtab\0.go.buildinfo\0"
    head_bytes = 64 if is_64 else 52
    header = struct.Struct(f"{order}IIQQQQIIQQ" if is_64 else f"{order}IIIIIIIIII")
    sections = [
        (0, 0, 0),
        (names.index(b".shstrtab"), head_bytes, len(names)),
        (names.index(b".go.buildinfo"), head_bytes + len(names), len(info)),
    ]
    table = b"".join(header.pack(name, 0, 0, 0, offset, size, 0, 0, 0, 0) for name, offset, size in sections)
    at = head_bytes + len(names) + len(info)
    ident = b"\x7fELF" + bytes([2 if is_64 else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    words = "QQQ" if is_64 else "III"
    rest = struct.pack(
        f"{order}HHI{words}IHHHHHH", 2, 62, 1, 0, 0, at, 0, head_bytes, 0, 0, header.size, len(sections), 1
    )
    path.write_bytes(ident + rest + names + info + table)
    return path


@pytest.mark.parametrize("is_64", [True, False])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "main_package",
    [
        "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus-shim",
        "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus",
        "gopkg.in/k8snetworkplumbingwg/multus-cni.v3/cmd",
        "github.com/intel/multus-cni/multus",
    ],
)
def test_a_program_of_upstream_is_refused_by_its_main_package(
    tmp_path: Path, main_package: str, is_64: bool, order: str
) -> None:
    path = go_program(tmp_path / "macvlan2", main_package, is_64=is_64, order=order)
    with pytest.raises(PluginIsMultusError, match='^plugin "macvlan2" is Multus itself') as caught:
        refuse_multus("macvlan2", str(path))
    assert str(path) in caught.value.details


@pytest.mark.parametrize(
    "main_package",
    [
        "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/passthru-cni",
        "github.com/containernetworking/plugins/plugins/main/macvlan",
    ],
)
def test_other_go_programs_pass(tmp_path: Path, main_package: str) -> None:
    refuse_multus("x", str(go_program(tmp_path / "x", main_package)))


def test_our_shim_is_refused_behind_a_link_and_as_a_copy(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(OUR_SHIM)
    (tmp_path / "copy").write_bytes(OUR_SHIM.read_bytes())
    for name in ("link", "copy"):
        with pytest.raises(PluginIsMultusError):
            refuse_multus(name, str(tmp_path / name))


def test_a_file_is_looked_at_again_after_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "net"
    path.write_bytes(b"#!/bin/sh\n# application/vnd.multus.cni-stdout\n")
    refuse_multus("net", str(path))
    path.unlink()
    shutil.copy2(OUR_SHIM, path)
    with pytest.raises(PluginIsMultusError):
        refuse_multus("net", str(path))


PLUGINS = "github.com/containernetworking/plugins"


@pytest.mark.parametrize(
    ("more", "version"),
    [
        # Built in its repository by Go 1.24 or newer, and as a dependency of another module.
        (f"mod\t{PLUGINS}\tv1.9.1\th1:8oU6=\ndep\tgithub.com/x/y\tv0.1.0\n", "v1.9.1"),
        (f"mod\tx\t(devel)\ndep\t{PLUGINS}/v9\tv9.0.0\ndep\t{PLUGINS}\tv1.10.0\th1:8oU6=\n", "v1.10.0"),
        # As the makers build their releases.
        (
            f'mod\t{PLUGINS}\t(devel)\nbuild\t-ldflags="-extldflags -static -X '
            f'{PLUGINS}/pkg/utils/buildversion.BuildVersion=v1.6.0-rc1"\nbuild\tCGO_ENABLED=0\n',
            "v1.6.0-rc1",
        ),
        # Debian's, and one from a checkout.
        ("build\t-compiler=gc\n", ""),
        (f"mod\t{PLUGINS}\t(devel)\n", ""),
    ],
)
def test_the_release_of_a_program(tmp_path: Path, more: str, version: str) -> None:
    package = f"{PLUGINS}/plugins/main/bridge"
    assert build(str(go_program(tmp_path / "bridge", package, more=more))) == Build(package, version)


def test_a_program_that_is_not_of_go_has_no_release(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")
    assert build(str(tmp_path / "script")) == build(sys.executable) == Build()
    assert builds([str(tmp_path)], ["script", "none"]) == {}
    (tmp_path / "script").chmod(0o755)
    assert builds([str(tmp_path)], ["script", "none"]) == {"script": Build()}


@pytest.mark.parametrize("cut", [0, 4, 20, 63, 80, 120])
def test_a_damaged_program_is_left_to_the_attempt_to_run_it(tmp_path: Path, cut: int) -> None:
    path = go_program(tmp_path / "x", "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus")
    path.write_bytes(path.read_bytes()[:cut])
    refuse_multus("x", str(path))
