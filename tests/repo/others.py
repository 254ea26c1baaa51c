"""Make docs/tested-with.md: which programs of others ran beside the daemon, where and when, and which did not.

    python -m tests.repo.others            # after a change of a pin, of a table below, or of a module's constants

A module of tests names the programs of others that it runs, `RUNS: Final = ("ovs-cni",)`, or whose files and results
of a public report it plays: `PLAYS`. Version and date of the first are here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from multus_daemon.plugins.builtin.registry import MODELS
from tests.e2e import build_tools
from tests.e2e.build_tools import pinned
from tests.kernels import selection
from tests.kernels.debian_kernels import SERIES

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "tested-with.md"
CHANGE, WEEK, KERNELS, HAND = "each change", "each week", "kernels, each week", "by hand"
SEEN: Final = "2026-11-29"
"""When all of what each change runs was last seen to pass."""


class Program(NamedTuple):
    """What ran."""

    version: str
    seen: str = SEEN
    variable: str = ""
    """The variable of the environment that names it, if no tool of ours builds it: `tests.programs.given`."""


def _debian(version: str) -> str:
    return f"Debian 12's {version}"


_KUBERNETES: Final = "k8s.io/kubernetes"
_PLUGINS: Final = "github.com/containernetworking/plugins"
PROGRAMS: Final = {
    "Multus, thick": Program(pinned("gopkg.in/k8snetworkplumbingwg/multus-cni.v4", build_tools.UPSTREAM)),
    "Multus, thick, as v4.3.1": Program("default branch of 2026-08-20", "2026-11-26", "UPSTREAM_NEW_DAEMON"),
    "Multus, thin": Program(pinned("gopkg.in/k8snetworkplumbingwg/multus-cni.v4", build_tools.UPSTREAM)),
    "Multus, thin, v3": Program(pinned("gopkg.in/k8snetworkplumbingwg/multus-cni.v3", build_tools.THIN_V3)),
    "reference plugins": Program(pinned(_PLUGINS, build_tools.PLUGINS)),
    "reference plugins, earlier": Program(pinned(_PLUGINS, build_tools.EARLIER), variable="CNI_REFERENCE_DIR"),
    "reference plugins, Debian's": Program(_debian("1.1.1")),
    "flannel's cni-plugin": Program(MODELS["flannel"][1], variable="WIDE_FLANNEL"),
    "whereabouts": Program(pinned("github.com/k8snetworkplumbingwg/whereabouts", build_tools.WHEREABOUTS)),
    "bond-cni": Program("258926a (2026-01-27)", variable="WIDE_BOND_CNI"),
    "sriov-cni": Program("1b7acc5 (2026-07-18)", variable="WIDE_SRIOV_CNI"),
    "sriov-network-device-plugin": Program("40b6f50 (2026-06-25)", variable="WIDE_SRIOV_DEVICE_PLUGIN"),
    "ovs-cni": Program("v0.39.0", "2026-11-24", "WIDE_OVS_CNI"),
    "multus-dynamic-networks-controller": Program("default branch", "2026-11-24", "WIDE_DYNAMIC_NETWORKS_CONTROLLER"),
    "Kubernetes": Program(pinned(_KUBERNETES)),
    "Kubernetes, oldest": Program(pinned(_KUBERNETES, build_tools.OLDEST), "2026-11-24"),
    "Kubernetes, newest": Program(pinned(_KUBERNETES, build_tools.NEWEST), "2026-11-24"),
    "containerd": Program(_debian("1.6.20")),
    "containerd 2": Program(pinned("github.com/containerd/containerd/v2", build_tools.CONTAINERD), "2026-11-24"),
    "ocicni, with which CRI-O calls plugins": Program("18fd1eb (2026-08-18)", variable="WIDE_OCICNI"),
    "Open vSwitch": Program("Debian's, in user space", "2026-11-24"),
    "helm": Program(pinned("helm.sh/helm/v3", build_tools.HELM)),
    "cosign": Program(pinned("github.com/sigstore/cosign/v3", build_tools.COSIGN)),
    "krew": Program(pinned("sigs.k8s.io/krew", build_tools.KREW)),
    "Prometheus": Program(_debian("2.42.0")),
    "dnsmasq": Program(_debian("2.90")),
    "Linux": Program(f"Debian's {' and '.join(SERIES)}, by QEMU"),
}
"""By the name that a `RUNS` has, in the order of the page."""

_READ: Final = {
    "ib-sriov-cni, rdma-cni, accelerated-bridge-cni, userspace CNI": "configurations and words of failed ADDs",
    "route-override": "a stand-in with its keys; the real one by `CNI_THIRD_PARTY_DIR`",
    "whereabouts v0.9.4": "the built-in follows it; the binary that it is compared with is the one above",
    "CRI-O": "its library ocicni ran",
    "RKE2, k3s, Harvester, microk8s, OpenShift, MicroShift, Talos": "[directories](distributions.md), on a real node",
    "NVIDIA's network operator, home-operations' chart": "[the way that their Multus ends](distributions.md)",
    "node-readiness-controller 0.5": "[its rule](operations.md#ready-before-pods), by the schema of its documentation",
    "network-resources-injector": "[differences](operations.md#resource-injector)",
    "Argo CD, Flux": "[two renderings are the same](environments.md#gitops), and the API server finds no difference",
    "cert-manager": "its objects are rendered; a certificate by hand takes their place",
    "SELinux, enforcing": "[what it needs](environments.md#pod-security-and-selinux)",
}
"""What never ran, and what stands in for it."""
READ: Final = "2026-11-28"

_HEAD: Final = """\
# Ran, read, not run

