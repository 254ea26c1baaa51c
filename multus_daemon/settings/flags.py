"""Flags of `multus-daemon` that set a setting."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

FLAGS: Final = MappingProxyType(
    {
        # Upstream's first thick release.
        "additional-bin-dir": "binDir",
        "binDir": "binDir",
        "cni-config-dir": "cniConfigDir",
        "cni-version": "cniVersion",
        "cniDir": "cniDir",
        "force-cni-version": "forceCNIVersion",
        "global-namespaces": "globalNamespaces",
        "multus-autoconfig-dir": "multusAutoconfigDir",
        "multus-conf-file": "multusConfigFile",
        "multus-kubeconfig-file-host": "kubeconfig",
        "multus-log-file": "logFile",
        "multus-log-level": "logLevel",
        "multus-log-to-stderr": "logToStderr",
        "multus-master-cni-file": "multusMasterCNI",
        "multus-rundir": "socketDir",
        "namespace-isolation": "namespaceIsolation",
        "override-network-name": "overrideNetworkName",
        "readiness-indicator-file": "readinessindicatorfile",
        # Ours, which the manifests and the documentation use.
        "chroot-dir": "chrootDir",
        "cni-dir": "cniDir",
        "conf-dir": "confDir",
        "kubeconfig": "kubeconfig",
        "log-level": "logLevel",
        "metrics-authorization": "metricsAuthorization",
        "metrics-port": "metricsPort",
        "metrics-tls": "metricsTLS",
        "per-node-certificate": "perNodeCertificate",
        "socket-dir": "socketDir",
    }
)
"""Flags of settings: the flag, without dashes -> the key."""
_BOOLEANS: Final = frozenset(
    {"forceCNIVersion", "logToStderr", "metricsAuthorization", "namespaceIsolation", "overrideNetworkName"}
)
_JSON: Final = frozenset({"metricsPort", "metricsTLS", "perNodeCertificate"})
_GO_BOOLEANS: Final = MappingProxyType(
    {
        **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
        **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
    }
)


class _Set(argparse.Action):
    """Store the flag as the user wrote it, and its value, in `flags` of the namespace: `settings.Flags`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.flags = {**namespace.flags, self.dest: (option_string, _value(self.dest, str(values)))}


def add_flags(group: argparse._ArgumentGroup, keys: frozenset[str]) -> None:
    """Add the flags of these settings. They are stored in `flags` of the namespace, which must be there: `Flags`."""
    for flag, key in FLAGS.items():
        if key in keys:
            kind = "BOOL" if key in _BOOLEANS else "JSON" if key in _JSON else "TEXT"
            optional: dict[str, Any] = {"nargs": "?", "const": "true"} if kind == "BOOL" else {}
            group.add_argument(
                f"--{flag}", action=_Set, dest=key, metavar=kind, help=key, default=argparse.SUPPRESS, **optional
            )


def _value(key: str, text: str) -> Any:
    """Return `text` as JSON has it. A malformed value stays text: `settings` refuses it and names the flag."""
    if key in _BOOLEANS:
        return _GO_BOOLEANS.get(text, text)
    if key in _JSON:
        try:
            return msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return text
    return text
