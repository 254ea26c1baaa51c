"""A directory of manifests as it changes."""

import json
import logging
import os
import pathlib

import pytest

from multus_daemon.cluster.standalone.folder import Folder


def pod(name: str, note: str = "") -> str:
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, annotations: {{note: '{note}'}}}}\n"


def names(folder: Folder) -> list[str]:
    return sorted(name for _, name in folder.scan().pods)


def test_which_files_count(tmp_path: pathlib.Path) -> None:
    for path in ("a.yaml", "sub/deep/b.yml", "sub/status/c.yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(pod(pathlib.Path(path).stem))
    (tmp_path / "d.json").write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "d"}}))
    for path in (".hidden.yaml", ".git/x.yaml", "status/web/x.yaml", "x.txt", "x.yaml~", "yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(pod("x"))
    folder = Folder(tmp_path)
    assert names(folder) == ["a", "b", "c", "d"]
    # What `store` watches: not where our own status files are, of which each ADD makes one.
    assert folder.directories.keys() == {tmp_path / path for path in ("", "sub", "sub/deep", "sub/status")}


def test_a_mounted_config_map(tmp_path: pathlib.Path) -> None:
    """Kubernetes mounts one as links through `..data`, and swaps that link."""
    for revision in ("a", "b"):
        (tmp_path / f"..{revision}").mkdir()
        (tmp_path / f"..{revision}" / "pod.yaml").write_text(pod(revision))
    (tmp_path / "..data").symlink_to("..a")
    (tmp_path / "pod.yaml").symlink_to("..data/pod.yaml")
    folder = Folder(tmp_path)
    assert names(folder) == ["a"]
    (tmp_path / "..new").symlink_to("..b")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert names(folder) == ["b"]


def test_a_link_to_a_directory_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(pod("a"))
    (tmp_path / "loop").symlink_to(tmp_path)
    assert Folder(tmp_path).scan().errors == {}


def test_changes_and_removals(tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path)
    assert names(folder) == []
    (tmp_path / "a.yaml").write_text(pod("a", "old"))
    assert names(folder) == ["a"]
    (tmp_path / "a.yaml").write_text(pod("a", "newer"))
    assert folder.scan().pods["default", "a"].annotations["note"] == "newer"
    (tmp_path / "a.yaml").unlink()
    assert names(folder) == []


def test_a_broken_file_keeps_its_last_good_content(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "a.yaml").write_text(pod("a"))
    (tmp_path / "b.yaml").write_text(pod("b"))
    folder.scan()
    (tmp_path / "a.yaml").write_text("kind: [")
    with caplog.at_level(logging.INFO):
        first = folder.scan()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        second = folder.scan()
        assert sorted(first.pods) == sorted(second.pods) == [("default", "a"), ("default", "b")]
        assert list(second.errors) == ["a.yaml"]
        assert "not YAML" in second.errors["a.yaml"]
        assert [record.levelname for record in caplog.records] == ["ERROR"]  # once, not with every scan
        (tmp_path / "a.yaml").write_text(pod("c"))
        assert names(folder) == ["b", "c"]
        assert folder.scan().errors == {}
    assert "in order again" in caplog.records[-1].getMessage()


def test_a_file_that_was_never_good_declares_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{pod('a')}---\nkind: Pod\n")
    view = Folder(tmp_path).scan()
    assert view.pods == {}
    assert "object 1: apiVersion" in view.errors["a.yaml"]


def test_the_second_of_two_declarations_is_an_error(tmp_path: pathlib.Path) -> None:
    for order in (("a", "b"), ("b", "a")):
        for name in order:
            (tmp_path / f"{name}.yaml").write_text(pod("same", name))
        view = Folder(tmp_path).scan()
        assert view.pods["default", "same"].annotations["note"] == "a"
        assert view.errors == {"b.yaml": "Pod default/same is declared in a.yaml already"}
        for name in order:
            (tmp_path / f"{name}.yaml").unlink()


def test_twice_in_one_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{pod('x', '1')}---\n{pod('x', '2')}")
    view = Folder(tmp_path).scan()
    assert view.pods["default", "x"].annotations["note"] == "1"
    assert "declared in a.yaml already" in view.errors["a.yaml"]


def test_a_file_that_is_too_large(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text("#" * (1024 * 1024 + 1))
    assert "larger than 1048576 bytes" in Folder(tmp_path).scan().errors["a.yaml"]


def test_what_is_no_file(tmp_path: pathlib.Path) -> None:
    """A pipe would block whoever opens it to read; a directory and a dead link are errors or nothing."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "directory.yaml").mkdir()
    (tmp_path / "dead.yaml").symlink_to("nowhere")
    (tmp_path / "a.yaml").write_text(pod("a"))
    assert names(Folder(tmp_path)) == ["a"]


def test_a_directory_that_is_missing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "missing").scan()


def test_unchanged_files_are_not_read_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(pod("a"))
    folder = Folder(tmp_path)
    folder.scan()
    monkeypatch.setattr("multus_daemon.runtime.fs.read_limited", lambda *_args, **_named: pytest.fail("read again"))
    assert names(folder) == ["a"]


def test_kinds_that_are_passed_over_are_logged_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.yaml").write_text("apiVersion: v1\nkind: Service\n")
    folder = Folder(tmp_path)
    with caplog.at_level(logging.INFO):
        folder.scan()
        folder.scan()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/a.yaml: v1/Service is passed over: only pods and NetworkAttachmentDefinitions count"
    ]
