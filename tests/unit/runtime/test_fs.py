import errno
import os
import socket
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.runtime import fs

AS_ROOT = os.geteuid() == 0


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- write_atomic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 300_000])
def test_content_is_written_and_replaced(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.conf"
    fs.write_atomic(path, b"old")
    fs.write_atomic(path, data)
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("wanted", [0o600, 0o644, 0o666])
def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path, umask: int, wanted: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o400)
    fs.write_atomic(path, b"new", mode=wanted)
    assert mode(path) == wanted


def record(monkeypatch: pytest.MonkeyPatch, calls: list[str], name: str) -> None:
    real: Callable[..., Any] = getattr(os, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        if name == "fsync":
            kind = "directory" if stat.S_ISDIR(os.fstat(arguments[0]).st_mode) else "file"
            calls.append(f"fsync {kind}")
        else:
            calls.append(name)
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, recorded)


def test_content_is_on_the_disk_before_its_name_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("write", "fchmod", "fsync", "rename"):
        record(monkeypatch, calls, name)
    fs.write_atomic(tmp_path / "a", b"x")
    assert calls == ["write", "fchmod", "fsync file", "rename", "fsync directory"]
    calls.clear()
    fs.write_atomic(tmp_path / "a", b"x", fsync=False)
    assert calls == ["write", "fchmod", "rename"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    fs.write_atomic(tmp_path / "a", bytes(range(100)))
    assert (tmp_path / "a").read_bytes() == bytes(range(100))


@pytest.mark.parametrize("step", ["write", "fchmod", "fsync", "close", "rename"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    path = tmp_path / "a.conf"
    path.write_bytes(b"old")
    real: Callable[..., Any] = getattr(os, step)

    def fail(*arguments: Any) -> None:
        if step == "close":
            real(*arguments)
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        with pytest.raises(type(failure)):
            fs.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_that_could_not_be_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail)
        patched.setattr(os, "unlink", fail)
        with pytest.raises(OSError, match="Input/output error"):
            fs.write_atomic(tmp_path / "a", b"new")
    assert fs.sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failing_fsync_of_the_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(fs, "fsync_directory", fail)
    with pytest.raises(OSError, match="Input/output error"):
        fs.write_atomic(tmp_path / "a", b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_directory_scanners_pass_over_the_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        seen.extend(entry.name for entry in tmp_path.iterdir())
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    fs.write_atomic(tmp_path / "00-multus.conf", b"x")
    [name] = seen
    assert name.startswith(".")
    assert Path(name).suffix not in (".conf", ".conflist", ".json")


def test_a_long_name_is_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    fs.write_atomic(path, b"x")
    assert path.read_bytes() == b"x"


def test_a_symbolic_link_is_replaced_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"untouched")
    link.symlink_to(target)
    fs.write_atomic(link, b"x")
    assert not link.is_symlink()
    assert target.read_bytes() == b"untouched"


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fs.write_atomic(tmp_path / "none" / "a", b"x")


# --- read_limited ----------------------------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [0, 1, 9, 10])
def test_up_to_the_limit(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * size)
    assert fs.read_limited(path, limit=10) == b"x" * size


def test_above_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 11)
    with pytest.raises(fs.FileTooLargeError, match="larger than 10 bytes") as caught:
        fs.read_limited(path, limit=10)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))


def test_links_are_followed_unless_told_not_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to("a")
    assert fs.read_limited(tmp_path / "link") == b"x"
    assert fs.read_limited(tmp_path / "a", follow=False) == b"x"
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        fs.read_limited(tmp_path / "link", follow=False)


def test_files_of_proc_have_no_size_and_are_read_all_the_same() -> None:
    assert fs.read_limited(Path("/proc/self/status")).startswith(b"Name:")


def test_what_is_no_regular_file_is_refused_at_once_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    fifo, held = tmp_path / "fifo", tmp_path / "held"
    os.mkfifo(fifo)
    os.mkfifo(held)
    writer = os.open(held, os.O_RDWR)  # a writer that says nothing
    before = open_descriptors()
    try:
        for path in (fifo, held, tmp_path, Path("/dev/null")):
            with pytest.raises(OSError, match="not a regular file"):
                fs.read_limited(path)
        assert open_descriptors() == before
    finally:
        os.close(writer)


def test_what_others_can_make_is_not_waited_for(tmp_path: Path) -> None:
    """The paths are opened for writing: a pipe without a reader, a pipe with one, a socket."""
    fifo, held, bound = (tmp_path / name for name in ("fifo", "held", "bound"))
    os.mkfifo(fifo)
    os.mkfifo(held)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(bound))
    reader = os.open(held, os.O_RDWR)
    before = open_descriptors()
    try:
        for path in (fifo, held, bound):
            with pytest.raises(fs.NotRegularFileError, match=f"not a regular file: '{path}'"):
                fs.append(path, b"x")
            with pytest.raises(fs.NotRegularFileError):
                fs.open_regular(path, os.O_WRONLY | os.O_CREAT)
        assert open_descriptors() == before
    finally:
        os.close(reader)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fs.read_limited(tmp_path / "none")


