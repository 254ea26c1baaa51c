"""Find, or build once, the programs that the end-to-end tests run: Kubernetes, upstream's daemon, plugins, helm, ...

    python -m tests.e2e.build_tools                          # what the tests need
    python -m tests.e2e.build_tools kubelet kube-scheduler   # these
    python -m tests.e2e.build_tools --wide                   # what the tests of `make wide` need besides
    python -m tests.e2e.build_tools --find                   # says where they are, builds nothing

Looked for in this order: the directory `KUBEBUILDER_ASSETS`, the PATH, and a cache outside the source tree, which this
module fills from the Go modules that `tools/go.mod` and those of its subdirectories pin. Only the standard library is
imported, so that any Python from 3.11 on runs it. Tests call `find`, which never builds: a build takes minutes, and a
test must not.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.programs import path_of

MODULE: Final = Path(__file__).resolve().parent / "tools"
"""Directory of the `go.mod` with the pins of Kubernetes and etcd."""

UPSTREAM: Final = MODULE / "upstream"
"""Directory of the `go.mod` for upstream's daemon. It is separate to build with the dependencies of its release."""

THIN_V3: Final = MODULE / "thin_v3"
"""Directory of the `go.mod` for the last thin plugin of upstream's v3, which many packages still install."""

LINTER: Final = MODULE / "actionlint"
"""Directory of the `go.mod` for the program that checks `.github/workflows`."""

HELM: Final = MODULE / "helm"
"""Directory of the `go.mod` for the program that lints, renders and installs `charts/`."""

PLUGINS: Final = MODULE / "plugins"
"""Directory of the `go.mod` with the release of the reference plugins that our built-ins follow."""

EARLIER: Final = MODULE / "earlier_plugins"
"""Directory of the `go.mod` with the release before, which many nodes have."""

OLDEST: Final = MODULE / "oldest"
"""Directory of the `go.mod` with the oldest Kubernetes that the daemon is tested with."""

NEWEST: Final = MODULE / "newest"
"""Directory of the `go.mod` with the newest Kubernetes that the daemon is tested with."""

CONTAINERD: Final = MODULE / "containerd"
"""Directory of the `go.mod` with a containerd that is newer than the packages of a stable distribution."""

WHEREABOUTS: Final = MODULE / "whereabouts"
"""Directory of the `go.mod` for the IPAM plugin and the reconciler that our addresses are compared with."""

COSIGN: Final = MODULE / "cosign"
"""Directory of the `go.mod` for the program that signs a release."""

KREW: Final = MODULE / "krew"
"""Directory of the `go.mod` for the program that installs `kubectl multus`."""

_MULTUS: Final = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4"
_MULTUS_V3: Final = "gopkg.in/k8snetworkplumbingwg/multus-cni.v3"
_CNI_PLUGINS: Final = "github.com/containernetworking/plugins"
_WHEREABOUTS: Final = "github.com/k8snetworkplumbingwg/whereabouts"
_CONTAINERD: Final = "github.com/containerd/containerd/v2"
_KINDS_OF_PLUGINS: Final = {
    "main": ("bridge", "dummy", "host-device", "ipvlan", "loopback", "macvlan", "ptp", "tap", "vlan"),
    "meta": ("bandwidth", "firewall", "portmap", "sbr", "tuning", "vrf"),
    "ipam": ("dhcp", "host-local", "static"),
}


@dataclass(frozen=True)
class Tool:
    """One program. Its package is a `tool` line in the `go.mod`, so that `go mod tidy` keeps what it needs."""

    package: str
    module: str
    """The module whose version is the program's."""
    directory: Path = MODULE
    """Where the `go.mod` is."""
    on_path: bool = True
    """True if a program of this name on the PATH can be used."""


