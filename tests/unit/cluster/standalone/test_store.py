"""The standalone store beyond the contract suite: its directory, misses, watching, files, Events."""

import asyncio
import contextlib
import json
import logging
import os
import pathlib
from collections.abc import AsyncIterator

import pytest
import yaml

from multus_daemon.cluster.standalone import status_file
from multus_daemon.cluster.standalone.store import Folder, StandaloneStore
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StatusWriteError, StoreUnavailableError
from tests.aside import running
from tests.waiting import eventually

VALUE = '[{\n    "name": "web/n",\n    "dns": {}\n}]'


def declare(directory: pathlib.Path, name: str, uid: str = "u1", note: str = "") -> Pod:
    """A manifest of a pod in the namespace web."""
    metadata = {"namespace": "web", "name": name, "uid": uid, "annotations": {"note": note}}
    (directory / f"{name}.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata}))
    return Pod(Namespace("web"), PodName(name), PodUid(uid), {"note": note})


def pod(store: StandaloneStore, name: str, uid: str = "") -> Pod:
    return store.pod(Namespace("web"), PodName(name), PodUid(uid))


@contextlib.asynccontextmanager
async def watching(store: StandaloneStore) -> AsyncIterator[None]:
    async with running(store.run()) as task:
        yield
        assert not task.done()


def test_a_file_just_written_counts_at_once(tmp_path: pathlib.Path) -> None:
    store = StandaloneStore(tmp_path)
    store.refresh()
    declared = declare(tmp_path, "a")
    assert pod(store, "a") == declared


def test_what_is_known_is_told_without_a_look_at_the_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StandaloneStore(tmp_path)
    declared = declare(tmp_path, "a", uid="u1")
    store.refresh()
    monkeypatch.setattr(store, "refresh", lambda: pytest.fail("it is known"))
    for uid in ("", "u1"):
        assert pod(store, "a", uid) == declared


def test_a_pod_just_created_anew_counts_at_once(tmp_path: pathlib.Path) -> None:
    store = StandaloneStore(tmp_path)
    declare(tmp_path, "a", uid="u1")
    store.refresh()
    declare(tmp_path, "a", uid="second")
    assert (pod(store, "a", "second")).uid == "second"


def test_misses_name_files_with_errors(tmp_path: pathlib.Path) -> None:
    (tmp_path / "bad.yaml").write_text("kind: [")
    store = StandaloneStore(tmp_path)
    with pytest.raises(PodNotFoundError, match=r"web/a; files with errors: bad\.yaml \(not YAML"):
        pod(store, "a")
    with pytest.raises(NetworkNotFoundError, match=r"web/n; files with errors: bad\.yaml"):
        store.network("web", "n")
    assert list(store._view.errors) == ["bad.yaml"]


def test_a_directory_that_can_not_be_read(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "d"
    store = StandaloneStore(directory)
    with pytest.raises(StoreUnavailableError, match="No such file"):
        pod(store, "a")
    directory.mkdir()
    declared = declare(directory, "a")
    assert pod(store, "a") == declared
    (directory / "a.yaml").unlink()
    directory.rmdir()
    assert pod(store, "a") == declared  # what was known stays
    with pytest.raises(StoreUnavailableError):
        store.network("web", "n")


async def test_watch_follows_a_directory_that_is_replaced(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multus_daemon.runtime.inotify.LOOK_SECONDS", 60)  # without it nothing is seen but by the watch
    (tmp_path / "sub").mkdir()
    declare(tmp_path / "sub", "a", note="1")
    (tmp_path / ".new").mkdir()
    declare(tmp_path / ".new", "a", note="2")
    store = StandaloneStore(tmp_path)
    async with watching(store):
        await asyncio.sleep(0.3)
        (tmp_path / "sub").rename(tmp_path / ".old")
        (tmp_path / ".new").rename(tmp_path / "sub")
        await eventually(lambda: store._view.pods["web", "a"].annotations["note"] == "2")
        await asyncio.sleep(0.3)
        declare(tmp_path / "sub", "a", note="3")
        await eventually(lambda: store._view.pods["web", "a"].annotations["note"] == "3")


async def test_watch_survives_a_directory_that_comes_later(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multus_daemon.runtime.inotify.POLL_SECONDS", 0.05)
    directory = tmp_path / "d"
    store = StandaloneStore(directory)
    async with watching(store):
        said = lambda: [record for record in caplog.records if "can't be watched" in record.getMessage()]  # noqa: E731
        await eventually(lambda: bool(said()))
        await asyncio.sleep(0.3)
        assert len(said()) == 1
        directory.mkdir()
        declare(directory, "a")
        await eventually(lambda: ("web", "a") in store._view.pods)


async def test_watch_polls_where_there_is_no_watch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_named: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("multus_daemon.runtime.inotify.changes", refuse)
    monkeypatch.setattr("multus_daemon.runtime.inotify.POLL_SECONDS", 0.05)
    store = StandaloneStore(tmp_path)
    async with watching(store):
        declare(tmp_path, "a")
        await eventually(lambda: ("web", "a") in store._view.pods)


def test_what_concerns_us_of_what_is_watched(tmp_path: pathlib.Path) -> None:
    store = StandaloneStore(tmp_path)

    def concerns(path: str) -> bool:
        return store._is_relevant((tmp_path / path).parent, pathlib.Path(path).name)

    assert concerns("a.yaml")
    assert concerns("sub")
    assert concerns("..data")
    assert concerns("sub/status")
    assert not concerns("status")
    assert not concerns("a.yaml.swp")


@pytest.mark.conformance("pods-33")
def test_the_status_file_reads_like_a_pod(tmp_path: pathlib.Path) -> None:
    store = StandaloneStore(tmp_path)
    declared = declare(tmp_path, "a")
    store.refresh()
    store.write_network_status(declared, VALUE, keep_trying=False)
    path = tmp_path / "status" / "web" / "a.yaml"
    assert path.read_text() == (
        "apiVersion: v1\n"
        "kind: Pod\n"
        "metadata:\n"
        "  namespace: web\n"
        "  name: a\n"
        "  uid: u1\n"
        "  annotations:\n"
        "    k8s.v1.cni.cncf.io/network-status: |-\n"
        "      [{\n"
        '          "name": "web/n",\n'
        '          "dns": {}\n'
        "      }]\n"
    )
    assert path.stat().st_mode & 0o777 == 0o644
    store.refresh()
    assert store._view.errors == {}  # it is not taken for a manifest


def test_a_status_that_can_not_be_written(tmp_path: pathlib.Path) -> None:
    store = StandaloneStore(tmp_path)
    declared = declare(tmp_path, "a")
    store.refresh()
    (tmp_path / "status").write_text("in the way")
    with pytest.raises(StatusWriteError, match="status file of pod web/a"):
        store.write_network_status(declared, VALUE, keep_trying=False)


@pytest.mark.parametrize("word", ["yes", "NO", "on", "null", "1e3", "2026-11-23", "0x1f", "web"])
def test_names_that_yaml_takes_for_something_else_stay_names(tmp_path: pathlib.Path, word: str) -> None:
    status_file.write(tmp_path, Pod(Namespace(word.lower()), PodName(word.lower()), PodUid(word)), word)
    written = yaml.safe_load(status_file.path_of(tmp_path, word.lower(), word.lower()).read_text())
    assert written["metadata"] == {
        "namespace": word.lower(),
        "name": word.lower(),
        "uid": word,
        "annotations": {"k8s.v1.cni.cncf.io/network-status": word},
    }


def test_status_files_are_removed_with_their_namespace(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        status_file.write(tmp_path, Pod(Namespace("web"), PodName(name), PodUid("u")), VALUE)
    assert status_file.read(tmp_path, "web", "a") == VALUE
    assert status_file.remove(tmp_path, "web", "a")
    assert not status_file.remove(tmp_path, "web", "a")
    assert status_file.read(tmp_path, "web", "a") is None
    assert (tmp_path / "status" / "web").is_dir()
    assert status_file.remove(tmp_path, "web", "b")
    assert not (tmp_path / "status" / "web").exists()


@pytest.mark.parametrize(("namespace", "name"), [("..", "a"), ("web", ".."), ("web", "../a"), ("a/b", "c"), ("", "a")])
def test_names_never_lead_out_of_the_status_directory(tmp_path: pathlib.Path, namespace: str, name: str) -> None:
    with pytest.raises(ValueError, match="can't be a pod"):
        status_file.path_of(tmp_path, namespace, name)


@pytest.mark.parametrize("text", ["", "[]", "metadata: {annotations: {}}", "a: ["])
def test_a_status_file_that_is_not_ours(tmp_path: pathlib.Path, text: str) -> None:
    path = status_file.path_of(tmp_path, "web", "a")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match="no network-status"):
        status_file.read(tmp_path, "web", "a")


def test_events_are_logged(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StandaloneStore(tmp_path)
    store.event(declare(tmp_path, "a"), "Warning", "NoNetworkFound", "no such network")
    assert caplog.messages == ["event for web/a: NoNetworkFound: no such network"]


def test_pods_of_the_node_need_every_manifest(tmp_path: pathlib.Path) -> None:
    """A file that can't be read may declare a pod that lives."""
    store = StandaloneStore(tmp_path)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "status": {"phase": "Running"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(pod))
    assert [(str(found), found.phase) for found in store.node_pods()] == [("default/a", "Running")]
    (tmp_path / "b.yaml").write_text("{")
    with pytest.raises(StoreUnavailableError, match=r"b\.yaml"):
        store.node_pods()


# --- the directory as it changes -------------------------------------------------------------------------------------


def manifest(name: str, note: str = "") -> str:
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, annotations: {{note: '{note}'}}}}\n"


def names(folder: Folder) -> list[str]:
    return sorted(name for _, name in folder.scan().pods)


def test_which_files_count(tmp_path: pathlib.Path) -> None:
    for path in ("a.yaml", "sub/deep/b.yml", "sub/status/c.yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(manifest(pathlib.Path(path).stem))
    (tmp_path / "d.json").write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "d"}}))
    for path in (".hidden.yaml", ".git/x.yaml", "status/web/x.yaml", "x.txt", "x.yaml~", "yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(manifest("x"))
    folder = Folder(tmp_path)
    assert names(folder) == ["a", "b", "c", "d"]
    # The watched directories: not where our own status files are, of which each ADD makes one.
    assert folder.directories.keys() == {tmp_path / path for path in ("", "sub", "sub/deep", "sub/status")}


def test_a_mounted_config_map(tmp_path: pathlib.Path) -> None:
    """Kubernetes mounts one as links through `..data`, and swaps that link."""
    for revision in ("a", "b"):
        (tmp_path / f"..{revision}").mkdir()
        (tmp_path / f"..{revision}" / "pod.yaml").write_text(manifest(revision))
    (tmp_path / "..data").symlink_to("..a")
    (tmp_path / "pod.yaml").symlink_to("..data/pod.yaml")
    folder = Folder(tmp_path)
    assert names(folder) == ["a"]
    (tmp_path / "..new").symlink_to("..b")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert names(folder) == ["b"]


def test_a_link_to_a_directory_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("a"))
    (tmp_path / "loop").symlink_to(tmp_path)
    assert Folder(tmp_path).scan().errors == {}


