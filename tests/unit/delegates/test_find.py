"""Links inside a chroot lead where chroot(2) would have them lead."""

from __future__ import annotations

import pytest

from multus_daemon.delegates import find


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
    assert find.resolve(str(root), "/a/link") == str(root / "a" / "b" / "file")


def test_links_to_directories(root):
    (root / "x").symlink_to("/a")
    (root / "a" / "y").symlink_to("../x/b")
    assert find.resolve(str(root), "/x/y/file") == str(root / "a" / "b" / "file")


def test_never_outside(root):
    (root / "link").symlink_to("../file")
    with pytest.raises(FileNotFoundError):
        find.resolve(str(root), "/link")


def test_loop(root):
    (root / "x").symlink_to("y")
    (root / "y").symlink_to("/x")
    with pytest.raises(OSError, match="symbolic links"):
        find.resolve(str(root), "/x")


def test_file_as_a_directory(root):
    with pytest.raises(NotADirectoryError):
        find.resolve(str(root), "/a/b/file/x")


@pytest.mark.parametrize("root", ["", "/"])
def test_without_a_root(root, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert find.resolve(root, str(tmp_path / "link")) == str((tmp_path / "file").resolve())
    assert find.resolve(root, "/") == "/"