TOOLS: Final[dict[str, Tool]] = {
    "etcd": Tool("go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
    **{
        name: Tool(f"k8s.io/kubernetes/cmd/{name}", "k8s.io/kubernetes")
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
    },
    # On the PATH it is of any release, or what a cloud's tools call so.
    "kubectl": Tool("k8s.io/kubernetes/cmd/kubectl", "k8s.io/kubernetes", on_path=False),
    # Not by their own names: on the PATH those are ours.
    **{
        f"upstream-{name}": Tool(f"{_MULTUS}/cmd/{name}", _MULTUS, UPSTREAM)
        for name in ("multus", "multus-daemon", "multus-shim", "install_multus", "thin_entrypoint")
    },
    "upstream-v3-multus": Tool(f"{_MULTUS_V3}/cmd", _MULTUS_V3, THIN_V3),
    "upstream-passthru": Tool(f"{_MULTUS}/cmd/passthru-cni", _MULTUS, UPSTREAM),
    # Not one of the PATH: what it objects to depends on its release.
    "actionlint": Tool(
        "github.com/rhysd/actionlint/cmd/actionlint", "github.com/rhysd/actionlint", LINTER, on_path=False
    ),
    # What it renders depends on its release.
    "helm": Tool("helm.sh/helm/v3/cmd/helm", "helm.sh/helm/v3", HELM, on_path=False),
    "cosign": Tool("github.com/sigstore/cosign/v3/cmd/cosign", "github.com/sigstore/cosign/v3", COSIGN, on_path=False),
    "krew": Tool("sigs.k8s.io/krew/cmd/krew", "sigs.k8s.io/krew", KREW),
    # On the PATH it is of any release.
    "whereabouts": Tool(f"{_WHEREABOUTS}/cmd", _WHEREABOUTS, WHEREABOUTS, on_path=False),
    "whereabouts-ip-control-loop": Tool(f"{_WHEREABOUTS}/cmd/controlloop", _WHEREABOUTS, WHEREABOUTS, on_path=False),
    # The names of the plugins are too common for the PATH.
    **{
        f"{prefix}-{name}": Tool(f"{_CNI_PLUGINS}/plugins/{kind}/{name}", _CNI_PLUGINS, directory, on_path=False)
        for prefix, directory in (("plugin", PLUGINS), ("earlier-plugin", EARLIER))
        for kind, names in _KINDS_OF_PLUGINS.items()
        for name in names
    },
    **{
        f"{directory.name}-{name}": Tool(f"k8s.io/kubernetes/cmd/{name}", "k8s.io/kubernetes", directory)
        for directory in (OLDEST, NEWEST)
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
    },
    # On the PATH is the distribution's.
    **{
        name: Tool(f"{_CONTAINERD}/cmd/{name}", _CONTAINERD, CONTAINERD, on_path=False)
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    },
}

CONTROL_PLANE: Final = ("etcd", "kube-apiserver")
"""Programs that `apiserver.ApiServer` runs."""

NODE: Final = ("kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
"""Additional programs that `cluster.real_node.RealNode` runs."""

PREDECESSOR: Final = ("upstream-multus-daemon", "upstream-multus-shim")
"""Programs that `upstream.Upstream` runs."""

PREDECESSORS_IMAGE: Final = (*PREDECESSOR, "upstream-install_multus", "upstream-passthru")
"""Programs of upstream's image that its thick manifest calls."""

THIN: Final = ("upstream-multus", "upstream-thin_entrypoint", "upstream-v3-multus")
"""Programs of upstream's thin images, for `test_thin`."""

CHARTS: Final = ("helm",)
"""Programs that `test_chart` runs."""

WORKFLOWS: Final = ("actionlint",)
"""Programs that `test_workflows` runs."""

ADDRESSES: Final = ("whereabouts", "whereabouts-ip-control-loop")
"""Programs that `addresses` runs as its control."""

REFERENCE_PLUGINS: Final = tuple(name for names in _KINDS_OF_PLUGINS.values() for name in names)
"""Names of the reference plugins; each is built as `plugin-NAME`, for `test_check`."""

DEFAULT: Final = (
    CONTROL_PLANE
    + PREDECESSORS_IMAGE
    + THIN
    + NODE
    + WORKFLOWS
    + CHARTS
    + ADDRESSES
    + tuple(f"plugin-{name}" for name in REFERENCE_PLUGINS)
)
"""Programs that the tests of `make e2e` need."""

PUBLISHING: Final = ("cosign", "krew")
"""Programs that the try of a release runs."""

_OTHER_RELEASES: Final = (OLDEST, NEWEST, CONTAINERD, EARLIER)
WIDE: Final = (*(name for name, tool in TOOLS.items() if tool.directory in _OTHER_RELEASES), *PUBLISHING)
"""Programs that the tests of `make wide` need besides: mostly other releases of what `make e2e` runs."""

PROGRESS_SECONDS: Final = 15.0
COMMAND: Final = "python -m tests.e2e.build_tools"


class ToolError(Exception):
    """A program is not there or cannot be built; the message says which one and how to get it."""


# --- what is pinned ------------------------------------------------------------------------------------------------


def pinned(module: str, directory: Path = MODULE) -> str:
    """Version of a module in a `go.mod`, such as `v1.35.4`."""
    text = (directory / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s*{re.escape(module)}\s+(v\S+)", text, re.MULTILINE)
    if not found:
        raise ToolError(f"{directory / 'go.mod'} does not pin {module}")
    return found[1]


def required_go(directory: Path = MODULE) -> str:
    """The oldest Go that the pinned modules build with, such as `1.25.0`."""
    found = re.search(r"^go (\S+)$", (directory / "go.mod").read_text(), re.MULTILINE)
    if not found:
        raise ToolError(f"{directory / 'go.mod'} has no go line")
    return found[1]


def link_flags(directory: Path = MODULE) -> str:
    """No symbols; and the release is stamped in, or Kubernetes' programs call themselves v0.0.0-master.

    Into helm that of the Kubernetes that it knows, too.
    """
    flags = ["-s", "-w"]
    if directory in (MODULE, OLDEST, NEWEST):
        version = pinned("k8s.io/kubernetes", directory)
        major, minor, _ = version.removeprefix("v").split(".", 2)
        # kubelet and kube-scheduler take it from component-base, client libraries from client-go.
        stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        holders = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        flags += [f"-X {holder}.{key}={value}" for holder in holders for key, value in stamps.items()]
    if directory == HELM:
        # As its Makefile does: without, it takes every cluster that it renders for to be Kubernetes 1.20.
        minor = pinned("k8s.io/client-go", directory).split(".")[1]
        for holder in ("chartutil", "lint/rules"):
            stem = f"-X helm.sh/helm/v3/pkg/{holder}.k8sVersion"
            flags += [f"{stem}Major=1", f"{stem}Minor={minor}"]
        flags.append(f"-X helm.sh/helm/v3/internal/version.version={pinned('helm.sh/helm/v3', directory)}")
    return " ".join(flags)


# --- finding -------------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """Where the builds are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "multus-daemon" / "tools"


def source(module: str, directory: Path) -> Path:
    """Directory of a pinned module's source, which a build has left in Go's module cache. Raises ToolError."""
    if not (go := path_of("go")):
        raise ToolError(f"the source of {module} is found by `go`, which is not on the PATH")
    command = [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", module]
    env = os.environ | {"GOWORK": "off", "GOPROXY": "off"}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise ToolError(f"the source of {module} is not in Go's module cache: `make e2e` builds from it")
    return Path(done.stdout.strip())


def _pins(directory: Path) -> str:
    """A digest of everything that decides what a build gives, but for the version of Go."""
    digest = hashlib.sha256()
    flags = link_flags(directory).encode()
    for part in ((directory / "go.mod").read_bytes(), (directory / "go.sum").read_bytes(), flags):
        digest.update(hashlib.sha256(part).digest())
    return f"{digest.hexdigest()[:16]}-{platform.machine()}"


def _go_version() -> str:
    """`go1.26.1`, or an empty string where there is no Go."""
    if not (go := path_of("go")):
        return ""
    command = [go, "env", "GOVERSION"]
    done = subprocess.run(command, cwd=MODULE, capture_output=True, text=True, check=False)
    # A development build says more than the version.
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.strip() else ""


def _caches(directory: Path) -> list[Path]:
    """Directories with builds of these pins: by the present Go, or by any where there is none."""
    if version := _go_version():
        return [cache_root() / f"{_pins(directory)}-{version}"]
    return sorted(cache_root().glob(f"{_pins(directory)}-go*[0-9]"))


def find(name: str) -> Path:
    """The program's path.

    Raises ToolError, with what to do, where it is not there.
    """
    tool = TOOLS.get(name)
    if tool is None:
        raise ToolError(f"no tool of that name: {name}; there are: {', '.join(TOOLS)}")
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        candidate = Path(assets) / name
        if os.access(candidate, os.X_OK):
            return candidate.resolve()
    if tool.on_path and (on_path := path_of(name)):
        return Path(on_path).resolve()
    for directory in _caches(tool.directory):
        if os.access(directory / name, os.X_OK):
            return directory / name
    raise ToolError(
        f"{name} is neither in KUBEBUILDER_ASSETS, {'nor on the PATH, ' if tool.on_path else ''}nor built: "
        f"`make {'wide' if name in WIDE else 'e2e'}`, or `{COMMAND} {name}` in the source tree, builds it once "
        f"(minutes; needs Go {required_go(tool.directory)} or newer)"
    )


def find_all(names: Sequence[str], instead: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """Path of each program; `instead` has those that are not looked for. Raises ToolError."""
    return {name: (instead or {}).get(name) or find(name) for name in names}


def reference(prefix: str = "plugin") -> Path:
    """Return a directory with the reference plugins under their own names; `prefix`: that of their tools.

    With flannel's if WIDE_FLANNEL names it: no Go module proxy has it. Raises ToolError.
    """
    programs = {name: find(f"{prefix}-{name}") for name in REFERENCE_PLUGINS}
    if flannel := os.environ.get("WIDE_FLANNEL"):
        programs["flannel"] = Path(flannel)
    directory = programs["bridge"].parent / "by-name"
    directory.mkdir(exist_ok=True)
    for name, program in programs.items():
        # Another process may do the same.
        with contextlib.suppress(FileExistsError):
            (directory / name).symlink_to(program)
    return directory


def release(*directories: Path) -> dict[str, Path]:
    """The programs of WIDE that these directories pin, by the names of those whose place they take.

    Raises ToolError.
    """
    names = [name for name in WIDE if TOOLS[name].directory in directories]
    return {name.removeprefix("oldest-").removeprefix("newest-"): find(name) for name in names}


# --- building ------------------------------------------------------------------------------------------------------


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def require_go(directory: Path) -> str:
    """The version of the Go toolchain, such as `go1.26.1`.

    Raises ToolError where there is none, or an older one than `go.mod` asks for.
    """
    version, needed = _go_version(), required_go(directory)
    advice = (
        f"Go {needed} or newer builds the test tools: Debian's package `golang` where it is as new as that (backports "
        "have newer ones), else the toolchain from go.dev; or point KUBEBUILDER_ASSETS at a directory with the programs"
    )
    if not version:
        raise ToolError(f"no `go` on the PATH. {advice}")
    if _numbers(version) < _numbers(needed):
        raise ToolError(f"{path_of('go')} is {version}. {advice}")
    return version


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock; a second builder waits here, and then finds everything built."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is building the same tools; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(names: Sequence[str]) -> dict[str, Path]:
    """Path of each program; those that are not there are built, which takes minutes and is told on standard output.

    Raises ToolError where a build is not possible or fails.
    """
    found: dict[str, Path] = {}
    missing = []
    for name in names:
        try:
            found[name] = find(name)
        except ToolError:
            if name not in TOOLS:
                raise
            missing.append(name)
    for name in missing:
        pins = TOOLS[name].directory
        directory = cache_root() / f"{_pins(pins)}-{require_go(pins)}"
        with _locked(directory.with_name(directory.name + ".lock")):
            if not os.access(directory / name, os.X_OK):
                _build(name, directory)
        found[name] = directory / name
    return found


def _build(name: str, directory: Path) -> None:
    """Compile into a temporary directory beside the target, then rename: a half build is never found."""
    tool = TOOLS[name]
    directory.mkdir(parents=True, exist_ok=True)
    _say(f"{name}: building {tool.package} ({pinned(tool.module, tool.directory)}) into {directory}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as scratch:
        target, log = Path(scratch) / name, Path(scratch) / "log"
        # NB: -mod=readonly also against a GOFLAGS of the user; go.work files above the tree are not ours.
        build = [str(path_of("go")), "build", "-v", "-mod=readonly", "-trimpath"]
        command = [*build, "-ldflags", link_flags(tool.directory)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, "-o", str(target), tool.package],
                cwd=tool.directory,
                env=os.environ | {"CGO_ENABLED": "0", "GOWORK": "off"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                _watch(child, name, log, start)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        if child.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise ToolError(f"go build of {name} failed with status {child.returncode}:\n{tail}")
        size = target.stat().st_size >> 20
        target.rename(directory / name)
    _say(f"{name}: built in {time.monotonic() - start:.0f} s, {size} MiB")


def _watch(child: subprocess.Popen[bytes], name: str, log: Path, start: float) -> None:
    """Wait for the compiler, with a line every now and then."""
    while True:
        try:
            child.wait(timeout=PROGRESS_SECONDS)
        except subprocess.TimeoutExpired:
            lines = log.read_text(errors="replace").splitlines()
            modules = sum(line.startswith("go: downloading") for line in lines)
            fetched = f"{modules} modules downloaded, " if modules else ""
            seconds = time.monotonic() - start
            _say(f"{name}: {seconds:4.0f} s, {fetched}{len(lines) - modules} packages compiled")
        else:
            return


def _say(text: str) -> None:
    print(f"build_tools: {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Build what the end-to-end tests run, once.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TOOLS)}; default: {' '.join(DEFAULT)}")
    parser.add_argument("--wide", action="store_true", help=f"what `make wide` needs besides: {' '.join(WIDE)}")
    parser.add_argument("--find", action="store_true", help="build nothing; fail where a program is missing")
    parser.add_argument(
        "--reference",
        metavar="PREFIX",
        help="print the directory for CNI_REFERENCE_DIR: `plugin`, \
or `earlier-plugin`",
    )
    options = parser.parse_args(arguments)
    names: list[str] = options.names or list(WIDE if options.wide else DEFAULT)
    try:
        if options.reference:
            print(reference(options.reference))
            return 0
        found = {name: find(name) for name in names} if options.find else ensure(names)
    except ToolError as error:
        print(f"build_tools: {error}", file=sys.stderr)
        return 1
    for name, path in found.items():
        _say(f"{name} is {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