def test_changes_and_removals(tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path)
    assert names(folder) == []
    (tmp_path / "a.yaml").write_text(manifest("a", "old"))
    assert names(folder) == ["a"]
    (tmp_path / "a.yaml").write_text(manifest("a", "newer"))
    assert folder.scan().pods["default", "a"].annotations["note"] == "newer"
    (tmp_path / "a.yaml").unlink()
    assert names(folder) == []


def test_a_broken_file_keeps_its_last_good_content(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "a.yaml").write_text(manifest("a"))
    (tmp_path / "b.yaml").write_text(manifest("b"))
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
        (tmp_path / "a.yaml").write_text(manifest("c"))
        assert names(folder) == ["b", "c"]
        assert folder.scan().errors == {}
    assert "valid again" in caplog.records[-1].getMessage()


def test_a_file_that_was_never_good_declares_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{manifest('a')}---\nkind: Pod\n")
    view = Folder(tmp_path).scan()
    assert view.pods == {}
    assert "object 1: apiVersion" in view.errors["a.yaml"]


def test_the_second_of_two_declarations_is_an_error(tmp_path: pathlib.Path) -> None:
    for order in (("a", "b"), ("b", "a")):
        for name in order:
            (tmp_path / f"{name}.yaml").write_text(manifest("same", name))
        view = Folder(tmp_path).scan()
        assert view.pods["default", "same"].annotations["note"] == "a"
        assert view.errors == {"b.yaml": "Pod default/same is declared in a.yaml already"}
        for name in order:
            (tmp_path / f"{name}.yaml").unlink()


