"""The reference plugins as programs, and all that the kernel tells of what they leave."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from multus_daemon.plugins import find
from tests import programs
from tests.waiting import PATIENCE

DIRECTORY = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
HOW = f"set CNI_REFERENCE_DIR (now {DIRECTORY}) to a build of containernetworking/plugins v1.10.0, or apt-get install \
containernetworking-plugins"

# What differs from link to link or from moment to moment.
# What differs without anybody's wish: the reference's host end has a queue length of 0, which matters to none but a
# queueing discipline that somebody sets, and is wrong for that.
_VOLATILE = re.compile(
    r"txqlen|ifindex|link_index|link_netnsid|.*_timer|bridge_id|root_port|designated_\w+|no|id|valid_life_time|"
    r"preferred_life_time|temporary|dynamic|address|stats\w*|handle|metainfo"
)
# Also in the ids of bridges, which have no leading zeros.
_MAC = re.compile(r"\b([0-9a-f]{1,2}:){5}[0-9a-f]{1,2}\b")
_PORT = re.compile(r"veth[0-9a-f]{8}")
_SECRET_SYSCTLS = ("stable_secret", "mc_forwarding")


def has(*plugins: str) -> bool:
    """Return whether the reference has all of the plugins."""
    return all((DIRECTORY / name).exists() for name in plugins)


def needs(*plugins: str) -> pytest.MarkDecorator:
    """Skips a test without them."""
    return pytest.mark.skipif(not has(*plugins), reason=f"no reference plugins {', '.join(plugins)}: {HOW}")


@functools.cache
def is_old() -> bool:
    """Debian 12's v1.1.1: it lacks keys, and some of its state differs from what v1.9.1 leaves."""
    if not has("bridge"):
        return True
    done = subprocess.run(
        [DIRECTORY / "bridge"], env={"CNI_COMMAND": "VERSION"}, capture_output=True, text=True, timeout=PATIENCE
    )
    return "1.1.0" not in json.loads(done.stdout)["supportedVersions"]


@functools.cache
def release() -> tuple[int, ...]:
    """Return the release, such as (1, 10, 0); that of Debian 12 if it is not known."""
    version = find.build(str(DIRECTORY / "host-local")).version if has("host-local") else ""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) or (1, 1, 1)


def require_masquerade(keys: dict[str, Any]) -> None:
    """Skip the test if the plugin needs a program for its rules that the host lacks; the old one knows no nftables."""
    if keys.get("ipMasq") and (is_old() or keys.get("ipMasqBackend") == "iptables"):
        programs.require("iptables")


def needs_new() -> pytest.MarkDecorator:
    """Skips a test about what v1.1.1 does not know."""
    return pytest.mark.skipif(is_old(), reason=f"needs v1.9.1 or newer, not v1.1.1: {HOW}")


def needs_newest() -> pytest.MarkDecorator:
    """Skips a test about what v1.9.1 does not know."""
    return pytest.mark.skipif(release() < (1, 10), reason=f"needs v1.10.0 or newer: {HOW}")


