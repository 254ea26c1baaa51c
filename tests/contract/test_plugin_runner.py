"""The contract of `Plugin`, over binaries with and without chroot, and over the built-ins.

First what every implementation promises, with `loopback`, which exists as a binary and as a built-in; then what
running a process adds, with a plugin that hangs, floods and dies on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from multus_daemon import deadlines
from multus_daemon.plugins import find
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.process import ProcessRunner
from multus_daemon.plugins.select import Plugins
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import ExpiredError
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni.errors import CniError, InternalError, IoFailureError, TryAgainLaterError
from multus_daemon.spec.cni.result import Result
from tests import calls
from tests.contract.conftest import in_thread
from tests.disks import hanging
from tests.namespaces import IFF_UP, entered, flags, named

DEBIAN = "/usr/lib/cni"
PLUGIN = Path(__file__).parent.parent / "fakes" / "plugin.py"
HANGS_SECONDS = 4.0
"""Time of a plugin that hangs: it must have started by then, on a busy machine too."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for chroot(2) and mounts: run pytest as root")
needs_debian = pytest.mark.skipif(
    not os.path.exists(f"{DEBIAN}/loopback"), reason="no reference plugins: apt-get install containernetworking-plugins"
)


def invocation(verb="ADD", *, stdin=b"{}", netns="/run/netns/none", path="/bin", args=""):
    try:
        fields = json.loads(stdin)
    except ValueError:
        fields = {}
    return Invocation(verb, "c0ffee", netns, "net1", args, path, fields, raw=stdin)


# --- every implementation --------------------------------------------------------------------------------------------


def _programs(chroot_dir: str = "") -> ProcessRunner:
    return ProcessRunner([DEBIAN], chroot_dir=chroot_dir)


def _binaries() -> Plugins:
    return Plugins(_programs(), "off")


def _chrooted() -> Plugins:
    return Plugins(_programs("/proc/self/root"), "off")


def _builtins() -> Plugins:
    return Plugins(_programs(), "prefer")


def run(plugins: Plugins, plugin_type: str, invocation: Invocation) -> Result:
    """Run a plugin as the engine does."""
    return calls.run(plugins.recorded(plugin_type, invocation), invocation)


@pytest.fixture(params=[_binaries, _chrooted, _builtins], ids=["binary", "chroot", "built-in"])
async def plugins(request):
    if request.param is _chrooted and os.geteuid() != 0:
        pytest.skip("needs root, for chroot(2): run pytest as root")
    return request.param()


@pytest.fixture
def netns():
    with named("runner") as path:
        yield path


LOOPBACK = b'{"cniVersion":"1.0.0","name":"lo","type":"loopback"}'


@needs_debian
class TestEveryPlugin:
    def test_place(self, plugins):
        assert plugins.of("loopback", invocation(stdin=LOOPBACK)).place
        assert plugins.of("no-such", invocation()).place == ""

    async def test_unknown_plugin(self, plugins):
        with pytest.raises(CniError):
            await in_thread(run, plugins, "no-such", invocation())

    async def test_stdin_that_is_no_json(self, plugins, netns):
        with pytest.raises(CniError) as caught:
            await in_thread(run, plugins, "loopback", invocation(stdin=b"garbage", netns=netns))
        assert caught.value.code != 0
        assert caught.value.msg

    @needs_root
    async def test_loopback_comes_up_and_goes_down(self, plugins, netns):
        made = await in_thread(run, plugins, "loopback", invocation(stdin=LOOPBACK, netns=netns))
        assert [(found.name, found.sandbox) for found in made.interfaces] == [("lo", netns)]
        assert "127.0.0.1/8" in [found.address for found in made.ips]
        assert _loopback_is_up(netns)
        for _ in range(2):
            assert await in_thread(run, plugins, "loopback", invocation("DEL", stdin=LOOPBACK, netns=netns)) == Result()
            assert not _loopback_is_up(netns)


def _loopback_is_up(netns):
    with entered(netns):
        return bool(flags("lo") & IFF_UP)


# --- processes: a plugin that does as it is told ---------------------------------------------------------------------


class Runner(ProcessRunner):
    async def execute(self, *call):
        return await in_thread(self.run, *call)