def test_twice_in_one_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{manifest('x', '1')}---\n{manifest('x', '2')}")
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
    (tmp_path / "a.yaml").write_text(manifest("a"))
    assert names(Folder(tmp_path)) == ["a"]


def test_a_directory_that_is_missing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "missing").scan()


def test_unchanged_files_are_not_read_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(manifest("a"))
    folder = Folder(tmp_path)
    folder.scan()
    monkeypatch.setattr("multus_daemon.runtime.fs.read_limited", lambda *_args, **_named: pytest.fail("read again"))
    assert names(folder) == ["a"]


def test_other_kinds_are_logged_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.yaml").write_text("apiVersion: v1\nkind: Service\n")
    folder = Folder(tmp_path)
    with caplog.at_level(logging.INFO):
        folder.scan()
        folder.scan()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/a.yaml: v1/Service is ignored: only pods, NetworkAttachmentDefinitions and Namespaces count"
    ]


def namespace(directory: pathlib.Path, file: str, labels: object, name: str = "web") -> None:
    item = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    (directory / file).write_text(yaml.safe_dump(item))


def test_labels_of_a_namespace(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StandaloneStore(tmp_path)
    namespace(tmp_path, "a.yaml", {"multus.io/hotplug": "true"})
    store.refresh()
    assert store.namespace_labels("web") == {"multus.io/hotplug": "true"}
    # The API refuses such a label; here the last valid one stays.
    namespace(tmp_path, "a.yaml", {"multus.io/hotplug": True})
    store.refresh()
    assert "label multus.io/hotplug: a string is needed, not a boolean: put it in quotes" in caplog.text
    assert store.namespace_labels("web") == {"multus.io/hotplug": "true"}
    namespace(tmp_path, "b.yaml", {"multus.io/hotplug": "false"})
    store.refresh()
    assert "Namespace web is declared in a.yaml already" in caplog.text
    assert store.namespace_labels("web") == {"multus.io/hotplug": "true"}
    namespace(tmp_path, "c.yaml", {}, name="Not Valid")
    store.refresh()
    assert "metadata.name 'Not Valid'" in caplog.text
    (tmp_path / "a.yaml").unlink()
    store.refresh()
    assert store.namespace_labels("web") == {"multus.io/hotplug": "false"}


def test_a_condition_is_logged_when_it_changes(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    item = declare(tmp_path, "web-1")
    store = StandaloneStore(tmp_path)
    store.refresh()
    for ready, reason in ((True, "NetworksAttached"), (True, "NetworksAttached"), (False, "AttachmentBroken")):
        store.condition(item, ready=ready, reason=reason, message="net1")
    store.condition(Pod(item.namespace, item.name, PodUid("u2")), ready=False, reason="OfAnother", message="")
    lines = [line for line in caplog.messages if "multus.io/NetworksReady" in line]
    assert lines == [
        "condition of web/web-1: multus.io/NetworksReady=True: NetworksAttached: net1",
        "condition of web/web-1: multus.io/NetworksReady=False: AttachmentBroken: net1",
    ]
    (tmp_path / "web-1.yaml").unlink()
    declare(tmp_path, "web-2")
    store.refresh()
    store.condition(pod(store, "web-2"), ready=True, reason="NetworksAttached", message="")
    assert set(store.conditions) == {("web", "web-2")}
