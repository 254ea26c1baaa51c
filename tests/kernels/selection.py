"""The tests that each kernel gets: what depends on a kernel, and what only some kernels have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from multus_daemon.plugins.builtin.registry import PLUGINS

_NETNS: Final = Path("tests/netns")

BUILTINS: Final = tuple(
    str(path) for name in sorted(PLUGINS) if (path := _NETNS / f"test_{name.replace('-', '_')}.py").exists()
)
"""The files of the built-ins. One that is added later is among them."""

DEVICES: Final = tuple(f"tests/netns/test_{name}.py" for name in ("dummy", "ipvlan", "tap", "vlan", "vrf"))
"""Those whose devices not every kernel has: all of their tests run here."""

KERNEL: Final = tuple(
    f"tests/netns/test_{name}.py"
    for name in ("chain", "differential", "interchange", "removal", "repair", "replaced_namespace", "traffic", "watch")
)
"""Mixed calls with the reference; removal, drift and repair, cookies of namespaces, the watch of other namespaces."""

DAEMON: Final = (
    "tests/e2e/test_standalone.py::test_a_pod_gets_three_networks_and_leaves_nothing",
    "tests/e2e/test_rights.py::test_the_daemon_has_what_the_manifest_grants",
    "tests/e2e/test_rights.py::test_system_calls_are_those_of_the_runtime_default_profile",
    "tests/e2e/test_drift.py::test_what_is_broken_is_shown_and_repaired_by_hand",
    "tests/e2e/test_bond.py",
    "tests/e2e/test_sriov.py",
)
"""Through shim and daemon, which has the rights of the manifest."""

WHOLE: Final = (
    "--numprocesses=2",
    "--cases=1",
    # They take a quarter of the time, and depend on no kernel: random configurations, and the most namespaces.
    *("-k", "not test_any_ and not test_many_namespaces"),
    *(f"--beside={path}" for path in BUILTINS if path not in DEVICES),
    *BUILTINS,
    *KERNEL,
    *DAEMON,
)
SHORT: Final = (
    "--numprocesses=0",
    "--cases=1",
    *(f"tests/netns/test_{name}.py" for name in ("replaced_namespace", "watch")),
    # The host's own kernel may have no VLANs of bridges.
    "tests/netns/test_repair.py::test_vlans",
    *DAEMON[:1],
)
