"""`image/slim.py` on a small root: what goes, what stays, and that nothing outside is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from image import slim

STATUS = "Package: bash\nStatus: install ok installed\nVersion: 1\n\nPackage: dash\nVersion: 2\n"


def base(root: Path, lists: dict[str, str], status: str = STATUS) -> Path:
    info = root / "var/lib/dpkg/info"
    info.mkdir(parents=True)
    (root / "var/lib/dpkg/status").write_text(status)
    (root / "usr/bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for name, files in lists.items():
        (info / f"{name}.list").write_text(files)
    return root


def test_a_package_goes_with_its_files_and_its_entry(tmp_path: Path) -> None:
    root = base(
        tmp_path, {"bash:amd64": "/.\n/bin\n/bin/bash\n/etc/skel\n/etc/shared\n", "dash": "/bin/dash\n/etc/shared\n"}
    )
    for path in ("usr/bin/bash", "usr/bin/dash", "etc/shared"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).touch()
    (root / "etc/skel").mkdir()
    (root / "usr/bin/sh").symlink_to("dash")
    (root / "usr/bin/rbash").symlink_to("bash")
    slim.slim(root)
    assert sorted(path.name for path in (root / "usr/bin").iterdir()) == ["dash", "sh"]
    # A file of two packages, and the link to the directory of programs, stay.
    assert [path.name for path in (root / "etc").iterdir()] == ["shared"]
    assert (root / "bin").is_symlink()
    assert [path.name for path in (root / "var/lib/dpkg").iterdir()] == ["status"]
    assert (root / "var/lib/dpkg/status").read_text() == "Package: dash\nVersion: 2\n\n"


def test_a_base_of_other_packages_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/bash").touch()
    slim.slim(tmp_path)
    assert (tmp_path / "usr/bin/bash").exists()


def test_a_path_out_of_the_image_ends_the_build(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "bash").touch()
    root = base(tmp_path / "root", {"bash": "/away/bash\n"})
    (root / "away").symlink_to(outside)
    with pytest.raises(SystemExit, match="is outside of"):
        slim.slim(root)
    assert (outside / "bash").exists()


@pytest.mark.parametrize(
    ("package", "goes"),
    [("bash", True), ("libapt-pkg7.0", True), ("libgnutls30t64", True), ("python3.11-venv", True), ("dash", False),
     ("libssl3", False), ("libpython3.11-stdlib", False), ("python3", False), ("libc6", False), ("libffi8", False)],
)  # fmt: skip
def test_names_of_packages(package: str, goes: bool) -> None:
    assert slim.unneeded(package) is goes
