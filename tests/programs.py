"""The programs of the host that tests start. A test that lacks one is skipped, with its name and how to get it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

PACKAGES: Final = {
    "bash": "bash",
    "bridge": "iproute2",
    "buildah": "buildah",
    "busybox": "busybox-static",
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "debootstrap": "debootstrap",
    "depmod": "kmod",
    "dnsmasq": "dnsmasq-base",
    "docker-registry": "docker-registry",
    "dpkg-deb": "dpkg",
    "fish": "fish",
    "g++": "g++",
    "gcc": "gcc",
    "git": "git",
    "ip": "iproute2",
    "ip6tables": "iptables",
    "iptables": "iptables",
    "iptables-restore": "iptables",
    "iptables-save": "iptables",
    "make": "make",
    "modprobe": "kmod",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "ovs-vswitchd": "openvswitch-switch",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "qemu-system-x86_64": "qemu-system-x86",
    "runc": "runc",
    "setpriv": "util-linux",
    "ss": "iproute2",
    "sysctl": "procps",
    "tar": "tar",
    "tc": "iproute2",
    "unshare": "util-linux",
    "zsh": "zsh",
}
"""Debian's package of each program."""

_SOURCES: Final = {
    "WIDE_BOND_CNI": "./bond of github.com/k8snetworkplumbingwg/bond-cni",
    "WIDE_OVS_CNI": "./cmd/plugin of github.com/k8snetworkplumbingwg/ovs-cni",
    "WIDE_SRIOV_CNI": "./cmd/sriov of github.com/k8snetworkplumbingwg/sriov-cni",
    "WIDE_SRIOV_DEVICE_PLUGIN": "./cmd/sriovdp of github.com/k8snetworkplumbingwg/sriov-network-device-plugin",
    "WIDE_WHEREABOUTS": "./cmd of github.com/k8snetworkplumbingwg/whereabouts",
    "WIDE_OCICNI": "./tools/ocicnitool of github.com/cri-o/ocicni",
    "UPSTREAM_NEW_DAEMON": "./cmd/multus-daemon of github.com/k8snetworkplumbingwg/multus-cni, v4.3.1 or newer",
    "UPSTREAM_NEW_SHIM": "./cmd/multus-shim of github.com/k8snetworkplumbingwg/multus-cni, v4.3.1 or newer",
}


def path_of(name: str) -> str | None:
    """Return the path of a program, for a test that also works without it."""
    return shutil.which(name)


def missing(*names: str) -> str:
    """Return which of the programs the host lacks and how to get them; empty if it has all."""
    absent = [name for name in names if not path_of(name)]
    packages = sorted({PACKAGES[name] for name in absent})
    return f"needs {', '.join(absent)}: apt-get install {' '.join(packages)}" if absent else ""


def needed(name: str) -> str:
    """Return the path of a program of the host; skip the test, or the module that is being imported, without it."""
    require(name)
    return path_of(name) or name


def require(*names: str) -> None:
    """Skip the test, or the module that is being imported, if the host lacks one of the programs."""
    if reason := missing(*names):
        pytest.skip(reason, allow_module_level=True)


def needs(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if the host lacks one of the programs."""
    reason = missing(*names)
    return pytest.mark.skipif(bool(reason), reason=reason)


def given(variable: str) -> Path:
    """Return the program that a variable of the environment names; skip the test if it is not set.

    No package and no Go module proxy has these programs: whoever runs the tests builds them.
    """
    source = _SOURCES[variable]
    if not (path := os.environ.get(variable)):
        pytest.skip(
            f"{variable} is not set: build {source} in a checkout, `CGO_ENABLED=0 go build`, and set it to the program"
        )
    assert os.access(path, os.X_OK), f"{variable}: {path} is no program"
    return Path(path)
