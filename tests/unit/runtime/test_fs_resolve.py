"""Links inside a chroot lead where chroot(2) would have them lead."""

from __future__ import annotations

import pytest

from multus_daemon.runtime import fs


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("")
    (tmp_path / "file").write_text("outside")
    return root


@pytest.mark.parametrize(
    "target",
    ["/a/b/file", "b/file", "../a/b/file", "../../../../a/b/file", "/../a/./b//file", "/hop"],
)
def test_links(root, target):
    (root / "a" / "link").symlink_to(target)
    (root / "hop").symlink_to("a/b/file")
    assert fs.resolve(str(root), "/a/link") == str(root / "a" / "b" / "file")


def test_links_to_directories(root):
    (root / "x").symlink_to("/a")
    (root / "a" / "y").symlink_to("../x/b")
    assert fs.resolve(str(root), "/x/y/file") == str(root / "a" / "b" / "file")


def test_never_outside(root):
    (root / "link").symlink_to("../file")
    with pytest.raises(FileNotFoundError):
        fs.resolve(str(root), "/link")


def test_loop(root):
    (root / "x").symlink_to("y")
    (root / "y").symlink_to("/x")
    with pytest.raises(OSError, match="symbolic links"):
        fs.resolve(str(root), "/x")


def test_file_as_a_directory(root):
    with pytest.raises(NotADirectoryError):
        fs.resolve(str(root), "/a/b/file/x")


@pytest.mark.parametrize("root", ["", "/"])
def test_without_a_root(root, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert fs.resolve(root, str(tmp_path / "link")) == str((tmp_path / "file").resolve())
    assert fs.resolve(root, "/") == "/"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/new/x", "new/x"),
        ("/a/new/../b/x", "a/b/x"),
        # A link that leads nowhere yet: its target is inside as well.
        ("/dangling/x", "run/new/x"),
        ("/up/x", "new/x"),
    ],
)
def test_what_is_not_there_yet(root, path, expected):
    (root / "dangling").symlink_to("/run/new")
    (root / "up").symlink_to("../../new")
    assert fs.resolve(str(root), path, missing=True) == str(root / expected)
    with pytest.raises(FileNotFoundError):
        fs.resolve(str(root), path)
