"""No daemon: who waits how long, and DELs that are kept for later."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import stat
import threading
import time
import typing

import pytest

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Shim, Stub

NAME = re.compile(r"[0-9]{20}-[0-9]+\.json")
STDOUT = b"Content-Type: application/vnd.multus.cni-stdout\r\n"
WAITING = ["ADD", "CHECK", "GC"]


@pytest.mark.waits
@pytest.mark.parametrize("verb", WAITING)
def test_no_socket_until_the_wait_is_over(shim: Shim, verb: str) -> None:
    result = shim.hasty(verb)
    assert result.error["code"] == 11
    msg = result.error["msg"]
    assert msg.startswith(
        f"multus daemon does not listen on {shim.socket_dir}/multus.sock: ENOENT (no such file), tried for 1.0 s; "
    )
    assert 0.95 < result.seconds < 8


@pytest.mark.parametrize("verb", WAITING)
def test_dead_socket(shim: Shim, late_daemon: Stub, verb: str) -> None:
    result = shim.hasty(verb)
    assert result.error["code"] == 11
    assert "ECONNREFUSED (nobody listens), tried for 1.0 s" in result.error["msg"]
    assert result.seconds < 8


def test_a_path_through_a_file_is_waited_for(shim: Shim) -> None:
    (shim.socket_dir / "file").touch()
    error = shim.hasty(conf={"daemonSocketDir": f"{shim.socket_dir}/file"}).error
    assert error["code"] == 11
    assert "ENOTDIR" in error["msg"]


@pytest.mark.waits
@pytest.mark.parametrize("verb", [*WAITING, "DEL"])
def test_daemon_that_comes_up_meanwhile(shim: Shim, late_daemon: Stub, verb: str) -> None:
    timer = threading.Timer(0.3, late_daemon.start)
    began = time.monotonic()
    timer.start()
    result = shim(verb)
    timer.join()
    assert (result.code, result.out) == (0, b"{}")
    assert 0.25 < time.monotonic() - began < 30
    assert len(late_daemon.requests) == 1
    assert not shim.cni_dir.exists()


@pytest.mark.waits
def test_full_backlog_is_waited_for(shim: Shim) -> None:
    """A busy daemon refuses connections with EAGAIN for a moment."""
    path = str(shim.socket_dir / "multus.sock")
    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        try:
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                try:
                    waiting[-1].connect(path)
                except BlockingIOError:
                    break
            error = shim.hasty().error
            assert error["code"] == 11
            assert "EAGAIN" in error["msg"]
            error = shim("STATUS").error
            assert error["code"] == 50
            assert "EAGAIN" in error["msg"]

            def make_room() -> None:
                time.sleep(0.3)
                for _ in waiting[:-1]:
                    listener.accept()[0].close()
                conn, _ = listener.accept()
                with conn:
                    conn.recv(65536)
                    conn.sendall(b"HTTP/1.1 200 OK\r\n" + STDOUT + b"Content-Length: 2\r\n\r\nok")

            thread = threading.Thread(target=make_room)
            thread.start()
            result = shim()
            thread.join()
            assert (result.code, result.out) == (0, b"ok")
        finally:
            for sock in waiting:
                sock.close()


@pytest.mark.weak_spot(42)
@pytest.mark.parametrize("listening", [True, False], ids=["dead socket", "no socket"])
def test_status_asks_once(shim: Shim, request: pytest.FixtureRequest, listening: bool) -> None:
    if listening:
        request.getfixturevalue("late_daemon")
    result = shim("STATUS")
    name = "ECONNREFUSED" if listening else "ENOENT"
    assert result.error["code"] == 50
    assert result.error["msg"].startswith(f"multus daemon is not available: {shim.socket_dir}/multus.sock: {name}")
    assert result.seconds < 8


@pytest.mark.parametrize("verb", [*WAITING, "STATUS"])
def test_socket_of_another_kind_is_not_waited_for(shim: Shim, verb: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(shim.socket_dir / "multus.sock"))
        result = shim(verb)
    assert result.error["code"] == (50 if verb == "STATUS" else 999)
    assert "EPROTOTYPE" in result.error["msg"]
    assert result.seconds < 8


@pytest.mark.parametrize("verb", [*WAITING, "STATUS"])
def test_socket_path_at_and_past_its_limit(shim: Shim, verb: str) -> None:
    room = 107 - len(str(shim.socket_dir)) - len("//multus.sock")
    fits = shim.socket_dir / ("d" * room)
    fits.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(fits / "multus.sock"))
        error = shim.hasty(verb, conf={"daemonSocketDir": str(fits)}).error
        assert error["code"] == (50 if verb == "STATUS" else 11)
        assert "ECONNREFUSED" in error["msg"]
    error = shim(verb, conf={"daemonSocketDir": str(fits) + "d"}).error
    assert error["code"] == 7
    assert error["msg"].startswith("daemonSocketDir is too long: ")
    assert "108 bytes" in error["msg"]


def test_without_permission_there_is_no_wait(shim: Shim) -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: run as root, to drop to another user for one call")
    os.chmod(shim.socket_dir.parent, 0o755)
    os.chmod(shim.socket_dir, 0o700)
    if not os.path.exists("/usr/bin/setpriv"):
        pytest.skip("no setpriv: install util-linux")
    binary = shim.socket_dir.parent / "shim"
    binary.write_bytes(shim.binary.read_bytes())
    binary.chmod(0o755)
    result = shim(command=["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(binary)])
    assert result.error["code"] == 999
    assert "EACCES" in result.error["msg"]
    assert "root" in result.error["msg"]
    assert result.seconds < 8


class TestSpool:
    """A DEL that the daemon does not take succeeds, and is kept."""

    def expect_one(self, shim: Shim) -> pathlib.Path:
        (kept,) = shim.spool.iterdir()  # NB: lists dot-files too, so this proves that no temporary file is left
        assert NAME.fullmatch(kept.name)
        return kept

    @pytest.mark.weak_spot(3)
    def test_no_daemon(self, shim: Shim) -> None:
        before = time.time_ns()
        result = shim.hasty("DEL")
        assert (result.code, result.out) == (0, b"")
        kept = self.expect_one(shim)
        assert before < int(kept.name[:20]) < time.time_ns()
        note = result.err.decode()
        assert "DEL of container c0ffee interface eth0" in note
        assert "ENOENT" in note
        assert str(kept) in note
        assert note.endswith("\n")

    def test_content_is_the_body_that_would_have_been_posted(self, shim: Shim, late_daemon: Stub) -> None:
        stdin = shim.config() + b"\n"
        env = shim.environment("DEL", CNI_ARGS="<é>") | {"PATH": "/bin"}
        assert shim.hasty(stdin=stdin, env=env).code == 0
        kept = self.expect_one(shim).read_bytes()
        late_daemon.start()
        assert shim(stdin=stdin, env=env).out == b"{}"
        assert kept == late_daemon.requests[0].body
        assert json.loads(kept)["env"] == {k: v for k, v in env.items() if k.startswith("CNI_")}

    @pytest.mark.parametrize("mask", ["0", "077", "0777"])
    def test_modes_whatever_the_umask(self, shim: Shim, mask: str) -> None:
        above = shim.cni_dir / "a" / "b"
        result = shim(
            "DEL",
            conf={"cniDir": f"{above}/cni/"},
            command=["/bin/sh", "-c", f'umask {mask}; exec "{shim.hasty.binary}"'],
        )
        assert result.code == 0
        modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (above.parent, above, above / "cni", above / "cni/spool")}
        assert list(modes.values()) == [0o755, 0o755, 0o700, 0o700]
        (kept,) = (above / "cni" / "spool").iterdir()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert kept.stat().st_nlink == 1

    def test_relative_directory(self, shim: Shim) -> None:
        script = f'cd "{shim.socket_dir}"; exec "{shim.hasty.binary}"'
        conf: dict[str, object] = {"cniDir": "x/y"}
        assert shim("DEL", conf=conf, command=["/bin/sh", "-c", script]).code == 0
        assert len(list((shim.socket_dir / "x/y/spool").iterdir())) == 1

    def test_existing_directories_keep_their_modes(self, shim: Shim) -> None:
        shim.spool.mkdir(parents=True)
        shim.cni_dir.chmod(0o751)
        shim.spool.chmod(0o711)
        assert shim.hasty("DEL").code == 0
        assert stat.S_IMODE(shim.cni_dir.stat().st_mode) == 0o751
        assert stat.S_IMODE(shim.spool.stat().st_mode) == 0o711

    def test_names_are_in_the_order_of_the_requests(self, shim: Shim) -> None:
        for i in range(5):
            assert shim.hasty(env=shim.environment("DEL", CNI_CONTAINERID=f"c{i}")).code == 0
        kept = [json.loads(p.read_bytes())["env"]["CNI_CONTAINERID"] for p in sorted(shim.spool.iterdir())]
        assert kept == ["c0", "c1", "c2", "c3", "c4"]

    @pytest.mark.waits(long=True)
    def test_default_wait_is_ten_seconds(self, shim: Shim, late_daemon: Stub) -> None:
        result = shim("DEL")
        assert result.code == 0
        assert 9.9 < result.seconds < 60
        assert "ECONNREFUSED" in result.err.decode()
        self.expect_one(shim)

    @pytest.mark.waits
    @pytest.mark.weak_spot(33)
    def test_hanging_daemon(self, shim: Shim, daemon: Stub) -> None:
        daemon.hang()
        result = shim.hasty("DEL")
        assert (result.code, result.out) == (0, b"")
        assert 0.9 < result.seconds < 8
        assert "no complete reply to DEL within 1.0 s" in result.err.decode()
        assert self.expect_one(shim).read_bytes() == daemon.requests[0].body

    def test_socket_that_can_never_work(self, shim: Shim) -> None:
        result = shim("DEL", conf={"daemonSocketDir": "/" + "x" * 200})
        assert result.code == 0
        assert result.seconds < 8
        self.expect_one(shim)

    @pytest.mark.weak_spot(3)
    @pytest.mark.npwg("7.2b")
    def test_error_of_the_daemon_is_not_kept(self, shim: Shim, daemon: Stub) -> None:
        daemon.answer(b"HTTP/1.1 500 X\r\n" + STDOUT + b"Content-Length: 3\r\n\r\nbad")
        result = shim("DEL")
        assert (result.code, result.out) == (1, b"bad")
        assert not shim.cni_dir.exists()

    def test_refused_del_is_not_kept(self, shim: Shim) -> None:
        assert shim("DEL", conf={"cniVersion": "9.9.9"}).code == 1
        assert not shim.cni_dir.exists()

    def test_below_a_regular_file(self, shim: Shim) -> None:
        shim.cni_dir.touch()
        error = shim.hasty("DEL").error
        assert error["code"] == 5
        assert f"cannot make the directory {shim.spool}: ENOTDIR" in error["msg"]
        assert "ENOENT" in error["msg"]  # why the daemon did not take it

    def test_spool_is_a_link(self, shim: Shim) -> None:
        """A link may lead to a place where others can read or plant requests."""
        shim.cni_dir.mkdir()
        shim.spool.symlink_to(shim.socket_dir)
        error = shim.hasty("DEL").error
        assert error["code"] == 5
        assert "ENOTDIR" in error["msg"] or "ELOOP" in error["msg"]
        assert list(shim.socket_dir.iterdir()) == []

    def test_full_disk_leaves_no_temporary_file(self, shim: Shim) -> None:
        # A file size limit stands in for the full disk: the write fails half way, with EFBIG as SIGXFSZ is ignored.
        script = f'trap "" XFSZ; ulimit -f 1; exec "{shim.hasty.binary}"'
        conf: dict[str, object] = {"padding": "x" * 5000}
        error = shim("DEL", conf=conf, command=["/bin/sh", "-c", script]).error
        assert error["code"] == 5
        assert "cannot write " in error["msg"]
        assert "EFBIG" in error["msg"]
        assert list(shim.spool.iterdir()) == []

    def test_many_at_once(self, shim: Shim) -> None:
        results: list[int] = []
        call = lambda: results.append(shim.hasty("DEL").code)  # noqa: E731
        threads = [threading.Thread(target=call) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [0] * 20
        kept = list(shim.spool.iterdir())
        assert len(kept) == 20
        assert all(NAME.fullmatch(p.name) and json.loads(p.read_bytes()) for p in kept)
