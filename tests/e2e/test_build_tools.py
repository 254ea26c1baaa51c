"""The builder of the test tools, with a `go` that is a shell script: nothing is compiled here."""

from __future__ import annotations

import fcntl
import re
import threading
import time
from pathlib import Path

import pytest

from tests.e2e import build_tools
from tests.e2e.build_tools import ToolError, ensure, find, main

GO = """\
#!/bin/sh
if [ "$1" = env ]; then echo {version}; exit; fi
echo "$@" >>{log}
while [ "$1" != -o ]; do shift; done
{build}
"""
BUILT = 'printf "#!/bin/sh\\n" >"$2"; chmod 755 "$2"'


class Machine:
    """A PATH and a cache with nothing on them yet."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.cache = root / "cache"
        self.log = root / "go.log"
        self.bin.mkdir()

    def program(self, path: Path, text: str = "#!/bin/sh\n") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def go(self, version: str = "go1.99.0", build: str = BUILT) -> None:
        self.program(self.bin / "go", GO.format(version=version, log=self.log, build=build))

    @property
    def builds(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return made


def test_the_pins_are_read() -> None:
    assert build_tools.pinned("k8s.io/kubernetes").startswith("v1.")
    assert build_tools.pinned("go.etcd.io/etcd/server/v3").startswith("v3.")
    assert "gitVersion=v1." in build_tools.link_flags()
    with pytest.raises(ToolError, match="does not pin"):
        build_tools.pinned("k8s.io/none")


def test_each_program_is_a_tool_line_of_the_module() -> None:
    for tool in build_tools.TOOLS.values():
        text = (tool.directory / "go.mod").read_text()
        # Of one line only, where it is the only one.
        assert re.search(rf"(?m)^(?:tool |\t){re.escape(tool.package)}$", text)
        assert build_tools.pinned(tool.module, tool.directory).startswith("v")


def test_assets_come_before_the_path_and_the_path_before_the_cache(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.go()
    built = ensure(["etcd"])["etcd"]
    assert built.is_relative_to(machine.cache)
    assert find("etcd") == built
    on_path = machine.program(machine.bin / "etcd")
    assert find("etcd") == on_path
    asset = machine.program(tmp_path / "assets" / "etcd")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(asset.parent))
    assert find("etcd") == asset
    assert main(["--find", "etcd"]) == 0


def test_a_kubectl_on_the_path_is_not_taken(machine: Machine) -> None:
    machine.program(machine.bin / "kubectl")
    with pytest.raises(ToolError, match="kubectl is neither in KUBEBUILDER_ASSETS, nor built"):
        find("kubectl")


def test_a_missing_program_is_a_message_that_helps(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ToolError, match=r"kube-apiserver is neither in .* `make e2e`.* needs Go 1\.\d+"):
        find("kube-apiserver")
    with pytest.raises(ToolError, match="no tool of that name: kubeadm"):
        ensure(["kubeadm"])
    assert main(["--find", "etcd"]) == 1
    assert "etcd is neither" in capsys.readouterr().err


def test_no_go_or_an_old_one_says_which_is_needed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.bin))
    with pytest.raises(ToolError, match=r"no `go` on the PATH\. Go 1\.\d+.*Debian's package `golang`"):
        ensure(["etcd"])
    machine.go(version="go1.19.8")
    monkeypatch.setenv("PATH", f"{machine.bin}:/usr/bin:/bin")
    with pytest.raises(ToolError, match=r"is go1\.19\.8\. Go 1\.\d+"):
        ensure(["etcd"])
    assert not machine.builds


def test_built_once_and_found_without_go(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.go()
    first = ensure(["etcd", "kube-apiserver"])
    assert ensure(["etcd", "kube-apiserver"]) == first
    assert [line.split()[-1] for line in machine.builds] == [build_tools.TOOLS[name].package for name in first]
    assert "-trimpath" in machine.builds[0]
    (machine.bin / "go").unlink()
    # Else a Go of the system's is found.
    monkeypatch.setenv("PATH", str(machine.bin))
    assert find("etcd") == first["etcd"]
    assert "etcd: built in" in capsys.readouterr().out


def test_another_go_builds_anew(machine: Machine) -> None:
    machine.go("go1.98.0")
    old = ensure(["etcd"])["etcd"]
    machine.go("go1.98.1")
    assert ensure(["etcd"])["etcd"] != old


def test_a_failed_build_leaves_nothing_and_shows_the_compiler_s_words(machine: Machine) -> None:
    machine.go(build='printf half >"$2"; echo "main.go:1: no such thing" >&2; exit 3')
    with pytest.raises(ToolError, match=r"go build of etcd failed with status 3:\nmain\.go:1: no such thing"):
        ensure(["etcd"])
    assert [name for name in machine.files if not name.endswith(".lock")] == []


def test_progress_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_tools, "PROGRESS_SECONDS", 0.1)
    say, said = build_tools._say, machine.cache.parent / "said"

    def note(text: str) -> None:
        say(text)
        said.write_text(text)

    monkeypatch.setattr(build_tools, "_say", note)
    waits = f"until grep -qs '2 packages' {said}; do sleep 0.05; done"
    machine.go(build=f"echo 'go: downloading a v1'; echo x; echo y; {waits}; {BUILT}")
    ensure(["etcd"])
    assert "1 modules downloaded, 2 packages compiled" in capsys.readouterr().out


def test_a_second_builder_waits_for_the_first(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.go()
    path = ensure(["etcd"])["etcd"]
    lock = next(machine.cache.rglob("*.lock"))
    path.unlink()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        builder = threading.Thread(target=ensure, args=(["etcd"],))
        builder.start()
        deadline = time.monotonic() + 20
        said = ""
        while "waiting for it" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().out
            time.sleep(0.02)
        assert "waiting for it" in said
        assert not path.exists()
        # What the first one has built is not built again.
        machine.program(path)
    builder.join(timeout=20)
    assert len(machine.builds) == 1