@pytest.mark.skipif(AS_ROOT, reason="root may read everything; run the tests as another user for this one")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch(mode=0)
    with pytest.raises(PermissionError):
        fs.read_limited(path)


# --- remove, ensure_directory ----------------------------------------------------------------------------------------


def test_remove(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    assert fs.remove(path) is True
    assert fs.remove(path) is False
    with pytest.raises(OSError, match=f"{os.strerror(errno.EISDIR)}|{os.strerror(errno.EPERM)}"):
        fs.remove(tmp_path)


@pytest.mark.parametrize("wanted", [0o700, 0o755])
def test_ensure_directory_makes_parents_and_sets_the_mode_of_the_last(tmp_path: Path, umask: int, wanted: int) -> None:
    path = tmp_path / "a" / "b" / "c"
    fs.ensure_directory(path, mode=wanted)
    assert mode(path) == wanted


def test_ensure_directory_leaves_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    path.chmod(0o711)
    (path / "file").touch()
    fs.ensure_directory(path)
    assert mode(path) == 0o711
    assert (path / "file").exists()


def test_ensure_directory_where_another_process_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    real = Path.mkdir

    def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
        if self == path:
            real(path)
        real(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    fs.ensure_directory(path)
    assert path.is_dir()


def test_ensure_directory_where_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    for wanted in (path, path / "b"):
        with pytest.raises(FileExistsError):
            fs.ensure_directory(wanted)


@pytest.mark.parametrize("write", [fs.write_atomic, fs.append])
def test_the_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    path = tmp_path / "c1.json"
    path.touch()
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'$"):
        write(path, b"x")


class TestSweep:
    """Killed writers leave files behind."""

    def test_the_temporary_file_of_a_dead_writer_goes_and_everything_else_stays(self, tmp_path: Path) -> None:
        dead = DEAD_PID
        gone = tmp_path / f".c1.json.{dead}-0123456789ab"
        own = tmp_path / f".c2.json.{os.getpid()}-0123456789ab"
        others = [tmp_path / ".c3.json.1-0123456789ab", tmp_path / "c4.json", tmp_path / ".hidden"]
        for path in (gone, own, *others):
            path.write_bytes(b"")
        assert fs.sweep(tmp_path, own=False) == 1
        assert sorted(tmp_path.iterdir()) == sorted([own, *others])
        gone.touch()
        assert fs.sweep(tmp_path) == 2
        assert sorted(tmp_path.iterdir()) == sorted(others)

    def test_no_directory_has_nothing_to_sweep(self, tmp_path: Path) -> None:
        assert fs.sweep(tmp_path / "absent") == 0


# The kernel's highest process id is 2**22: no process has this one.
DEAD_PID = 2**22 + 1


def test_sweep_of_one_file_in_a_directory_of_many(tmp_path: Path) -> None:
    mine, foreign = ".00-multus.conf.99999999-0123456789ab", ".10-net.conf.99999999-0123456789ab"
    for name in (mine, foreign, "00-multus.conf"):
        (tmp_path / name).touch()
    assert fs.sweep(tmp_path, name="00-multus.conf") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([foreign, "00-multus.conf"])


# --- directories that only we use ------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [0o777, 0o755, 0o500, 0o1777], ids=oct)
def test_a_private_directory_gets_its_mode_back(tmp_path: Path, found: int) -> None:
    path = tmp_path / "d"
    path.mkdir()
    path.chmod(found)
    fs.ensure_private_directory(path)
    assert mode(path) == 0o700
    assert not fs.repair_private_directory(path)


def test_a_private_directory_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "d").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="no link"):
        fs.ensure_private_directory(tmp_path / "d")
    assert mode(tmp_path / "elsewhere") == 0o755
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="exists"):
        fs.ensure_private_directory(tmp_path / "dangling")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(not AS_ROOT, reason="needs root: only root can give a directory to somebody else")
def test_a_private_directory_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.mkdir()
    os.chown(path, 4711, 4711)
    with pytest.raises(PermissionError, match="belongs to user 4711"):
        fs.ensure_private_directory(path)


def test_a_hard_link_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"theirs")
    os.link(tmp_path / "other", tmp_path / "ours")
    fs.write_atomic(tmp_path / "ours", b"new")
    assert (tmp_path / "other").read_bytes() == b"theirs"


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    tracemalloc.start()
    try:
        assert fs.read_limited(tmp_path / "a", limit=100 * 1024 * 1024) == b"x" * 100
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_file_whose_size_is_not_told_is_read_whole() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    assert b"Threads:" in fs.read_limited(Path("/proc/self/status"))
    with pytest.raises(fs.FileTooLargeError):
        fs.read_limited(Path("/proc/self/status"), limit=10)