def call(
    plugin: str,
    verb: str,
    path: str,
    config: dict[str, Any],
    *,
    ifname: str = "eth0",
    container: str = "container1",
    args: str = "",
    bin_dir: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """One call of a reference plugin; `bin_dir`: where it finds its IPAM plugin."""
    return subprocess.run(
        [str(DIRECTORY / plugin)],
        input=json.dumps(config).encode(),
        env={
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": path,
            "CNI_IFNAME": ifname,
            "CNI_ARGS": args,
            "CNI_PATH": str(bin_dir or DIRECTORY),
            "PATH": os.environ["PATH"],
        },
        capture_output=True,
        timeout=PATIENCE,
    )


def examples(number: int) -> hypothesis.settings:
    """So many for a test whose fixtures serve all of them; none is made smaller."""
    return hypothesis.settings(
        max_examples=number,
        deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )


def run(plugin: str, verb: str, path: str, config: dict[str, Any], **options: Any) -> Any:
    """`call`, which must succeed; what it printed."""
    done = call(plugin, verb, path, config, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else None


# --- what is left ----------------------------------------------------------------------------------------------------


def _text(text: str) -> str:
    return _PORT.sub("PORT", _MAC.sub("MAC", text))


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items() if not _VOLATILE.fullmatch(key)}
    if isinstance(value, list):
        return [_scrubbed(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _lines(kind: str, items: list[Any]) -> list[str]:
    return sorted(f"{kind} {json.dumps(_scrubbed(item), sort_keys=True)}" for item in items)


def _sysctls(netns: Any) -> list[str]:
    folders = [f"/proc/sys/net/{family}/{kind}" for family in ("ipv4", "ipv6") for kind in ("conf", "neigh")]
    found = netns.files(*folders) | {"ip_forward": netns.sysctl("net/ipv4/ip_forward")}
    told = {path: text for path, text in found.items() if not path.endswith(_SECRET_SYSCTLS)}
    lines = [f"{path}:{line}" for path, text in told.items() for line in text.splitlines()]
    # All at once: there are hundreds.
    return sorted(_text("\n".join(lines)).splitlines())


def rules(netns: Any) -> list[str]:
    """List the rules of nft and iptables, one line for each."""
    listed = [f"{tool}: {line}" for tool in ("iptables", "ip6tables") for line in _iptables(netns, tool)]
    # Asked for a chain of it, iptables makes the table.
    tables = re.sub(r"table ip6? nat \{\n\}\n", "", netns.run("nft", "list", "ruleset"))
    return [*listed, *(f"nft: {_text(line)}" for line in tables.splitlines())]


def _iptables(netns: Any, tool: str) -> list[str]:
    return [_text(line) for line in netns.run(tool, "-w", "-t", "nat", "-S").splitlines()]


def state(netns: Any, *, with_rules: bool = False) -> list[str]:
    """Links with all details, addresses, routes, ports, VLANs, sysctls, rules where asked for; a line for each.

    Names of ports and MAC addresses are replaced; what IPv6 makes by itself is left out.
    """
    links = settled(netns)
    for link in links:
        link["addr_info"] = [
            item for item in link["addr_info"] if item["scope"] != "link" or not item["local"].startswith("fe80:")
        ]
    routes = [
        route
        for family in ("-4", "-6")
        for route in netns.ip(family, "route", "show", "table", "all")
        if not route["dst"].startswith(("fe80:", "ff00:"))
    ]
    ports, vlans = [], []
    if any(
        "bridge" in (link.get("linkinfo", {}).get(key) for key in ("info_kind", "info_slave_kind")) for link in links
    ):
        ports = json.loads(netns.run("bridge", "-d", "-j", "link") or "[]")
        vlans = json.loads(netns.run("bridge", "-j", "vlan") or "[]")
    return [
        *_lines("link", links),
        *_lines("route", routes),
        *_lines("port", ports),
        *_lines("vlan", vlans),
        *(rules(netns) if with_rules else []),
        *_sysctls(netns),
    ]


def require_same(found: list[str], expected: list[str]) -> None:
    """Fail with the lines that only one of them has."""
    lines = difflib.unified_diff(expected, found, "reference", "built-in", n=0, lineterm="")
    if different := [line for line in lines if not line.startswith("@@")]:
        pytest.fail("\n".join(different), pytrace=False)


_WITH_CARRIER = ("bridge", "macvlan", "veth")


def settled(netns: Any) -> list[Any]:
    """The links, once those that are up have seen their carrier, and say so, and no address is tentative."""
    links: list[Any] = []
    for _ in range(600):
        links = netns.ip("-d", "addr", "show")
        waiting = [
            link["ifname"]
            for link in links
            if ("UP" in link["flags"] and not {"LOWER_UP", "NO-CARRIER", "M-DOWN"} & set(link["flags"]))
            or (link["operstate"] in ("DOWN", "LOWERLAYERDOWN") and "LOWER_UP" in link["flags"])
            # The kernel's watch of carriers has not come by yet.
            or (link["operstate"] == "UNKNOWN" and link.get("linkinfo", {}).get("info_kind") in _WITH_CARRIER)
            or any("tentative" in item for item in link["addr_info"])
        ]
        if not waiting:
            break
        time.sleep(0.05)
    return links