class Bench:
    """A plugin installed, here or in a root of its own, and the means to see what became of it."""

    def __init__(self, root: Path | None, directory: Path, interpreter: str) -> None:
        self.root = root
        self.chroot_dir = str(root) if root else ""
        self.outside = directory
        self.inside = "/" + str(directory.relative_to(root)) if root else str(directory)
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.install("steered", interpreter)

    def install(self, name, interpreter=None):
        _, _, code = PLUGIN.read_text().partition("\n")
        (self.bin / name).write_text(f"#!{interpreter} -IS\n{code}")
        (self.bin / name).chmod(0o755)

    def runner(self, **options):
        return Runner([f"{self.inside}/none", f"{self.inside}/bin"], chroot_dir=self.chroot_dir, **options)

    def invocation(self, verb="ADD", **steer):
        config = {"name": "n", "steer": {verb: {"record": f"{self.inside}/calls", **steer}}}
        return invocation(verb, stdin=json.dumps(config).encode(), args="K=V;IgnoreUnknown=1", path="/cni/path")

    def calls(self):
        path = self.outside / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def child_pid(self):
        return int((self.outside / "calls.child").read_text())


@pytest.fixture(params=["plain", "chroot"])
def bench(request, tmp_path):
    if request.param == "plain":
        yield Bench(None, tmp_path, sys.executable)
        return
    if os.geteuid() != 0:
        pytest.skip("needs root, for chroot(2) and mounts: run pytest as root")
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("the plugin in the chroot needs /usr/bin/python3: apt-get install python3-minimal")
    root = tmp_path / "root"
    for name in ("usr", "proc", "dev", "data"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    mounted = []
    try:
        for name in ("usr", "proc", "dev"):
            subprocess.run(["mount", "--bind", f"/{name}", root / name], check=True)
            mounted.append(root / name)
        yield Bench(root, root / "data", "/usr/bin/python3")
    finally:
        for path in reversed(mounted):
            subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(autouse=True)
def nothing_left():
    """No child of ours, running or zombie, and no descriptor outlives a test."""
    before, had = set(os.listdir("/proc/self/fd")), _children()
    yield
    end = time.monotonic() + 2
    while (new := _children() - had) and time.monotonic() < end:
        time.sleep(0.02)
    assert not new, f"processes left: {new}"
    # The event loop of the test is closed by now, so this is exact.
    left = {fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")}
    assert not left, f"descriptors left: {[(fd, os.readlink(f'/proc/self/fd/{fd}')) for fd in left]}"


def _children():
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):
            found |= set(Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def is_alive(pid):
    """Return whether the process runs; a zombie (of init, not ours) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid):
    for _ in range(1500):
        if not is_alive(pid):
            return True
        await asyncio.sleep(0.02)
    return False


@pytest.mark.weak_spot(59)
@pytest.mark.conformance("server-1")
async def test_what_the_plugin_gets(bench, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("CNI_IFNAME", "outer")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        call = bench.invocation(stdout='{"ips":[]}')
        assert await bench.runner().execute("steered", call) == b'{"ips":[]}'
    [seen] = bench.calls()
    assert {key: value for key, value in seen["env"].items() if key.startswith("CNI_")} == {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c0ffee",
        "CNI_NETNS": "/run/netns/none",
        "CNI_IFNAME": "net1",
        "CNI_ARGS": "K=V;IgnoreUnknown=1",
        "CNI_PATH": "/cni/path",
    }
    own = {"PATH", "LC_ALL", "GOMAXPROCS", "MULTUS_DAEMON"}
    assert {key for key in seen["env"] if not key.startswith("CNI_")} - {"LC_CTYPE"} == own
    assert seen["env"]["GOMAXPROCS"] == str(min(2, os.cpu_count() or 1))
    assert seen["stdin"].encode() == call.stdin
    assert seen["cwd"] == "/"
    assert seen["argv"] == [f"{bench.inside}/bin/steered"]
    # 0, 1, 2 and the one that listed them.
    assert len(seen["fds"]) == 4


async def test_environment_can_be_given(bench):
    runner = bench.runner(environ={"PATH": "/bin", "GOMAXPROCS": "7"})
    await runner.execute("steered", bench.invocation())
    assert bench.calls()[0]["env"]["GOMAXPROCS"] == "7"
    assert bench.calls()[0]["env"]["PATH"] == "/bin"


async def test_empty_variables_are_set(bench):
    call = dataclasses.replace(bench.invocation("GC"), container_id="", netns="", ifname="", args="", path="")
    await bench.runner().execute("steered", call)
    seen = {key: value for key, value in bench.calls()[0]["env"].items() if key.startswith("CNI_")}
    assert len(seen) == 6
    assert set(seen.values()) == {"GC", ""}


@pytest.mark.parametrize("is_ipam", [False, True], ids=["alone", "IPAM of a built-in"])
async def test_status_is_about_no_container(bench, monkeypatch, is_ipam):
    monkeypatch.setenv("CNI_IFNAME", "outer")
    (bench.bin / "seen").write_text(f"#!/bin/sh\nenv > {bench.inside}/seen\n")
    (bench.bin / "seen").chmod(0o755)
    config = {"cniVersion": "1.1.0", "name": "n", "type": "ptp", "ipam": {"type": "seen"}}
    call = Invocation("STATUS", "", "", "", "", "/cni/path", config)
    plugins = Plugins(bench.runner(), "off")
    plugin = Builtin("ptp", Path("/"), plugin_for=plugins.recorded) if is_ipam else plugins.of("seen", call)
    await in_thread(calls.run, plugin, call)
    seen = {line for line in (bench.outside / "seen").read_text().splitlines() if line.startswith("CNI_")}
    assert seen == {"CNI_COMMAND=STATUS", "CNI_PATH=/cni/path"}


async def test_stdin_larger_than_a_pipe(bench):
    call = bench.invocation()
    large = dataclasses.replace(call, raw=call.stdin[:-1] + b',"filler":"' + b"x" * 3_000_000 + b'"}')
    await bench.runner().execute("steered", large)
    assert bench.calls()[0]["stdin"].encode() == large.stdin


async def test_plugin_that_reads_no_stdin(bench):
    (bench.bin / "deaf").write_text("#!/bin/sh\nexec <&-\necho '{}'\n")
    (bench.bin / "deaf").chmod(0o755)
    large = invocation(stdin=b" " * 3_000_000)
    assert await bench.runner().execute("deaf", large) == b"{}\n"


async def test_output_larger_than_a_pipe(bench):
    text = json.dumps({"text": "y" * 1_000_000})
    assert await bench.runner().execute("steered", bench.invocation(stdout=text)) == text.encode()


async def test_the_plugins_own_error_passes(bench):
    error = {"cniVersion": "1.0.0", "code": 11, "msg": "no address left", "details": "10.1.0.0/24"}
    call = bench.invocation(stdout=json.dumps(error), stderr="looked everywhere\n", exit=1)
    with pytest.raises(TryAgainLaterError) as caught:
        await bench.runner().execute("steered", call)
    assert caught.value.code == 11
    assert caught.value.msg == "no address left"
    assert caught.value.explanation == '10.1.0.0/24; plugin "steered", ADD; stderr: looked everywhere'


@pytest.mark.parametrize(
    ("steer", "msg"),
    [
        ({"exit": 1, "stdout": ""}, 'plugin "steered" failed without a message (exit status 1)'),
        ({"exit": 3, "stdout": "", "stderr": "a\nboom\n"}, 'plugin "steered" failed (exit status 3): boom'),
        ({"signal": 9}, 'plugin "steered" failed without a message (ended by signal 9, SIGKILL)'),
        ({"exit": 1, "stdout": "Segfault!"}, 'plugin "steered" failed (exit status 1), and /'),
        ({"exit": 1, "stdout": '{"code":"x"}'}, 'plugin "steered" failed (exit status 1), and /'),
        ({"exit": 1, "stdout": "{}"}, 'plugin "steered" failed without a message (exit status 1)'),
        ({"exit": 126, "stdout": ""}, 'plugin "steered" failed without a message (exit status 126)'),
        ({"exit": 127, "stdout": "", "stderr": "sh: x"}, 'plugin "steered" failed (exit status 127): sh: x'),
    ],
)
async def test_failures_without_a_cni_error(bench, steer, msg):
    with pytest.raises(InternalError) as caught:
        await bench.runner().execute("steered", bench.invocation("DEL", **steer))
    assert caught.value.msg.startswith(msg)
    assert caught.value.code == 999
    assert 'plugin "steered", DEL' in caught.value.details
    assert len(bench.calls()) == 1


async def test_only_the_end_of_stderr_is_kept(bench):
    call = bench.invocation(exit=1, stdout="", stderr="start" + "z" * 30_000 + "finish")
    with pytest.raises(InternalError) as caught:
        await bench.runner().execute("steered", call)
    assert caught.value.details.endswith("finish")
    assert "start" not in caught.value.details
    assert len(caught.value.details) < 9000


@pytest.mark.weak_spot(34)
async def test_a_plugin_that_hangs_is_ended(bench):
    began = time.monotonic()
    with pytest.raises(TryAgainLaterError, match=r'^plugin "steered" did not end within 4 s') as caught:
        await bench.runner(timeout=HANGS_SECONDS, grace=30).execute(
            "steered", bench.invocation(hang=60, stderr="waiting for a lock")
        )
    assert time.monotonic() - began < 20
    assert "waiting for a lock" in caught.value.details
    assert not is_alive(bench.calls()[0]["pid"])


async def test_a_plugin_that_ignores_sigterm_is_killed(bench):
    began = time.monotonic()
    with pytest.raises(TryAgainLaterError):
        await bench.runner(timeout=HANGS_SECONDS, grace=0.4).execute(
            "steered", bench.invocation(hang=60, ignore=["TERM"])
        )
    assert HANGS_SECONDS + 0.4 <= time.monotonic() - began < 30
    assert not is_alive(bench.calls()[0]["pid"])


async def test_a_plugin_that_sigkill_does_not_end_is_not_waited_for(bench, monkeypatch):
    """The plugin behaves like one that waits in the kernel (state D). It is reaped as soon as it ends."""
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(deadlines, "KILLED_SECONDS", 0.4)
    began = time.monotonic()
    with pytest.raises(TryAgainLaterError, match="did not end within 4 s"):
        await bench.runner(timeout=HANGS_SECONDS, grace=0.4).execute("steered", bench.invocation(hang=60))
    assert HANGS_SECONDS + 0.4 + 0.4 <= time.monotonic() - began < 30
    pid = bench.calls()[0]["pid"]
    assert is_alive(pid)
    kill(pid, signal.SIGKILL)
    for _ in range(1000):
        if not os.path.exists(f"/proc/{pid}"):
            break
        await asyncio.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


async def test_grandchildren_of_a_plugin_that_hangs_are_ended_too(bench):
    call = bench.invocation(hang=60, child="quiet", ignore=["TERM"])
    with pytest.raises(TryAgainLaterError):
        await bench.runner(timeout=HANGS_SECONDS, grace=0.2).execute("steered", call)
    assert await gone(bench.child_pid())


@pytest.mark.parametrize("ignored", [[], ["TERM"]])
async def test_grandchildren_in_a_session_of_their_own_are_ended_too(bench, ignored):
    call = bench.invocation(hang=60, child="detached", ignore=ignored)
    with pytest.raises(TryAgainLaterError):
        await bench.runner(timeout=HANGS_SECONDS, grace=0.2).execute("steered", call)
    assert await gone(bench.child_pid())


@pytest.mark.parametrize("kind", ["daemon", "daemon-on-term"])
async def test_what_was_forked_twice_is_ended_too(bench, kind):
    """Its parent is init, and it has a session of its own."""
    with pytest.raises(TryAgainLaterError):
        await bench.runner(timeout=HANGS_SECONDS, grace=2).execute("steered", bench.invocation(hang=60, child=kind))
    assert await gone(bench.child_pid())


async def test_a_daemon_of_another_call_lives_on(bench):
    await bench.runner().execute("steered", bench.invocation(child="daemon"))
    daemon = bench.child_pid()
    with pytest.raises(TryAgainLaterError):
        await bench.runner(timeout=HANGS_SECONDS, grace=0.2).execute("steered", bench.invocation(hang=60))
    assert is_alive(daemon)
    os.kill(daemon, signal.SIGKILL)


async def test_a_grandchild_that_holds_stdout_is_not_waited_for(bench, monkeypatch):
    monkeypatch.setattr(deadlines, "PIPES_AFTER_EXIT_SECONDS", 0.2)
    began = time.monotonic()
    assert await bench.runner().execute("steered", bench.invocation(child="holds-pipes", stdout="{}")) == b"{}"
    assert deadlines.PIPES_AFTER_EXIT_SECONDS <= time.monotonic() - began < deadlines.PIPES_AFTER_EXIT_SECONDS + 10
    assert await gone(bench.child_pid())


async def test_a_detached_grandchild_that_holds_stdout_is_not_waited_for(bench, monkeypatch):
    monkeypatch.setattr(deadlines, "PIPES_AFTER_EXIT_SECONDS", 0.2)
    began = time.monotonic()
    assert await bench.runner().execute("steered", bench.invocation(child="detached", stdout="{}")) == b"{}"
    assert time.monotonic() - began < deadlines.PIPES_AFTER_EXIT_SECONDS + 10
    os.kill(bench.child_pid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["quiet", "daemon"])
async def test_a_daemon_with_closed_pipes_lives_on(bench, monkeypatch, kind):
    monkeypatch.setattr(deadlines, "PIPES_AFTER_EXIT_SECONDS", 20.0)
    began = time.monotonic()
    assert await bench.runner().execute("steered", bench.invocation(child=kind, stdout="{}")) == b"{}"
    assert time.monotonic() - began < deadlines.PIPES_AFTER_EXIT_SECONDS
    assert is_alive(bench.child_pid())
    os.kill(bench.child_pid(), signal.SIGKILL)


async def test_a_daemon_lives_on_also_where_the_event_loop_is_late(bench, monkeypatch):
    """No time to wait for the pipes: what they hold, and that they are closed, is seen all the same."""
    monkeypatch.setattr(deadlines, "PIPES_AFTER_EXIT_SECONDS", 0.0)
    text = json.dumps({"text": "x" * 60_000})
    call = bench.invocation(child="quiet", stdout=text)
    assert await bench.runner().execute("steered", call) == text.encode()
    assert is_alive(bench.child_pid())
    os.kill(bench.child_pid(), signal.SIGKILL)


@pytest.mark.parametrize("ignored", [[], ["TERM", "PIPE"]])
async def test_a_flood_on_stdout_is_cut(bench, ignored):
    began = time.monotonic()
    with pytest.raises(InternalError, match=r'^plugin "steered" wrote more than 1048576 bytes to stdout'):
        await bench.runner(max_output=1 << 20, grace=0.3).execute(
            "steered", bench.invocation(flood=100_000_000, ignore=ignored)
        )
    assert time.monotonic() - began < 20
    assert not is_alive(bench.calls()[0]["pid"])


@pytest.mark.parametrize("ignored", [[], ["TERM"]])
async def test_cancelled(bench, ignored):
    runner = bench.runner(grace=0.3)
    task = asyncio.create_task(runner.execute("steered", bench.invocation(hang=60, child="quiet", ignore=ignored)))
    while not (bench.outside / "calls.child").exists() or not (bench.outside / "calls.child").read_text():
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Reaped before the caller went on, not some time later.
    assert not os.path.exists(f"/proc/{bench.calls()[0]['pid']}")
    assert await gone(bench.child_pid())


def test_the_deadline_of_its_request_ends_it(bench):
    with pytest.raises(ExpiredError), deadline.within(HANGS_SECONDS):
        bench.runner(grace=0.3).run("steered", bench.invocation(hang=60))
    assert not os.path.exists(f"/proc/{bench.calls()[0]['pid']}")


async def test_cancelled_again_and_again(bench):
    task = asyncio.create_task(bench.runner(grace=0.4).execute("steered", bench.invocation(hang=60, ignore=["TERM"])))
    while not bench.calls():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.02)
    assert task.cancelled()
    assert not os.path.exists(f"/proc/{bench.calls()[0]['pid']}")


async def test_cancelled_leaves_the_plugin_its_grace(bench):
    task = asyncio.create_task(bench.runner(grace=20).execute("steered", bench.invocation(hang=60, tidy=0.3)))
    while not bench.calls():
        await asyncio.sleep(0.02)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.02)
    assert task.cancelled()
    assert (bench.outside / "calls.tidy").read_text() == "done"


async def test_cancelled_at_every_moment(bench):
    """Also while the thread is just about to start the process."""
    others = _children()
    for step in range(40):
        task = asyncio.create_task(bench.runner(grace=0.1).execute("steered", bench.invocation(hang=0.01)))
        await asyncio.sleep(step * 0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not _children() - others, step


async def test_many_at_once(bench):
    runner = bench.runner()
    texts = [json.dumps({"number": number}) for number in range(12)]
    calls = [runner.execute("steered", bench.invocation(stdout=text, hang=0.2)) for text in texts]
    assert await asyncio.gather(*calls) == [text.encode() for text in texts]
    assert len({seen["pid"] for seen in bench.calls()}) == 12


async def test_without_pidfd(bench, monkeypatch):
    def missing(pid, flags=0):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    assert await bench.runner().execute("steered", bench.invocation(stdout="{}")) == b"{}"
    with pytest.raises(TryAgainLaterError):
        await bench.runner(timeout=HANGS_SECONDS, grace=0.2).execute(
            "steered", bench.invocation(hang=60, ignore=["TERM"])
        )
    assert not is_alive(bench.calls()[1]["pid"])


# --- a busy binary ---------------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(55)
async def test_a_binary_that_is_being_written_is_tried_again(bench):
    file = open(bench.bin / "steered", "ab")  # noqa: SIM115
    threading.Timer(0.3, file.close).start()
    assert await bench.runner().execute("steered", bench.invocation(stdout="{}")) == b"{}"
    assert len(bench.calls()) == 1


@pytest.mark.weak_spot(55)
async def test_a_binary_that_stays_busy_is_an_error(bench, monkeypatch):
    monkeypatch.setattr("multus_daemon.plugins.process.backoff", lambda first, last: iter([0.001] * 9))
    expected = r'^plugin "steered" is being written by another program: text file busy, 6 attempts'
    with open(bench.bin / "steered", "ab"), pytest.raises(TryAgainLaterError, match=expected):
        await bench.runner().execute("steered", bench.invocation())
    assert not bench.calls()


async def test_busy_is_told_from_other_reasons(bench):
    """Behind the chroot program both are exit status 126."""
    (bench.bin / "broken").write_text("#!/proc\n")
    (bench.bin / "broken").chmod(0o755)
    began = time.monotonic()
    with pytest.raises(IoFailureError, match=r'^plugin "broken" could not be started') as caught:
        await bench.runner().execute("broken", bench.invocation())
    assert "Permission denied" in str(caught.value)
    assert time.monotonic() - began < 10


async def test_missing_interpreter(bench):
    (bench.bin / "orphan").write_text("#!/no/such/interpreter\n")
    (bench.bin / "orphan").chmod(0o755)
    with pytest.raises(IoFailureError, match=r'^plugin "orphan" could not be started'):
        await bench.runner().execute("orphan", bench.invocation())


async def test_a_program_for_another_machine_says_for_which(bench):
    head = bytearray(Path("/bin/true").read_bytes())
    head[18:20] = (183).to_bytes(2, "little")
    (bench.bin / "foreign").write_bytes(head)
    (bench.bin / "foreign").chmod(0o755)
    machine = os.uname().machine
    expected = f'^plugin "foreign" could not be started: it is a program for aarch64, and this node is {machine};'
    with pytest.raises(IoFailureError, match=expected) as caught:
        await bench.runner().execute("foreign", bench.invocation())
    assert f"install the plugin for {machine} as {bench.inside}/bin/foreign" in caught.value.remedy


# --- lookup ----------------------------------------------------------------------------------------------------------


def test_locate_is_seen_from_inside(bench):
    runner = bench.runner()
    assert runner.locate("steered").path == f"{bench.inside}/bin/steered"
    (bench.bin / "link").symlink_to(f"{bench.inside}/bin/steered")
    assert runner.locate("link").path == f"{bench.inside}/bin/link"
    (bench.bin / "dangling").symlink_to("/no/such")
    assert runner.locate("dangling").path == ""
    (bench.bin / "directory").mkdir()
    assert runner.locate("directory").path == ""
    (bench.bin / "data").write_text("")
    assert runner.locate("data").path == ""


@pytest.mark.conformance("server-1")
async def test_an_absolute_link_leads_inside(bench):
    (bench.bin / "link").symlink_to(f"{bench.inside}/bin/steered")
    assert await bench.runner().execute("link", bench.invocation(stdout="{}")) == b"{}"


async def test_not_found(bench):
    with pytest.raises(find.PluginNotFoundError) as caught:
        await bench.runner().execute("absent", bench.invocation())
    assert caught.value.code == 7
    assert caught.value.msg == f'failed to find plugin "absent" in path [{bench.inside}/none {bench.inside}/bin]'


@pytest.mark.conformance("server-2")
@needs_root
async def test_what_is_only_outside_of_the_chroot_is_not_found(tmp_path):
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    runner = Runner(["/usr/bin"], chroot_dir=str(tmp_path))
    assert ProcessRunner(["/usr/bin"]).locate("true").path
    assert runner.locate("true").path == ""
    with pytest.raises(find.PluginNotFoundError, match=r"path \[/usr/bin\]"):
        await runner.execute("true", invocation())


async def test_not_executable(bench):
    (bench.bin / "data").write_text("#!/bin/sh\n")
    with pytest.raises(IoFailureError, match=r'^plugin "data" is not executable: '):
        await bench.runner().execute("data", bench.invocation())


@pytest.mark.parametrize("name", ["", "../steered", "bin/steered", "..", ".", "a\0b"])
async def test_names_that_are_none(bench, name):
    with pytest.raises(CniError) as caught:
        await bench.runner().execute(name, bench.invocation())
    assert caught.value.code == 7
    assert bench.runner().locate(name).path == ""


def test_no_thread(bench, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    runner = bench.runner()
    path = runner.locate("steered").path
    monkeypatch.setattr(threading.Thread, "start", fail)
    for known in (path, ""):
        with pytest.raises(TryAgainLaterError, match='^plugin "steered" could not be started: no thread'):
            runner.run("steered", bench.invocation(), known)
    assert not bench.calls()


# --- a directory that hangs -----------------------------------------------------------------------------------------


@pytest.fixture
def stuck(bench, monkeypatch):
    """The bench's directory of plugins does not answer any more."""
    monkeypatch.setattr(deadlines, "PLUGIN_LOOKUP_SECONDS", 0.2)
    runner = bench.runner(timeout=0.5, grace=0.1)
    assert runner.locate("steered").path
    with hanging(bench.bin):
        yield runner


def _pool_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncio_")]


async def test_a_look_up_in_a_directory_that_hangs(bench, stuck):
    expected = rf'^directory {bench.inside}/none, {bench.inside}/bin does not answer: plugin "steered" could not be'
    before = set(threading.enumerate())
    for _ in range(5):
        with pytest.raises(IoFailureError, match=expected):
            stuck.locate("steered")
        with pytest.raises(IoFailureError, match=expected):
            await stuck.execute("steered", bench.invocation())
    # Each kind of look costs one thread, however often it is repeated, and none of the default executor.
    assert len([thread for thread in set(threading.enumerate()) - before if thread.name == "read"]) <= 2
    assert _pool_threads() == []


async def test_a_look_up_that_hangs_is_cancelled_at_once(bench, stuck, monkeypatch):
    monkeypatch.setattr(deadlines, "PLUGIN_LOOKUP_SECONDS", 60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await bench.runner().execute("steered", bench.invocation())


async def test_an_exec_that_hangs(bench, stuck, monkeypatch):
    """Its file was there a moment ago."""
    monkeypatch.setattr(deadlines, "KILLED_SECONDS", 0.2)
    with pytest.raises(TryAgainLaterError, match='^plugin "steered" did not end within 0.5 s'):
        await stuck.execute("steered", bench.invocation(), f"{bench.inside}/bin/steered")
    assert _pool_threads() == []


def test_no_chroot_program(monkeypatch):
    monkeypatch.setattr("multus_daemon.plugins.process.CHROOT_PROGRAMS", ("/no/chroot",))
    with pytest.raises(FileNotFoundError, match="no chroot program"):
        ProcessRunner(["/bin"], chroot_dir="/host")
    ProcessRunner(["/bin"], chroot_dir="/")


@pytest.mark.parametrize(("dirs", "root"), [(["bin"], ""), (["/bin"], "host"), ([""], "")])
def test_relative_directories_are_refused(dirs, root):
    with pytest.raises(ValueError, match="not an absolute path"):
        ProcessRunner(dirs, chroot_dir=root)


@pytest.mark.conformance("server-2")
@needs_root
async def test_a_chroot_directory_that_is_missing(tmp_path):
    with pytest.raises(CniError):
        await Runner(["/bin"], chroot_dir=str(tmp_path / "none")).execute("true", invocation())