Which programs of others were seen beside this daemon: where, in which version, and when last.

*Each change*: `.ci/run`. *Each week*: `.ci/run wide`. *By hand*: without the program the tests are skipped, and say how
to build it. `python -m tests.repo.others` makes this page from the tests.
"""


@functools.cache
def named(constant: str) -> dict[str, tuple[str, ...]]:
    """The programs in the constant `RUNS` or `PLAYS` of each module that has it, by its path."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if value := re.search(rf"^{constant}: Final = (\(.*?\))$", path.read_text(), re.MULTILINE | re.DOTALL):
            found[path.relative_to(ROOT).as_posix()] = tuple(ast.literal_eval(value[1]))
    return found


def where(program: Program, module: str) -> str:
    """What runs the module with the program."""
    if program.variable and program.variable not in _built_each_week():
        return HAND
    if module.startswith("tests/kernels/") or (program.variable and module in selection.DAEMON):
        return KERNELS
    return WEEK if program.variable or module.startswith("tests/wide/") else CHANGE


@functools.cache
def _built_each_week() -> frozenset[str]:
    """The variables that the weekly workflow and `make wide` set."""
    text = (ROOT / ".github" / "workflows" / "wide.yml").read_text() + (ROOT / "Makefile").read_text()
    return frozenset(re.findall(r"^\s+(?:build )?(\w+)[ =]", text, re.MULTILINE))


def _ran() -> Iterator[str]:
    for name, program in PROGRAMS.items():
        modules = [module for module, names in named("RUNS").items() if name in names]
        ways = dict.fromkeys(where(program, module) for module in modules)
        yield f"| {name} | {program.version} | {', '.join(ways)} | {program.seen} | {_listed(modules)} |"


def _played() -> Iterator[str]:
    plays = named("PLAYS")
    for name in sorted({name for names in plays.values() for name in names}, key=str.lower):
        yield f"| {name} | {_listed(module for module, names in plays.items() if name in names)} |"


def _listed(modules: Iterable[str]) -> str:
    return ", ".join(f"`{module}`" for module in modules)


def page() -> str:
    """The page."""
    parts = (
        _HEAD,
        "## Ran\n",
        "| program | version | where | last seen | tests |\n| --- | --- | --- | --- | --- |",
        *_ran(),
        "\n## Played\n",
        "A script prints what a public report says that the program printed, or the node has the program's files.\n",
        "| program | tests |\n| --- | --- |",
        *_played(),
        "\n## Read, not run\n",
        f"Their sources or documentation were read, last on {READ}.\n",
        "| program | what there is instead |\n| --- | --- |",
        *(f"| {name} | {instead} |" for name, instead in _READ.items()),
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
